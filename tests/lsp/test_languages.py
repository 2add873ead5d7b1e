"""What is missing at cursors in every language that has a grammar: tables of texts with a cursor, `¦`, in `cursors/`.

An entry is a line of what is expected and the text below it:

    === NAME: KIND [LINES], ENDS[, indent COLUMNS][, brings CLOSER][, unit tab | COLUMNS]

LINES are 1 where none are given, the indentation None, the closer "", the unit what the language indents by.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infill_lsp import languages
from infill_lsp.core import Gap, Snapshot
from infill_lsp.documents import Document
from infill_lsp.extraction import cut
from infill_lsp.languages import ALIASES, LANGUAGES

TABLES = Path(__file__).with_name("cursors")
#: What each table of a language with calls, strings and comments has.
PLACES = {"rest of a line", "body", "arguments", "string", "comment", "broken code", "file end", "after a closer"}
#: Languages that have no such thing.
WITHOUT = {
    "bash": {"arguments"},
    "haskell": {"arguments"},
    "html": {"arguments"},
    "json": {"arguments"},
    "make": {"string"},
    "markdown": {"body", "arguments", "string", "comment", "broken code"},
    "ocaml": {"arguments"},
    "toml": {"body", "arguments"},
    "yaml": {"arguments"},
}


@dataclass(frozen=True)
class Cursor:
    language: str
    name: str
    expected: str
    text: str

    def snapshot(self) -> Snapshot:
        before, mark, after = self.text.partition("¦")
        assert mark, self
        lines = before.split("\n")
        document = Document("file:///project/file", self.language, 1, before + after)
        return document.snapshot(len(lines) - 1, len(lines[-1]), "utf-32", wait=True)


def table(language: str) -> list[Cursor]:
    path = TABLES / f"{language}.txt"
    if not path.exists():
        return []
    entries = re.split(r"^=== (.+): (.+)\n", path.read_text(), flags=re.MULTILINE)
    return [Cursor(language, *entry) for entry in zip(entries[1::3], entries[2::3], entries[3::3], strict=True)]


CURSORS = [cursor for language in LANGUAGES for cursor in table(language)]


def said(gap: Gap, language: str) -> str:
    """What the gap says of itself, as a table has it."""
    parts = [gap.kind if gap.max_lines == 1 else f"{gap.kind} {gap.max_lines}", gap.closes]
    if gap.min_indent is not None:
        parts.append(f"indent {gap.min_indent}")
    if gap.closer:
        parts.append(f"brings {gap.closer}")
    if gap.indent_unit != languages.of(language).indent:
        parts.append("unit tab" if gap.indent_unit == "\t" else f"unit {len(gap.indent_unit)}")
    return ", ".join(parts)


@pytest.mark.parametrize("cursor", CURSORS, ids=[f"{cursor.language}: {cursor.name}" for cursor in CURSORS])
def test_what_is_missing_at_a_cursor(cursor: Cursor) -> None:
    if languages.grammar(cursor.language) is None:
        pytest.skip(f"{LANGUAGES[cursor.language].package} is not installed")
    snapshot = cursor.snapshot()
    gap = cut(snapshot, "automatic")
    assert isinstance(gap, Gap), gap
    assert said(gap, snapshot.language) == cursor.expected


@pytest.mark.parametrize("cursor", CURSORS, ids=[f"{cursor.language}: {cursor.name}" for cursor in CURSORS])
def test_a_string_and_a_comment_say_what_ends_them_behind_the_cursor(cursor: Cursor) -> None:
    if languages.grammar(cursor.language) is None:
        pytest.skip(f"{LANGUAGES[cursor.language].package} is not installed")
    gap = cut(cursor.snapshot(), "automatic")
    assert isinstance(gap, Gap), gap
    assert bool(gap.quote) == (gap.kind in ("string", "comment", "docstring") and gap.closes == "closer")
    assert gap.quote in gap.tail


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_grammar_counts_only_with_its_table(language: str) -> None:
    names = [cursor.name for cursor in table(language)]
    assert len(names) == len(set(names)) >= 8
    assert PLACES - WITHOUT.get(language, set()) <= set(names)


def test_there_is_no_table_without_a_grammar() -> None:
    assert {path.stem for path in TABLES.glob("*.txt")} == set(LANGUAGES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_grammar_has_every_node_that_its_entry_names(language: str) -> None:
    grammar = languages.grammar(language)
    if grammar is None:
        pytest.skip(f"{LANGUAGES[language].package} is not installed")
    of = LANGUAGES[language]
    named = {name for one in of.injections for name in (one.node, *one.opening, *one.closing)}
    named |= of.comments | of.strings | of.interpolations | of.arguments | of.bodies | {*of.openers} | {*of.headers}
    named |= of.definitions | of.containers | of.wrappers | of.imports
    assert named <= {grammar.node_kind_for_id(number) for number in range(grammar.node_kind_count)}
    assert of.containers <= of.definitions


#: Language ids of editors, and the grammar that reads each.
IDS = {
    "typescriptreact": "tsx",
    "javascriptreact": "javascript",
    "shellscript": "bash",
    "sh": "bash",
    "csharp": "csharp",
    "cs": "csharp",
    "jsonc": "json",
    "makefile": "make",
    "vue": "html",
    "svelte": "html",
    "cuda-cpp": "cpp",
    "Python": "python",
    "objective-c": None,
    "dockerfile": None,
    "plaintext": None,
    "": None,
}


@pytest.mark.parametrize(("name", "language"), IDS.items())
def test_what_editors_call_a_language_is_known(name: str, language: str | None) -> None:
    assert languages.of(name) is (LANGUAGES[language] if language else languages.PLAIN)
    assert (languages.grammar(name) is not None) == (language is not None)


def test_every_other_name_is_one_of_a_language() -> None:
    assert set(ALIASES.values()) <= set(LANGUAGES)
    assert set(ALIASES).isdisjoint(LANGUAGES)


def test_each_grammar_is_a_dependency_with_an_exact_version_to_test_with() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["grammars"]
    packages = {name for one in asked if (name := re.split("[<>=]", one)[0]).startswith("tree-sitter-")}
    assert packages == {language.package for language in LANGUAGES.values()}
    pinned = {line.partition("==")[0] for line in (root / "constraints.txt").read_text().split("\n")}
    assert packages <= pinned


def test_a_grammar_that_is_not_installed_leaves_lines_and_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LANGUAGES, "rust", replace(LANGUAGES["rust"], package="tree-sitter-no-such-grammar"))
    assert languages.grammar("rust") is None
    text = "fn f(a: i32) {\n    ¦\n}\n"
    snapshot = Cursor("rust", "", "", text).snapshot()
    gap = cut(snapshot, "automatic")
    assert snapshot.tree is None
    assert isinstance(gap, Gap)
    assert said(gap, "rust") == "lines 12, closer, indent 1"


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_broken_code_in_any_language_gives_a_gap_that_is_the_document(data: st.DataObject) -> None:
    cursor = data.draw(st.sampled_from(CURSORS))
    text = cursor.text.replace("¦", "")
    first, last, at = (data.draw(st.integers(0, len(text))) for _ in range(3))
    text = text[: min(first, last)] + data.draw(st.sampled_from(["", "(", '"', "é😀\n\t"])) + text[max(first, last) :]
    at = min(at, len(text))
    gap = cut(Cursor(cursor.language, "", "", text[:at] + "¦" + text[at:]).snapshot(), "invoked")
    assert isinstance(gap, Gap)
    assert gap.prefix + gap.head + "¦" + gap.tail + gap.suffix == text[:at] + "¦" + text[at:]
    assert gap.max_lines == 1 or gap.min_indent is not None
    assert gap.definition is None or gap.definition[0] <= gap.prefix.count("\n") <= gap.definition[1]


DEFINITIONS = [
    ("python", "x = 1\n¦\n", None),
    ("python", "def f():\n    a = 1\n    ¦\n\ndef g():\n    pass\n", (0, 2)),
    ("python", "def f():\n    a = 1\n¦\n\ndef g():\n    pass\n", None),
    ("python", "class A:\n    def f(self):\n        a = ¦\n", (1, 2)),
    ("python", "class A:\n    def f(self):\n        a = 1\n    ¦\n", (0, 3)),
    ("javascript", "f();\nfunction g() {\n  a();\n  ¦\n}\n", (1, 4)),
    ("rust", "impl A {\n    fn f() {\n        ¦\n    }\n}\n", (1, 3)),
    ("lua", "function f()\n  a()\n  ¦\nend\n", (0, 3)),
    ("elixir", "defmodule A do\n  def f(a) do\n    IO.puts(¦)\n  end\nend\n", (1, 3)),
    ("markdown", "# T\n\n```python\ndef f():\n    a = ¦\n```\n", (3, 4)),
]


@pytest.mark.parametrize(("language", "text", "rows"), DEFINITIONS)
def test_the_definition_around_a_cursor(language: str, text: str, rows: tuple[int, int] | None) -> None:
    gap = cut(Cursor(language, "", "", text).snapshot(), "automatic")
    assert isinstance(gap, Gap)
    assert gap.definition == rows
