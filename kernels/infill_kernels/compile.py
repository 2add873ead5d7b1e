"""Compiles Triton kernels ahead of use for a GPU that need not be there: what a test or a bench asks of a kernel.

Each module of Triton kernels has a function `variants()` that yields what it launches in practice. Nothing here runs a
kernel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

#: Compute capabilities the kernels are built for, A100, L4 and RTX 40, H100 and H200, B200, RTX 50, and the bytes of
#: shared memory that each gives a thread block (CUDA C++ Programming Guide, table of technical specifications).
CAPABILITIES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

#: Modules with a function `variants()`.
MODULES = ("attention_triton", "commit_triton", "fp8_triton", "pointwise_triton", "unmask_triton")

#: Bytes of registers spilled a thread that a kernel may have: what stays in L1 and costs little.
MOST_SPILLS = 128


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
    #: The lowest compute capability that has what it needs.
    least: int = 80


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


def compile_all(
    capabilities: Sequence[int], processes: int, sample: bool = False
) -> Iterator[tuple[str, Variant, int, Cubin]]:
    """(module, variant, capability, cubin) of every variant there is, compiled in so many processes.

    sample: every variant for one capability, and every kernel for all of them.
    """
    jobs = []
    for module in MODULES:
        kernels: dict[Any, list[int]] = {}
        variants = _variants(module)
        for index, variant in enumerate(variants):
            kernels.setdefault(variant.fn, []).append(index)
        for indices in kernels.values():
            turns = min(len(indices), len(capabilities))
            jobs += [
                (module, index, capability)
                for place, index in enumerate(indices)
                for turn, capability in enumerate(capabilities)
                if capability >= variants[index].least and (not sample or place % len(capabilities) == turn % turns)
            ]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for (module, index, capability), cubin in zip(jobs, pool.map(_compile_job, jobs), strict=True):
            yield module, _variants(module)[index], capability, cubin


def _variants(module: str) -> list[Variant]:
    return list(import_module(f"infill_kernels.{module}").variants())


def _compile_job(job: tuple[str, int, int]) -> Cubin:
    module, index, capability = job
    return compile_variant(_variants(module)[index], capability)


def main() -> None:
    """Prints the table of what the kernels take; exits with 1 where one takes more than a GPU has."""
    parser = argparse.ArgumentParser(prog="python -m infill_kernels.compile", description=main.__doc__)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=tuple(CAPABILITIES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--sample", action="store_true", help="each variant for one of them only")
    options = parser.parse_args()
    print(f"{'kernel':80} {'sm':>4} {'registers':>9} {'spills':>7} {'shared':>9}")
    too_much = []
    for module, variant, capability, cubin in compile_all(options.capability, options.processes, options.sample):
        shared = f"{cubin.shared_bytes / 1024:.1f} KiB"
        name = f"{module.removesuffix('_triton')}: {variant.name}"
        print(f"{name:80} {capability:>4} {cubin.registers:>9} {cubin.spills:>7} {shared:>9}", flush=True)
        if cubin.shared_bytes > CAPABILITIES[capability] or cubin.spills > MOST_SPILLS:
            too_much.append(f"{name} for {capability}: {shared} of shared memory, {cubin.spills} bytes of spills")
    if too_much:
        sys.exit("too much for the GPU:\n" + "\n".join(too_much))


if __name__ == "__main__":
    main()
