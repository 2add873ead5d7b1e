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
    moved,
    plan,
    rotate,
)
from infill_kernels.commit import ENDED, FULL, LIVE, CanvasState, EntropyBound, Rule, Threshold, Verified
from infill_kernels.dispatch import Backend, backend, canvas_attention, commit, rotate_and_store, unmask
from infill_kernels.unmask import Allowed, Head, Unmasked, admitted, logits

__all__ = [
    "BRANCH",
    "ENDED",
    "FULL",
    "LEFT",
    "LIVE",
    "OPEN",
    "PAGE",
    "Allowed",
    "Backend",
    "CanvasState",
    "EntropyBound",
    "Head",
    "KVPool",
    "Part",
    "Placed",
    "Plan",
    "Rope",
    "Rule",
    "Threshold",
    "Unmasked",
    "Verified",
    "admitted",
    "backend",
    "canvas_attention",
    "commit",
    "logits",
    "moved",
    "plan",
    "rotate",
    "rotate_and_store",
    "unmask",
]
