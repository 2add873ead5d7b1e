"""The typist: what is typed key by key, what is taken of an offer, and what of the engine's work counts."""

from __future__ import annotations

import random

import pytest
from infill_engine.training.corpus import Document

from bench.typing import Piece, Tally, keys, outcome, pause_s, position, quantiles, right_part, worked_s


def test_a_new_line_is_one_key_with_its_indentation() -> None:
    assert keys("    if a:\n        b\n\nc") == [*["    ", "i", "f", " ", "a", ":"], "\n        ", "b", "\n", "\n", "c"]
    assert "".join(keys("a\t\n\t𝔘 b")) == "a\t\n\t𝔘 b"


@pytest.mark.parametrize(
    ("offered", "whole", "word"),
    [
        ("return a", "return a", "return a"),
        ("return a + b", "", "return a"),
        ("retur", "retur", "retur"),
        ("r", "", ""),
        ("raise", "", ""),
        ("", "", ""),
    ],
)
def test_only_what_the_file_says_is_taken(offered: str, whole: str, word: str) -> None:
    assert right_part(offered, "return a\n", "whole") == whole
    assert right_part(offered, "return a\n", "word") == word


def test_the_worth_of_an_answer() -> None:
    offers = [None, "", "return a", "return b", "raise"]
    assert [outcome(offer, "return a\n") for offer in offers] == ["late", "quiet", "right", "begun", "wrong"]


def test_pauses_are_longer_where_something_begins() -> None:
    def median(key: str, before: str) -> float:
        choose = random.Random(1)
        return sorted(pause_s(key, before, choose) for _ in range(101))[50]

    assert median("b", "a") < median("(", "a") < median("a", "x\n    ")
    assert median("b", "a") == median("b", "a")


def test_a_piece_is_whole_lines_with_room_around_them() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    document = Document("p", "python", "a.py", text)
    piece = Piece.of(document, 30, random.Random(3))
    assert piece is not None
    assert piece.before + piece.typed + piece.after == text
    assert piece.before.endswith("\n")
    assert piece.after.startswith("\n")
    assert 30 <= len(piece.typed) < 45
    assert Piece.of(Document("p", "python", "b.py", text[:200]), 30, random.Random(3)) is None


def test_places_and_figures() -> None:
    assert position("a\n𝔘b") == (1, 3)
    assert quantiles([]) == ""
    assert quantiles([3.0, 1.0, 2.0]) == "2 / 3 (3)"
    text = "infill_step_seconds_sum 1.5\ninfill_encoding_seconds_total 0.5\ninfill_step_seconds_count 9\n"
    assert worked_s(text) == 2.0
    tally = Tally("m", "whole", keys=100, pressed=80, characters=120, accepted=30, worked_s=2.0, used_s=0.5)
    tally.outcomes = ["right", "wrong", "quiet", "late"]
    assert tally.cells()[3:] == ["25.0%", "20.0%", "50.0%", "25.0%", "0.0%", "25.0%", "25.0%", "25.0%"]
    assert tally.latency()[-2:] == ["17", "75%"]
