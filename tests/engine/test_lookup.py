"""Look-up proposals against their definition, spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from infill_engine.lookup import LONGEST, PLACES, TEXTS, LastTexts, Lookup

MOST = 4

tokens = st.lists(st.integers(0, 3), max_size=40)


def spelled_out(before: list[int], after: list[int]) -> tuple[int, ...]:
    text = [*after, -1, *before]
    best: tuple[int, int] = (0, 0)
    for end in range(1, len(text) - 1):
        same = 0
        while same < LONGEST and same <= end and text[end - same] == text[len(text) - 1 - same] != -1:
            same += 1
        if same >= 2:
            best = max(best, (same, end))
    if not best[0]:
        return ()
    following = text[best[1] + 1 :][: min(MOST, best[0])]
    return tuple(following[: following.index(-1)] if -1 in following else following)


@given(tokens, tokens, tokens)
def test_proposes_what_followed_the_longest_latest_match(before, after, written):
    lookup = Lookup(before, after, MOST)
    for token in written:
        lookup.append(token)
    known = before + written
    assert len(known) + len(after) < 2 * PLACES + 2  # so that no place is passed over
    assert lookup.propose() == spelled_out(known, after)


def test_both_sides_are_looked_at():
    assert Lookup([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3], [], MOST).propose() == (4, 5, 6)
    assert Lookup([2, 3], [1, 2, 3, 4, 5], MOST).propose() == (4, 5)
    assert Lookup([7], [1, 2], MOST).propose() == ()
    assert Lookup([], [], MOST).propose() == ()


@given(
    st.text("ab\n", max_size=8),
    st.text("ab\n", min_size=1, max_size=8),
    st.integers(0, 8),
    st.text("abc\n", max_size=3),
)
def test_the_rest_of_the_last_text_is_known_while_it_is_typed(before, text, typed, other):
    texts = LastTexts()
    texts.keep("d", before, text)
    assert texts.rest("d", before + text[:typed]) == text[typed:]
    assert texts.rest("other", before) == ""
    if not text.startswith(other):
        assert texts.rest("d", before + other) == ""
    if before:
        assert texts.rest("d", before[:-1]) == ""


def test_a_text_that_was_ended_early_does_not_hide_the_longer_one_before_it():
    texts = LastTexts()
    texts.keep("d", "x = ", "compute(a, b)")
    texts.keep("d", "x = c", "omp")
    texts.keep("d", "x = c", "")
    assert texts.rest("d", "x = co") == "mpute(a, b)"
    texts.keep("d", "x = c", "all()")
    assert texts.rest("d", "x = ca") == "ll()"
    assert texts.rest("d", "x = co") == ""


def test_what_was_written_behind_a_text_that_is_not_typed_yet_follows_it():
    texts = LastTexts()
    texts.keep("d", "x = ", "compute(a, b)")
    texts.keep("d", "x = compute(a, b)", "\ny = 2")
    assert texts.rest("d", "x = comp") == "ute(a, b)\ny = 2"
    assert texts.rest("d", "x = compute(a, b)") == "\ny = 2"


def test_a_long_file_may_lose_its_beginning():
    texts = LastTexts()
    file = "".join(f"line {i}\n" for i in range(100))
    texts.keep("d", file, "alpha\nbeta")
    assert texts.rest("d", file[7:] + "alpha\nb") == "eta"
    assert texts.rest("d", file[7:] + "beta") == ""


def test_only_so_many_texts_are_kept():
    texts = LastTexts()
    for i in range(TEXTS + 1):
        texts.keep(i, "x", "y")
    assert [bool(texts.rest(i, "x")) for i in (0, 1, TEXTS)] == [False, True, True]
