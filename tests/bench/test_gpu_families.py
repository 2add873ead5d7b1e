"""The GPU's bench of the families: that it works can be shown without one, what it measures cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import gpu_families
from bench.gpu_families import HEADER, Device, Row

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["diffusion-gemma", "dream"])
def test_steps_are_measured_beside_transformers_with_the_same_weights(family, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")

    def once(self: Device, work: Callable[[], object]) -> float:
        work()
        return 2.0

    monkeypatch.setattr(Device, "ms", once)
    written, gemma = tmp_path / "found.json", family == "diffusion-gemma"
    monkeypatch.setattr(sys, "argv", ["bench", family, "fp32", "--tiny", "--device", "cpu", "--json", str(written)])
    gpu_families.main()
    told = capsys.readouterr().out
    rows = [Row(**row) for row in json.loads(written.read_text())["rows"]]
    by = [row.by.split()[0] for row in rows]
    assert by == [
        "infill-engine",
        "infill-engine",
        "transformers",
        "transformers",
        *["infill-engine,"] * (0 if gemma else 2),
    ]
    assert rows[2].off is not None
    assert rows[2].off < 1e-4
    for row, batch in zip(rows, [1, 2] * 3, strict=False):
        assert row.batch == batch
        # 32 slots in 48 passes of 2 ms, or a slot a pass.
        assert row.tokens_s[0] == pytest.approx(batch * (32 / 48 if gemma else 1) / 2e-3)
        assert len(row.cells) == len(HEADER)
        assert told.count(f"| {' | '.join(row.cells)} |") == 2  # as it came, and in the table


def test_the_script_writes_what_it_measures(tmp_path):
    told = subprocess.run(
        ["bash", "bench/gpu_families.sh", "--tiny", "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "SLOWER": "10"},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    for name in ("gemma_bf16", "gemma_fp8", "dream_bf16", "dream_fp8"):
        assert f"{name}: done in" in told.stdout
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert "CPU" in found["device"]
        assert {row["batch"] for row in found["rows"]} == {1, 2}
        assert f"| {' | '.join(HEADER)} |" in (tmp_path / f"{name}.txt").read_text()
    assert told.stdout.count("| infill-engine") >= 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu(tmp_path):
    command = [sys.executable, "-m", "bench.gpu_families", "dream", "bf16"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1
    assert told.stderr.strip() == "torch finds no GPU: use --tiny --device cpu to see that this works"
