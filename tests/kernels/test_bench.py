"""The bench of the kernels: that it works can be shown without a GPU, what it measures cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_runs_interpreted_and_agrees_with_torch(tmp_path):
    pytest.importorskip("triton")
    done = bench("--interpret", "--json", str(tmp_path / "kernels.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    kernels = ["unmask", "unmask, soft", "attention", "rotate_and_store", "commit", "add_rmsnorm", "gated"]
    assert [row["kernel"] for row in rows] == kernels
    for row in rows:
        assert not row["failed"]
        assert row["us"].keys() >= {"triton", "torch"}
        assert all(value < 1e-4 for value in row["difference"].values())
        assert row["kernel"] in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu():
    done = bench()
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert len(done.stderr.splitlines()) == 1
