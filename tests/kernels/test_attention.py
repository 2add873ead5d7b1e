"""The canvas attention reference against attention spelled out a query at a time."""

from __future__ import annotations

import math
from functools import cached_property

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_kernels import (
    BRANCH,
    LEFT,
    OPEN,
    PAGE,
    KVPool,
    Part,
    Placed,
    Rope,
    plan,
)
from infill_kernels.attention import canvas_attention, rotate_and_store

BASE = 10_000.0


def turned(x, position):
    """One head at one position, in fp64."""
    size = len(x)
    angle = position * BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    a, b = x.double().chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def spelled_out(q, k, v, part, contexts, gate, window):
    """fp64 [N, Hq, hd]; k and the contexts' keys are not rotated; everything is placed absolutely."""
    (m, kv_heads, size), n = k.shape, len(q)
    position, parent, token_class = part.positions, part.parents, part.classes
    near = lambda a, b: window is None or abs(a - b) < window
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(n):
        i = m - n + row
        ancestors, above = {i}, i
        while (above := parent[above]) >= 0:
            ancestors.add(above)
        for head in range(q.shape[1]):
            g = head // (q.shape[1] // kv_heads)
            here = turned(q[row, head], position[i])
            scores, values = [], []
            for (ck, cv), placed in zip(contexts, part.contexts, strict=True):
                for j in range(placed.first, placed.end):
                    if (placed.block and token_class[i] == BRANCH) or not near(position[i], placed.start + j):
                        continue
                    scores.append(here @ turned(ck[j, g], placed.start + j) / math.sqrt(size) + placed.bias)
                    values.append(cv[j, g].double())
            for j in range(m):
                group = token_class[i] == token_class[j] == OPEN and parent[i] == parent[j]
                if (j in ancestors or group) and near(position[i], position[j]):
                    gated = gate if position[j] > position[i] else 0.0
                    scores.append(here @ turned(k[j, g], position[j]) / math.sqrt(size) + gated)
                    values.append(v[j, g].double())
            out[row, head] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


def tree(origin, left, masks, branch):
    """`left` tokens, an open group after the last and one after the last but one, and a branch that continues that."""
    early = masks // 2
    positions = [*range(origin, origin + left), *range(origin + left - 1, origin + left - 1 + early)]
    positions += range(origin + left, origin + left + masks - early)
    positions += range(origin + left - 1, origin + left - 1 + branch)
    parents = [*range(-1, left - 1), *[left - 2] * early, *[left - 1] * (masks - early)]
    parents += [left - 2 if i == 0 else left + masks + i - 1 for i in range(branch)]
    return positions, parents, [LEFT] * left + [OPEN] * masks + [BRANCH] * branch


class Case:
    """A random ragged batch in a pool of shuffled pages, and what attention should make of it."""

    def __init__(self, canvases, kv_heads, group, size, seed, window=None, dtype=torch.float32, device="cpu"):
        """canvases: (left, masks, branch, queries, at, lengths of contexts) each."""
        self.random = torch.Generator().manual_seed(seed)
        self.heads = (kv_heads * group, kv_heads, size)
        self.device = device
        self.pool = KVPool(1, kv_heads, size, 64, dtype, device)
        self.pool.keys.fill_(torch.nan), self.pool.values.fill_(torch.nan)
        self.pool._free = torch.randperm(64, generator=self.random).tolist()
        self.rope, self.gate, self.window = Rope(size, BASE, device, positions=4), -1.0, window
        self.parts, qkv, self.drawn = [], [], []
        for left, masks, branch, queries, at, lengths in canvases:
            positions, parents, classes = tree(7, left, masks, branch)
            m = len(positions)
            contexts = [(self.draw(t, kv_heads, size), self.draw(t, kv_heads, size)) for t in lengths]
            placed = []
            for i, (k, v) in enumerate(contexts):
                pages, end, start = self.store(k, v, 0, range(len(k))), len(k), (0, -9, -20)[i]
                placed.append(Placed(pages, min(i, end), end, start, (0.0, 1.0, -0.5)[i], i > 0))
            q, k, v = self.draw(m, kv_heads * group, size), self.draw(m, kv_heads, size), self.draw(m, kv_heads, size)
            n = min(queries, m)
            pages = self.store(k[: m - n], v[: m - n], at, positions[: m - n], m)
            part = Part(positions, parents, classes, n, pages, at, placed)
            self.parts.append(part)
            qkv.append(torch.cat([q, k, v], 1)[m - n :])
            self.drawn.append((q[m - n :], k, v, part, contexts))
        self.qkv = torch.cat(qkv)
        self.plan = plan(self.parts, self.gate, device)

    @cached_property
    def expected(self):
        """fp64 [N, Hq, hd]."""
        return torch.cat([spelled_out(*drawn, self.gate, self.window) for drawn in self.drawn])

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def store(self, k, v, at, positions, room=0):
        """Pages with room for `at` + `room` tokens that hold k and v from slot `at` on, by the reference itself."""
        pages = [self.pool.take() for _ in range(-(-(at + max(room, len(k), 1)) // PAGE))]
        if len(k):
            chain = [*range(-1, len(k) - 1)]
            of_pass = plan([Part(list(positions), chain, [LEFT] * len(k), len(k), pages, at, [])], device=self.device)
            kv = torch.cat([k, v], 1).to(self.device)
            rotate_and_store(kv, self.pool.keys[0], self.pool.values[0], of_pass, self.rope)
        return pages

    def run(self, attention=canvas_attention, store=rotate_and_store):
        keys, values = self.pool.keys[0], self.pool.values[0]
        q = store(self.qkv.to(self.device, keys.dtype), keys, values, self.plan, self.rope)
        scale = self.heads[2] ** -0.5
        return attention(q, keys, values, self.plan, self.rope, scale=scale, window=self.window).cpu()


canvas_shapes = st.tuples(
    st.integers(2, 40),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(1, 12),
    st.sampled_from([0, 5, 31, 40]),
    st.lists(st.sampled_from([0, 1, 6, 32, 70]), max_size=3),
)


@settings(max_examples=25, deadline=None)
@given(
    canvases=st.lists(canvas_shapes, min_size=1, max_size=3),
    kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([2, 8]),
    seed=st.integers(0, 2**16),
    window=st.sampled_from([None, 5, 30]),
)
def test_agrees_with_attention_spelled_out(canvases, kv_heads, group, size, seed, window):
    case = Case(canvases, kv_heads, group, size, seed, window)
    torch.testing.assert_close(case.run().double(), case.expected, rtol=1e-4, atol=1e-5)


def test_a_context_may_stand_anywhere():
    """Scores depend on distances only: moving the canvas and a context together changes nothing."""
    case = Case([(3, 0, 0, 1, 0, [40])], 2, 1, 8, seed=0)

    def at(shift: int) -> torch.Tensor:
        part = case.parts[0]
        part = Part([20 + shift], [-1], [LEFT], 1, part.pages, 0, [part.contexts[0]._replace(start=shift)])
        of_pass, pool = plan([part]), case.pool
        q = rotate_and_store(case.qkv, pool.keys[0], pool.values[0], of_pass, case.rope)
        return canvas_attention(q, pool.keys[0], pool.values[0], of_pass, case.rope, scale=1.0)

    torch.testing.assert_close(at(0), at(-19), rtol=1e-4, atol=1e-5)


def test_a_group_at_the_root_sees_itself():
    """A canvas whose tokens all see each other, as families without a left part have it."""
    case = Case([(3, 0, 0, 3, 0, [])], 1, 1, 8, seed=0)
    part = case.parts[0]._replace(parents=[-1] * 3, classes=[OPEN] * 3)
    of_pass, pool = plan([part]), case.pool
    q = rotate_and_store(case.qkv, pool.keys[0], pool.values[0], of_pass, case.rope)
    got = canvas_attention(q, pool.keys[0], pool.values[0], of_pass, case.rope, scale=8**-0.5)
    q, k, v = case.qkv.unbind(1)
    expected = spelled_out(q[:, None], k[:, None], v[:, None], part, [], 0.0, None)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_pool_lends_each_page_once_and_no_more_than_it_has():
    pool = KVPool(2, 1, 4, 3, torch.float16)
    assert pool.page_bytes == 2 * 2 * PAGE * 4 * 2
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(MemoryError, match="in use"):
        pool.take()
    pool.give(taken[:1])
    assert pool.take() == taken[0]
