"""The unmask reference against a plain softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_kernels import Head, Unmasked, logits, unmask
from infill_kernels.unmask import unmask as reference


def case(rows: int, vocab: int, width: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(rows, width, generator=noise)
    return hidden, torch.randn(vocab, width, generator=noise)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(2, 131),
    width=st.sampled_from([1, 7, 64]),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    softcap=st.sampled_from([None, 30.0]),
    restrict=st.booleans(),
)
def test_agrees_with_a_float64_softmax(rows, vocab, width, seed, scale, temperature, softcap, restrict):
    hidden, weight = case(rows, vocab, width, seed, scale)
    banned = torch.zeros(vocab, dtype=torch.bool)
    banned[0] = True
    allowed = None
    if restrict:
        allowed = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < 0.5
        allowed[:, 1] = True
        allowed[::3] = True
    head = Head(weight, softcap, banned)
    sets = None if allowed is None else head.allow(rows, {i: ids for i, ids in enumerate(allowed) if not ids.all()})
    out = unmask(hidden, head, temperature=temperature, allowed=sets, soft=True)

    z = (hidden @ weight.T).double()  # the product rounds as torch does; all after it is held to float64
    torch.testing.assert_close(z, hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5 * scale * width)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    admitted = (~banned).expand(rows, vocab) if allowed is None else ~banned & allowed
    z = z.masked_fill(~admitted, -math.inf)
    p = z.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    top = z.max(-1)

    assert admitted.gather(1, out.token[:, None]).all()
    chosen = z.gather(1, out.token[:, None])[:, 0]
    torch.testing.assert_close(chosen, top.values, rtol=1e-5, atol=1e-4)  # the arg max, up to rounding between ties
    torch.testing.assert_close(out.prob.double(), top.values.sub(z.logsumexp(-1)).exp(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(out.lse.double(), z.logsumexp(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(out.soft.double(), p @ weight.double(), rtol=1e-3, atol=1e-3)
    assert torch.equal(out.sample, out.token)


def test_extreme_logits_give_numbers_and_not_nan():
    hidden = torch.tensor([[1e4], [0.0], [-1e4]])
    out = unmask(hidden, Head(torch.tensor([[1.0], [0.5], [-3.0]])))
    assert torch.isfinite(out.lse).all()
    assert torch.isfinite(out.entropy).all()
    assert out.token.tolist() == [0, 0, 2]
    assert out.entropy[1].item() == pytest.approx(math.log(3), abs=1e-6)


def test_given_noise_decides_the_sample_and_can_be_replayed():
    hidden, weight = case(4, 50, 8, seed=3)
    uniform = torch.rand(4, 50, generator=torch.Generator().manual_seed(1))
    noise = -torch.log(-torch.log(uniform))
    first = unmask(hidden, Head(weight), noise=noise)
    again = unmask(hidden, Head(weight), noise=noise)
    assert torch.equal(first.sample, again.sample)
    assert torch.equal(first.sample, (hidden @ weight.T + noise).argmax(-1))
    assert not torch.equal(first.sample, first.token)


def test_gumbel_samples_follow_the_softmax():
    weight = torch.tensor([[0.0], [1.0], [2.0]])
    draws = 20_000
    uniform = torch.rand(draws, 3, generator=torch.Generator().manual_seed(7)).clamp(1e-9, 1 - 1e-9)
    out = unmask(torch.ones(draws, 1), Head(weight), noise=-torch.log(-torch.log(uniform)))
    share = torch.bincount(out.sample, minlength=3) / draws
    torch.testing.assert_close(share, weight[:, 0].softmax(0), atol=0.015, rtol=0)


def test_ties_go_to_the_lowest_id():
    out = unmask(torch.ones(1, 1), Head(torch.tensor([[0.0], [2.0], [1.0], [2.0]])), noise=torch.zeros(1, 4))
    assert out.token.tolist() == out.sample.tolist() == [1]


def test_a_row_that_admits_nothing_is_refused():
    banned = torch.tensor([True, False, False, False, False])
    head = Head(case(2, 5, 3, seed=0)[1], banned=banned)
    with pytest.raises(ValueError, match="row 1 admits no token"):
        head.allow(2, {0: ~banned, 1: banned})
    with pytest.raises(ValueError, match="banned"):
        Head(head.weight, banned=torch.ones(5, dtype=torch.bool))


def test_a_set_restricts_its_own_row_only():
    weight = torch.tensor([[1.0], [2.0], [3.0]])
    head = Head(weight)
    out = unmask(torch.ones(3, 1), head, allowed=head.allow(3, {1: torch.tensor([True, False, False])}))
    assert out.token.tolist() == [2, 0, 2]
    assert out.prob[1].item() == 1.0
    assert out.entropy[1].item() == 0.0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    hidden, weight = case(1, 5, 3, seed=0)
    with pytest.raises(ValueError, match="temperature"):
        unmask(hidden, Head(weight), temperature=temperature)


def test_chosen_logits_equal_those_of_the_whole_product():
    hidden, weight = case(6, 40, 16, seed=5)
    head = Head(weight, softcap=5.0)
    ids = torch.tensor([[0, 39], [1, 1], [2, 7], [3, 3], [4, 0], [5, 5]])
    torch.testing.assert_close(logits(hidden, head, ids), logits(hidden, head).gather(1, ids))


class Other:
    """A head's other form: its product, and an `unmask` that tells that it was asked."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.asked = weight, 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T

    def unmask(self, hidden: torch.Tensor, head: Head, **options: Any) -> Unmasked:
        self.asked += 1
        return reference(hidden, head, **options)


def test_a_faster_projection_is_what_is_used():
    hidden, weight = case(2, 6, 3, seed=1)
    other = Other(torch.randn(6, 3, generator=torch.Generator().manual_seed(9)))
    head = Head(weight, project=other)
    for more, asked in ({}, 1), ({"noise": torch.zeros(2, 6)}, 1), ({"soft": True}, 1), ({}, 2):
        out = unmask(hidden, head, **more)
        assert torch.equal(out.token, (hidden @ other.weight.T).argmax(-1))
        assert other.asked == asked
