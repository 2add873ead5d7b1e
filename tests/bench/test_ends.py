"""Rules for where a gap ends: what they know, how they are fitted, and what is counted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from random import Random

import numpy as np
import pytest

from bench.ends import FEATURES, Ends, Judged, Place, clear_at, features, fit, judge, read


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
    assert judge(gaps, (tells,)).right > 0.95
    assert judge(gaps, (other,)).right < 0.6
    assert judge(gaps, (tells, other)).right > 0.95


def test_a_choice_is_early_right_or_late():
    gaps = [Ends("p", "python", "lines", (Place(1, 0.0, 0.0),) * 3, true) for true in (0, 1, 2, 2)]
    assert Judged.of([1, 1, 0, 2], gaps) == Judged(right=0.5, early=0.25, late=0.25)


def test_the_weights_make_the_probabilities_that_there_are():
    """Of two ends that differ by one in what the rule knows the better is the true one as often as a softmax says."""
    chance, weight, gaps = Random(3), 1.5, []
    for i in range(4000):
        better = chance.randrange(2)
        places = tuple(Place(1, 0.0, float(line == better)) for line in range(2))
        true = better if chance.random() < 1 / (1 + math.exp(-weight)) else 1 - better
        gaps.append(Ends(f"p{i}", "python", "lines", places, true))
    assert fit(gaps, ("suffix",))[FEATURES.index("suffix")] == pytest.approx(weight, abs=0.15)


def test_the_engine_stops_once_the_best_end_leads_all_later_ones():
    places = tuple(Place(line, 0.0, 0.0, open=line == 2) for line in (1, 2, 3, 4))
    gap = Ends("p", "python", "lines", places, 0)
    assert clear_at(gap, [3.0, 0.0, 2.0, 0.0], 2.5) == 3  # an open end says nothing, one at 2 is too near
    assert clear_at(gap, [3.0, 0.0, 0.4, 9.0], 2.5) == 2
    assert clear_at(gap, [3.0, 0.0, 2.0, 9.0], 2.5) == 3


def test_scores_are_kept_in_a_file(tmp_path):
    gaps = world(5, "END")
    kept = tmp_path / "ends.jsonl"
    kept.write_text("\n".join(json.dumps(asdict(one)) for one in gaps))
    assert read(kept) == gaps


def test_weights_of_what_a_rule_may_not_know_are_nothing():
    weights = fit(world(50, "END"), ("END",))
    unknown = [i for i, name in enumerate(FEATURES) if name != "END"]
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
    assert judge(flipped, ("END",)).right < 0.3
    assert np.isfinite(fit(flipped, FEATURES)).all()
