"""The canvas attention reference against attention spelled out a query at a time."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_kernels import BRANCH, LEFT, OPEN, Context, Rope, canvas_attention, plan, rotate

BASE = 10_000.0


def spelled_out(q, k, v, position, parent, token_class, contexts, starts, blocks, biases, gate):
    """k and the contexts' keys are not rotated; everything is placed absolutely."""
    (m, kv_heads, size), n = k.shape, len(q)
    rope = lambda x, at: rotate(x[None, None].double(), angle(at, size))[0, 0]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(n):
        i = m - n + row
        ancestors = {i}
        while parent[i] >= 0 and (i := parent[i]) >= 0:
            ancestors.add(i)
        i = m - n + row
        for head in range(q.shape[1]):
            g = head // (q.shape[1] // kv_heads)
            scores, values = [], []
            for (ck, cv), start, block, bias in zip(contexts, starts, blocks, biases, strict=True):
                if block and token_class[i] == BRANCH:
                    continue
                for j in range(ck.shape[0]):
                    at = rope(q[row, head], position[i]) @ rope(ck[j, g], start + j)
                    scores.append(at / math.sqrt(size) + bias)
                    values.append(cv[j, g].double())
            for j in range(m):
                group = token_class[i] == token_class[j] == OPEN and parent[i] == parent[j]
                if j in ancestors or group:
                    at = rope(q[row, head], position[i]) @ rope(k[j, g], position[j])
                    scores.append(at / math.sqrt(size) + (gate if position[j] > position[i] else 0.0))
                    values.append(v[j, g].double())
            out[row, head] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


def angle(at, size):
    inverse = BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = (at * inverse).cos(), (at * inverse).sin()
    return torch.cat([cos, cos])[None], torch.cat([-sin, sin])[None]


@settings(max_examples=25, deadline=None)
@given(
    left=st.integers(1, 5),
    masks=st.integers(0, 4),
    branch=st.integers(0, 3),
    queries=st.integers(1, 12),
    lengths=st.lists(st.integers(0, 6), max_size=3),
    kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([2, 8]),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_attention_spelled_out(left, masks, branch, queries, lengths, kv_heads, group, size, seed):
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    origin = 7
    position = [*range(origin, origin + left + masks), *range(origin + left - 1, origin + left - 1 + branch)]
    parent = [*range(-1, left - 1), *[left - 1] * masks]
    parent += [left - 2 if i == 0 else left + masks + i - 1 for i in range(branch)]
    token_class = [LEFT] * left + [OPEN] * masks + [BRANCH] * branch
    m = len(position)
    n = min(queries, m)
    q, k, v = draw(n, kv_heads * group, size), draw(m, kv_heads, size), draw(m, kv_heads, size)
    contexts = [(draw(t, kv_heads, size), draw(t, kv_heads, size)) for t in lengths]
    starts = [0, -9, -20][: len(lengths)]
    blocks, biases, gate = [False, True, True][: len(lengths)], [0.0, 1.0, -0.5][: len(lengths)], -1.0

    rope = Rope(size, BASE)
    of_pass = plan(
        torch.tensor(position), torch.tensor(parent), torch.tensor(token_class), n, rope, starts, blocks, gate
    )
    local = lambda x: rotate(x, rope.tables(torch.arange(len(x)))).transpose(0, 1)
    cached = [Context(local(ck), cv.transpose(0, 1), bias) for (ck, cv), bias in zip(contexts, biases, strict=True)]
    own = rotate(k, rope.tables(torch.tensor(position))).transpose(0, 1)
    q_at = rotate(q, rope.tables(torch.tensor(position[-n:])))
    got = canvas_attention(q_at, own, v.transpose(0, 1), cached, of_pass, scale=size**-0.5)

    expected = spelled_out(q, k, v, position, parent, token_class, contexts, starts, blocks, biases, gate)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_context_may_stand_anywhere():
    """Scores depend on distances only: moving the canvas and a context together changes nothing."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, generator=random) for _ in range(3))
    ck, cv = (torch.randn(2, 5, 8, generator=random) for _ in range(2))
    rope = Rope(8, BASE)

    def at(shift: int) -> torch.Tensor:
        position = torch.tensor([20 + shift])
        of_pass = plan(position, torch.tensor([-1]), torch.tensor([LEFT]), 1, rope, [shift], [False])
        own = rotate(k, rope.tables(position)).transpose(0, 1)
        q_at = rotate(q, rope.tables(position))
        return canvas_attention(q_at, own, v.transpose(0, 1), [Context(ck, cv)], of_pass, scale=1.0)

    torch.testing.assert_close(at(0), at(-19), rtol=1e-4, atol=1e-5)
