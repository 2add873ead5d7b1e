"""`commit` as one Triton kernel, a program a canvas. Rules, formulas and signature are those of `commit.py`.

Entropies are compared, not sorted: slot i comes after j if (H_j, j) < (H_i, i), so the entropy accepted before it is

    before_i = sum_j H_j [(H_j, j) < (H_i, i)]
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infill_kernels.commit import (
    ENDED,
    FULL,
    LIVE,
    CanvasState,
    EntropyBound,
    Rule,
    Threshold,
    Verified,
    check_noise,
)
from infill_kernels.compile import Variant
from infill_kernels.unmask import Unmasked

_LIVE, _ENDED, _FULL = tl.constexpr(LIVE), tl.constexpr(ENDED), tl.constexpr(FULL)
_VERIFIED, _THRESHOLD, _ENTROPY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

#: Pointers to views whose alignment depends on the number of canvases or rows: nothing is compiled for that.
_COUNTS = ("committed", "proposed", "size", "status", "first", "rows")
_OUTPUTS = ("out_token", "out_sample", "out_prob", "out_entropy")

#: Slots compared with all others at once: what keeps 512 x 8 comparisons in registers.
_CHUNK = 8

_WARPS = 4


def commit(
    state: CanvasState,
    outputs: Unmasked,
    first: Tensor,
    rows: Tensor,
    ends: Tensor,
    rule: Rule,
    noise: Tensor | None = None,
) -> None:
    """`infill_kernels.commit.commit`, fused."""
    check_noise(rule, noise)
    canvases, capacity = state.tokens.shape
    kind, bound, settled = _parameters(rule)
    with torch.cuda.device_of(state.tokens):
        _commit[(canvases,)](
            state.tokens,
            state.prob,
            state.predicted,
            state.committed,
            state.proposed,
            state.size,
            state.status,
            outputs.token,
            outputs.sample,
            outputs.prob,
            outputs.entropy,
            first,
            rows,
            ends,
            noise,
            capacity,
            bound,
            settled,
            RULE=kind,
            ENDS=len(ends),
            BLOCK_S=triton.next_power_of_2(capacity),
            CHUNK=_CHUNK,
            num_warps=_WARPS,
        )


def _parameters(rule: Rule) -> tuple[int, float, float]:
    """The rule as the kernel takes it: kind, bound, settled."""
    match rule:
        case Verified():
            return 0, 0.0, 0.0
        case Threshold(prob):
            return 1, prob, 0.0
        case EntropyBound(bound, settled):
            return 2, bound, settled


@triton.jit
def _leftmost(where, slot, otherwise):
    """The first slot that holds."""
    return tl.min(tl.where(where, slot, otherwise), 0)


@triton.jit(do_not_specialize_on_alignment=[*_COUNTS, *_OUTPUTS])
def _commit(
    tokens, prob, predicted, committed, proposed, size, status,
    out_token, out_sample, out_prob, out_entropy, first, rows, ends, noise,
    capacity, bound, settled,
    RULE: tl.constexpr, ENDS: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    canvas = tl.program_id(0)
    begin, end = tl.load(committed + canvas), tl.load(size + canvas)
    known = begin + tl.load(proposed + canvas)
    count = tl.minimum(tl.load(rows + canvas), end - begin)
    start = tl.load(first + canvas).to(tl.int64)
    if tl.load(status + canvas) == _LIVE:
        slot = tl.arange(0, BLOCK_S)
        line = slot - begin
        fed = (line >= 0) & (line < count)
        within = slot < capacity
        row = start + line
        at = canvas.to(tl.int64) * capacity + slot
        new = tl.load(out_token + row, fed, other=-1)
        sure = tl.load(out_prob + row, fed, other=0.0)
        reach = begin + count
        written, kept = new, fed
        if RULE == _VERIFIED:
            wrong = fed & (new != tl.load(tokens + at, within, other=-1))
            agreed = tl.minimum(_leftmost(wrong, slot, capacity), known)
            stop = tl.minimum(agreed + 1, reach)
            reach = tl.where(agreed == known, reach, stop)
        elif RULE == _THRESHOLD:
            stop = tl.minimum(_leftmost(fed & (slot > begin) & ~(sure >= bound), slot, capacity), reach)
            reach = stop
        else:
            entropy = tl.load(out_entropy + row, fed, other=float("inf"))
            before = tl.zeros([BLOCK_S], tl.float32)
            for i in range(0, count, CHUNK):
                other = i + tl.arange(0, CHUNK)
                h = tl.load(out_entropy + start + other, other < count, other=float("inf"))[None, :]
                tie = (h == entropy[:, None]) & (other[None, :] < line[:, None])
                before += tl.sum(tl.where((h < entropy[:, None]) | tie, h, 0.0), 1)
            mean = tl.sum(tl.where(fed, entropy, 0.0), 0) / count
            changed = tl.sum((fed & (new != tl.load(predicted + at, within, other=-1))).to(tl.int32), 0)
            done = (changed == 0) & (mean < settled)
            drawn = tl.load(out_sample + row, fed, other=-1)
            fresh = tl.load(noise + at, within, other=0)
            written = tl.where(fed & (done | (before <= bound)), tl.where(done, new, drawn), fresh)
            kept = within & (slot >= begin)
            stop = tl.where(done, end, begin)
            reach = stop
        ending = slot < 0
        for i in tl.static_range(ENDS):
            ending = ending | (written == tl.load(ends + i))
        cut = _leftmost(fed & ending, slot, capacity)
        ended = cut < stop
        stop = tl.minimum(stop, cut)
        left = tl.where(ended, 0, reach - stop)
        grown = tl.where((stop == end) & ~ended, tl.minimum(2 * end, capacity), end)
        tl.debug_barrier()  # all have read the state before one writes it
        tl.store(tokens + at, written, kept)
        tl.store(prob + at, sure, fed)
        tl.store(predicted + at, new, fed)
        tl.store(committed + canvas, stop)
        tl.store(proposed + canvas, left)
        tl.store(size + canvas, grown)
        tl.store(status + canvas, tl.where(ended, _ENDED, tl.where(stop == capacity, _FULL, _LIVE)))


def variants() -> Iterator[Variant]:
    """Each rule on canvases of up to 256 slots."""
    signature = dict.fromkeys(("tokens", "predicted", "ends"), "*i64:16") | {"prob": "*fp32:16"}
    signature |= dict.fromkeys(_OUTPUTS[:2], "*i64") | dict.fromkeys(_OUTPUTS[2:], "*fp32")
    signature |= dict.fromkeys(_COUNTS, "*i32") | {"capacity": "i32:16", "bound": "fp32", "settled": "fp32"}
    for rule in (Verified(), Threshold(), EntropyBound()):
        kind = _parameters(rule)[0]
        constants: dict[str, Any] = {"RULE": kind, "ENDS": 1, "BLOCK_S": 256, "CHUNK": _CHUNK}
        noise = {"noise": "*i64:16"} if isinstance(rule, EntropyBound) else {}
        if not noise:
            constants["noise"] = None
        yield Variant(type(rule).__name__, _commit, {**signature, **noise}, constants, _WARPS, 1)
