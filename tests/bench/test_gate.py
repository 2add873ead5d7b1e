"""Fitting and judging of what decides how much is shown, on texts whose probabilities are true."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from infill_engine.protocol import Candidate
from msgspec.structs import replace as altered

from bench import gate
from bench.score import Filled
from infill_lsp.confidence import FEATURES, cuts, shown

WORDS = ("one ", "two ", "three ", "four ")


def world(count: int, seed: int = 0, honesty: float = 1.0) -> list[gate.Options]:
    """Gaps whose tokens are each right with the probability that they say, to the power `honesty`."""
    random = Random(seed)
    found = []
    for index in range(count):
        text = truth = ""
        probs, offsets, right = [], [], True
        for word in WORDS[: random.randrange(1, 5)]:
            prob = random.choice([0.3, 0.7, 0.95, 0.999])
            right = right and random.random() < prob**honesty
            text, truth = text + word, truth + (word if right else "wrong ")
            probs.append(prob)
            offsets.append(len(text))
        found.append(
            gate.Options.of(
                Filled(
                    index=index,
                    package=f"p{random.randrange(12)}",
                    language="python",
                    made="rest",
                    kind="rest",
                    truth=truth,
                    tail="",
                    candidate=Candidate(text, tuple(probs), tuple(offsets)),
                    chosen=text,
                    shown=text,
                    rest="",
                    similarity=0.0,
                    ms=1.0,
                    steps=1,
                    tokens=1,
                    reason="end",
                )
            )
        )
    return found


def test_a_text_is_right_where_the_truth_begins_with_it():
    (gap,) = world(1)
    gap = gate.Options.of(altered(gap.filled, truth="one two!"))
    assert [bool(right) for right in gap.right] == [
        "one two!".startswith(gap.filled.shown[:size].rstrip()) for size in gap.sizes
    ]
    assert gap.saved(4) == 4
    assert gap.saved(0) == 0


def test_where_nothing_is_missing_whatever_is_shown_is_wrong():
    (gap,) = world(1)
    assert not gate.Options.of(altered(gap.filled, truth="")).right.any()


def test_a_shown_text_keeps_the_probabilities_of_its_own_tokens():
    (gap,) = world(1)
    of = altered(gap.filled, candidate=Candidate("    abc de fg", (0.1, 0.5, 0.6, 0.7), (4, 7, 10, 13)), shown="abc de")
    assert [cut.offset for cut in cuts(shown(of.candidate, of.shown), "rest")] == [3, 6]
    assert gate.Options.of(of).product == pytest.approx([0.5, 0.3])


def test_the_places_to_cut_are_those_at_which_the_product_shows_something():
    (gap,) = world(1)
    of = altered(gap.filled, candidate=Candidate("(a + b", (0.5,) * 4, (1, 2, 4, 6)), shown="(a + b")
    assert gate.Options.of(of).sizes.tolist() == [4, 6]


def test_a_text_that_is_not_the_candidates_is_not_shown():
    (gap,) = world(1)
    assert not len(gate.Options.of(altered(gap.filled, shown="something else")).sizes)


@pytest.mark.parametrize("honesty", [1.0, 3.0])
def test_the_gate_says_how_often_it_is_right(honesty):
    judged = gate.judge(world(1500, honesty=honesty), gate=True)
    for weight, said, right in gate.calibration(judged):
        if weight > 0.05:
            assert said == pytest.approx(right, abs=0.08)


def test_a_gate_of_texts_without_sense_shows_next_to_nothing():
    """Probabilities say nothing there, and one in ten is right."""
    random = Random(1)
    gaps = [replace(gap, right=np.full(len(gap.sizes), random.random() < 0.1, np.bool_)) for gap in world(600)]
    assert gate.judge(gaps, gate=True).point.shown < 0.1


def test_what_is_shown_is_right_as_often_as_it_should_be():
    gaps = world(1500)
    for of in (True, False):
        found = gate.judge(gaps, gate=of).point
        assert found.shown > 0.3
        assert found.precision > gate.PRECISION - 0.07


def test_a_gate_saves_no_less_than_the_product_alone():
    gaps = world(1500)
    assert gate.judge(gaps, gate=True).point.saved > 0.95 * gate.judge(gaps, gate=False).point.saved


def test_no_package_is_judged_by_what_was_fitted_on_it():
    gaps = world(400)
    first, second = gate.halves(gaps)
    assert sorted(first + second) == list(range(400))
    assert not {gaps[i].filled.package for i in first} & {gaps[i].filled.package for i in second}
    assert 0.4 < len(first) / 400 < 0.6
    before = gate.judge(gaps, gate=True).sizes
    for half in (first, second):
        other = [replace(gap, right=~gap.right) if i in set(half) else gap for i, gap in enumerate(gaps)]
        after = gate.judge(other, gate=True).sizes
        assert [after[i] for i in half] == [before[i] for i in half]
        assert after != before


def test_the_running_product_cuts_before_it_falls_too_low():
    gap = next(gap for gap in world(50) if len(gap.sizes) == 4)
    for size, product in zip(gap.sizes, gap.product, strict=True):
        assert gate.by_product(gap, product) == size
    assert gate.by_product(gap, 1.0) == 0


def test_the_product_gets_a_weight_for_each_feature():
    fitted = gate.final(world(300))
    assert tuple(fitted.weights) == FEATURES
    assert 0 < fitted.thresholds["eager"] <= fitted.thresholds["balanced"] <= fitted.thresholds["quiet"] < 1


def test_a_text_breaks_off_only_where_hardly_anything_is_lost(monkeypatch):
    gaps = world(300)

    def saved(of, threshold):
        return sum(gap.saved(gate.by_product(gap, threshold)) for gap in of)

    monkeypatch.setattr(gate, "FLOORS", (0.9, 0.5, 0.2, 0.05))
    for threshold in (0.6, 0.3, 0.1):
        at = gate.floor(gaps, gate.by_product, [0.9, threshold])
        costs = {
            floor: 1 - saved([gap.until(floor) for gap in gaps], threshold) / saved(gaps, threshold)
            for floor in gate.FLOORS
        }
        assert costs[at] <= gate.FLOOR_COSTS
        assert all(cost > gate.FLOOR_COSTS for floor, cost in costs.items() if floor > at)
    monkeypatch.setattr(gate, "FLOORS", (0.9,))
    assert gate.floor(gaps, gate.by_product, [0.3]) == 0


def test_a_broken_text_keeps_the_token_that_made_it_unsure():
    gap = next(gap for gap in world(50) if len(gap.sizes) == 4 and gap.product[2] < gap.product[1])
    assert len(gap.until(float(gap.product[1])).sizes) == 3
    assert len(gap.until(0.0).sizes) == 4


def test_no_gaps_with_text_are_no_reason_to_fail():
    gaps = [gate.Options.of(altered(gap.filled, shown="")) for gap in world(6)]
    judged = gate.judge(gaps, gate=True)
    assert judged.point.shown == 0
    assert gate.calibration(judged) == []
    assert {name: weight for name, weight in gate.final(gaps).weights.items() if weight} == {"product": 1}
