"""`quantise_rows` in Triton: a row is read once and written once, where torch takes seven kernels.

Formula and signature are those of fp8.py. Needs compute capability 8.9, which has e4m3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from infill_kernels.compile import Variant
from infill_kernels.fp8 import E4M3, LARGEST, SMALLEST_SCALE
from infill_kernels.pointwise_triton import row_warps

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _quantise(x, values, scale, width, BLOCK: tl.constexpr):
    """Grid (N,): one row."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    there = number < width
    exact = tl.load(x + row * width + number, there, other=0.0).to(tl.float32)
    step = tl.maximum(tl.div_rn(tl.max(tl.abs(exact), 0), _LARGEST), _SMALLEST)
    y = tl.div_rn(exact, tl.zeros_like(exact) + step)
    y = tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST)
    tl.store(values + row * width + number, y.to(values.dtype.element_ty), there)
    tl.store(scale + row, step)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8.quantise_rows`."""
    n, width = x.shape
    values, scale = x.new_empty(n, width, dtype=E4M3), x.new_empty(n, 1, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _quantise[(n,)](x.contiguous(), values, scale, width, BLOCK=block, num_warps=row_warps(block))
    return values, scale


def variants() -> Iterator[Variant]:
    """The inputs of the embedded model's products and of DiffusionGemma's."""
    for width in (576, 1536, 2816):
        block = triton.next_power_of_2(width)
        signature = {"x": "*bf16:16", "values": "*fp8e4nv:16", "scale": "*fp32:16", "width": "i32:16"}
        yield Variant(
            f"quantise, bf16, {width} wide", _quantise, signature, {"BLOCK": block}, row_warps(block), least=89
        )
