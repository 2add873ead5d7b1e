"""Compiles Triton kernels ahead of use for a GPU that need not be there: what a test or a bench asks of a kernel.

Each module of Triton kernels has a function `variants()` that yields what it launches in practice. Nothing here runs a
kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Compute capabilities the kernels are built for: A100, L4 and RTX 40, H100 and H200, B200, RTX 50.
CAPABILITIES = (80, 89, 90, 100, 120)


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a kernel."""

    #: Unique within its module; for people.
    name: str
    #: The `triton.jit` function.
    fn: Any
    #: Type of each argument that is no constant, by name: "*bf16", "i32", "fp32". ":16" behind it promises that 16
    #: divides the address or number, which a launch finds by itself.
    signature: Mapping[str, str]
    #: Value of each `tl.constexpr` argument, by name; also None for a pointer that is not given.
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Cubin:
    """What a compiled variant takes of the machine."""

    #: 32-bit registers a thread.
    registers: int
    #: Bytes of shared memory a thread block.
    shared_bytes: int
    #: Bytes of stack and local memory a thread: registers that did not suffice.
    spills: int
    #: Bytes of machine code and data.
    size: int


def compile_variant(variant: Variant, capability: int) -> Cubin:
    """Compiles for compute capability `capability` (90 is 9.0) with the assembler in Triton's own wheel.

    Raises `RuntimeError` in a process where Triton interprets kernels (TRITON_INTERPRET=1), and what Triton raises for
    a kernel that does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if not isinstance(variant.fn, JITFunction):
        raise RuntimeError(
            f"{variant.name}: kernels are interpreted here; compile in a process without TRITON_INTERPRET"
        )
    names = variant.fn.arg_names
    missing = set(names) ^ (set(variant.signature) | set(variant.constants))
    if missing:
        raise ValueError(
            f"{variant.name}: signature and constants differ from the kernel's arguments in {sorted(missing)}"
        )
    types = {name: variant.signature.get(name, "constexpr").removesuffix(":16") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if variant.signature.get(name, "").endswith(":16")
    }
    compiled = triton.compile(
        ASTSource(variant.fn, types, dict(variant.constants), aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    cubin = compiled.asm["cubin"]
    usage = _resources(cubin)
    return Cubin(usage["REG"], compiled.metadata.shared, usage["STACK"] + usage["LOCAL"], len(cubin))


def _resources(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says of a cubin's one kernel: REG, STACK, LOCAL, SHARED and others."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
