"""Chooses between the fused kernels and their torch references: the one place that does.

The references are the specification, and what serves where Triton does not; each name has the same signature in both.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from infill_kernels import attention
from infill_kernels.attention import Plan, Rope
from infill_kernels.commit import CanvasState, Rule
from infill_kernels.unmask import Allowed, Head, Unmasked

Backend = Literal["triton", "compiled", "torch"]


def backend(device: torch.device | str, head: Head | None = None) -> Backend:
    """Which kernels serve tensors on `device`, and a model with this head: "compiled" are those of `cpu.py`."""
    if head is not None and head.project is not None:
        return "compiled"
    return "triton" if torch.device(device).type == "cuda" and _has_triton() else "torch"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def unmask(
    hidden: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    allowed: Allowed | None = None,
    noise: Tensor | None = None,
    soft: bool = False,
) -> Unmasked:
    """`infill_kernels.unmask.unmask`. A head with its own projection is served by that, as far as it can."""
    if head.project is not None and noise is None and not soft:
        return head.project.unmask(hidden, head, temperature=temperature, allowed=allowed)
    if backend(hidden.device) == "triton" and head.project is None:
        from infill_kernels.unmask_triton import unmask as chosen
    else:
        from infill_kernels.unmask import unmask as chosen
    return chosen(hidden, head, temperature=temperature, allowed=allowed, noise=noise, soft=soft)


def commit(
    state: CanvasState,
    outputs: Unmasked,
    first: Tensor,
    rows: Tensor,
    ends: Tensor,
    rule: Rule,
    noise: Tensor | None = None,
) -> None:
    """`infill_kernels.commit.commit`."""
    if backend(state.tokens.device) == "triton":
        from infill_kernels.commit_triton import commit as chosen
    else:
        from infill_kernels.commit import commit as chosen
    chosen(state, outputs, first, rows, ends, rule, noise)


def rotate_and_store(qkv: Tensor, keys: Tensor, values: Tensor, plan: Plan, rope: Rope) -> Tensor:
    """`infill_kernels.attention.rotate_and_store`."""
    if backend(qkv.device) == "triton":
        from infill_kernels.attention_triton import rotate_and_store as chosen
    else:
        from infill_kernels.attention import rotate_and_store as chosen
    return chosen(qkv, keys, values, plan, rope)


def canvas_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: Plan, rope: Rope, *, scale: float, window: int | None = None
) -> Tensor:
    """`infill_kernels.attention.canvas_attention`."""
    if backend(q.device) == "triton":
        from infill_kernels import attention_triton

        return attention_triton.canvas_attention(q, keys, values, plan, rope, scale=scale, window=window)
    return attention.canvas_attention(q, keys, values, plan, rope, scale=scale, window=window)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`infill_kernels.fp8.quantise_rows`."""
    if backend(x.device) == "triton":
        from infill_kernels.fp8_triton import quantise_rows as chosen
    else:
        from infill_kernels.fp8 import quantise_rows as chosen
    return chosen(x)
