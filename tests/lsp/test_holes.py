"""Which places are holes: written as source with a list of what is found, and where it would be written."""

from __future__ import annotations

import pytest
from marked import at

from infill_lsp.core import Snapshot, Span
from infill_lsp.documents import Document
from infill_lsp.holes import holes

BODY = "def f(a):\n    {}\n\n\ndef g():\n    return 1\n"


def filled(
    snapshot: Snapshot,
    spans: tuple[Span, ...] = (),
    markers: tuple[str, ...] = (),
    document: Document | None = None,
) -> str:
    """The document with @ in each hole, what is ahead of it written."""
    text = list(snapshot.lines)
    for site in reversed(holes(snapshot, spans, markers, document)):
        (row, start), (last, end) = site.span
        assert row == last
        text[row] = text[row][:start] + site.lead + "@" + text[row][end:]
    return "\n".join(text)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    ...\n", "def f():\n    @\n"),
        ("def f(): ...\n", "def f():@\n"),
        ("...\n", "@\n"),
        ("def f(a):\n    b = ...\n    return ...\n", "def f(a):\n    b = @\n    return @\n"),
        ("def f():\n    ...  # sum them\n", "def f():\n    # sum them\n    @\n"),
        ("def f():\n    ...  # noqa: E701\n", "def f():\n    @  # noqa: E701\n"),
        ("class A:\n    ...\n", "class A:\n    @\n"),
        ("def f():\n    pass  # ...\n", "def f():\n    @\n"),
        ("def f():\n    pass  # TODO: sum them\n", "def f():\n    # TODO: sum them\n    @\n"),
        ('def f():\n    """Sum."""\n    pass  # sum\n', 'def f():\n    """Sum."""\n    # sum\n    @\n'),
        ("x = f(???, 1)\n", "x = f(@, 1)\n"),
        ("x = ???\n", "x = @\n"),
        ('x = f"{???}"\n', 'x = f"{@}"\n'),
    ],
)
def test_holes_of_python(source: str, expected: str) -> None:
    assert filled(at(source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        "x: tuple[int, ...] = ()\n",
        "def f(a: int = ...) -> Callable[..., int]:\n    return a\n",
        "x = a[..., 0]\n",
        "x = '...'\n",
        's = """\n...\n# TODO: no remark\n    pass  # ...\n"""\n',
        "x: int = ...\n",
        "MISSING = ...\n",
        "class A(Protocol):\n    def f(self) -> int: ...\n",
        "class A:\n    @abc.abstractmethod\n    def f(self) -> int:\n        ...\n",
        "@overload\ndef f(a: int) -> int: ...\n",
        "class FillError(Exception): ...\n",
        "try:\n    f()\nexcept OSError:\n    pass  # it is gone already\n",
        "def f():\n    pass\n",
        "x = 1  # ??? why\n",
        "f('why???')\n",
        "x = 1....__class__\n",
    ],
)
def test_what_is_complete_is_no_hole(source: str) -> None:
    assert holes(at(source)) == []


def test_a_stub_has_no_holes() -> None:
    assert holes(at("def f() -> int: ...\n", uri="file:///project/module.pyi")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # The block has nothing else, ends there, or the next statement stands apart.
        ("def f():\n    # TODO: sum\n\n\nx = 1\n", "def f():\n    # TODO: sum\n    @\n\n\nx = 1\n"),
        ("def f():\n    a()\n    # FIXME sum\n", "def f():\n    a()\n    # FIXME sum\n    @\n"),
        ("def f():\n    # TODO: sum\n\n    return a\n", "def f():\n    # TODO: sum\n    @\n\n    return a\n"),
        # All lines of the remark stay above.
        ("def f():\n    # TODO: sum\n    # and print\n", "def f():\n    # TODO: sum\n    # and print\n    @\n"),
        # What keeps the block open is replaced.
        ("def f():\n    # TODO: sum\n    pass\n", "def f():\n    # TODO: sum\n    @\n"),
        ("def f():\n    # TODO\n    raise NotImplementedError('f')\n", "def f():\n    # TODO\n    @\n"),
        ("def f():\n    # TODO: sum\n    ...\n", "def f():\n    # TODO: sum\n    @\n"),
        # About code that is there, or about the file.
        ("def f():\n    # TODO: make it fast\n    return sum(a)\n", None),
        ("import os\n\n# TODO: split this module\n\nx = 1\n", None),
        ("x = 1  # TODO: make it 2\n", None),
    ],
)
def test_a_task_is_a_hole_where_a_statement_is_missing(source: str, expected: str | None) -> None:
    assert filled(at(source)) == (source if expected is None else expected)


def test_a_task_that_is_pointed_at_is_a_hole() -> None:
    snapshot = at("def f():\n    # TODO: check a\n    return sum(a)\n")
    here = Span((1, 6), (1, 6))
    assert filled(snapshot, (here,)) == "def f():\n    # TODO: check a\n    @\n    return sum(a)\n"
    assert holes(snapshot, (Span((0, 0), (2, 0)),)) == []
    open_body = at("def f():\n    # TODO: check a\n    pass\n")
    assert filled(open_body, (here,)) == "def f():\n    # TODO: check a\n    @\n"


@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [
        ("scala", "def f: Int = ???\n", "def f: Int = @\n"),
        ("rust", "fn f() -> i32 {\n    todo!()\n}\n", "fn f() -> i32 {\n    @\n}\n"),
        ("typescript", "function f() {\n  // TODO: sum\n}\n", "function f() {\n  // TODO: sum\n  @\n}\n"),
        ("c", "int f(void) {\n\t/* TODO: sum */\n}\n", "int f(void) {\n\t/* TODO: sum */\n\t@\n}\n"),
        ("javascript", "f(...args)\n  ...\n", "f(...args)\n  @\n"),
        ("nolanguage", "x = ???;\n# what is ???\nprint('???')\n", "x = @;\n# what is ???\nprint('???')\n"),
        ("yaml", "a: 1\n...\n", None),
        ("markdown", "# TODO\n\n...\n\n??? note\n", None),
    ],
)
def test_holes_of_other_languages(language: str, source: str, expected: str | None) -> None:
    assert filled(at(source, language)) == (source if expected is None else expected)


def test_a_marker_is_a_hole_wherever_it_stands() -> None:
    snapshot = at("x = <FILL> + 1\n# <FILL>\n    <FILL>\n")
    assert filled(snapshot, markers=("<FILL>", "")) == "x = @ + 1\n# @\n    @\n"
    sites = holes(snapshot, markers=("<FILL>",))
    assert [(site.lines is None, site.min_indent) for site in sites] == [(True, None), (True, None), (False, 4)]


def test_spans_choose_the_holes() -> None:
    snapshot = at("def f(a):\n    b = ...\n    c = ...\n    return ???\n")
    assert filled(snapshot, (Span((2, 0), (2, 0)),)) == "def f(a):\n    b = ...\n    c = @\n    return ???\n"
    assert filled(snapshot, (Span((1, 0), (2, 4)),)) == "def f(a):\n    b = @\n    c = @\n    return ???\n"
    assert filled(snapshot, (Span((9, 0), (99, 0)),)) == "\n".join(snapshot.lines)


SCRIPT = "function f() {{\n  // TODO sum\n{}}}\nlet x = {};\n".format
MIXED = [
    (
        "vue",
        "<template>\n  <p>...</p>\n</template>\n<script>\n" + SCRIPT("", "???") + "</script>\n",
        "<template>\n  <p>...</p>\n</template>\n<script>\n" + SCRIPT("  @\n", "@") + "</script>\n",
    ),
    (
        "markdown",
        "# Wait ...\n\n...\n\n```python\ndef f(a):\n    pass  # sum\n```\n\n```js\nlet y = ???;\n```\n",
        "# Wait ...\n\n...\n\n```python\ndef f(a):\n    # sum\n    @\n```\n\n```js\nlet y = @;\n```\n",
    ),
]


@pytest.mark.parametrize(("language", "source", "expected"), MIXED)
def test_what_is_embedded_has_the_holes_of_its_own_language(language: str, source: str, expected: str) -> None:
    document = Document("file:///project/a", language, 1, source)
    snapshot = document.snapshot(0, 0, "utf-32")
    assert filled(snapshot, document=document) == expected
    rows = [row for row, line in enumerate(snapshot.lines) if "TODO" in line or "pass" in line]
    spans = tuple(Span((row, 0), (row, 0)) for row in rows)
    assert [site.span.start[0] for site in holes(snapshot, spans, document=document)] == rows
