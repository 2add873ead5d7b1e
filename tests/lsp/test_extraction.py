"""The gap at a cursor: its kind and limits, the text around it, and where nothing is offered."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infill_engine.protocol import Candidate, InfillRequest, decode_request, encode
from marked import at

from infill_lsp.core import Edit, Gap, Kind, Silence, Snapshot, Trigger
from infill_lsp.extraction import (
    MAX_CHARACTERS,
    MAX_LINE,
    MAX_PREFIX,
    MAX_SUFFIX,
    STATEMENT_LINES,
    cut,
    indentation,
)
from infill_lsp.holes import holes
from infill_lsp.postprocess import edit

CURSORS: list[tuple[str, str, Kind, int, int | None]] = [
    ("empty document", "|", "lines", 8, 0),
    ("blank document", "\n\n|\n\n", "lines", 8, 0),
    ("file start before code", "|\nimport os\n", "line", 1, None),
    ("start of a line with code", "|import os\n", "span", 1, None),
    ("file end after a statement", "x = 1\n|", "lines", 8, 0),
    ("file end inside a function", "def f():\n    x = 1\n    |", "lines", 8, 4),
    ("rest of a statement", "x = |", "rest", 1, None),
    ("rest without a newline at the end", "def f():\n    return |", "rest", 1, None),
    ("after a closer", "print(x)|\n", "rest", 1, None),
    ("after a whole statement", "def f():\n    x = 1|\n    return x\n", "rest", 1, None),
    ("before a colon", "if x|:\n    pass\n", "rest", 1, None),
    ("a value before a comma", "d = {\n    'a': |,\n}\n", "rest", 1, None),
    ("arguments", "print(|)\n", "arguments", 1, None),
    ("between arguments", "call(a, |, b)\n", "arguments", 1, None),
    ("arguments that close on the next line", "call(\n    a, |\n)\n", "arguments", 1, None),
    ("arguments that close here", "call(\n    a, |)\n", "arguments", 1, None),
    ("parameters", "def f(|):\n    pass\n", "arguments", 1, None),
    ("before an operator", "x = | + 1\n", "span", 1, None),
    ("inside a string", "x = 'a|'\n", "string", 1, None),
    ("unclosed string", "x = 'a |\n", "string", 1, None),
    ("comment", "x = 1\n# explain |\ny = 2\n", "comment", 1, None),
    ("comment that ends with a colon", "# TODO:|\n", "comment", 1, None),
    ("comment behind a header", "if x:  # because|\n", "comment", 1, None),
    ("docstring line with a colon", 'def f():\n    """Do.\n\n    Args:\n    |\n    """\n', "docstring", 1, None),
    ("decorator", "@|\ndef f():\n    pass\n", "rest", 1, None),
    ("after a header", "def f():|", "lines", 12, 1),
    ("after a header, body there", "def f():|\n    return 1\n", "rest", 1, None),
    ("after a header, another definition below", "def f():|\n\ndef g():\n    pass\n", "lines", 12, 1),
    ("after a method's header", "class A:\n    def f():|\n\n    def g():\n        pass\n", "lines", 12, 5),
    ("empty body", "def f():\n    |\n", "lines", 12, 1),
    ("empty body, cursor not indented", "def f():\n|\n", "lines", 12, 1),
    ("empty body after a comment", "def f():\n    # explain\n    |\n", "lines", 12, 1),
    ("empty body behind a commented header", "def f():  # why: x\n    |\n", "lines", 12, 1),
    ("empty body of a header of many lines", "  def f(\n          a,\n  ):\n    |\n", "lines", 12, 3),
    ("empty body before else", "if x:\n    |\nelse:\n    y\n", "lines", 12, 1),
    ("empty else in broken code", "x = (\nelse:\n    |\n", "lines", 12, 1),
    ("empty except", "try:\n    x\nexcept E:\n    |\n", "lines", 12, 1),
    ("empty case", "match x:\n    case 1:\n        |\n", "lines", 12, 5),
    ("start of a body", "def f():\n    |\n    return 1\n", "line", 1, None),
    ("body after a docstring", 'def f():\n    """Do."""\n    |\n', "lines", 12, 4),
    (
        "body after a long docstring",
        'def f():\n    """Do.\n\n    More.\n    """\n    |\nx = 1\n',
        "lines",
        12,
        4,
    ),
    ("behind a docstring", 'def f():\n    """Do."""|\n', "lines", 12, 4),
    ("docstring of a body that is there", 'def f():\n    """Do."""\n    |\n    return 1\n', "line", 1, None),
    ("left of a documented stub", 'def f():\n    """Do."""\n\n|\n', "lines", 8, 0),
    ("a returned string is no docstring", "def f():\n    return 'x'\n    |\n", "lines", 8, 4),
    ("middle of a block", "def f():\n    a = 1\n    |\n    b = 2\n", "line", 1, None),
    ("middle of a block, cursor not indented", "def f():\n    a = 1\n|\n    b = 2\n", "line", 1, None),
    ("end of a block", "def f():\n    for x in y:\n        a = x\n        |\n    return a\n", "lines", 8, 8),
    ("between definitions", "def f():\n    pass\n\n|\n\ndef g():\n    pass\n", "lines", 8, 0),
    (
        "between methods",
        "class A:\n    def f():\n        pass\n\n    |\n\n    @g\n    def h():\n        pass\n",
        "lines",
        8,
        4,
    ),
    (
        "between methods, not indented",
        "class A:\n    def f():\n        pass\n|\n    def h():\n        pass\n",
        "lines",
        8,
        4,
    ),
    ("tabs", "def f():\n\tx = 1\n\t|\n", "lines", 8, 8),
    ("tabs, empty body", "class A:\n\tdef f(self):\n\t\t|\n", "lines", 12, 9),
    ("empty brackets", "x = [\n    |\n]\n", "lines", 12, 1),
    ("end of a dict", "x = {\n    'a': 1,\n    |\n}\n", "lines", 8, 4),
    ("middle of a dict", "x = {\n    'a': 1,\n    |\n    'b': 2,\n}\n", "line", 1, None),
    ("open bracket, nothing below", "    x = call(|\n", "lines", 12, 4),
    ("open bracket, closer below", "x = call(|\n)\n", "lines", 12, 1),
    ("a slice's colon", "y = x[1:|\n", "rest", 1, None),
    ("a lambda's colon", "f = lambda x:|\n", "rest", 1, None),
    ("a dict's colon", "d = {\n    'a':|\n}\n", "rest", 1, None),
    ("bracket in a string", "x = 'a('|\n", "rest", 1, None),
    ("broken code above", "def (:\n  ]]\n\nx = |\n", "rest", 1, None),
    ("CRLF", "def f():\r\n    a = 1\r\n    |\r\n    b = 2\r\n", "line", 1, None),
]


def gap_of(snapshot: Snapshot, trigger: Trigger = "automatic") -> Gap:
    gap = cut(snapshot, trigger)
    assert isinstance(gap, Gap), gap
    return gap


def silence_of(snapshot: Snapshot, trigger: Trigger = "automatic") -> str:
    silence = cut(snapshot, trigger)
    assert isinstance(silence, Silence)
    return silence.reason


@pytest.mark.parametrize(
    ("source", "kind", "max_lines", "min_indent"),
    [row[1:] for row in CURSORS],
    ids=[row[0] for row in CURSORS],
)
def test_what_is_missing_at_a_cursor(source: str, kind: Kind, max_lines: int, min_indent: int | None) -> None:
    gap = gap_of(at(source))
    assert (gap.kind, gap.max_lines, gap.min_indent) == (kind, max_lines, min_indent)


@pytest.mark.parametrize(
    ("source", "kind", "max_lines", "min_indent"),
    [
        ("function f() {|\n}\n", "lines", 12, 1),
        ("function f() {\n  |\n}\n", "lines", 12, 1),
        ("function f() {\n  a();\n  |\n}\n", "lines", 8, 2),
        ("f(|);\n", "span", 1, None),
        ("let x = |;\n", "rest", 1, None),
        ("a:|\n", "rest", 1, None),
    ],
)
def test_a_language_without_a_grammar_goes_by_brackets_and_indentation(
    source: str, kind: Kind, max_lines: int, min_indent: int | None
) -> None:
    gap = gap_of(at(source, language="tcl"))
    assert (gap.kind, gap.max_lines, gap.min_indent) == (kind, max_lines, min_indent)


@pytest.mark.parametrize(
    ("source", "open_lines"),
    [
        ("def f():\n    a = 1\n    |\n    b = 2\n", STATEMENT_LINES),
        ("x = {\n    |\n    'b': 2,\n}\n", STATEMENT_LINES),
        ("def f():\n    |\n        b = 2\n", 0),
        ("def f():\n|\n    b = 2\n", 0),
        ("def f():\n    a = |\n    b = 2\n", 0),
        ("def f():\n    a = 1\n    |\n", 0),
        ('"""\n|\nText.\n"""\n', 0),
    ],
)
def test_only_a_line_above_its_sibling_may_open_something(source: str, open_lines: int) -> None:
    assert gap_of(at(source)).open_lines == open_lines


def test_of_a_long_comment_the_lines_stand_for_the_code_behind_it() -> None:
    short, long = (gap_of(at("def f():\n" + count * "    # so\n" + "    |\n" + "x = 1\n")) for count in (50, 5_000))
    assert (short.kind, short.min_indent) == ("lines", 1)
    assert (long.kind, long.min_indent) == ("lines", 4)


def test_without_a_tree_python_goes_by_its_words() -> None:
    snapshot = at("def f():\n    |\n")
    blind = replace(snapshot, tree=None)
    assert gap_of(blind) == replace(gap_of(snapshot), definition=None)


@pytest.mark.parametrize("trigger", ["automatic", "invoked"])
@given(
    before=st.text(st.sampled_from("ab _:([{)]}'\"#\\\n\t é😀\u2028\f=,@") | st.sampled_from("\n ")),
    after=st.text(st.sampled_from("ab _:([{)]}'\"#\\\n\t é😀\u2028\f=,@") | st.sampled_from("\n ")),
    words=st.lists(st.sampled_from(["def f():\n", "    ", "class A:\n", '"""', "return x\n", "if x:", "else:\n"])),
    eol=st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_the_gap_and_what_surrounds_it_is_the_document(
    trigger: Trigger, before: str, after: str, words: list[str], eol: str
) -> None:
    before = "".join(words) + before
    answer = cut(at((before + "|" + after).replace("\n", eol)), trigger)
    if isinstance(answer, Silence):
        assert trigger == "automatic"
        assert "word" in answer.reason
        return
    assert (answer.prefix + answer.head, answer.tail + answer.suffix) == (before, after)
    assert "\n" not in answer.head + answer.tail
    assert answer.max_lines == 1 or not answer.tail.strip()
    request = InfillRequest(
        client="c",
        document="d",
        prefix=answer.prefix,
        head=answer.head,
        tail=answer.tail,
        suffix=answer.suffix,
    )
    assert decode_request(encode(request)) == request


def test_a_model_sees_lf_whatever_the_document_has() -> None:
    gap = gap_of(at("a\r\n\tb = |\r\nc\rd\n"))
    assert (gap.prefix, gap.head, gap.tail, gap.suffix) == ("a\n", "\tb = ", "", "\nc\nd\n")


def test_half_a_surrogate_pair_does_not_stop_a_request() -> None:
    gap = gap_of(at("a\ud83d\nb\ude00 = |\n\ud83d"))
    assert (gap.prefix, gap.head, gap.suffix) == ("a\ufffd\n", "b\ufffd = ", "\n\ufffd")
    encode(InfillRequest(client="c", document="d", prefix=gap.prefix, head=gap.head, suffix=gap.suffix))


ABOVE = [f"above_{row} = {row}\n" for row in range(8_000)]
BELOW = [f"\nbelow_{row} = {row}" for row in range(8_000)]


def test_the_surroundings_are_capped_at_whole_lines() -> None:
    gap = gap_of(at("".join(ABOVE) + "x = |" + "".join(BELOW)))
    assert 0.6 * MAX_PREFIX < len(gap.prefix) <= MAX_PREFIX
    assert "".join(ABOVE).endswith("\n" + gap.prefix)
    assert 0.6 * MAX_SUFFIX < len(gap.suffix) <= MAX_SUFFIX
    assert "".join(BELOW).startswith(gap.suffix + "\n")


def test_the_cut_ends_of_the_surroundings_stay_while_lines_are_written() -> None:
    firsts, lasts = set(), set()
    for count in range(0, 1_000, 25):
        written = "".join(f"y = {row}\n" for row in range(count))
        gap = gap_of(at("".join(ABOVE) + written + "x = |" + "".join(BELOW[: 8_000 - count]), "text"))
        firsts.add(gap.prefix.partition("\n")[0])
        gap = gap_of(at("".join(ABOVE) + "x = |" + "".join(BELOW[count:]), "text"))
        lasts.add(gap.suffix.rpartition("\n")[2])
    # 7 kB and 17 kB pass by.
    assert len(firsts) <= 2
    assert len(lasts) <= 3


def test_a_cut_prefix_begins_where_a_block_does() -> None:
    block = "def f_{0}(a):\n    b = a\n    return b\n\n\n"
    gap = gap_of(at("".join(block.format(row) for row in range(4_000)) + "|"))
    assert gap.prefix.startswith("def f_")


def test_a_neighbour_longer_than_the_cap_is_left_out() -> None:
    gap = gap_of(at("a" * MAX_PREFIX + "\nx = |\n" + "b" * MAX_SUFFIX))
    assert (gap.prefix, gap.suffix) == ("", "")


@pytest.mark.parametrize("language", ["latex", "python", "vue", "no such language"])
@pytest.mark.parametrize("quote", ["'", '"', "`", "f'{", 'f"', "f(", "#{", "/*", ""])
@pytest.mark.parametrize("unit", ["\\alpha ", "\\\\", "\\", "'", '"', "(", "{", "a", " ", "...", "# TODO ", "f'{"])
def test_no_line_takes_time_to_read(language: str, quote: str, unit: str) -> None:
    for opening in ("It's (", "x = f("):
        line = (opening + quote + unit * MAX_LINE)[:MAX_LINE]
        snapshot = at(f"{line}|", language)
        assert isinstance(cut(snapshot, "automatic"), Gap)
        assert isinstance(edit(snapshot, gap_of(snapshot), Candidate(quote + 100 * unit)), (Edit, Silence))
        holes(snapshot)


def test_inside_a_word_only_on_request() -> None:
    assert "middle of a word" in silence_of(at("func|tion()\n"))
    assert gap_of(at("func|tion()\n"), "invoked").kind == "span"
    assert gap_of(at("func| tion()\n")).kind == "span"


@pytest.mark.parametrize("trigger", ["automatic", "invoked"])
def test_long_lines_and_big_documents_are_left_alone(trigger: Trigger) -> None:
    long = "x = [" + "1," * (MAX_LINE // 2)
    assert "line is longer" in silence_of(at(long + "|"), trigger)
    assert gap_of(at(long + "\n|"), trigger).kind == "lines"
    assert "document is longer" in silence_of(at("x = 1\n" * (MAX_CHARACTERS // 6 + 1) + "|", "text"), trigger)


@pytest.mark.parametrize(
    "uri",
    [
        "file:///project/a.py",
        "untitled:Untitled-1",
        "vscode-notebook-cell:/project/a.ipynb#W0sZmlsZQ%3D%3D",
        "vscode-remote://ssh-remote%2Bhost/project/a.py",
        "file:///project/environment.py",
        "file:///.env/a.py",
    ],
)
def test_documents_that_people_write_are_served(uri: str) -> None:
    assert gap_of(at("x = |", uri=uri)).kind == "rest"


@pytest.mark.parametrize("scheme", ["git", "output", "vscode-scm", "vscode-chat-code-block", "https", "search-editor"])
def test_documents_that_people_only_read_are_not(scheme: str) -> None:
    assert f"scheme {scheme} " in silence_of(at("x = |", uri=f"{scheme}:/project/a.py"))
    assert silence_of(at("x = |", uri="no-scheme"))


@pytest.mark.parametrize(
    "uri",
    [
        "file:///project/.env",
        "file:///project/%2Eenv.local",
        "file:///C%3A/a/server.PEM",
        "untitled:/p/id_rsa?x#y",
    ],
)
def test_files_of_secrets_are_never_read(uri: str) -> None:
    assert "secrets" in silence_of(at("KEY=|", uri=uri), "invoked")


@pytest.mark.parametrize(("line", "column"), [("", 0), ("x", 0), ("    x", 4), ("\tx", 8), ("  \tx", 8), ("\t  x", 10)])
def test_indentation_counts_a_tab_to_the_next_eighth_column(line: str, column: int) -> None:
    assert indentation(line) == column
