"""`unmask` as Triton kernels: the [N, V] logits are never written.

Formulas and signature are those of `unmask.py`. The vocabulary is cut into tiles; a program owns a tile of rows and a
run of vocabulary tiles and keeps, a row, over the tiles it has seen (y as in `unmask.py`, minus infinity where an id is
not admitted):

    m = max y       s = sum exp(y - m)       u = sum exp(y - m) (y - m)       and the arg max of y and of y + g

When the maximum grows from m to m', s' = s exp(m - m') and u' = (u + (m - m') s) exp(m - m'). A second kernel merges
the programs' states by the same rule; then prob = 1 / s, lse = m + log s, entropy = log s - u / s.

The weight is read once for up to 128 rows, so few rows cost what reading it costs. Products go through the tensor cores
with rows padded to 16 and fp32 sums; fp32 weights are multiplied in fp32, not TF32. The soft embedding is a second
pass: logits are computed again, a chunk of the vocabulary at a time, and exp(y - m) / s is multiplied with the same
weight rows. Every sum has a fixed order, so a replay gives the same bits.

Sources: online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867); tiled log-sum-exp over a vocabulary (Cut
Cross-Entropy, Wijmans et al. 2024, arXiv 2411.09009, section 4).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infill_kernels.compile import Variant
from infill_kernels.unmask import Allowed, Head, Unmasked, check_temperature

#: Weights exp(y - m) / s kept at once by the pass for the soft embedding: 8 MiB in bf16, what stays in L2.
CHUNK = 1 << 22

#: Pointers to views whose alignment depends on the number of rows: nothing is compiled for that.
_ROWS = ["token", "sample", "top", "prob", "lse", "entropy"]


class _Tile(NamedTuple):
    """Sizes of a tile of logits, and what a program that computes it is given."""

    v: int
    n: int
    d: int
    warps: int
    stages: int


def _tile(rows: int, itemsize: int) -> _Tile:
    """Few rows: bound by reading the weight, many bytes in flight. Many: bound by arithmetic, square tiles. All stay
    below 99 KiB of shared memory, what the smallest of the supported GPUs give a program."""
    n = min(max(16, triton.next_power_of_2(rows)), 128)
    if itemsize == 4:
        return _Tile(64, min(n, 64), 32, 4 if n == 16 else 8, 3)
    return _Tile(128, n, 64, 4 if n <= 32 else 8, {16: 5, 32: 4, 64: 3, 128: 3}[n])


def unmask(
    hidden: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    allowed: Allowed | None = None,
    noise: Tensor | None = None,
    soft: bool = False,
) -> Unmasked:
    """`infill_kernels.unmask.unmask`, fused. Does not wait for the device. Ignores `head.project`.

    The weight has to be contiguous; the hidden states are rounded to its dtype.
    """
    check_temperature(temperature)
    weight, device = head.weight, hidden.device
    if not weight.is_contiguous():
        raise ValueError("the head's weight must be contiguous: call .contiguous() once where it is loaded")
    (vocab, width), rows = weight.shape, len(hidden)
    tile = _tile(rows, weight.itemsize)
    row_tiles, tiles = triton.cdiv(rows, tile.n), triton.cdiv(vocab, tile.v)
    span = triton.cdiv(tiles, max(1, _programs(device) // max(1, row_tiles))) * tile.v
    splits = triton.cdiv(vocab, span)
    inputs: dict[str, Any] = {
        "hidden": hidden.to(weight.dtype).contiguous(),
        "weight": weight,
        "banned": None if head.banned is None else head.banned.view(torch.uint8),
        "mask": None if allowed is None else allowed.mask.view(torch.uint8),
        "row_set": None if allowed is None else allowed.row,
        "rows": rows,
        "vocab": vocab,
        "softcap": None if head.softcap is None else float(head.softcap),
        "temperature": float(temperature),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **_blocks(tile, width),
    }
    numbers = torch.empty(4, splits, rows, device=device)
    ids = torch.empty(2, splits, rows, dtype=torch.int32, device=device)
    top, prob, lse, entropy = torch.empty(4, rows, device=device)
    token, sample = torch.empty(2, rows, dtype=torch.int64, device=device)
    with torch.cuda.device_of(hidden):
        _scan[(row_tiles, splits)](
            **inputs, noise=None if noise is None else noise.contiguous(), numbers=numbers, ids=ids, span=span
        )
        _merge[(rows,)](
            numbers, ids, token, sample, top, prob, lse, entropy, rows, splits, BLOCK_S=triton.next_power_of_2(splits)
        )
        expected = _expected(inputs, tile, top, prob) if soft else None
    return Unmasked(
        token=token, sample=token if noise is None else sample, prob=prob, lse=lse, entropy=entropy, soft=expected
    )


def _expected(inputs: dict[str, Any], tile: _Tile, top: Tensor, prob: Tensor) -> Tensor:
    """The soft embedding [N, D], a chunk of the vocabulary at a time."""
    weight, rows, vocab = inputs["weight"], inputs["rows"], inputs["vocab"]
    width, row_tiles = weight.shape[1], triton.cdiv(rows, tile.n)
    mix = _mix_tile(rows, weight.itemsize)
    columns, mix_rows = triton.cdiv(width, mix.d), triton.cdiv(rows, mix.n)
    tiles = min(max(1, CHUNK // (max(1, rows) * tile.v)), triton.cdiv(vocab, tile.v))
    splits = min(tiles, max(1, _programs(weight.device) // max(1, columns * mix_rows)))
    span = triton.cdiv(tiles, splits) * tile.v
    chunk = tiles * tile.v
    weights = torch.empty(rows, chunk, dtype=weight.dtype, device=weight.device)
    sums = torch.zeros(splits, rows, width, device=weight.device)
    for start in range(0, vocab, chunk):
        _soften[(row_tiles, tiles)](**inputs, top=top, prob=prob, weights=weights, start=start, chunk=chunk)
        _mix[(columns, mix_rows, splits)](
            weights,
            weight,
            sums,
            rows,
            vocab,
            start,
            span,
            chunk,
            num_warps=mix.warps,
            num_stages=mix.stages,
            **_blocks(mix, width),
        )
    return sums.sum(0).to(weight.dtype)


def _blocks(tile: _Tile, width: int) -> dict[str, Any]:
    return {"WIDTH": width, "BLOCK_V": tile.v, "BLOCK_N": tile.n, "BLOCK_D": tile.d}


def _mix_tile(rows: int, itemsize: int) -> _Tile:
    n = min(max(16, triton.next_power_of_2(rows)), 128)
    if itemsize == 4:
        return _Tile(32, min(n, 64), 64, 4 if n == 16 else 8, 3)
    return _Tile(64, n, 128, 4 if n <= 32 else 8, 3)


def _programs(device: torch.device) -> int:
    """How many programs fill a device: two a multiprocessor, so that one loads while the other is between tiles."""
    if device.type != "cuda":
        return 4  # the interpreter's
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _tempered(
    hidden, weight, banned, mask, row_set, row, first, vocab, softcap, temperature,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_V]: y of the rows `row` (existing ones) and the ids from `first` on."""
    local = tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    id = tl.cast(first, tl.int64) + local
    exists = id < vocab
    # Offsets within a tile fit 32 bits: few registers for addresses. Ids behind the last read the last one's weights
    # again, which costs no mask in the loop, and are not admitted.
    w = tl.minimum(local, vocab - 1 - first)[None, :] * WIDTH + column[:, None]
    h = row[:, None] * WIDTH + column[None, :]
    weight += tl.cast(first, tl.int64) * WIDTH
    y = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for d in range(0, WIDTH, BLOCK_D):
        if WIDTH % BLOCK_D == 0:
            y = tl.dot(tl.load(hidden + d + h), tl.load(weight + d + w), y, input_precision="ieee")
        else:
            inside = column < WIDTH - d
            a = tl.load(hidden + d + h, inside[None, :], other=0.0)
            y = tl.dot(a, tl.load(weight + d + w, inside[:, None], other=0.0), y, input_precision="ieee")
    if softcap is not None:
        y = softcap * (1 - 2 / (tl.exp(2 * y / softcap) + 1))  # tanh; right at both infinities of exp
    y = y / temperature
    free = exists
    if banned is not None:
        free = free & (tl.load(banned + id, exists, other=1) == 0)
    admitted = tl.broadcast_to(free[None, :], [BLOCK_N, BLOCK_V])
    if mask is not None:
        own = tl.load(row_set + row)[:, None]
        at = mask + own.to(tl.int64) * vocab + id[None, :]
        admitted = admitted & (tl.load(at, exists[None, :] & (own >= 0), other=1) != 0)
    return tl.where(admitted, y, -float("inf"))


@triton.jit
def _better(y, first, best, id):
    """The larger of each row's maximum so far and that of y [BLOCK_N, ids from `first` on], and its id; the lower id of
    equal ones."""
    top, at = tl.max(y, 1, return_indices=True, return_indices_tie_break_left=True)
    return tl.maximum(best, top), tl.where(top > best, first + at, id)


@triton.jit(do_not_specialize=["rows"])
def _scan(
    hidden, weight, banned, mask, row_set, noise, numbers, ids, rows, vocab, span, softcap, temperature,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The states (m, s, u, max y + g) and ids of one tile of rows over `span` ids, a multiple of BLOCK_V.

    numbers: float32 [4, splits, N]; ids: int32 [2, splits, N].
    """
    split = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    inside = row < rows
    row = tl.minimum(row, rows - 1)
    m = tl.full([BLOCK_N], -float("inf"), tl.float32)
    s = tl.zeros([BLOCK_N], tl.float32)
    u = tl.zeros([BLOCK_N], tl.float32)
    best = tl.full([BLOCK_N], -float("inf"), tl.float32)
    token = tl.zeros([BLOCK_N], tl.int32)
    sample = tl.zeros([BLOCK_N], tl.int32)
    local = tl.arange(0, BLOCK_V // 2)
    for first in range(split * span, tl.minimum(split * span + span, vocab), BLOCK_V):
        y = _tempered(
            hidden, weight, banned, mask, row_set, row, first, vocab, softcap, temperature,
            WIDTH, BLOCK_V, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if noise is not None:
            # In halves: with a whole tile's noise in registers a tile of 128 rows spills 128 to 416 bytes a thread.
            g = noise + tl.cast(first_row, tl.int64) * vocab + first
            g += (row - first_row)[:, None] * vocab + local[None, :]
            left, right = tl.split(tl.permute(tl.reshape(y, [BLOCK_N, 2, BLOCK_V // 2]), [0, 2, 1]))
            left += tl.load(g, (local < vocab - first)[None, :], other=0.0)
            best, sample = _better(left, first, best, sample)
            tl.debug_barrier()  # keeps the compiler from loading both at once
            right += tl.load(g + BLOCK_V // 2, (local < vocab - first - BLOCK_V // 2)[None, :], other=0.0)
            best, sample = _better(right, first + BLOCK_V // 2, best, sample)
        grown, token = _better(y, first, m, token)
        base = tl.where(grown == -float("inf"), 0.0, grown)  # nothing admitted yet: -inf - -inf would be NaN
        gap = tl.where(m == -float("inf"), 0.0, m - base)
        below = tl.maximum(y - base[:, None], -200.0)  # exp is 0 there, and so is its product, also for minus infinity
        e = tl.exp(below)
        u = tl.exp(gap) * (u + gap * s) + tl.sum(e * below, 1)
        s = tl.exp(gap) * s + tl.sum(e, 1)
        m = grown
    stride = tl.num_programs(1) * rows
    numbers += split * rows + row
    ids += split * rows + row
    tl.store(numbers, m, inside)
    tl.store(numbers + stride, s, inside)
    tl.store(numbers + 2 * stride, u, inside)
    tl.store(numbers + 3 * stride, best, inside)
    tl.store(ids, token, inside)
    tl.store(ids + stride, sample, inside)


@triton.jit(do_not_specialize=["rows", "splits"], do_not_specialize_on_alignment=_ROWS)
def _merge(
    numbers, ids, token, sample, top, prob, lse, entropy, rows, splits, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Merges one row's states of all splits; the first of equal ones wins, which has the lowest id."""
    row, stride = tl.program_id(0), splits * rows
    split = tl.arange(0, BLOCK_S)
    inside = split < splits
    at = split * rows + row
    m = tl.load(numbers + at, inside, other=-float("inf"))
    s = tl.load(numbers + stride + at, inside, other=0.0)
    u = tl.load(numbers + 2 * stride + at, inside, other=0.0)
    best = tl.load(numbers + 3 * stride + at, inside, other=-float("inf"))
    base, winner = tl.max(m, 0, return_indices=True, return_indices_tie_break_left=True)
    gap = tl.where(m == -float("inf"), 0.0, m - base)
    total = tl.sum(tl.exp(gap) * s, 0)
    mean = tl.sum(tl.exp(gap) * (u + gap * s), 0) / total
    tl.store(token + row, tl.load(ids + winner * rows + row).to(tl.int64))
    _, winner = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(sample + row, tl.load(ids + stride + winner * rows + row).to(tl.int64))
    tl.store(top + row, base)
    tl.store(prob + row, 1 / total)
    tl.store(lse + row, base + tl.log(total))
    tl.store(entropy + row, tl.maximum(tl.log(total) - mean, 0.0))


@triton.jit(do_not_specialize=["rows", "start"], do_not_specialize_on_alignment=_ROWS)
def _soften(
    hidden, weight, banned, mask, row_set, top, prob, weights, rows, vocab, start, chunk, softcap, temperature,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """p of the ids start .. start + chunk, [N, chunk] in the weight's dtype; 0 behind the last id."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    row = tl.minimum(row, rows - 1)
    behind = tl.program_id(1) * BLOCK_V
    out = weights + row.to(tl.int64)[:, None] * chunk + behind + tl.arange(0, BLOCK_V)[None, :]
    if start + behind < vocab:
        y = _tempered(
            hidden, weight, banned, mask, row_set, row, start + behind, vocab, softcap, temperature,
            WIDTH, BLOCK_V, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        p = tl.exp(y - tl.load(top + row)[:, None]) * tl.load(prob + row)[:, None]
        tl.store(out, p.to(weights.dtype.element_ty), inside[:, None])
    else:
        tl.store(out, tl.zeros([BLOCK_N, BLOCK_V], weights.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["rows", "start"])
def _mix(
    weights, weight, sums, rows, vocab, start, span, chunk,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds a chunk's sum_t p_t w_t to sums, float32 [splits, N, D]; a split owns `span` ids of the chunk."""
    split = tl.program_id(2)
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = sums + (split.to(tl.int64) * rows + row)[:, None] * WIDTH + column[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    acc = tl.load(out, inside, other=0.0)
    local = tl.arange(0, BLOCK_V)
    weights += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * chunk + local[None, :]
    weight += tl.cast(start, tl.int64) * WIDTH
    last = vocab - 1 - start
    for at in range(split * span, tl.minimum(split * span + span, chunk), BLOCK_V):
        w = weight + tl.cast(at, tl.int64) * WIDTH
        w += tl.minimum(local, last - at)[:, None] * WIDTH + column[None, :]  # p is 0 behind the last id
        b = tl.load(w) if WIDTH % BLOCK_D == 0 else tl.load(w, (column < WIDTH)[None, :], other=0.0)
        acc = tl.dot(tl.load(weights + at), b, acc, input_precision="ieee")
    tl.store(out, acc, inside)


def variants() -> Iterator[Variant]:
    """What the embedded model (576 wide), DiffusionGemma (2816) and a wide head (5376) launch, by dtype and rows."""
    for dtype, width, rows, restricted in (
        ("bf16", 576, 1, True),
        ("fp16", 576, 16, True),
        ("fp32", 576, 1, True),
        ("fp32", 576, 64, False),
        ("bf16", 2816, 16, False),
        ("bf16", 2816, 32, True),
        ("bf16", 2816, 64, False),
        ("bf16", 2816, 256, False),
        ("bf16", 5376, 256, True),
        ("bf16", 579, 16, True),
    ):
        itemsize = 4 if dtype == "fp32" else 2
        tile, mix = _tile(rows, itemsize), _mix_tile(rows, itemsize)
        data, name = f"*{dtype}:16", f"{dtype}, {width} wide, {rows} rows"
        restrictions = {"banned": "*u8:16", "mask": "*u8:16", "row_set": "*i32:16"}
        inputs = dict.fromkeys(("hidden", "weight"), data) | {"rows": "i32", "vocab": "i32:16", "temperature": "fp32"}
        inputs |= restrictions if restricted else {"softcap": "fp32"}
        constants = dict.fromkeys({"softcap", *restrictions} - set(inputs)) | _blocks(tile, width)
        scan = inputs | {"numbers": "*fp32:16", "ids": "*i32:16", "span": "i32:16", "noise": "*fp32:16"}
        yield Variant(f"scan, {name}", _scan, scan, constants, tile.warps, tile.stages)
        soften = inputs | {"top": "*fp32", "prob": "*fp32", "weights": data, "start": "i32", "chunk": "i32:16"}
        yield Variant(f"soften, {name}", _soften, soften, constants, tile.warps, tile.stages)
        signature = {"weights": data, "weight": data, "sums": "*fp32:16", "rows": "i32", "vocab": "i32:16"}
        signature |= {"start": "i32", "span": "i32:16", "chunk": "i32:16"}
        yield Variant(f"mix, {name}", _mix, signature, _blocks(mix, width), mix.warps, mix.stages)
    pointers = {"numbers": "*fp32:16", "ids": "*i32:16", "token": "*i64", "sample": "*i64"}
    pointers |= dict.fromkeys(("top", "prob", "lse", "entropy"), "*fp32")
    yield Variant("merge", _merge, {**pointers, "rows": "i32", "splits": "i32"}, {"BLOCK_S": 512}, 4, 1)
