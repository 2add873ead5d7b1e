"""The Triton `commit` against the reference, on the GPU where there is one and interpreted where there is none."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from infill_kernels import ENDED, LIVE, CanvasState, EntropyBound, Rule, Threshold, Unmasked, Verified
from infill_kernels.commit import commit as reference

pytest.importorskip("triton")
from infill_kernels.commit_triton import commit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, ENDS = 30, [5, 6]


def states(canvases: int, size: int, capacity: int) -> tuple[CanvasState, CanvasState]:
    first, second = (CanvasState.new(canvases, size, capacity, DEVICE) for _ in range(2))
    return first, second


def step(state: CanvasState, generator: torch.Generator, rule: Rule) -> tuple[Unmasked, torch.Tensor, torch.Tensor]:
    """Random rows for the canvases as they stand; many agree with the proposal, or with the last prediction."""
    committed, size = state.committed.tolist(), state.size.tolist()
    proposed, tokens = state.proposed.tolist(), []
    for i, (begin, known, end) in enumerate(zip(committed, proposed, size, strict=True)):
        whole = isinstance(rule, EntropyBound)
        fed = end - begin if whole else min(known + 3, end - begin + 1)
        own = torch.randint(0, VOCAB, (fed,), generator=generator)
        before = state.predicted[i, begin:end] if whole else state.tokens[i, begin : begin + known]
        agree = (torch.rand(len(before), generator=generator) < (0.9 if i % 2 else 1)) & (before.cpu() >= 0)
        own[: len(before)][agree] = before.cpu()[agree]
        tokens.append(own)
    rows = torch.tensor([len(own) for own in tokens], dtype=torch.int32)
    n = int(rows.sum())
    quarters = torch.randint(0, 5, (2, n), generator=generator) / 4  # their sums are exact in any order
    sample = torch.randint(0, VOCAB, (n,), generator=generator)
    entropy = quarters[1] * torch.repeat_interleave(torch.rand(len(rows), generator=generator) < 0.5, rows)
    outputs = (torch.cat(tokens), sample, quarters[0], quarters[0], entropy)
    return Unmasked(*(x.to(DEVICE) for x in outputs)), (rows.cumsum(0) - rows).int().to(DEVICE), rows.to(DEVICE)


@pytest.mark.parametrize("rule", [Verified(), Threshold(0.5), EntropyBound(bound=1.0, settled=0.3)])
@pytest.mark.parametrize(("canvases", "size", "capacity"), [(1, 1, 1), (5, 2, 13), (3, 8, 32)])
def test_steps_leave_the_state_that_the_reference_leaves(rule, canvases, size, capacity):
    generator = torch.Generator().manual_seed(canvases)
    state, expected = states(canvases, size, capacity)
    ends = torch.tensor(ENDS, device=DEVICE)
    seen = {LIVE}
    for _ in range(8):
        outputs, first, rows = step(expected, generator, rule)
        noise = torch.randint(0, VOCAB, (canvases, capacity), generator=generator).to(DEVICE)
        commit(state, outputs, first, rows, ends, rule, noise)
        reference(expected, outputs, first, rows, ends, rule, noise)
        for field in ("committed", "proposed", "size", "status", "predicted"):
            assert torch.equal(getattr(state, field), getattr(expected, field)), field
        known = torch.arange(capacity, device=DEVICE) < (expected.committed + expected.proposed)[:, None]
        if isinstance(rule, EntropyBound):
            known = torch.ones_like(known)
        assert torch.equal(state.tokens[known], expected.tokens[known])
        final = torch.arange(capacity, device=DEVICE) < (expected.committed + (expected.status == ENDED))[:, None]
        assert torch.equal(state.tokens[final], expected.tokens[final])
        assert torch.equal(state.prob[final], expected.prob[final])
        seen |= set(expected.status.tolist())
    assert len(seen) > 1, "the case reaches an end or the capacity"


def test_the_fields_compared_are_all_there_are():
    assert {field.name for field in fields(CanvasState)} == {
        *("tokens", "prob", "predicted", "committed", "proposed", "size", "status")
    }


def test_the_entropy_bound_needs_noise():
    state, _ = states(1, 2, 4)
    outputs, first, rows = step(state, torch.Generator().manual_seed(0), Threshold())
    with pytest.raises(ValueError, match="noise"):
        commit(state, outputs, first, rows, torch.tensor(ENDS, device=DEVICE), EntropyBound())
