"""The Triton attention against the reference, on the GPU where there is one and interpreted where there is none."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_kernels import LEFT, OPEN, plan
from infill_kernels.attention import canvas_attention, rotate_and_store
from test_attention import BASE, Case, canvas_shapes, spelled_out

triton = pytest.importorskip("triton")
from infill_kernels import attention_triton as fused  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: (left, masks, branch, queries, slot of token 0, contexts): ragged rows; one query and an empty context; no context.
RAGGED = [(9, 4, 3, 12, 31, [40, 6, 70]), (2, 0, 0, 1, 0, [0]), (5, 2, 0, 3, 5, [])]


def of(case: Case, splits: int | None = None) -> torch.Tensor:
    return case.run(partial(fused.canvas_attention, splits=splits), fused.rotate_and_store)


@pytest.mark.parametrize(
    ("size", "kv_heads", "group", "splits", "window"),
    [
        (64, 3, 3, 1, None),
        (64, 1, 3, 8, 9),
        (128, 1, 7, 4, None),
        (256, 2, 1, 2, 9),
        (512, 1, 8, 1, None),
        (512, 1, 2, 4, 9),
    ],
)
def test_agrees_with_the_reference(size, kv_heads, group, splits, window):
    case = Case(RAGGED if size < 256 else RAGGED[:2], kv_heads, group, size, 0, window, device=DEVICE)
    torch.testing.assert_close(of(case, splits), case.run(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "splits"), [(64, 4), (512, 1)])
def test_half_precision(size, splits):
    case = Case(RAGGED, 1, 3, size, 1, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(of(case, splits).float(), case.run().float(), rtol=2e-3, atol=2e-3)


@settings(max_examples=6, deadline=None)
@given(
    canvases=st.lists(canvas_shapes, min_size=1, max_size=2),
    heads=st.sampled_from([(1, 3), (2, 1), (1, 20)]),
    seed=st.integers(0, 2**16),
    window=st.sampled_from([None, 5, 30]),
    splits=st.sampled_from([1, 2, 16]),
)
def test_agrees_with_the_reference_on_any_batch(canvases, heads, seed, window, splits):
    case = Case(canvases, *heads, 16, seed, window, device=DEVICE)
    torch.testing.assert_close(of(case, splits), case.run(), rtol=1e-4, atol=1e-5)


def test_many_rows_take_several_tiles():
    case = Case([(70, 3, 2, 75, 31, [33]), (1, 0, 0, 1, 0, [5])], 1, 3, 64, 2, device=DEVICE)
    torch.testing.assert_close(of(case), case.run(), rtol=1e-4, atol=1e-5)


def test_a_group_at_the_root_sees_itself():
    case = Case([(5, 0, 0, 5, 0, [])], 1, 1, 64, seed=0, device=DEVICE)
    part = case.parts[0]._replace(parents=[-1] * 5, classes=[OPEN] * 5)
    case.plan = plan([part], device=DEVICE)
    q, k, v = case.qkv.unbind(1)
    expected = spelled_out(q[:, None], k[:, None], v[:, None], part, [], 0.0, None)
    torch.testing.assert_close(of(case).double(), expected, rtol=1e-4, atol=1e-5)


def test_rotates_and_stores_what_the_reference_does_and_nothing_else():
    case = Case(RAGGED, 2, 3, 64, 3, dtype=torch.float16, device=DEVICE)
    mine, theirs = ((case.pool.keys[0].clone(), case.pool.values[0].clone()) for _ in range(2))
    qkv = case.qkv.to(DEVICE, torch.float16)
    got = fused.rotate_and_store(qkv, *mine, case.plan, case.rope)
    torch.testing.assert_close(got, rotate_and_store(qkv, *theirs, case.plan, case.rope), rtol=2e-3, atol=1e-3)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_plan_may_lie_in_room_for_more(splits):
    """More canvases, without queries, and more rows; what is behind the last canvas's must not be used."""
    case = Case(RAGGED, 1, 3, 64, 8, device=DEVICE)
    n, more, keys, values = len(case.qkv), 5, case.pool.keys[0], case.pool.values[0]
    expected, before = case.run(), (keys.clone(), values.clone())
    lists = {f.name: getattr(case.plan, f.name) for f in fields(case.plan)}
    for name, values_of in lists.items():
        if isinstance(values_of, torch.Tensor):
            start = name in ("query_start", "token_start", "context_start")
            room = values_of[-1:].expand(more) if start else torch.full_like(values_of[:1], 1 << 30).expand(more)
            lists[name] = torch.cat([values_of, room])
    roomy = replace(case.plan, **lists)
    qkv = torch.cat([case.qkv, torch.full_like(case.qkv[:1], torch.nan).expand(more, -1, -1)]).to(DEVICE)
    q = fused.rotate_and_store(qkv, keys, values, roomy, case.rope)
    out = fused.canvas_attention(q, keys, values, roomy, case.rope, scale=0.125, splits=splits)
    torch.testing.assert_close(out[:n].cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((keys, values), before, equal_nan=True)


def test_refuses_what_it_would_misread():
    case = Case(RAGGED[1:], 1, 1, 64, 0, device=DEVICE)
    keys, values = case.pool.keys[0], case.pool.values[0]
    q = torch.zeros(case.qkv.shape[0], 1, 64, device=DEVICE)
    attend = partial(fused.canvas_attention, plan=case.plan, rope=case.rope, scale=1.0)
    with pytest.raises(ValueError, match="one dtype"):
        attend(q.half(), keys, values)
    with pytest.raises(ValueError, match="contiguous"):
        attend(q, keys.transpose(-1, -2).contiguous().transpose(-1, -2), values)
    with pytest.raises(ValueError, match="power of two"):
        attend(q[..., :48], keys[..., :48].contiguous(), values[..., :48].contiguous())


def torch_itself(case: Case) -> torch.Tensor:
    """The same by torch's own attention in the pool's dtype: a canvas of LEFT tokens behind a context, as dense copies.
    What is projected in the pass is rounded before it is turned."""
    (q, k, v, part, [(context_k, context_v)]), dtype = case.drawn[0], case.pool.keys.dtype
    positions, (n, m, t) = torch.tensor(part.positions), (len(q), len(k), len(context_k))
    causal = torch.where(torch.arange(m) <= torch.arange(m - n, m)[:, None], 0.0, -torch.inf)
    q = turned_all(q.to(dtype), positions[m - n :])
    k = torch.cat([turned_all(context_k, torch.arange(t)), turned_all(k.to(dtype), positions)])
    q, k, v = (x.to(DEVICE, dtype).transpose(0, 1)[None] for x in (q, k, torch.cat([context_v, v])))
    mask = torch.cat([torch.zeros(n, t), causal], 1).to(DEVICE, dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1).cpu()


def turned_all(x, position):
    """Rotary positions for x [N, H, hd], in fp64, as fp32."""
    size = x.shape[-1]
    angle = position.double()[:, None] * BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.complex(*x.double().chunk(2, -1)) * turn
    return torch.cat([turned.real, turned.imag], -1).float()


def error(got: torch.Tensor, case: Case) -> float:
    """Root mean square against fp64."""
    return float((got.double() - case.expected).square().mean().sqrt())


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16], ids=["bf16", "fp16"]
)
def test_rounds_no_worse_than_torch_does(dtype, splits):
    """Where nothing is turned back, the inputs of both are rounded in the same places; 5% is for the order of sums.
    Interpreted, in fp16: 5.8e-5, torch 6.0e-5."""
    case = Case([(12, 0, 0, 8, 3, [200])], 1, 2, 64, 4, dtype=dtype, device=DEVICE)
    assert error(of(case, splits), case) <= 1.05 * error(torch_itself(case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_bf16_agrees_with_the_reference(size):
    case = Case(RAGGED, 2, 3, size, 5, dtype=torch.bfloat16, device=DEVICE)
    for splits in (1, 4, None):
        torch.testing.assert_close(of(case, splits).float(), case.run().float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_can_be_captured_and_compiles_nothing_for_the_lengths_of_lists(monkeypatch):
    """Replays a captured pass on other numbers, then runs plans whose lists lie anywhere in memory."""
    case = Case(RAGGED, 2, 3, 64, 6, dtype=torch.bfloat16, device=DEVICE)
    keys, values = case.pool.keys[0], case.pool.values[0]
    qkv = case.qkv.to(DEVICE, keys.dtype)

    def run() -> torch.Tensor:
        q = fused.rotate_and_store(qkv, keys, values, case.plan, case.rope)
        return fused.canvas_attention(q, keys, values, case.plan, case.rope, scale=0.125, splits=4)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    qkv.copy_(torch.randn_like(qkv))
    graph.replay()
    torch.testing.assert_close(out, run())

    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kwargs: compiled.append(kwargs) and None)
    for left in range(11, 21):
        other = Case(
            [(left, 0, 0, left, 0, [left]), (3, 0, 0, 2, 0, [])], 2, 3, 64, 7, dtype=torch.bfloat16, device=DEVICE
        )
        other.run(partial(fused.canvas_attention, splits=4), fused.rotate_and_store)
    assert not compiled


def test_every_rule_is_felt():
    """Where a rule of the plan goes, the result changes, and as the reference's does."""
    case = Case(RAGGED[:1], 1, 3, 64, 0, device=DEVICE)
    part = case.parts[0]
    full = of(case)
    for other in (
        part._replace(classes=[LEFT] * len(part.classes)),
        part._replace(contexts=[c._replace(block=False) for c in part.contexts]),
        part._replace(contexts=[c._replace(bias=0.0) for c in part.contexts]),
        part._replace(contexts=[c._replace(start=0) for c in part.contexts]),
    ):
        case.plan = plan([other], case.gate, DEVICE)
        changed = of(case)
        assert not torch.allclose(full, changed, atol=1e-3)
        torch.testing.assert_close(changed, case.run(canvas_attention), rtol=1e-4, atol=1e-5)
