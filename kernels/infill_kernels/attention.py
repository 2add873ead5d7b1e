"""`canvas_attention`: queries of a canvas tree against cached contexts and the canvas itself.

Knows nothing of models or text. This is the torch reference, the readable specification of a fused kernel.

A canvas is a tree given by three integers a token: its position, its parent (an index into the canvas, -1 for the root)
and its class. A token sees

- its ancestors and itself;
- if it is OPEN: all OPEN tokens with the same parent (the members of its group), in both directions;
- every context, but a BRANCH token does not see the contexts marked `block`.

A context's keys are cached rotated at positions local to it (0, 1, 2, ...). RoPE scores depend on the difference of two
positions only, so a context that starts at absolute position p0 is placed by turning the query back by p0 instead of
rotating the keys again: its cache serves wherever it stands.

    score(i, j) = scale * R(-p0) q_i . k_j + bias_context                  q_i = R(x_i) W_q h_i,  k_j = R(j) W_k h_j
    score(i, j) = scale * q_i . k_j + bias_right [x_j > x_i]               within the canvas, k_j = R(x_j) W_k h_j
    out_i = sum_j softmax_j(score(i, j)) v_j                               over all that i sees

Source: RoPE (Su et al. 2021, arXiv 2104.09864, section 3.4.2), in the half-split layout of GPT-NeoX and Llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Token classes of a canvas tree.
LEFT, OPEN, BRANCH = 0, 1, 2


class Rope:
    """Rotary tables in fp32, grown on demand. Not safe to share between threads.

    A head (a, b) of two halves is turned to (a cos - b sin, b cos + a sin): with the sign in the table, one product
    with itself and one with its halves swapped.
    """

    def __init__(self, head_size: int, base: float, device: torch.device | str = "cpu") -> None:
        self._inverse = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size)
        self._cos = self._sin = torch.empty(0, 1, head_size, device=device)

    def tables(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, fp32 [N, 1, hd], for integer positions [N] >= 0."""
        top = int(position.max()) + 1 if position.numel() else 0
        if top > len(self._cos):
            angle = torch.arange(2 * top, device=self._inverse.device).float()[:, None] * self._inverse
            self._cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None]
            self._sin = torch.cat([-angle.sin(), angle.sin()], -1)[:, None]
        return self._cos[position], self._sin[position]


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the heads of x [N, H, hd] by tables of [N, 1, hd] (or [1, 1, hd]: all by the same)."""
    cos, sin = tables
    if x.dtype != cos.dtype:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Context(NamedTuple):
    """One cached piece of context in one layer."""

    #: [Hkv, T, hd], rotated at local positions first, first + 1, ...
    k: Tensor
    #: [Hkv, T, hd].
    v: Tensor
    #: Added to the scores of its keys.
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class CanvasPlan:
    """What all layers of one pass share: who sees whom, and how queries are rotated.

    N queries are the last N of the canvas's M tokens; the others' keys and values are cached.
    """

    #: fp32 [N, M], added to the scores within the canvas: minus infinity where the query does not see the key, the
    #: gate where the key stands to its right. None where it would be all zeros.
    bias: Tensor | None
    #: Rotary tables of the queries' positions.
    own: tuple[Tensor, Tensor]
    #: The tables that turn a query back to each context's start; None for a start at 0.
    back: tuple[tuple[Tensor, Tensor] | None, ...]
    #: bool [N] a context, False where a query must not see it; None: all see it.
    visible: tuple[Tensor | None, ...]


def plan(
    position: Tensor,
    parent: Tensor,
    token_class: Tensor,
    queries: int,
    rope: Rope,
    starts: Sequence[int],
    blocks: Sequence[bool],
    bias_right: float = 0.0,
) -> CanvasPlan:
    """Plans one pass over a canvas of M tokens of which the last `queries` are computed.

    position, parent, token_class: int64 [M] on the host, parents before children; starts: the absolute position of each
    context's local position 0, which is not after position 0; blocks: whether that context is hidden from BRANCH
    tokens; bias_right: the gate on keys to the right.
    """
    size, above = len(position), parent.tolist()
    seen = np.zeros((size, size), dtype=bool)
    for i, p in enumerate(above):
        assert p < i, "parents come before their children"
        if p >= 0:
            seen[i] = seen[p]
        seen[i, i] = True
    sees = torch.from_numpy(seen)
    is_open = token_class == OPEN
    sees |= is_open[:, None] & is_open[None] & (parent[:, None] == parent[None])
    own = position[-queries:]
    bias = bias_right * (position[None] > own[:, None]).float()
    bias.masked_fill_(~sees[-queries:], -torch.inf)
    branch = token_class[-queries:] == BRANCH
    return CanvasPlan(
        bias=bias if bool(bias.any()) else None,
        own=rope.tables(own),
        back=tuple(rope.tables(torch.tensor([-start])) if start else None for start in starts),
        visible=tuple(~branch if block and bool(branch.any()) else None for block in blocks),
    )


def canvas_attention(
    q: Tensor, k: Tensor, v: Tensor, contexts: Sequence[Context], plan: CanvasPlan, *, scale: float
) -> Tensor:
    """Attention of one layer. Returns [N, Hq, hd].

    q: [N, Hq, hd]; k, v: [Hkv, M, hd], the canvas's own; q and k are rotated at their positions. Hq is a multiple of
    Hkv, query head h reads key head h // (Hq / Hkv).
    """
    n, heads, size = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads

    def grouped(x: Tensor) -> Tensor:  # [N, Hq, hd] -> [Hkv, group * N, hd]
        return x.view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * n, size)

    if scale != 1.0:
        q = q * scale
    here = grouped(q)
    scores = []
    for context, tables, visible in zip(contexts, plan.back, plan.visible, strict=True):
        score = (here if tables is None else grouped(rotate(q, tables))) @ context.k.transpose(1, 2)
        if context.bias:
            score += context.bias
        if visible is not None:
            score.view(kv_heads, group, n, -1).masked_fill_(~visible[:, None], -torch.inf)
        scores.append(score)
    score = here @ k.transpose(1, 2)
    if plan.bias is not None:
        score.view(kv_heads, group, n, -1).add_(plan.bias.to(score.dtype))
    scores.append(score)
    weights = torch.split(torch.cat(scores, -1).softmax(-1), [s.shape[-1] for s in scores], dim=-1)
    out = weights[-1] @ v
    for weight, context in zip(weights, contexts, strict=False):
        out += weight @ context.v
    return out.view(kv_heads, group, n, size).permute(2, 0, 1, 3).reshape(n, heads, size)
