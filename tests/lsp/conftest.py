"""Folders of its own for every test, so that none meets a person's engine, and an editor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from editor import Editor
from pytest_lsp.client import make_test_lsp_client


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder (socket paths are limited) that holds the folders `run`, `cache` and `config`."""
    yield from _home(monkeypatch)


@pytest.fixture(scope="module")
def shared_home() -> Iterator[Path]:
    """A `home` for the tests of a module that can share an engine: one takes seconds to start."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from _home(monkeypatch)


def _home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="infill-"))
    monkeypatch.setenv("INFILL_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("INFILL_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("INFILL_CONFIG_DIR", str(folder / "config"))
    yield folder
    for table in folder.glob("*.json"):
        command = [sys.executable, "-m", "infill_engine", "stop", "--model", f"fake:{table}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(folder)


@pytest.fixture
async def editor() -> AsyncIterator[Editor]:
    """An editor whose server is not started yet."""
    client = make_test_lsp_client()
    yield Editor(client)
    if client._server is not None and client._server.returncode is None:
        client._server.kill()
    await client.stop()
