"""Every kernel compiles to machine code of every GPU that is served, and fits it; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from infill_kernels import compile as compiling
from infill_kernels.compile import Cubin, Variant


def test_kernels_fit_every_gpu(tmp_path):
    """In processes of its own, where Triton compiles, with an empty cache. About 50 s of processor time."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "infill_kernels.compile", "--sample", "--processes", "2"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert {int(row[-5]) for row in rows} == set(compiling.CAPABILITIES)
    assert {row[0] + "_triton" for row in rows} == {
        module.replace("_triton", ":_triton") for module in compiling.MODULES
    }
    # These three give a kernel the same shape, so that what fits 8.0 also fits the small ones.
    assert all(float(row[-2]) <= 99 for row in rows if int(row[-5]) in (80, 89, 120))


@pytest.mark.parametrize("cubin", [Cubin(64, 100 << 10, 0, 1), Cubin(255, 0, 200, 1)], ids=["shared", "spills"])
def test_a_kernel_that_does_not_fit_is_told(monkeypatch, cubin):
    rows = [("unmask_triton", Variant("scan", None, {}, {}), 120, cubin)]
    monkeypatch.setattr(compiling, "compile_all", lambda *_: iter(rows))
    monkeypatch.setattr(sys, "argv", ["compile"])
    with pytest.raises(SystemExit, match="too much for the GPU:\nunmask: scan for 120"):
        compiling.main()
