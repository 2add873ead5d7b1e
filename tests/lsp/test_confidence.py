"""How much of a candidate is worth showing."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infill_engine.protocol import Candidate, End

from infill_lsp.confidence import FEATURES, FITTED, PRODUCT, SHORTEST, Gate, best, cuts, fitted
from infill_lsp.core import Edit, Kind, Silence
from infill_lsp.settings import Aggressiveness

TOKENS = st.lists(st.tuples(st.text("ab_ (\n", min_size=1, max_size=4), st.floats(0, 1)), max_size=12)


def candidate(tokens: list[tuple[str, float]], ends: tuple[End, ...] = ()) -> Candidate:
    text, offsets = "", []
    for token, _ in tokens:
        text += token
        offsets.append(len(text))
    return Candidate(text, tuple(prob for _, prob in tokens), tuple(offsets), ends)


def gate(threshold: float, **weights: float) -> Gate:
    thresholds: dict[Aggressiveness, float] = {"quiet": 0.9, "balanced": threshold, "eager": 0.01}
    return Gate(dict.fromkeys(FEATURES, 0.0) | weights, thresholds)


def worth(gate: Gate, of: Candidate, kind: Kind, aggressiveness: Aggressiveness = "balanced") -> str:
    """What is shown of a text."""
    found = gate.sure(Edit(0, 0, 0, of.text), of, kind, aggressiveness)
    return found.text if isinstance(found, Edit) else ""


@given(TOKENS)
def test_texts_are_cut_in_order_between_words_and_never_to_nothing(tokens):
    of = candidate(tokens)
    offsets = [cut.offset for cut in cuts(of, "rest")]
    assert offsets == sorted(set(offsets))
    for offset in offsets:
        assert of.text[:offset].strip()
        around = of.text[offset - 1 : offset + 1]
        assert len(around) < 2 or not all(c.isalnum() or c == "_" for c in around)
    if of.text.strip():
        assert offsets[-1] == len(of.text)


def test_a_cut_knows_what_stands_before_it():
    found = cuts(candidate([("a", 0.5), (" =", 0.5), ("\n b", 0.1)], (End(3, -1.0, 0.25), End(6, None, 0.5))), "lines")
    features = [dict(zip(FEATURES, cut.features, strict=True)) for cut in found]
    assert [cut.offset for cut in found] == [1, 3, 6]
    assert [of["product"] for of in features][:2] == pytest.approx([0.0, -1.0986], abs=1e-4)
    assert [of["line end"] for of in features] == [0, 1, 1]
    assert [of["whole"] for of in features] == [0, 0, 1]
    assert [of["scored"] for of in features] == [0, 1, 1]
    assert [of["kind lines"] for of in features] == [1, 1, 1]
    assert features[1]["end log"] == pytest.approx(-1.3863, abs=1e-4)


@given(TOKENS)
def test_what_follows_says_nothing_of_a_text_but_where_it_ends(tokens):
    """Else a text would be judged by more than what is shown of it."""
    own = [FEATURES.index(name) for name in FEATURES if name not in ("line end", "whole")]
    whole = cuts(candidate([*tokens, (" ", 0.3)]), "rest")
    for cut in cuts(candidate(tokens), "rest"):
        (same,) = (other for other in whole if other.offset == cut.offset)
        assert [cut.features[i] for i in own] == [same.features[i] for i in own]


def test_the_cut_with_the_most_right_characters_is_taken_of_those_that_are_sure_enough():
    options = [(2, 0.9), (5, 0.8), (40, 0.3)]
    assert best(options, 0.85) == 2
    assert best(options, 0.7) == 5
    assert best(options, 0.2) == 40
    assert best(options, 0.95) == 0
    assert best([], 0.5) == 0


def test_a_gate_shows_the_sure_beginning_of_a_text_or_nothing():
    of = candidate([("self", 0.99), (".name", 0.95), (" or", 0.2), (" x", 0.2)])
    assert worth(gate(0.6, product=1.0), of, "rest") == "self.name"
    assert worth(gate(0.999, product=1.0), of, "rest") == ""
    assert worth(gate(0.01, product=1.0), Candidate(""), "rest") == ""
    assert worth(gate(0.6, product=1.0), candidate([("\n", 0.9)]), "lines") == ""


def test_the_more_eager_the_more_is_shown():
    of = candidate([("self", 0.99), (".name", 0.8), (" or something", 0.7)])
    shown = [worth(gate(0.6, product=1.0), of, "rest", how) for how in get_args(Aggressiveness)]
    assert shown == ["self", "self.name", "self.name or something"]


def test_a_beginning_that_cannot_stand_alone_is_not_shown_alone():
    of = candidate([("first", 0.99), ("(", 0.98), ("a", 0.97), (")", 0.1)])
    sure = gate(0.5, product=1.0).sure(Edit(0, 0, 0, of.text), of, "rest", stands=lambda part: "(" not in part.text)
    assert sure == Edit(0, 0, 0, "first")
    none = gate(0.5, product=1.0).sure(Edit(0, 0, 0, of.text), of, "rest", stands=lambda part: False)
    assert none == Silence("what is right with 99% cannot stand alone, or would break the file (infill.parseCheck)")


def test_broken_probabilities_break_nothing():
    of = candidate([("a", 0.0), ("(", 1.0)])
    for cut in cuts(of, "rest"):
        assert 0 <= gate(0.5, product=1e9).confidence(cut) <= 1


def test_the_installed_weights_are_those_of_the_features():
    if not FITTED.exists():
        pytest.skip("no gate was fitted")
    of = fitted()
    assert tuple(of.weights) == FEATURES
    quiet, balanced, eager = (of.thresholds[how] for how in get_args(Aggressiveness))
    assert 1 > quiet >= balanced >= eager > 0
    for a, b in pairwise([0.1, 0.5, 0.9, 0.999]):
        low, high = (cuts(candidate([("x", prob), (" y", prob)]), "rest")[-1] for prob in (a, b))
        assert of.confidence(low) < of.confidence(high)


def test_an_edit_is_cut_to_what_is_sure_and_leaves_what_it_would_have_replaced():
    of = candidate([("one", 0.9), (" +", 0.9), (" b", 0.1), (")", 0.1), ("\n", 0.9), ("c", 0.9)])
    whole = Edit(3, 4, 5, "one + b)\nc")
    sure = gate(0.5, **{"product log": 4.0, "one": 2.0}).sure(whole, of, "rest")
    assert sure == Edit(3, 4, 4, "one +")


def test_an_edit_that_is_sure_stays_as_it_is():
    of, whole = candidate([("one", 0.9), ("\n", 0.9), ("two", 0.9)]), Edit(3, 4, 5, "one\ntwo")
    assert gate(0.5, one=1.0).sure(whole, of, "lines") == whole


def test_nothing_is_shown_of_an_edit_that_is_not_sure():
    of = candidate([("one", 0.9), (" two", 0.9)])
    assert gate(0.5, one=-1.0).sure(Edit(0, 0, 0, "one two"), of, "rest") == Silence(
        "the text is right with 27%, balanced shows from 50%"
    )
    assert isinstance(gate(0.5, one=9.0).sure(Edit(0, 0, 0, "elsewhere"), of, "rest"), Silence)


def test_what_is_not_worth_a_key_is_shown_to_who_asks_for_everything_alone():
    sure = gate(0.5, one=9.0)
    for text, least in {'"': 1, "):": 1, "\n    x\n": 1, "end": SHORTEST, "\n  }\n}\n}": SHORTEST}.items():
        of = candidate([(text, 0.99)])
        assert worth(sure, of, "lines", "eager") == text
        assert bool(worth(sure, of, "lines")) == (least == SHORTEST)
        assert bool(worth(sure, of, "lines", "quiet")) == (least == SHORTEST)
    found = sure.sure(Edit(0, 0, 0, "):"), candidate([("):", 0.99)]), "rest")
    assert found == Silence("the text is too short to save a key, balanced shows 3 characters or more")
    # The longer one that is less sure is no way out.
    assert worth(gate(0.5, product=1.0), candidate([("(", 0.99), ("self", 0.1)]), "rest") == ""


def test_where_nothing_was_fitted_a_text_is_as_sure_as_its_tokens_together(tmp_path):
    of = candidate([("one", 0.9), (" +", 0.8), (" b", 0.1)])
    assert fitted(tmp_path / "none.json") is PRODUCT
    for cut, sure in zip(cuts(of, "rest"), (0.9, 0.72, 0.072), strict=True):
        assert PRODUCT.confidence(cut) == pytest.approx(sure)
    found = PRODUCT.sure(Edit(0, 0, 0, of.text), of, "rest")
    assert isinstance(found, Edit)
    assert found.text == "one +"
