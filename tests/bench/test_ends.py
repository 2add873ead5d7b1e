"""Rules for where a gap ends: what they know, how they are fitted, and what is counted."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from bench.ends import FEATURES, Ends, Place, features, fit, judge


def world(count: int, tells: str, seed: int = 0) -> list[Ends]:
    """Gaps of which one of two scores tells the true end, and the other is chance."""
    chance, gaps = Random(seed), []
    for i in range(count):
        true, after = chance.randrange(3), chance.randint(1, 2)
        places = []
        for line in range(true + 1 + after):
            bonus = 4.0 * (line == true)
            end, suffix = (bonus, 0.0) if tells == "END" else (0.0, bonus)
            places.append(Place(line + 1, chance.gauss(end - 2, 0.5), chance.gauss(suffix - 3, 0.5)))
        gaps.append(Ends(f"p{i % 4}", "python", "lines", tuple(places), true))
    return gaps


def test_what_a_suffix_gains_is_over_the_best_end_before():
    places = (Place(1, 0.5, -2.0), Place(2, 0.1, -1.5), Place(3, 0.2, -1.8))
    gained = features(Ends("p", "python", "lines", places, 1))[:, FEATURES.index("suffix, gained")]
    assert gained == pytest.approx([0.0, 0.5, -0.3])


@pytest.mark.parametrize(("tells", "other"), [("END", "suffix"), ("suffix", "END")])
def test_a_rule_that_knows_what_tells_is_right_and_one_that_does_not_guesses(tells, other):
    gaps = world(200, tells)
    assert judge(gaps, (tells,)).best > 0.95
    assert judge(gaps, (other,)).best < 0.6
    assert judge(gaps, (tells, other)).best > 0.95


def test_a_rule_stops_at_the_end_and_goes_on_before_it():
    of = judge(world(200, "END"), ("END",))
    assert of.stops > 0.95
    assert of.goes_on > 0.95
    assert of.right > 0.9


def test_weights_of_what_a_rule_may_not_know_are_nothing():
    weights = fit(world(50, "END"), ("END",))
    unknown = [i for i, name in enumerate(FEATURES) if name not in ("one", "END")]
    assert not weights[unknown].any()
    assert weights[FEATURES.index("END")] > 0


def test_each_gap_is_judged_by_what_other_packages_taught():
    """Packages whose ends are told the other way round than in the rest spoil it."""
    gaps = world(200, "END")
    flipped = [
        Ends(g.package, g.language, g.made, tuple(Place(p.lines, -p.end, p.suffix) for p in g.places), g.true)
        if g.package in ("p0", "p2")
        else g
        for g in gaps
    ]
    assert judge(flipped, ("END",)).best < 0.3
    assert np.isfinite(fit(flipped, FEATURES)).all()
