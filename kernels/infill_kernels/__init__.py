"""Kernels: tensors in, tensors out. Knows torch (and Triton where it is at hand), and nothing of code or models."""

from infill_kernels.attention import (
    BRANCH,
    LEFT,
    OPEN,
    CanvasPlan,
    Context,
    Rope,
    canvas_attention,
    plan,
    rotate,
)
from infill_kernels.unmask import Allowed, Head, Unmasked, logits, unmask

__all__ = [
    "BRANCH",
    "LEFT",
    "OPEN",
    "Allowed",
    "CanvasPlan",
    "Context",
    "Head",
    "Rope",
    "Unmasked",
    "canvas_attention",
    "logits",
    "plan",
    "rotate",
    "unmask",
]
