"""What all tests of the benches need."""

from __future__ import annotations

import torch

#: Products of a few rows gain nothing from threads, which beside a busy process wait for each other a hundredfold.
torch.set_num_threads(1)
