"""Where a gap's text stops, written a token at a time."""

from __future__ import annotations

import pytest
from infill_engine.gap import GapText
from infill_engine.protocol import InfillRequest, is_open


def write(text: str, rest: str = "", size: int = 1, **request) -> tuple[GapText, str | None]:
    """Writes `rest + text` in pieces of `size` bytes until something stops it."""
    gap = GapText(InfillRequest(client="c", document="d", **request), rest.encode())
    data = (rest + text).encode()
    for at in range(0, len(data), size):
        reason = gap.append(data[at : at + size], 0.5)
        if reason is not None:
            return gap, reason
    return gap, None


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_one_line_gap_ends_at_the_newline(size):
    gap, reason = write("a + b\nprint()", size=size)
    assert reason == "end"
    assert gap.candidate().text == "a + b"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_healing_took_back_is_not_part_of_the_text(size):
    gap, reason = write("urn x\n", rest="\n    ret", size=size)
    assert reason == "end"
    assert gap.candidate().text == "urn x"


def test_pending_is_what_is_still_to_be_written_again():
    gap, _ = write("", rest="\n  re")
    assert gap.pending == b""
    gap = GapText(InfillRequest(client="c", document="d"), b"\n  re")
    gap.append(b"\n ", 1.0)
    assert gap.pending == b" re"
    gap.append(b" return", 1.0)  # a token may write past it
    assert gap.pending == b""
    assert gap.candidate().text == "turn"


def test_a_line_indented_less_is_not_part_of_it():
    gap, reason = write("\n    return 1\n\n\ndef g():", max_lines=8, min_indent=4)
    assert reason == "end"
    assert gap.candidate().text == "\n    return 1"


def test_a_tab_is_eight_columns():
    _, reason = write("\n\treturn 1\n\tx", max_lines=8, min_indent=8)
    assert reason is None
    _, reason = write("\n       return 1", max_lines=8, min_indent=8)
    assert reason == "end"


STATEMENTS = [
    ("if err != nil {\n\t\treturn err\n\t}\n\tx()", "\t", "if err != nil {\n\t\treturn err\n\t}"),
    ("x = f(\n        1,\n    )\n    y", "    ", "x = f(\n        1,\n    )"),
    ("if a:\n        b()\n        c()\n    d()", "    ", "if a:\n        b()\n        c()"),
    ("if a:\n    b()\n\nc()", "", "if a:\n    b()"),
    ("if (a) {\n  b()\n} else {\n  c()\n}\nd()", "", "if (a) {\n  b()\n} else {\n  c()\n}"),
    ("'a': [\n    1,\n  ],\n  'b': 2,", "  ", "'a': [\n    1,\n  ],"),
    ("x = f(1,\n      2)\ny = 1", "", "x = f(1,\n      2)"),
    ("a = 1\nb = [\n", "", "a = 1"),
    ("if a:\n  b()", "    ", "if a:"),
]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("text", "head", "expected"), STATEMENTS)
def test_a_line_that_opens_something_goes_on_until_that_is_closed(text, head, expected, size):
    gap, reason = write(text, head=head, open_lines=8, size=size)
    assert (gap.candidate().text, reason) == (expected, "end")


@pytest.mark.parametrize(("text", "head", "expected"), STATEMENTS)
def test_where_it_may_not_a_gap_of_one_line_has_one_line(text, head, expected):
    gap, reason = write(text, head=head)
    assert (gap.candidate().text, reason) == (text.partition("\n")[0], "end")


def test_what_is_never_closed_ends_at_the_limit():
    gap, reason = write("x = [\n" + "  1,\n" * 20, open_lines=4)
    assert (gap.candidate().text, reason) == ("x = [\n  1,\n  1,\n  1,", "limit")


def test_blank_lines_do_not_count_as_lines():
    gap, reason = write("\n    a\n\n    b\n    c", max_lines=2, min_indent=1)
    assert reason == "limit"
    assert gap.candidate().text == "\n    a\n\n    b"


def test_it_ends_before_the_line_that_follows_the_gap():
    gap, reason = write("\n    x = 1\n    return x\n", max_lines=8, suffix="\n\n    return x\n")
    assert reason == "end"
    assert gap.candidate().text == "\n    x = 1"


def test_a_line_begun_by_the_person_may_be_the_line_that_follows():
    gap, reason = write("turn x\n", rest=" re", head="    re", suffix="\n    return x\n", max_lines=3)
    assert reason == "end"
    assert gap.candidate().text == ""


def test_a_short_line_may_repeat():
    _, reason = write("\n}\n  a", max_lines=8, suffix="\n}\n")
    assert reason is None


@pytest.mark.parametrize("unit", ["{name} ", "ab, ", "lambda x: lambda x: "])
def test_a_model_that_stutters_is_stopped(unit):
    gap, reason = write("\n  done()\n  f(" + unit * 50, max_lines=8)
    assert reason == "limit"
    assert gap.candidate().text == "\n  done()"
    gap, reason = write("f(" + unit * 50, max_tokens=2000)
    assert reason == "limit"
    assert gap.candidate().text.count(unit) <= 1


@pytest.mark.parametrize("text", ["# " + "-" * 70, " " * 60 + "x", "0, 0, 0, 0, 1", "a" * 99, "0x" + "0" * 64])
def test_rulers_and_indentation_are_no_stutter(text):
    gap, reason = write(text, max_tokens=500)
    assert reason is None
    assert gap.candidate().text == text


@pytest.mark.parametrize(("least", "kept"), [(0.5, "wo"), (0.25, "wor"), (0.1, "word"), (0.01, "word + ")])
def test_a_text_breaks_off_behind_the_token_that_makes_it_too_unsure(least, kept):
    gap, reason = write("word + x", rest="\n    ", min_prob=least)  # what healing took back is none of the text
    assert reason == "unsure"
    gap.close()  # a word that is half written stays: it tells those before it from whole ones
    assert gap.candidate().text == kept
    assert write("word + x", min_prob=0.0)[1] is None


def test_where_a_text_ends_and_is_unsure_it_ends():
    _, reason = write("a\n", min_prob=0.3)
    assert reason == "end"


def test_the_token_limit():
    gap, reason = write("abcdefgh", max_tokens=5)
    assert reason == "limit"
    assert gap.candidate().text == "abcde"


def test_closing_drops_half_a_word_but_not_the_only_one():
    gap, _ = write("foo(bar")
    gap.close()
    assert gap.candidate().text == "foo("
    gap, _ = write("foo")
    gap.close()
    assert gap.candidate().text == "foo"


def test_half_a_character_is_not_shown():
    gap = GapText(InfillRequest(client="c", document="d"), b"")
    gap.append("é".encode()[:1], 1.0)
    assert gap.candidate().text == ""
    gap.append("é".encode()[1:], 1.0)
    assert gap.candidate().text == "é"


def test_offsets_count_characters_and_probabilities_belong_to_them():
    gap = GapText(InfillRequest(client="c", document="d"), b"x")
    for piece, prob in (("x", 0.9), ("é", 0.8), ("🙂b", 0.7)):
        gap.append(piece.encode(), prob)
    candidate = gap.candidate()
    assert candidate.text == "é🙂b"
    assert candidate.offsets == (1, 3)
    assert candidate.probs == (0.8, 0.7)


@pytest.mark.parametrize(("later", "prob"), [(-1.0, 0.001), (-4.0, 0.4)])
def test_the_best_end_is_clear_when_later_ones_are_worse(later, prob):
    gap, _ = write("\n a\n b\n c", max_lines=9)
    assert gap.score(2, -1.0, 0.4) is None
    assert gap.score(4, later, prob) == "end"
    assert [(end.offset, end.suffix_logprob) for end in gap.candidate().ends] == [(2, -1.0), (4, later)]


def test_an_end_close_to_the_best_keeps_it_open():
    gap, _ = write("\n a\n b\n c", max_lines=9)
    gap.score(2, -1.0, 0.0)
    gap.score(4, -1.2, 0.0)
    assert gap.score(6, -1.3, 0.0) is None


def test_an_open_end_is_no_evidence_that_the_gap_is_over():
    gap, _ = write("\n a\n if b {\n  c\n }", max_lines=9)
    assert gap.score(3, -1.0, 0.4) is None
    assert gap.score(11, -4.0, 0.001) is None
    assert gap.score(15, -4.0, 0.001) is None
    assert gap.score(18, -4.0, 0.001) == "end"
    assert [end.open for end in gap.candidate().ends] == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("a = 1", False),
        ("if a:", True),
        ("call(a,", True),
        ("call(a,\n  b)", False),
        ("x = [", True),
        ("a +", True),
        ("text = '('", False),
        ('text = "it\'s ["', False),
        ("} else {", True),
        ("items.map((x) =>", True),
        ("b)", False),
        ("", False),
        ("    \n", False),
        ("don't", False),
        ('"""Says', True),
        ("'''\n(", True),
        ('"""Says."""', False),
    ],
)
def test_a_text_that_opens_what_it_does_not_close_is_open(text, opened):
    assert is_open(text) is opened
