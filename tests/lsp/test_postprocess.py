"""What becomes of a candidate's text: the document after the edit must be what a person would write."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infill_engine.protocol import Candidate, End
from marked import at

from infill_lsp import languages
from infill_lsp.core import Edit, Gap, Silence, Snapshot
from infill_lsp.extraction import BLOCK_END_LINES, cut
from infill_lsp.postprocess import edit


def edit_at(source: str, candidate: str | Candidate) -> tuple[Snapshot, Edit | Silence]:
    snapshot = at(source)
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap), gap
    return snapshot, edit(snapshot, gap, Candidate(candidate) if isinstance(candidate, str) else candidate)


def applied(snapshot: Snapshot, change: Edit) -> str:
    """The document after the edit, with its own line ends."""
    lines = list(snapshot.lines)
    line = lines[change.row]
    lines[change.row] = line[: change.start] + change.text + line[change.end :]
    return snapshot.eol.join(lines)


def result(source: str, candidate: str | Candidate) -> str | None:
    """The document after the candidate's edit; None if nothing is offered."""
    snapshot, change = edit_at(source, candidate)
    return applied(snapshot, change) if isinstance(change, Edit) else None


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        ("print(|)", '"hi")', 'print("hi")'),
        ("print(|)", '"hi"', 'print("hi")'),
        ("array(|)", "1, 2))", "array(1, 2)"),
        ("x = [|]", "1, 2]", "x = [1, 2]"),
        ("x = {|}", "'a': 1}", "x = {'a': 1}"),
        ('print("|")', 'hi")', 'print("hi")'),
        ('print("|")', 'hi"', 'print("hi")'),
        ("print('|')", "hi')", "print('hi')"),
        ("x = `|`", "hi`", "x = `hi`"),
        ('x = """|"""', 'hi"""', 'x = """hi"""'),
        ("f(g(|))", "x))", "f(g(x))"),
        ("f(g(|))", "x)", "f(g(x))"),
        ("f(g(|)", "x))", "f(g(x))"),
        ("f(g(|)", "x)", "f(g(x))"),
        ("f(g[|)", "0])", "f(g[0])"),
        ("f(|)", "a).g(b)", "f(a).g(b)"),
        ("if x|:", " > 1:", "if x > 1:"),
        ('print("a|")', 'b", end="', 'print("ab")'),
        ('print("it\'s |")', "Tom's", "print(\"it's Tom's\")"),
        ("x = f'{|}'", 'd["a"]', "x = f'{d[\"a\"]}'"),
        ("call(a, |, c)", "b, c)", "call(a, b, c)"),
        ("call(a, |, c)", "b", "call(a, b, c)"),
        ("f(|) + 1", "a) + 1", "f(a) + 1"),
        ("f(|) + b", "a) + c + b", "f(a) + b"),
        ("x = | + b", "a +", "x = a + b"),
        ("x = |b", "a + ", "x = a + b"),
        ("if (a and |):", "b):", "if (a and b):"),
    ],
)
def test_what_stands_behind_the_cursor_is_not_written_twice(source: str, candidate: str, expected: str) -> None:
    assert result(source, candidate) == expected


@pytest.mark.parametrize(
    ("source", "candidate", "text", "replaced"),
    [
        ("def f(|):", "self, x) -> int:", "self, x) -> int:", "):"),
        ("f(|)", "a) + 1", "a) + 1", ")"),
        ("f(g(|))", "a), b) + 1", "a), b) + 1", "))"),
        ("f('|')", "a', b) or c", "a', b) or c", "')"),
        ("f(|)", "a", "a", ""),
        ("f(|)", "g(b)", "g(b)", ""),
    ],
)
def test_closers_are_replaced_only_where_the_text_goes_on_behind_them(
    source: str, candidate: str, text: str, replaced: str
) -> None:
    snapshot, change = edit_at(source, candidate)
    assert change == Edit(0, snapshot.column, snapshot.column + len(replaced), text)
    assert snapshot.tail.startswith(replaced)


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        ("x = |", "a) + b", "x = a"),
        ("x = |", "f(a)) + b", "x = f(a)"),
        ("x = |", "[a, '(']", "x = [a, '(']"),
        ("x = |", "')' + a", "x = ')' + a"),
        ("x = '(' + |", "a)", "x = '(' + a"),
        ("x = f(|", "a)", "x = f(a)"),
        ("x = f(|", "a) + b)", "x = f(a) + b"),
        # Closers left over below do not make the text's own pair a stray one.
        ("|\n    a, b))\n", "x = f(a)", "x = f(a)\n    a, b))\n"),
        ("x = f(\n    a,\n    |", "b)", "x = f(\n    a,\n    b)"),
        ("x = f(\n    a,\n    |\n)", "b)", "x = f(\n    a,\n    b\n)"),
        ("# don't\nx = |", "f(a)", "# don't\nx = f(a)"),
        ("# don't\nx = |", "f(a))", "# don't\nx = f(a)"),
        ("x = |", "f(a, (b", "x = f(a, (b"),
    ],
)
def test_a_closer_that_nothing_opened_ends_the_text(source: str, candidate: str, expected: str) -> None:
    assert result(source, candidate) == expected


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        ("a = 1\n|\nc = 3\n", "b = 2\nc = 3", "a = 1\nb = 2\nc = 3\n"),
        (
            "def f():\n    for x in y:\n        |\n    return z\n\nz = 1\n",
            "z = x\n        return z\n\nz = 1",
            "def f():\n    for x in y:\n        z = x\n    return z\n\nz = 1\n",
        ),
        (
            "def f():\n    |\n\ndef g():\n    pass\n",
            "x = 1\n    def g():",
            "def f():\n    x = 1\n\ndef g():\n    pass\n",
        ),
        # The last line is the body of the line above it, not the line below.
        (
            "def f(x):\n    for y in x:\n        y()\n        |\n    return x\n",
            "if y:\n            return x",
            "def f(x):\n    for y in x:\n        y()\n        if y:\n            return x\n    return x\n",
        ),
    ],
)
def test_following_lines_are_not_repeated(source: str, candidate: str, expected: str) -> None:
    assert result(source, candidate) == expected


def test_a_closing_line_that_the_text_needs_stays() -> None:
    source = "function f() {\n  |\n}\n"
    snapshot = at(source, language="javascript")
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    needed = edit(snapshot, gap, Candidate("if (a) {\n    b();\n  }"))
    assert isinstance(needed, Edit)
    assert applied(snapshot, needed) == "function f() {\n  if (a) {\n    b();\n  }\n}\n"
    too_many = edit(snapshot, gap, Candidate("if (a) {\n    b();\n  }\n  }\n"))
    assert too_many == needed
    repeated = edit(snapshot, gap, Candidate("b();\n  }"))
    assert isinstance(repeated, Edit)
    assert applied(snapshot, repeated) == "function f() {\n  b();\n}\n"


@pytest.mark.parametrize(
    ("source", "candidate"),
    [
        ("|\nimport os\n", "import os"),
        ("print(|)\nprint(a)\n", "a"),
        ("def f():\n    a = 1\n    |\n    return a\n", "return a"),
        ("def f():\n    a = 1\n    ret|\n\n    return a\n", "urn a"),
        ("def f():\n    a = 1\n    |\n  # end\n    return a\n", "# end\n    return a"),
    ],
)
def test_the_next_line_alone_is_nothing_new(source: str, candidate: str) -> None:
    assert result(source, candidate) is None


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        ("def f():\n    x = 1\n    |", "    return x", "def f():\n    x = 1\n    return x"),
        ("def f():\n    |", "    return 1", "def f():\n    return 1"),
        ("def f():\n\tx = 1\n\t|", "\treturn x", "def f():\n\tx = 1\n\treturn x"),
        ("def f():\n    x = 1\n    |", "y = 1\n    return x", "def f():\n    x = 1\n    y = 1\n    return x"),
        ("def f():\n    x = 1\n  |", "  return x", "def f():\n    x = 1\n    return x"),
        ("def f():\n|", "    return 1", "def f():\n    return 1"),
        ("def f():\n\tif x:\n\t\t|", "y()\n\t\tz()", "def f():\n\tif x:\n\t\ty()\n\t\tz()"),
    ],
)
def test_indentation_is_counted_once_and_kept_as_it_is(source: str, candidate: str, expected: str) -> None:
    assert result(source, candidate) == expected


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        ("func|tion()", "tion", None),
        ("func|tion()", "tion()", None),
        ("func|tion()", "tion_name", None),
        ("x = |data + 1", "read_data", None),
        ("x = |total", "sum(total", None),
        ("x = (|total", "sum(total", "x = (sum(total"),
        ("x = |total", "count + ", "x = count + total"),
        ("x = |data + b", "read_data + ", "x = read_data + data + b"),
    ],
)
def test_the_word_behind_the_cursor_stays_a_word(source: str, candidate: str, expected: str | None) -> None:
    assert result(source, candidate) == expected


@pytest.mark.parametrize(
    "candidate",
    ["", " ", "\n", "\n\n  ", ")", "})", "]);", ":", ",", "'", '"', '")', "`", "  )\n", ">", ";", "\t}"],
)
@pytest.mark.parametrize("source", ["x = |", "x = f(a|", "def f():\n    |"])
def test_closers_and_punctuation_alone_are_not_offered(source: str, candidate: str) -> None:
    assert result(source, candidate) is None


@pytest.mark.parametrize("candidate", ["a", "1", "[]", "{}", "()", '""', "''", "...", "-1", "b'', ''", "_", "é", "漢"])
def test_the_shortest_useful_text_is_offered(candidate: str) -> None:
    assert result("x = |", candidate) == "x = " + candidate


@pytest.mark.parametrize(
    "character",
    [
        "\0",
        "\x08",
        "\x1b",
        "\r",
        "\f",
        "\v",
        "\x7f",
        "\x85",
        "\u2028",
        "\u2029",
        "\u202e",
        "\u2066",
        chr(0xD83D),
        "\ufffd",
    ],
)
def test_text_that_no_document_gains_by_is_not_offered(character: str) -> None:
    assert result("x = |", f"a{character}b") is None


@pytest.mark.parametrize("eol", ["\n", "\r\n", "\r"])
def test_line_ends_are_the_documents(eol: str) -> None:
    source = eol.join(["def f():", "    |", "", "x = 1", ""])
    assert result(source, "a = 1\n    return a") == source.replace("|", f"a = 1{eol}    return a")


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        ("x = |", "1\ny = 2", "x = 1"),
        ("x = |", "1  ", "x = 1"),
        ("x = |", "\ny = 2", None),
        ("def f():\n    |", "a = 1\n\n    b = 2\nc = 3", "def f():\n    a = 1\n\n    b = 2"),
        ("def f():\n    |", "a = 1  \n\n  \n", "def f():\n    a = 1"),
        ("class A:\n    def f():\n        |", "a = 1\n    def g():", "class A:\n    def f():\n        a = 1"),
        (
            "x = 1\n|",
            "".join(f"y{n}\n" for n in range(99)),
            "\n".join(["x = 1", *(f"y{n}" for n in range(BLOCK_END_LINES))]),
        ),
        ("x = [|", "\n    1,\n]\ny = 2\n", "x = [\n    1,\n]"),
        ("x = [\n    |", "1,\n]\ny = 2\n", "x = [\n    1,\n]"),
    ],
)
def test_the_text_ends_where_the_gap_does(source: str, candidate: str, expected: str | None) -> None:
    assert result(source, candidate) == expected


BODY = "a = 1\n    b = 2\n    c = 3"


@pytest.mark.parametrize(
    ("ends", "lines"),
    [
        ([], 3),
        ([End(5, None, 0.9), End(15, None, 0.1)], 2),
        ([End(5, -1.0, 0.1), End(15, -0.5, 0.1), End(25, -2.0, 0.2)], 2),
        # A suffix that is likelier than before says more than one that is likely.
        ([End(5, -1.0, 0.3), End(15, -0.8, 0.1), End(25, -2.0, 0.3)], 1),
        ([End(5, -2.0, 0.3), End(15, -0.8, 0.1), End(25, -2.0, 0.3)], 2),
        ([End(5, -0.5, 0.1), End(15, -0.5, 0.9), End(25, -2.0, 0.2)], 2),
        # The model said that it is done.
        ([End(5, -0.5, 0.1), End(15, -0.5, 0.1), End(25, None, 0.9)], 3),
        ([End(25, None, 0.9)], 3),
        ([End(0, -0.1, 0.1), End(15, -0.5, 0.1)], 0),
    ],
)
def test_the_likeliest_end_is_taken(ends: list[End], lines: int) -> None:
    body = "\n".join(BODY.split("\n")[:lines])
    expected = f"def f():\n    z = 0\n    {body}\n\nx = 1\n" if lines else None
    assert result("def f():\n    z = 0\n    |\n\nx = 1\n", Candidate(BODY, ends=tuple(ends))) == expected


def test_a_body_does_not_end_before_it_begins() -> None:
    ends = (End(0, -0.1, 0.1), End(15, -0.5, 0.1))
    body = "\n".join(BODY.split("\n")[:2])
    assert result("def f():\n    |\n\nx = 1\n", Candidate(BODY, ends=ends)) == f"def f():\n    {body}\n\nx = 1\n"


def test_ends_do_not_cut_a_gap_of_one_line() -> None:
    assert result("x = |\n", Candidate("foo(a)\nb", ends=(End(3, -0.1, 0.9),))) == "x = foo(a)\n"


@pytest.mark.parametrize(
    ("source", "candidate", "expected"),
    [
        (
            "def f(a):\n    |\n    return 1\n",
            "if not a:\n        return 0",
            "def f(a):\n    if not a:\n        return 0\n    return 1\n",
        ),
        ("x = {\n  |\n  'b': 2,\n}\n", "'a': [\n    1,\n  ],", "x = {\n  'a': [\n    1,\n  ],\n  'b': 2,\n}\n"),
        ("x = 1\n|\ny = 2\n", "a = 1\nb = 2", "x = 1\na = 1\ny = 2\n"),
        # The header of what stands deeper below it brings no body of its own.
        ("x = 1\n|\n    y = 2\n", "if x:\n    z()", "x = 1\nif x:\n    y = 2\n"),
    ],
)
def test_above_its_sibling_a_line_may_bring_what_it_opens(source: str, candidate: str, expected: str) -> None:
    assert result(source, candidate) == expected


def test_text_that_looks_like_markup_is_plain_text() -> None:
    text = "'<fim_prefix>' + [MASK]"
    assert result("# <fim_prefix>\nx = |", text) == f"# <fim_prefix>\nx = {text}"


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|fim_middle|>", "<fim_suffix>", "<file_sep>", "</s>", "[/INST]"])
def test_special_tokens_and_what_follows_them_are_no_text(token: str) -> None:
    assert result("x = |", f"a + b{token}c") == "x = a + b"
    assert result("x = |", f"{token}c") is None


@pytest.mark.parametrize(
    ("source", "candidate"),
    [
        ("|", "def"),
        ("|\n", "def "),
        ("x = 1\n|", "class"),
        ("a|\n", "(b"),
        ("x = [1, 2|]\n", ", 3, def f"),
        # Python's grammar takes a header without a body for whole.
        ("def f():\n    |\n    return 1\n", "if x:"),
        ("def f():\n    return 1\n\n\n|\n\nx = 1\n", "for y in z:"),
        ("class A:\n    def f(self):\n        pass\n\n    |\n\n    x = 1\n", "def g(self):"),
    ],
)
def test_what_parses_goes_on_doing_so(source: str, candidate: str) -> None:
    snapshot, change = edit_at(source, candidate)
    assert change == Silence("the file parses now, and would not with the text in it (infill.parseCheck)")
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    assert isinstance(edit(snapshot, gap, Candidate(candidate), parse_check=False), Edit)


@pytest.mark.parametrize(
    ("source", "candidate"),
    [
        ("def f():\n    |\n        return 1\n", "if x:"),
        ("def f():\n    |\n    return 1\n", "if x: y()"),
        ("def f():\n    return 1\n\n\n|\n", "def g():\n    return 2"),
        ("def f():\n    |\n", "if x:"),  # Nothing is there that would be broken.
        ("def f():\n    return 1\n\n\nfor x in |\n", "y:"),
    ],
)
def test_a_header_is_offered_where_it_breaks_nothing(source: str, candidate: str) -> None:
    assert isinstance(edit_at(source, candidate)[1], Edit)


def test_a_piece_of_another_language_is_judged_alone() -> None:
    snapshot = at("# (\n```python\n|\n```\n", "markdown")
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    assert isinstance(edit(snapshot, gap, Candidate("def")), Silence)
    assert isinstance(edit(snapshot, gap, Candidate("import os")), Edit)


CODE = st.text(st.sampled_from("ab _:([{)]}'\"#\\\n\n\t  é😀=,;"), max_size=40)


@given(
    before=st.lists(st.sampled_from(["def f():\n", "    ", '"""', "x = [\n", "return x\n", "if (x"])).map("".join),
    head=CODE,
    after=CODE,
    text=CODE,
    eol=st.sampled_from(["\n", "\r\n", "\r"]),
    offsets=st.lists(st.tuples(st.integers(0, 40), st.none() | st.floats(-5, 0)), max_size=3),
)
def test_an_edit_changes_nothing_else(
    before: str, head: str, after: str, text: str, eol: str, offsets: list[tuple[int, float | None]]
) -> None:
    ends = tuple(End(offset, score, 0.5) for offset, score in offsets)
    snapshot, change = edit_at((before + head + "|" + after).replace("\n", eol), Candidate(text, ends=ends))
    if isinstance(change, Silence):
        return
    assert change.row == snapshot.row
    assert change.start == snapshot.column <= change.end <= len(snapshot.lines[snapshot.row])
    assert not re.search("[\r\n]", change.text.replace(eol, ""))
    assert change.text.replace(eol, "\n").strip()
    # Of the space in it what ends lines goes, and what begins them is the document's.
    assert re.sub("[ \t]", "", change.text.replace(eol, "\n")) in re.sub("[ \t]", "", text)
    replaced = iter(change.text)
    assert all(character in replaced for character in snapshot.tail[: change.end - change.start])
    document = applied(snapshot, change).split(eol)
    row = snapshot.row
    assert document[:row] == list(snapshot.lines[:row])
    assert document[row].startswith(snapshot.head)
    below = len(snapshot.lines) - row - 1
    assert document[len(document) - below :] == list(snapshot.lines[row + 1 :])
    assert document[len(document) - below - 1].endswith(snapshot.lines[row][change.end :])


@pytest.mark.parametrize(
    ("language", "source", "candidate", "expected"),
    [
        ("ruby", "def f(a)\n  |", "a + 1\nend\n\ndef g\n  2\nend", "def f(a)\n  a + 1\nend"),
        ("ruby", "def f(a)\n  |", "a.map do\n    1\n  end\nend\nf(1)", "def f(a)\n  a.map do\n    1\n  end\nend"),
        ("c", "void f() {\n    |", "a();\n}\n\nvoid g() {\n}", "void f() {\n    a();\n}"),
        (
            "c",
            "void f() {\n    |",
            "if (a) {\n        b();\n    }\n}",
            "void f() {\n    if (a) {\n        b();\n    }\n}",
        ),
        ("c", "if (a) {\n    |", "b();\n} else {\n    c();\n}", "if (a) {\n    b();\n} else {\n    c();\n}"),
        ("bash", "for a in b; do\n  |", "c\ndone\nd", "for a in b; do\n  c\ndone"),
    ],
)
def test_a_body_whose_closer_is_missing_ends_with_it(language: str, source: str, candidate: str, expected: str) -> None:
    if languages.grammar(language) is None:
        pytest.skip("the grammar is not installed")
    snapshot = at(source, language)
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    change = edit(snapshot, gap, Candidate(candidate))
    assert isinstance(change, Edit), change
    assert applied(snapshot, change) == expected


def test_a_text_in_tabs_gets_the_documents_unit_also_where_all_lines_near_are_deep() -> None:
    deep = "class A:\n    class B:\n        def f(self):\n" + "            self.a()\n" * 40
    _, change = edit_at(deep + "            if a:\n                |", "b()\n\t\t\t\tif c:\n\t\t\t\t\td()")
    assert isinstance(change, Edit)
    assert change.text.split("\n")[1:] == ["                if c:", "                    d()"]


def test_a_language_that_indents_by_tabs_gets_them_in_a_document_without_any() -> None:
    snapshot = at("package main\n\nfunc main() {|", "go")
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    change = edit(snapshot, gap, Candidate("\n    if a {\n        b()\n    }\n}"))
    assert isinstance(change, Edit)
    assert change.text == "\n\tif a {\n\t\tb()\n\t}\n}"
