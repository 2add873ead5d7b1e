"""The names that are visible at a cursor, in languages whose grammars name things differently."""

from __future__ import annotations

import re

import pytest

from infill_lsp import languages
from infill_lsp.core import Snapshot
from infill_lsp.documents import Document
from infill_lsp.scope import MAX_NAMES, visible

PYTHON = """\
import os.path as p, sys
from a import b as c, d
X: int = 1
def g(inner): pass
class A:
    def f(self, a, *b, k: int = q, **kw):
        x, y = h(1)
        self.w = 2
        for i in j:
            with open(n) as fh:
                ¦
                late = 1
def later(other): pass
"""
SOURCES = [
    ("python", PYTHON, "i fh x y self a b k kw f A g X c d p sys later", "q h w j n late inner other int"),
    (
        "typescript",
        "import a, { b as c } from 'x';\nexport function f(p: Foo, { q }: Bar) {\n  const [r, s] = g();\n"
        "  for (const t of u) {\n    ¦\n  }\n}\nfunction later(other) {}\n",
        "t r s p q f a c later",
        "Foo Bar g u other",
    ),
    (
        "rust",
        "fn f(p: Foo) -> Bar {\n    let (x, y) = g();\n    ¦\n}\nfn h(other: u8) {}\n",
        "x y p f h",
        "Foo Bar g other",
    ),
    (
        "go",
        "package a\nvar K = 1\nfunc f(p int) {\n\tx, y := g()\n\tfor i := range z {\n\t\t¦\n\t}\n}\n",
        "i x y p K",
        "g z int",
    ),
    ("java", "class A {\n  int w;\n  void f(String a) {\n    int x = g();\n    ¦\n  }\n}\n", "x a f w A", "g String"),
    ("c", "int f(int a, char *b) {\n    int x = g(), *y;\n    ¦\n}\n", "x y a b f", "g char"),
    ("kotlin", "fun f(a: Int): Foo {\n    val x = g()\n    ¦\n}\n", "x a f", "g Int Foo"),
    ("swift", "func f(a: Int) {\n    let x = g()\n    ¦\n}\n", "x a f", "g Int"),
    ("ruby", "def f(a, b: 1)\n  x = g\n  ¦\nend\n", "x a b", "g"),
    ("lua", "local k = 1\nlocal function f(a)\n  local x, y = g()\n  ¦\nend\n", "x y a f k", "g"),
]


def snapshot(language: str, source: str) -> Snapshot:
    before, _, after = source.partition("¦")
    lines = before.split("\n")
    document = Document("file:///project/file", language, 1, before + after)
    return document.snapshot(len(lines) - 1, len(lines[-1]), "utf-32", wait=True)


@pytest.mark.parametrize(("language", "source", "visible_there", "not_there"), SOURCES, ids=[row[0] for row in SOURCES])
def test_what_is_bound_around_the_cursor_is_visible(
    language: str, source: str, visible_there: str, not_there: str
) -> None:
    if languages.grammar(language) is None:
        pytest.skip("its grammar is not installed")
    names = visible(snapshot(language, source))
    assert set(visible_there.split()) <= set(names)
    assert set(not_there.split()).isdisjoint(names)


def test_the_nearest_comes_first() -> None:
    names = visible(snapshot("python", PYTHON))
    assert names.index("fh") < names.index("i") < names.index("x") < names.index("self") < names.index("X")


def test_it_is_bounded_and_empty_without_a_tree() -> None:
    many = "".join(f"x{row} = {row}\n" for row in range(5_000))
    names = visible(snapshot("python", many + "¦"))
    assert len(names) == MAX_NAMES
    assert names[0] == "x4999"
    assert visible(snapshot("text", "x = 1\n¦")) == ()
    assert all(re.fullmatch(r"x\d+", name) for name in names)
