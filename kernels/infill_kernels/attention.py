"""`canvas_attention`: queries of a ragged batch of canvas trees against paged contexts and the canvases themselves.

Knows nothing of models or text. This is the torch reference, the readable specification of the fused kernels.

Keys and values of every run of tokens lie in pages of one pool. A canvas is a tree given by integers a token: its
position, its parent (an index into the canvas, -1 for a root) and its class. A token sees

- its ancestors and itself;
- if it is OPEN: all OPEN tokens with the same parent (the members of its group), in both directions;
- every context placed for its canvas, but a BRANCH token does not see the contexts marked `block`.

Ancestry is two comparisons: number the tree's tokens in depth-first order (`enter`) and let `leave` be the number after
the last of a token's descendants; then j is an ancestor of i, or i itself, iff enter_j <= enter_i < leave_j.

A context's keys are cached rotated at positions local to it (0, 1, 2, ...). RoPE scores depend on the difference of two
positions only, so a context that starts at absolute position p0 is placed by turning the query back by p0 instead of
rotating the keys again: its cache serves wherever it stands.

    score(i, j) = scale * R(-p0) q_i . k_j + bias_context                  q_i = R(x_i) W_q h_i,  k_j = R(j) W_k h_j
    score(i, j) = scale * q_i . k_j + bias_right [x_j > x_i]               within the canvas, k_j = R(x_j) W_k h_j
    out_i = sum_j softmax_j(score(i, j)) v_j                               over all that i sees

With a sliding window w only keys with |x_i - x_j| < w are seen, x_j = p0 + j for a context's key.

Sources: RoPE (Su et al. 2021, arXiv 2104.09864, section 3.4.2), in the half-split layout of GPT-NeoX and Llama; pages
as in vLLM (Kwon et al. 2023, arXiv 2309.06180, section 4.1); tree attention as in SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Token classes of a canvas tree.
LEFT, OPEN, BRANCH = 0, 1, 2

#: Tokens a page.
PAGE = 32


class KVPool:
    """Keys and values of all layers, in pages of `PAGE` tokens that are lent out and taken back.

    Its size bounds the memory of all contexts and canvases together. Taking and giving back are thread-safe.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_size: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        transposed: bool = False,
    ) -> None:
        """transposed: the keys of a page lie as [hd, PAGE] in memory, for kernels that take many keys at a time."""
        sizes = (layers, pages, kv_heads, PAGE, head_size)
        #: [layers, pages, Hkv, PAGE, hd]; a page that nobody has holds anything. A CPU's memory is not touched before
        #: it is used.
        self.values = torch.empty(sizes, dtype=dtype, device=device)
        self.keys = torch.empty_like(self.values)
        if transposed:
            self.keys = self.keys.view(*sizes[:3], head_size, PAGE).transpose(-1, -2)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def page_bytes(self) -> int:
        """Memory of one page, keys and values of all layers."""
        return 2 * self.keys.nbytes // self.keys.shape[1]

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """A page. Raises `MemoryError` when all are lent out."""
        try:
            return self._free.pop()
        except IndexError:
            raise MemoryError("every page of the KV pool is in use") from None

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back."""
        self._free.extend(pages)


class Rope:
    """Rotary tables in fp32, grown on demand. Not safe to share between threads."""

    def __init__(
        self,
        head_size: int,
        base: float,
        device: torch.device | str = "cpu",
        positions: int = 2048,
        share: float = 1.0,
    ) -> None:
        """share: of each half of a head, how much turns; the rest stays as it is ("proportional" RoPE, whose turning
        frequencies are those of a whole head)."""
        self._inverse = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        self._inverse[int(share * head_size // 2) :] = 0.0
        self._device = device
        #: fp32 [2, P, hd / 2], cosines and sines of position times frequency.
        self.table = self._fill(positions)

    def reserve(self, positions: int) -> None:
        """Makes room for positions 0 to `positions` - 1."""
        if positions > self.table.shape[1]:
            self.table = self._fill(2 * positions)

    def _fill(self, positions: int) -> Tensor:
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * self._inverse
        return torch.stack([angle.cos(), angle.sin()]).float().to(self._device)


class Placed(NamedTuple):
    """A context where it stands for one canvas."""

    pages: Sequence[int]
    #: The first token that is seen, and the end of those.
    first: int
    end: int
    #: The absolute position of the context's local position 0, at most 0.
    start: int = 0
    #: Added to the scores of its keys.
    bias: float = 0.0
    #: Hidden from BRANCH tokens.
    block: bool = False


class Part(NamedTuple):
    """One canvas's share of a pass: M tokens, parents before children, of which the last `queries` are computed; the
    others' keys and values are in the pages already."""

    positions: Sequence[int]
    parents: Sequence[int]
    classes: Sequence[int]
    queries: int
    #: Token j of the canvas is slot `at + j` of these pages.
    pages: Sequence[int]
    at: int
    contexts: Sequence[Placed]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a pass share, for C canvases of T tokens in all, of which N are queries; int32 on one device.

    Ragged lists are concatenated; `x_start[c] : x_start[c + 1]` are those of canvas c, which may have none. What a list
    holds behind the last canvas's is room for more: it is not read, and rows there are not computed.
    """

    #: [C + 1] each.
    query_start: Tensor
    token_start: Tensor
    context_start: Tensor
    #: [C]: where the canvas's own pages begin in `pages`, and the slot of its token 0 in them.
    own_page: Tensor
    own_at: Tensor
    #: [N]: the index of each query in the token lists, and where its key goes, page * PAGE + offset.
    query_token: Tensor
    query_slot: Tensor
    #: [T]: absolute position; depth-first interval; the parent + 2 for an OPEN token, else 0; 1 for a BRANCH token.
    position: Tensor
    enter: Tensor
    leave: Tensor
    group: Tensor
    branch: Tensor
    #: [S] a placed context: where its pages begin in `pages`, the tokens seen of it, minus its start, whether a block.
    context_page: Tensor
    context_first: Tensor
    context_end: Tensor
    context_back: Tensor
    context_block: Tensor
    #: fp32 [S].
    context_bias: Tensor
    #: Page ids, each canvas's own and each context's.
    pages: Tensor
    #: The gate on keys to the right of the query, within a canvas.
    bias_right: float
    #: The most queries, and the most canvas tokens, that any canvas has, known on the host.
    most_queries: int
    most_tokens: int
    #: At least as many keys as any query may see, its canvas's and its contexts'; known on the host.
    most_keys: int
    #: The lowest number of rotary positions that the tables need.
    positions: int


def plan(parts: Sequence[Part], bias_right: float = 0.0, device: torch.device | str = "cpu") -> Plan:
    """Plans one pass over a batch of canvases. All integers travel to the device in one copy, which waits for nothing
    that the device does."""
    lists: dict[str, list[int]] = {name: [] for name in _INTEGERS}
    query_start, token_start, context_start, bias = [0], [0], [0], []
    for part in parts:
        size = len(part.positions)
        assert 0 < part.queries <= size
        assert len(part.pages) * PAGE >= part.at + size
        lists["own_page"].append(len(lists["pages"]))
        lists["own_at"].append(part.at)
        lists["pages"] += part.pages
        first = size - part.queries
        lists["query_token"] += range(token_start[-1] + first, token_start[-1] + size)
        lists["query_slot"] += [
            part.pages[slot // PAGE] * PAGE + slot % PAGE for slot in range(part.at + first, part.at + size)
        ]
        enter, leave = _intervals(part.parents)
        lists["position"] += part.positions
        lists["enter"] += enter
        lists["leave"] += leave
        lists["group"] += [p + 2 if c == OPEN else 0 for p, c in zip(part.parents, part.classes, strict=True)]
        lists["branch"] += [int(c == BRANCH) for c in part.classes]
        for context in part.contexts:
            assert context.start <= 0
            lists["context_page"].append(len(lists["pages"]))
            lists["context_first"].append(context.first)
            lists["context_end"].append(max(context.first, context.end))
            lists["context_back"].append(-context.start)
            lists["context_block"].append(int(context.block))
            lists["pages"] += context.pages
            bias.append(context.bias)
        query_start.append(query_start[-1] + part.queries)
        token_start.append(token_start[-1] + size)
        context_start.append(context_start[-1] + len(part.contexts))
    lists |= {"query_start": query_start, "token_start": token_start, "context_start": context_start}
    sizes = [len(values) for values in lists.values()]
    packed = np.fromiter(itertools.chain(*lists.values()), np.int32, sum(sizes))
    both = moved(torch.from_numpy(np.concatenate([packed, np.array(bias, np.float32).view(np.int32)])), device)
    views = dict(zip(lists, torch.split(both[: len(packed)], sizes), strict=True))
    return Plan(
        **views,
        context_bias=both[len(packed) :].view(torch.float32),
        bias_right=bias_right,
        most_queries=max(part.queries for part in parts),
        most_tokens=max(len(part.positions) for part in parts),
        most_keys=max(len(part.positions) + sum(max(0, c.end - c.first) for c in part.contexts) for part in parts),
        positions=1 + max(*lists["position"], *lists["context_back"], 0),
    )


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """A host's tensor on `device`. To a GPU it goes from pinned memory, in the order of the stream, and the host goes
    on at once."""
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


_INTEGERS = tuple(name for name, kind in Plan.__annotations__.items() if kind == "Tensor" and name != "context_bias")


def _intervals(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Each token's depth-first interval [enter, leave): those of its descendants lie inside it."""
    size = [1] * len(parents)
    for i in range(len(parents) - 1, -1, -1):
        if (parent := parents[i]) >= 0:
            assert parent < i, "parents come before their children"
            size[parent] += size[i]
    enter, free, top = [0] * len(parents), [0] * len(parents), 0
    for i, parent in enumerate(parents):
        if parent < 0:
            enter[i], top = top, top + size[i]
        else:
            enter[i] = free[parent]
            free[parent] += size[i]
        free[i] = enter[i] + 1
    return enter, [first + count for first, count in zip(enter, size, strict=True)]


def rotate(x: Tensor, rope: Rope, position: Tensor) -> Tensor:
    """Turns the heads of x [N, H, hd] to integer positions [N] >= 0; fp32.

    A head of two halves (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    cos, sin = rope.table[:, position.long(), None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_and_store(qkv: Tensor, keys: Tensor, values: Tensor, plan: Plan, rope: Rope) -> Tensor:
    """Rotates the queries and keys of one layer at their positions and writes keys and values into the pool.

    qkv: [N, Hq + 2 Hkv, hd], query heads first, then key heads, then value heads; keys, values: the layer's pool
    [pages, Hkv, PAGE, hd]. Returns the queries, [N, Hq, hd] in qkv's dtype.
    """
    rope.reserve(plan.positions)
    kv_heads, n = keys.shape[1], int(plan.query_start[-1])
    qk = rotate(qkv[:n, :-kv_heads], rope, plan.position[plan.query_token[:n]])
    slot = plan.query_slot[:n].long()
    keys[slot // PAGE, :, slot % PAGE] = qk[:, -kv_heads:].to(keys.dtype)
    values[slot // PAGE, :, slot % PAGE] = qkv[:n, -kv_heads:].to(values.dtype)
    q = torch.empty_like(qkv[:, : -2 * kv_heads], memory_format=torch.contiguous_format)
    q[:n] = qk[:, :-kv_heads]
    return q


def canvas_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: Plan, rope: Rope, *, scale: float, window: int | None = None
) -> Tensor:
    """Attention of one layer. Returns [N, Hq, hd] in q's dtype; computed in fp32. Rows of no canvas are undefined.

    q: [N, Hq, hd], rotated at its positions; keys, values: the layer's pool [pages, Hkv, PAGE, hd], which holds the
    canvases' own already. Hq is a multiple of Hkv, query head h reads key head h // (Hq / Hkv).
    """
    rope.reserve(plan.positions)
    out = torch.empty_like(q)
    queries, tokens, contexts = (starts.tolist() for starts in (plan.query_start, plan.token_start, plan.context_start))
    for c in range(len(queries) - 1):
        rows, own = slice(queries[c], queries[c + 1]), slice(tokens[c], tokens[c + 1])
        if rows.start == rows.stop:
            continue
        here = q[rows].float() * scale
        which = plan.query_token[rows].long()
        position = plan.position[which]
        scores, seen = [], []
        for s in range(contexts[c], contexts[c + 1]):
            first, end, back = (int(x[s]) for x in (plan.context_first, plan.context_end, plan.context_back))
            k, v = (_gather(pool, plan, int(plan.context_page[s]), first, end) for pool in (keys, values))
            turned = rotate(here, rope, plan.context_back[s : s + 1]) if back else here
            score = _scores(turned, k) + plan.context_bias[s]
            hidden = (plan.branch[which] * plan.context_block[s]).bool()[:, None]
            if window is not None:
                at = torch.arange(first - back, end - back, device=q.device, dtype=torch.int32)
                hidden = hidden | ((position[:, None] - at).abs() >= window)
            scores.append(score.masked_fill(hidden, -torch.inf))
            seen.append(v)
        first = int(plan.own_at[c])
        end = first + tokens[c + 1] - tokens[c]
        k, v = (_gather(pool, plan, int(plan.own_page[c]), first, end) for pool in (keys, values))
        right = (plan.position[own] > position[:, None]).float() * plan.bias_right
        enter, group = plan.enter[which][:, None], plan.group[which][:, None]
        sees = (plan.enter[own] <= enter) & (enter < plan.leave[own]) | (group > 0) & (group == plan.group[own])
        if window is not None:
            sees &= (position[:, None] - plan.position[own]).abs() < window
        scores.append((_scores(here, k) + right).masked_fill(~sees, -torch.inf))
        seen.append(v)
        weights = torch.cat(scores, -1).softmax(-1)
        out[rows] = _mix(weights, torch.cat(seen, 1)).to(q.dtype)
    return out


def _gather(pool: Tensor, plan: Plan, page: int, first: int, end: int) -> Tensor:
    """fp32 [Hkv, end - first, hd]: tokens of the run whose pages begin at `page` in the plan's list."""
    ids = plan.pages[page + first // PAGE : page + -(-end // PAGE)].long()
    kv_heads, _, size = pool.shape[1:]
    run = pool[ids].transpose(0, 1).reshape(kv_heads, -1, size)
    return run[:, first % PAGE : first % PAGE + end - first].float()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[Hq, N, K] of q [N, Hq, hd] and k [Hkv, K, hd]."""
    n, heads, size = q.shape
    grouped = q.transpose(0, 1).reshape(len(k), -1, size)
    return (grouped @ k.transpose(1, 2)).view(heads, n, -1)


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    """[N, Hq, hd] of weights [Hq, N, K] and v [Hkv, K, hd]."""
    heads, n, _ = weights.shape
    return (weights.view(len(v), -1, v.shape[1]) @ v).view(heads, n, -1).transpose(0, 1)
