"""Kernels: tensors in, tensors out. Knows torch (and Triton where it is at hand), and nothing of code or models."""

from infill_kernels.attention import (
    BRANCH,
    LEFT,
    OPEN,
    PAGE,
    KVPool,
    Part,
    Placed,
    Plan,
    Rope,
    canvas_attention,
    plan,
    rotate,
    rotate_and_store,
)
from infill_kernels.unmask import Allowed, Head, Unmasked, logits, unmask

__all__ = [
    "BRANCH",
    "LEFT",
    "OPEN",
    "PAGE",
    "Allowed",
    "Head",
    "KVPool",
    "Part",
    "Placed",
    "Plan",
    "Rope",
    "Unmasked",
    "canvas_attention",
    "logits",
    "plan",
    "rotate",
    "rotate_and_store",
    "unmask",
]
