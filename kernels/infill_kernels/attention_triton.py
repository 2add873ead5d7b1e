"""`canvas_attention` and `rotate_and_store` in Triton: the formulas, the plan and the signatures of attention.py.

One program takes the query heads of one key head and several rows of one canvas as the rows of a tile, and walks over
key tiles with an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). Few rows against many keys would leave
most of a GPU idle, so the key tiles are dealt out to several programs, and a second kernel puts their partial sums
together (flash-decoding: Dao et al. 2023, https://pytorch.org/blog/flash-decoding).

Grids depend on numbers that the host knows (`Plan.most_queries`, `Plan.most_keys`, the number of canvases), nothing
waits for the device, and nothing is compiled for the lengths of the plan's lists: a pass can be captured in a CUDA
graph. Pool and queries have one dtype; sums are in fp32, and products of fp32 are exact (no TF32).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from infill_kernels.attention import PAGE, Plan, Rope
from infill_kernels.compile import Variant

#: The plan's tensors as the kernel takes them. Views of one tensor, they lie anywhere: nothing is compiled for how.
_PLAN = (
    *("query_start", "token_start", "context_start", "own_page", "own_at", "query_token"),
    *("position", "enter", "leave", "group", "branch"),
    *("context_page", "context_first", "context_end", "context_back", "context_block", "context_bias", "pages"),
)
_STORE_PLAN = ("query_start", "query_token", "query_slot", "position")
_COUNTS = ("positions", "rows", "row_tiles", "window")

#: Partial sums of one row that the combining kernel holds at a time, in numbers.
_COMBINED = 16384


@triton.jit
def _fold(
    turned, keys, values, at, there, bias, seen, scale, top, total, mixed, HEAD: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Adds one tile of keys to the online softmax of a tile of queries.

    turned: [R, HEAD]; at: [K], where each key's numbers begin; there: [K], what may be loaded; bias: added to the
    scores; seen: [R, K], True where a row sees a key. Scores are in units of log 2, since exp2 is the machine's.
    """
    number = tl.arange(0, HEAD)
    where = at[:, None] + number[None, :]
    k = tl.load(keys + where, mask=there[:, None], other=0.0)
    v = tl.load(values + where, mask=there[:, None], other=0.0)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"  # of no effect on 16-bit products
    scores = tl.dot(turned, tl.trans(k), input_precision=precision) * scale + bias
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
    return new_top, total, mixed


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_PLAN)
def _attend(
    q, keys, values, table, out, partial, softmax,
    query_start, token_start, context_start, own_page, own_at, query_token, position, enter, leave, group, branch,
    context_page, context_first, context_end, context_back, context_block, context_bias, pages,
    positions, rows, row_tiles, window, scale, bias_right,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (canvases x row tiles, KV heads, splits); `rows` is N Hq. With SPLITS = 1 `out` gets the result; else
    partial [SPLITS, N Hq, HEAD] the unscaled sums and softmax [2, SPLITS, N Hq] their maxima and totals."""
    LOG2E: tl.constexpr = 1.4426950408889634
    canvas = tl.program_id(0) // row_tiles
    tile = tl.program_id(0) % row_tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    first_query = tl.load(query_start + canvas)
    queries = tl.load(query_start + canvas + 1) - first_query
    if tile * ROWS >= queries * GROUP:
        return
    packed = tile * ROWS + tl.arange(0, ROWS)
    live = packed < queries * GROUP
    query = first_query + packed // GROUP
    row = query.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
    token = tl.load(query_token + query, mask=live, other=0)
    here = tl.load(position + token, mask=live, other=0)
    is_branch = tl.load(branch + token, mask=live, other=0)
    if WINDOWED:
        lowest = tl.min(tl.where(live, here, 2147483647), 0) - window + 1
        beyond = tl.max(here, 0) + window

    number = tl.arange(0, HEAD)
    HALF: tl.constexpr = HEAD // 2
    q_at = q + row[:, None] * HEAD
    column = tl.arange(0, KEYS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD], tl.float32)

    dealt = 0  # key tiles of this canvas that lie before the current run; tile t is for split t % SPLITS
    for context in range(tl.load(context_start + canvas), tl.load(context_start + canvas + 1)):
        first = tl.load(context_first + context)
        end = tl.load(context_end + context)
        back = tl.load(context_back + context)
        hidden = (is_branch * tl.load(context_block + context)) > 0
        bias = tl.load(context_bias + context) * LOG2E
        page_list = pages + tl.load(context_page + context)
        # Where back is 0 this is exact: cosines are 1 and sines 0.
        cos = tl.load(table + back * HALF + number % HALF)
        sin = tl.load(table + (positions + back) * HALF + number % HALF)
        straight = tl.load(q_at + number[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        across = tl.load(q_at + ((number + HALF) % HEAD)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        across = tl.where(number[None, :] < HALF, -across, across)
        turned = (straight * cos[None, :] + across * sin[None, :]).to(keys.dtype.element_ty)
        if WINDOWED:
            first = tl.maximum(first, lowest + back)
            end = tl.minimum(end, beyond + back)
        tiles = tl.cdiv(tl.maximum(end - first, 0), KEYS)
        for t in range((split + SPLITS - dealt % SPLITS) % SPLITS, tiles, SPLITS):
            j = first + t * KEYS + column
            there = j < end
            page = tl.load(page_list + j // PAGE, mask=there, other=0).to(tl.int64)
            seen = there[None, :] & ~hidden[:, None]
            if WINDOWED:
                seen = seen & (tl.abs(here[:, None] - (j - back)[None, :]) < window)
            at = ((page * KV_HEADS + kv_head) * PAGE + j % PAGE) * HEAD
            top, total, mixed = _fold(
                turned, keys, values, at, there, bias, seen, scale, top, total, mixed, HEAD, EXACT
            )
        dealt += tiles

    straight = tl.load(q_at + number[None, :], mask=live[:, None], other=0.0)
    first_token = tl.load(token_start + canvas)
    tokens = tl.load(token_start + canvas + 1) - first_token
    slot_0 = tl.load(own_at + canvas)
    page_list = pages + tl.load(own_page + canvas)
    enter_here = tl.load(enter + token, mask=live, other=-1)
    group_here = tl.load(group + token, mask=live, other=0)
    for t in range((split + SPLITS - dealt % SPLITS) % SPLITS, tl.cdiv(tokens, KEYS), SPLITS):
        j = t * KEYS + column
        there = j < tokens
        page = tl.load(page_list + (slot_0 + j) // PAGE, mask=there, other=0).to(tl.int64)
        there_position = tl.load(position + first_token + j, mask=there, other=0)
        there_enter = tl.load(enter + first_token + j, mask=there, other=0)
        there_leave = tl.load(leave + first_token + j, mask=there, other=0)
        there_group = tl.load(group + first_token + j, mask=there, other=0)
        ancestor = (there_enter[None, :] <= enter_here[:, None]) & (enter_here[:, None] < there_leave[None, :])
        together = (group_here > 0)[:, None] & (group_here[:, None] == there_group[None, :])
        seen = (ancestor | together) & there[None, :]
        if WINDOWED:
            seen = seen & (tl.abs(here[:, None] - there_position[None, :]) < window)
        bias = tl.where(there_position[None, :] > here[:, None], bias_right * LOG2E, 0.0)
        at = ((page * KV_HEADS + kv_head) * PAGE + (slot_0 + j) % PAGE) * HEAD
        top, total, mixed = _fold(straight, keys, values, at, there, bias, seen, scale, top, total, mixed, HEAD, EXACT)

    if SPLITS == 1:
        mixed = mixed / tl.where(live, total, 1.0)[:, None]
        tl.store(out + row[:, None] * HEAD + number[None, :], mixed.to(out.dtype.element_ty), mask=live[:, None])
    else:
        tl.store(
            partial + (split.to(tl.int64) * rows + row)[:, None] * HEAD + number[None, :], mixed, mask=live[:, None]
        )
        tl.store(softmax + split * rows + row, top, mask=live)
        tl.store(softmax + (SPLITS + split) * rows + row, total, mask=live)


@triton.jit(do_not_specialize=("rows",))
def _combine(partial, softmax, out, rows, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    """Grid (N Hq,): one row's partial sums into its result. Every row sees itself, so some maximum is finite."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    number = tl.arange(0, HEAD)
    top = tl.load(softmax + split * rows + row)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(softmax + (SPLITS + split) * rows + row), 0)
    mixed = tl.load(partial + (split.to(tl.int64) * rows + row)[:, None] * HEAD + number[None, :])
    mixed = tl.sum(mixed * weight[:, None], 0) / total
    tl.store(out + row * HEAD + number, mixed.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=("canvases", "positions"), do_not_specialize_on_alignment=_STORE_PLAN)
def _rotate_and_store(
    qkv, keys, values, q, table, query_start, query_token, query_slot, position, canvases, positions,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (N, Hq + 2 Hkv): one head of one token. Rows behind the last canvas's are room for more, and left alone."""
    n = tl.program_id(0).to(tl.int64)
    if n >= tl.load(query_start + canvases):
        return
    head = tl.program_id(1)
    HALF: tl.constexpr = HEAD // 2
    number = tl.arange(0, HALF)
    source = qkv + (n * (HEADS + 2 * KV_HEADS) + head) * HEAD
    a = tl.load(source + number).to(tl.float32)
    b = tl.load(source + HALF + number).to(tl.float32)
    slot = tl.load(query_slot + n).to(tl.int64)
    place = (slot // PAGE * KV_HEADS) * PAGE + slot % PAGE
    if head < HEADS + KV_HEADS:
        at = tl.load(position + tl.load(query_token + n))
        cos = tl.load(table + at * HALF + number)
        sin = tl.load(table + (positions + at) * HALF + number)
        low, high = a * cos - b * sin, b * cos + a * sin
        target = q + (n * HEADS + head) * HEAD if head < HEADS else keys + (place + (head - HEADS) * PAGE) * HEAD
        tl.store(target + number, low.to(q.dtype.element_ty))
        tl.store(target + HALF + number, high.to(q.dtype.element_ty))
    else:
        target = values + (place + (head - HEADS - KV_HEADS) * PAGE) * HEAD
        tl.store(target + number, a.to(q.dtype.element_ty))
        tl.store(target + HALF + number, b.to(q.dtype.element_ty))


def rotate_and_store(qkv: Tensor, keys: Tensor, values: Tensor, plan: Plan, rope: Rope) -> Tensor:
    """As `attention.rotate_and_store`; qkv and the pool share a dtype, hd is a power of two from 16 on."""
    rope.reserve(plan.positions)
    n, heads, size = qkv.shape
    kv_heads = keys.shape[1]
    _check(qkv, keys, values)
    q = qkv.new_empty(n, heads - 2 * kv_heads, size)
    with torch.cuda.device_of(qkv):
        _rotate_and_store[(n, heads)](
            qkv.contiguous(),
            keys,
            values,
            q,
            rope.table,
            plan.query_start,
            plan.query_token,
            plan.query_slot,
            plan.position,
            len(plan.own_at),
            rope.table.shape[1],
            HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HEAD=size,
            PAGE=PAGE,
            num_warps=1,
        )
    return q


def canvas_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    rope: Rope,
    *,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """As `attention.canvas_attention`; q and the pool share a dtype, hd is a power of two from 16 on. Rows behind the
    last canvas's are undefined.

    splits: into how many programs a row's keys are dealt, a power of two; by default as many as fill the GPU.
    """
    rope.reserve(plan.positions)
    _check(q, keys, values)
    n, heads, size = q.shape
    kv_heads = keys.shape[1]
    group, canvases = heads // kv_heads, len(plan.own_at)
    tile_rows, tile_keys, num_warps, num_stages = _tiles(plan.most_queries * group, size, q.element_size())
    row_tiles = triton.cdiv(plan.most_queries * group, tile_rows)
    if splits is None:
        splits = _splits(canvases * row_tiles * kv_heads, triton.cdiv(plan.most_keys, tile_keys), size, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial = softmax = out
    if splits > 1:
        partial = q.new_empty(splits, n * heads, size, dtype=torch.float32)
        softmax = q.new_empty(2, splits, n * heads, dtype=torch.float32)
    with torch.cuda.device_of(q):
        _attend[(canvases * row_tiles, kv_heads, splits)](
            q.contiguous(),
            keys,
            values,
            rope.table,
            out,
            partial,
            softmax,
            *(getattr(plan, name) for name in _PLAN),
            positions=rope.table.shape[1],
            rows=n * heads,
            row_tiles=row_tiles,
            window=window or 0,
            scale=scale * math.log2(math.e),
            bias_right=float(plan.bias_right),
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD=size,
            PAGE=PAGE,
            ROWS=tile_rows,
            KEYS=tile_keys,
            SPLITS=splits,
            WINDOWED=window is not None,
            EXACT=q.dtype == torch.float32,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        if splits > 1:
            _combine[(n * heads,)](partial, softmax, out, n * heads, HEAD=size, SPLITS=splits, num_warps=4)
    return out


def _check(x: Tensor, keys: Tensor, values: Tensor) -> None:
    if not x.dtype == keys.dtype == values.dtype:
        raise ValueError(f"the KV pool is {keys.dtype} and the queries are {x.dtype}: give both one dtype")
    size = x.shape[-1]
    if size < 16 or size & (size - 1):
        raise ValueError(f"a head size must be a power of two from 16 on, not {size}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("a layer's keys and values must be contiguous [pages, Hkv, PAGE, hd]")


def _tiles(rows: int, size: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows and keys a tile, warps and pipeline stages, for at most `rows` query heads of one key head in a canvas.

    Chosen by what the compiler makes of it for compute capabilities 8.0 to 12.0: at most 72 bytes of registers spilled,
    and within the 99 KiB of shared memory of a consumer GPU. Keys are found through the page list, so that five stages
    keep two tiles in flight. Products in fp32 do not go through the tensor cores and take many registers.
    """
    exact = itemsize == 4
    tile_rows = 16 if exact else min(max(16, triton.next_power_of_2(rows)), 8192 // size, 64)
    tile_keys = 16 if exact else min(64, 8192 // size)
    num_warps = 8 if tile_rows * size >= (2048 if exact else 4096) else 4
    return tile_rows, tile_keys, num_warps, 5 if 2 * tile_keys * size * itemsize <= 32768 else 2


def _splits(programs: int, key_tiles: int, size: int, device: torch.device) -> int:
    """As many programs as give each multiprocessor two, a power of two so that few variants are compiled."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs
    most = min(wanted, key_tiles, _COMBINED // size, 64)
    return 1 << max(0, most.bit_length() - 1)


def variants() -> Iterator[Variant]:
    """What models launch: (dtype, head size, query heads a key head, rows, splits, window)."""
    for dtype, size, group, queries, splits, windowed in (
        ("bf16", 64, 3, 4, 32, False),
        ("bf16", 64, 3, 64, 1, False),
        ("fp32", 64, 3, 64, 8, True),
        ("fp16", 128, 7, 4, 32, False),
        ("bf16", 128, 7, 64, 1, False),
        ("fp32", 128, 7, 64, 1, False),
        ("bf16", 256, 2, 8, 16, True),
        ("bf16", 256, 2, 256, 1, True),
        ("bf16", 512, 8, 2, 16, False),
        ("bf16", 512, 8, 256, 1, False),
        ("fp32", 512, 8, 256, 1, False),
    ):
        data = f"*{dtype}:16"
        tile_rows, tile_keys, num_warps, num_stages = _tiles(queries * group, size, 4 if dtype == "fp32" else 2)
        signature = dict.fromkeys(("q", "keys", "values", "out"), data)
        signature |= {"table": "*fp32:16", "partial": "*fp32:16" if splits > 1 else data}
        signature |= {"softmax": signature["partial"]} | dict.fromkeys(_PLAN, "*i32") | {"context_bias": "*fp32"}
        signature |= dict.fromkeys(_COUNTS, "i32") | {"scale": "fp32", "bias_right": "fp32"}
        constants = {"KV_HEADS": 3, "GROUP": group, "HEAD": size, "PAGE": PAGE, "ROWS": tile_rows, "KEYS": tile_keys}
        constants |= {"SPLITS": splits, "WINDOWED": windowed, "EXACT": dtype == "fp32"}
        name = f"{dtype}, heads of {size}, {queries} x {group} rows, {splits} splits{', window' * windowed}"
        yield Variant(f"attend, {name}", _attend, signature, constants, num_warps, num_stages)
    for size in (64, 512):
        splits = min(64, _COMBINED // size)
        signature = {"partial": "*fp32:16", "softmax": "*fp32:16", "out": "*bf16:16", "rows": "i32"}
        yield Variant(
            f"combine, heads of {size}, {splits} splits", _combine, signature, {"HEAD": size, "SPLITS": splits}, 4
        )
    signature = dict.fromkeys(("qkv", "keys", "values", "q"), "*bf16:16") | {"table": "*fp32:16"}
    signature |= dict.fromkeys(("canvases", "positions"), "i32") | dict.fromkeys(_STORE_PLAN, "*i32")
    constants = {"HEADS": 9, "KV_HEADS": 3, "HEAD": 64, "PAGE": PAGE}
    yield Variant("rotate_and_store, bf16, heads of 64", _rotate_and_store, signature, constants, 1)
