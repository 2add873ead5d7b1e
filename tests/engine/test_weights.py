"""The prepared file of the weights: how it is saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from infill_engine.weights import _save


def test_what_killed_processes_left_is_swept_and_no_more(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    prepared = tmp_path / "weights.safetensors"
    left, others, mine = (tmp_path / f"weights.safetensors.{who}.part" for who in (dead.pid, os.getppid(), "mine"))
    for part in (left, others, mine):
        part.write_bytes(b"half")
    _save({"a": torch.zeros(2)}, {}, prepared)
    assert set(tmp_path.iterdir()) == {others, mine, prepared}
