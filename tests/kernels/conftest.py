"""Triton's kernels are interpreted where there is no GPU to run them. Triton reads this when a kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
