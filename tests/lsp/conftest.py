"""Folders of its own for every test, so that none meets a person's engine or another test's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder (socket paths are limited) that holds the runtime folder `run` and the cache `cache`."""
    folder = Path(tempfile.mkdtemp(prefix="infill-"))
    monkeypatch.setenv("INFILL_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("INFILL_CACHE_DIR", str(folder / "cache"))
    yield folder
    shutil.rmtree(folder)
