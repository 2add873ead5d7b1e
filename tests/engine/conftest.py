"""Folders of its own for every test, so that none meets a person's engine or another test's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

#: Products of a few rows gain nothing from threads, which beside a busy process wait for each other a hundredfold.
torch.set_num_threads(1)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder, short enough for sockets, that holds the runtime folder `run` and the cache `cache`."""
    with tempfile.TemporaryDirectory(prefix="infill-") as name:
        folder = Path(name)
        monkeypatch.setenv("INFILL_RUNTIME_DIR", str(folder / "run"))
        monkeypatch.setenv("INFILL_CACHE_DIR", str(folder / "cache"))
        monkeypatch.delenv("INFILL_MODEL_FILE", raising=False)
        yield folder
