"""A short soak: after random changes, with two editors on one folder, indexes and memory equal the truth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import soak
from infill_lsp import filling, folders


@pytest.fixture(autouse=True)
def _impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(filling, "MANY_CHANGES", 150)  # so that a small branch is a large one
    monkeypatch.setattr(folders, "MANY", 100)
    monkeypatch.setattr(soak, "ROUND", 250)
    monkeypatch.setattr(soak, "SWITCH", 1)


@pytest.mark.process
def test_indexes_and_memory_equal_the_folder_in_the_end(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    asyncio.run(soak.soak(root, tmp_path / "memory", events=500, editors=2, seed=1, branch=200))


def test_a_memory_that_misses_or_keeps_something_is_noticed(tmp_path: Path) -> None:
    engine = soak.Engine(tmp_path)
    workspace = engine.workspaces.of("w")
    workspace.put("a", b"1".hex(), [1, 2])
    assert soak._remembers(engine, "w", {"a": b"1"})
    assert not soak._remembers(engine, "w", {"a": b"2"})
    assert not soak._remembers(engine, "w", {"a": b"1", "b": b"1"})
    assert not soak._remembers(engine, "w", {})
    engine.workspaces.close()
