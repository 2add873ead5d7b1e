"""Chunks say something alone, and together they say what is in the file."""

from __future__ import annotations

import pytest
from definitions import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from infill_lsp import chunks
from infill_lsp.chunks import MAX_LINE, WHOLE, WINDOW, Chunk, cut, language_of, words

LONG = "\n".join(f"        value_{number} = {number}" for number in range(60))
SOURCE = f'''"""A module."""

import os
from pathlib import (
    Path,
)

LIMIT = 5
NAME = "x"


@decorated
def short(x: int) -> int:
    """Doubles."""
    return 2 * x


class Small:
    size: int

    def get(self) -> int:
        return self.size


class Big(Base):
    """Holds much."""

    kind = "big"

    @property
    def long(
        self,
    ) -> int:
        """Takes long."""
{LONG}
        return value_1

    async def brief(self) -> None:
        def inner() -> None:
            pass

        inner()

    class Nested:
        def deep(self) -> None:
            pass


if __name__ == "__main__":
    short(LIMIT)
'''


def named(name: str, text: str = SOURCE) -> list[Chunk]:
    return [chunk for chunk in cut(text, "python") if chunk.name == name]


def test_a_definition_is_a_chunk_with_its_decorators_and_docstring() -> None:
    (short,) = named("short")
    assert short.text == '@decorated\ndef short(x: int) -> int:\n    """Doubles."""\n    return 2 * x'
    assert SOURCE.split("\n")[short.first : short.last + 1] == short.text.split("\n")


def test_a_small_class_is_one_chunk() -> None:
    (small,) = named("Small")
    assert small.text.endswith("return self.size")
    assert named("get") == []


def test_a_big_class_is_an_outline_and_its_methods() -> None:
    (big,) = named("Big")
    assert big.text.split("\n") == [
        "class Big(Base):",
        '    """Holds much."""',
        '    kind = "big"',
        "    def long(",
        "        self,",
        "    ) -> int:",
        "    async def brief(self) -> None:",
        "    class Nested:",
    ]
    (brief,) = named("brief")
    assert brief.text.startswith("class Big(Base):\n    async def brief(self) -> None:\n        def inner()")
    assert named("inner") == []


def test_a_long_definition_is_cut_under_its_signature() -> None:
    first, *others = named("long")
    assert first.text.startswith("class Big(Base):\n    @property\n    def long(\n")
    assert others
    assert all(
        each.text.startswith("class Big(Base):\n    def long(\n        self,\n    ) -> int:\n") for each in others
    )
    parts = [first, *others]
    assert all(part.last - part.first < WINDOW for part in parts)
    assert [part.first for part in others] == [part.last + 1 for part in parts[:-1]]


def test_what_is_between_definitions_is_a_chunk_but_imports_are_not() -> None:
    between = [chunk.text for chunk in named("")]
    assert 'LIMIT = 5\nNAME = "x"' in between
    assert 'if __name__ == "__main__":\n    short(LIMIT)' in between
    assert not any("import" in text or "Path" in text for text in between)


def test_without_a_grammar_text_goes_into_windows() -> None:
    text = "\n".join(f"line {number}" for number in range(60)) + "\n\n\n"
    found = cut(text, "")
    assert [(chunk.first, chunk.last) for chunk in found] == [(0, 24), (25, 49), (50, 59)]
    assert all(chunk.name == "" for chunk in found)
    assert cut("", "") == cut("\n\n\n", "python") == []


def test_a_file_that_takes_too_long_to_parse_goes_into_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PARSE_S", -1)
    assert {chunk.name for chunk in cut(SOURCE * 50, "python")} == {""}


@pytest.mark.parametrize("language", SAMPLES)
def test_definitions_are_found_in_every_language(language: str) -> None:
    text, names = SAMPLES[language]
    found = [chunk for chunk in cut(text, language) if chunk.name]
    assert [chunk.name for chunk in found] == names
    lines = text.split("\n")
    assert all(chunk.text.split("\n") == lines[chunk.first : chunk.last + 1] for chunk in found)


def test_comments_and_attributes_above_belong_to_a_definition() -> None:
    assert cut(SAMPLES["rust"][0], "rust")[0].text.startswith("/// A point.\n#[derive(Debug)]\npub struct Point")
    assert cut(SAMPLES["java"][0], "java")[0].text.startswith("/** Doc. */\n@Service\npublic class Cart")
    assert cut(SAMPLES["go"][0], "go")[0].text.startswith("// Area of it.\n// Really.\nfunc")
    (last,) = cut("x = 1  # of x\ndef f():\n    return 1\n", "python")
    assert last.text.startswith("def f")


def test_methods_of_a_long_class_are_chunks_in_other_languages_too() -> None:
    body = "".join(f"        n += {number};\n" for number in range(30))
    add = f"    /** Adds. */\n    public void add(int x) {{\n{body}    }}\n"
    text = f"public class Cart {{\n{add}\n    void clear() {{\n        n = 0;\n    }}\n}}\n"
    found = {chunk.name: chunk.text for chunk in cut(text, "java")}
    assert found["clear"] == "public class Cart\n    void clear() {\n        n = 0;\n    }"
    assert found["Cart"].split("\n") == ["public class Cart {", "    public void add(int x)", "    void clear()"]


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("a/b.py", "python"),
        ("b.pyi", "python"),
        ("py", ""),
        ("a.py/b", ""),
        ("a.TSX", "tsx"),
        ("a.h", "c"),
        ("a.mts", "typescript"),
        ("x/Makefile", "make"),
        ("a.json", ""),
        ("a.unknown", ""),
        (".gitignore", ""),
    ],
)
def test_languages(path: str, language: str) -> None:
    assert language_of(path) == language


LINES = st.sampled_from(
    [
        *("def f(x):", "class A:", "    def g(self):", "        return 1", "    x = 1", "import os", "", "@d", "x = ("),
        *(
            ")",
            "    class B:",
            '    """Says."""',
            "\f",
            "é = '漢'",
            "\ud800",
            "if x:",
            "async def h(): pass",
            "x" * 300,
        ),
    ]
)


@settings(deadline=None)
@given(st.lists(LINES, max_size=120))
def test_any_text_is_cut_into_rows_that_are_there(lines: list[str]) -> None:
    text = "\n".join(lines)
    covered = set()
    for chunk in cut(text, "python"):
        assert 0 <= chunk.first <= chunk.last < len(lines)
        own = [line[:MAX_LINE] for line in lines[chunk.first : chunk.last + 1]]
        # All but an outline ends with its rows as they are.
        assert chunk.last - chunk.first >= WHOLE or chunk.text.split("\n")[-len(own) :] == own
        covered.update(range(chunk.first, chunk.last + 1))
    # Only imports, and single lines between definitions, are in no chunk.
    missed = {row for row, line in enumerate(lines) if line.strip() and "import" not in line} - covered
    assert not any({row, row + 1, row + 2} <= missed for row in missed)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("parseHTTPDate2", ["parse", "http", "date", "parsehttpdate2"]),
        ("parse_http_date", ["parse", "http", "date", "parsehttpdate"]),
        ("HTTPServer", ["http", "server", "httpserver"]),
        ("_private __init__", ["private", "init"]),
        ("x1 i 42 0x1F", ["x1", "0x1f"]),
        ("größe ΣΑΣ 漢字", ["gr", "öß", "größe", "σας", "漢字"]),
        ("a" * 100 + " ok", ["ok"]),
        ("foo.bar(baz)", ["foo", "bar", "baz"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_of_calls_those_that_define_are_definitions() -> None:
    body = "".join(f"    IO.puts({number})\n" for number in range(WHOLE))
    source = f"defmodule A do\n  use GenServer\n\n  def f(a) when a > 1 do\n{body}  end\n\n  defp g(b), do: f(b)\nend\n"
    found = [(chunk.name, chunk.text.split("\n")[0]) for chunk in cut(source, "elixir")]
    assert found == [("A", "defmodule A do"), ("f", "defmodule A"), ("f", "defmodule A"), ("g", "defmodule A")]
