"""`commit` against policies, the engine's and one by probability, and DiffusionGemma's sampler, for one canvas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine.core import Canvas, CommitPolicy, Rows
from infill_engine.policy import VerifiedPolicy
from infill_kernels import (
    ENDED,
    FULL,
    LIVE,
    CanvasState,
    EntropyBound,
    Rule,
    Threshold,
    Unmasked,
    Verified,
    commit,
)

CAPACITY, VOCAB, END = 16, 6, 5


@dataclass(frozen=True, slots=True)
class ConfidencePolicy:
    """Commits the frontier, and after it every slot whose top probability passes the threshold, up to the first that
    does not (Fast-dLLM, arXiv 2505.22618, section 3.3, kept contiguous: known text is a prefix of the canvas)."""

    threshold: float = 0.9

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        chain, masks = slice(1 + len(canvas.proposal)), canvas.group(len(canvas.proposal))
        tokens, probs = rows.token[chain] + rows.token[masks], rows.prob[chain] + rows.prob[masks]
        count = 1
        while count < len(probs) and probs[count] >= self.threshold:
            count += 1
        return canvas.commit(tokens[: min(count, canvas.size - canvas.frontier)])


def test_the_confidence_policy_commits_a_run_of_sure_slots_and_always_the_first() -> None:
    blank = [0.0] * 5
    rows = Rows([0, 0, 1, 0, 0], [0.5, 0.95, 0.9, 0.5, 0.99], blank, blank, blank)
    after = ConfidencePolicy(0.9).step(Canvas(origin=0, left=(1,), size=16, masks=(4,)), rows)
    assert after.committed == (0, 0, 1)


@dataclass
class Case:
    """One canvas and the rows of one step for it."""

    canvas: Canvas
    tokens: list[int]
    probs: list[float]
    entropy: list[float]
    sample: list[int]
    noise: list[int]
    status: int = LIVE


ids = st.integers(0, VOCAB - 1)


@st.composite
def cases(draw: st.DrawFn, rows_to_size: bool = False) -> Case:
    size = draw(st.sampled_from([1, 3, 8, CAPACITY]))
    committed = draw(st.integers(0, size - 1))
    proposal = [] if rows_to_size else draw(st.lists(ids, max_size=size - committed))
    masks = size - committed - len(proposal)
    rows = size - committed if rows_to_size else len(proposal) + 1 + draw(st.integers(0, masks))
    tokens = [*proposal, *draw(st.lists(ids, min_size=rows, max_size=rows))][:rows]  # agrees with some of it at least
    wrong = draw(st.integers(0, 2 * rows))
    tokens[wrong : wrong + 1] = [draw(ids)] if wrong < rows else []
    eighths = st.integers(0, 8).map(lambda x: x / 8)  # sums of these are exact in any order

    def some(what: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(what, min_size=rows, max_size=rows))

    return Case(
        Canvas(
            0,
            (0,),
            size,
            tuple(draw(st.lists(ids, min_size=committed, max_size=committed))),
            tuple(proposal),
            masks=(*[0] * len(proposal), rows - len(proposal) - 1),  # one group, behind the whole proposal
        ),
        tokens,
        some(eighths),
        [0.0] * rows if draw(st.booleans()) else some(eighths),
        [int(x) for x in some(ids)],
        draw(st.lists(ids, min_size=CAPACITY, max_size=CAPACITY)),
        draw(st.sampled_from([LIVE, LIVE, LIVE, ENDED, FULL])),
    )


def batch(cases: list[Case]) -> tuple[CanvasState, Unmasked, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state before the step, its outputs, where rows begin, how many there are, and the noise."""
    state = CanvasState.new(len(cases), 1, CAPACITY)
    for i, case in enumerate(cases):
        known = [*case.canvas.committed, *case.canvas.proposal]
        state.tokens[i, : len(known)] = torch.tensor(known, dtype=torch.int64)
        state.committed[i], state.proposed[i] = case.canvas.frontier, len(case.canvas.proposal)
        state.size[i], state.status[i] = case.canvas.size, case.status
    rows = torch.tensor([len(case.tokens) for case in cases], dtype=torch.int32)
    lists = ((case.tokens, case.sample, case.probs, case.entropy) for case in cases)
    token, sample, prob, entropy = (torch.tensor([*chain(*column)]) for column in zip(*lists, strict=True))
    outputs = Unmasked(token, sample, prob, torch.zeros_like(prob), entropy)
    return state, outputs, (rows.cumsum(0) - rows).int(), rows, torch.tensor([case.noise for case in cases])


def described(state: CanvasState, i: int) -> tuple[list[int], list[int], int, int]:
    committed, proposed = int(state.committed[i]), int(state.proposed[i])
    known = state.tokens[i, : committed + proposed].tolist()
    return known[:committed], known[committed:], int(state.size[i]), int(state.status[i])


def follow(case: Case, policy: CommitPolicy) -> tuple[list[int], list[int], int, int]:
    """What the engine does with one step: policy, cut, growth."""
    canvas = case.canvas
    if case.status != LIVE:
        return list(canvas.committed), list(canvas.proposal), canvas.size, case.status
    after = policy.step(canvas, Rows(case.tokens, case.probs, case.entropy, [], []))
    new = after.committed[canvas.frontier :]
    if END in new:
        return [*canvas.committed, *new[: new.index(END)]], [], canvas.size, ENDED
    status = FULL if after.frontier == CAPACITY else LIVE
    if after.full:
        after = after.grow(min(2 * after.size, CAPACITY))
    return list(after.committed), list(after.proposal), after.size, status


@settings(max_examples=150, deadline=None)
@given(
    st.lists(cases(), min_size=1, max_size=5),
    st.sampled_from([(Verified(), VerifiedPolicy()), (Threshold(0.5), ConfidencePolicy(0.5))]),
)
def test_a_step_is_that_of_the_policy(batched: list[Case], both: tuple[Rule, CommitPolicy]) -> None:
    rule, policy = both
    state, outputs, first, rows, noise = batch(batched)
    commit(state, outputs, first, rows, torch.tensor([END]), rule, noise)
    for i, case in enumerate(batched):
        assert described(state, i) == follow(case, policy)
        if case.status == LIVE:
            ended = int(state.status[i]) == ENDED  # then the slot behind the text holds the end itself
            new = slice(case.canvas.frontier, int(state.committed[i]) + ended)
            assert not ended or state.tokens[i, new][-1] == END
            assert state.prob[i, new].tolist() == case.probs[: new.stop - new.start]


@settings(max_examples=100, deadline=None)
@given(st.lists(cases(rows_to_size=True), min_size=1, max_size=5), st.booleans())
def test_an_entropy_bound_step_accepts_the_surest_and_noises_the_rest(batched: list[Case], repeated: bool) -> None:
    rule = EntropyBound(bound=1.0, settled=0.25)
    state, outputs, first, rows, noise = batch(batched)
    for i, case in enumerate(batched):
        if repeated:
            begin = case.canvas.frontier
            state.predicted[i, begin : begin + len(case.tokens)] = torch.tensor(case.tokens)
    commit(state, outputs, first, rows, torch.tensor([END]), rule, noise)
    for i, case in enumerate(batched):
        begin, size = case.canvas.frontier, case.canvas.size
        if case.status != LIVE:
            assert described(state, i) == (list(case.canvas.committed), [], size, case.status)
            continue
        if repeated and sum(case.entropy) / len(case.entropy) < 0.25:
            whole = replace(case, probs=[1.0] * len(case.probs))  # commits the most probable tokens, all at once
            assert described(state, i) == follow(whole, ConfidencePolicy())
            begin = size
            expected = case.noise[size : int(state.size[i])]
        else:
            assert described(state, i) == (list(case.canvas.committed), [], size, LIVE)
            expected, spent = case.noise[begin:size], 0.0
            for entropy, row in sorted((entropy, row) for row, entropy in enumerate(case.entropy)):
                if spent <= rule.bound:
                    expected[row] = case.sample[row]
                spent += entropy
        assert state.tokens[i, begin : begin + len(expected)].tolist() == expected


def test_several_steps_run_without_a_look_at_the_state() -> None:
    state = CanvasState.new(1, 2, 8)
    zero, rows = torch.zeros(1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for tokens in ([1, 2, 3], [4, 0, 2], [0, 1, END], [1, END, 1]):
        ones = torch.ones(3)
        outputs = Unmasked(torch.tensor(tokens), torch.tensor(tokens), ones, ones, ones)
        commit(state, outputs, zero, rows, torch.tensor([END]), Threshold(0.5))
    assert described(state, 0) == ([1, 2, 4, 0, 0, 1], [], 8, ENDED)


def test_the_entropy_bound_needs_noise() -> None:
    state = CanvasState.new(1, 2, 8)
    none, zero = torch.zeros(2), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="noise"):
        commit(
            state, Unmasked(none.long(), none.long(), none, none, none), zero, zero, torch.tensor([END]), EntropyBound()
        )
    with pytest.raises(ValueError, match="capacity"):
        CanvasState.new(1, 9, 8)
