"""`add_rmsnorm` and `gated` in Triton: each reads its inputs once and writes its results once.

Formulas and signatures are those of pointwise.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from infill_kernels.compile import Variant
from infill_kernels.pointwise import Activation

#: Numbers that a program of `gated` writes.
_BLOCK = 1024


@triton.jit
def _add_rmsnorm(x, residual, weight, total, out, width, eps, BLOCK: tl.constexpr):
    """Grid (N,): one row."""
    number = tl.arange(0, BLOCK)
    there = number < width
    at = tl.program_id(0).to(tl.int64) * width + number
    s = tl.load(x + at, there, other=0.0).to(tl.float32) + tl.load(residual + at, there, other=0.0).to(tl.float32)
    s = s.to(total.dtype.element_ty)
    tl.store(total + at, s, there)
    s = s.to(tl.float32)
    scale = tl.rsqrt(tl.sum(s * s, 0) / width + eps)
    y = s * scale * tl.load(weight + number, there, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), there)


@triton.jit
def _gated(x, out, width, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = number < width
    a = tl.load(x + 2 * row * width + number, there, other=0.0).to(tl.float32)
    b = tl.load(x + (2 * row + 1) * width + number, there, other=0.0).to(tl.float32)
    # (1 + tanh u) / 2 is the logistic function of 2 u, so both activations are a times one.
    u = a if SILU else 1.5957691216057308 * (a + 0.044715 * a * a * a)
    y = a * tl.sigmoid(u) * b
    tl.store(out + row * width + number, y.to(out.dtype.element_ty), there)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `pointwise.add_rmsnorm`."""
    x, residual = x.contiguous(), residual.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    n, width = x.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _add_rmsnorm[(n,)](
            x, residual, weight.contiguous(), total, out, width, eps, BLOCK=block, num_warps=row_warps(block)
        )
    return total, out


def gated(x: Tensor, activation: Activation) -> Tensor:
    """As `pointwise.gated`."""
    n, width = len(x), x.shape[1] // 2
    out = x.new_empty(n, width)
    with torch.cuda.device_of(x):
        _gated[(n, triton.cdiv(width, _BLOCK))](
            x.contiguous(), out, width, SILU=activation == "silu", BLOCK=_BLOCK, num_warps=4
        )
    return out


def row_warps(block: int) -> int:
    """Warps for one row of `block` numbers: eight numbers a thread, at most 16 warps."""
    return min(16, max(1, block // 256))


def variants() -> Iterator[Variant]:
    """The widths of the embedded model and of DiffusionGemma."""
    for width in (576, 2816):
        block = triton.next_power_of_2(width)
        signature = dict.fromkeys(("x", "residual", "weight", "total", "out"), "*bf16:16")
        signature |= {"width": "i32:16", "eps": "fp32"}
        yield Variant(f"add_rmsnorm, bf16, {width} wide", _add_rmsnorm, signature, {"BLOCK": block}, row_warps(block))
    for silu in (True, False):
        signature = {"x": "*bf16:16", "out": "*bf16:16", "width": "i32:16"}
        yield Variant(f"{'swiglu' if silu else 'geglu'}, bf16", _gated, signature, {"SILU": silu, "BLOCK": _BLOCK})
