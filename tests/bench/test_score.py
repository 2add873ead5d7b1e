"""What a filled gap is worth, and intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from infill_engine.protocol import Candidate

from bench.score import Filled, distance, first_line, ratio, same, similarity

FEW = st.text("ab\n", max_size=7)


def filled(shown: str, truth: str, *, tail: str = "", rest: str | None = None, chosen: str | None = None) -> Filled:
    return Filled(
        index=0,
        package="p",
        language="python",
        made="rest",
        kind="rest",
        truth=truth,
        tail=tail,
        candidate=Candidate(shown),
        chosen=shown if chosen is None else chosen,
        shown=shown,
        rest=tail if rest is None else rest,
        similarity=0.0,
        ms=1.0,
        steps=1,
        tokens=1,
        reason="end",
    )


def spelled_out(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(spelled_out(a[1:], b) + 1, spelled_out(a, b[1:]) + 1, spelled_out(a[1:], b[1:]) + (a[0] != b[0]))


@given(FEW, FEW)
def test_the_distance_is_the_fewest_edits(a, b):
    assert distance(a, b) == spelled_out(a, b)


def test_similarity_goes_from_nothing_in_common_to_the_same():
    assert similarity("abc", "xyz") == 0
    assert similarity("abc  ", "abc\n") == 1
    assert similarity("", "") == 1
    assert similarity("", "abc") == 0
    assert similarity("abcd", "abxd") == pytest.approx(0.75)


def test_space_at_the_end_is_no_difference_and_space_before_the_tail_is_none_either():
    assert same("a + b ", "", "a + b", "")
    assert same("a ", ")", "a", ")")
    assert not same(" a", "", "a", "")
    assert not same("a", ")", "a", "")


def test_an_edit_that_replaces_the_tail_is_judged_by_the_line_it_makes():
    assert filled("a) -> int:", "a) -> int", tail=":", rest="").exact
    assert not filled("a) -> str:", "a) -> int", tail=":", rest="").exact


def test_where_nothing_is_missing_only_silence_is_exact():
    assert filled("", "").exact
    assert not filled("x", "").exact


@pytest.mark.parametrize(
    ("chosen", "truth", "ended"),
    [
        ("a = 1", "a = 1", True),
        ("a = 1\n", "a = 1", True),
        ("a = 1\nb", "a = 1", False),
        ("a", "a = 1", False),
        ("b", "a = 1", None),
        ("", "a", False),
        ("", "", True),
    ],
)
def test_an_end_is_judged_where_the_texts_agree_up_to_it(chosen, truth, ended):
    assert filled("", truth, chosen=chosen).ended is ended


def test_the_first_line_is_the_first_that_says_something():
    assert first_line("\n\n  a  \nb") == "  a"
    assert first_line(" \n") == ""


def test_an_interval_holds_its_value_and_narrows_with_the_gaps():
    random = np.random.default_rng(0)
    few, many = ((random.random(n) < 0.3) for n in (50, 5000))
    a, b = ratio(few), ratio(many)
    assert a.low < a.value < a.high
    assert b.low < 0.3 < b.high
    assert b.high - b.low < (a.high - a.low) / 5
    assert b.high - b.low == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 5000), rel=0.15)


def test_a_ratio_is_paired():
    ours = np.random.default_rng(0).random(200)
    assert ratio(2 * ours, ours) == pytest.approx((2, 2, 2))


def test_a_ratio_to_nothing_is_none():
    assert np.isnan(ratio([1, 1], [0, 0]).value)
    assert np.isnan(ratio([]).value)
    assert ratio([1, 1], [0, 1]).high == np.inf


def test_a_table_is_the_same_each_time():
    assert ratio([1, 0, 1, 1]) == ratio([1, 0, 1, 1])
