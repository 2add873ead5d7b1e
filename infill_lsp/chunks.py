"""Cuts a file into chunks: pieces that say something alone, to be found and shown beside another file's gap.

Where the language has a grammar a chunk is a definition under the headers of the classes around it; a long one is cut
into windows, each under the definition's signature. A class too long for one chunk is an outline of what it has, and
chunks of its own for its methods. What stands between definitions, and a file without a grammar, goes into windows.

It does not know where text comes from, nor how chunks are found. Text is LF only; rows start at 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice
from math import ceil

from tree_sitter import Node, Parser, Query, QueryCursor, Tree

from infill_lsp.documents import parse
from infill_lsp.languages import grammar

#: Lines of a window, and of the longest definition that is one chunk.
WINDOW = 25
WHOLE = 32
#: Lines of a signature that stand above its later windows.
SIGNATURE = 4
#: Lines that are not blank in the shortest window between definitions.
SHORTEST = 2
#: Characters of a line in a chunk; what is longer is cut off.
MAX_LINE = 200
#: Chunks of one file.
MAX_CHUNKS = 2_000
#: Classes in classes whose methods are chunks of their own.
MAX_DEPTH = 4
#: CPU seconds a parse may take: a file that takes longer goes into windows.
PARSE_S = 0.5

#: A file's ending -> its language, where there is a grammar.
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
}

#: Language -> a query of its grammar for definitions (with fields `name` and `body`), for those of them that hold
#: others, for what stands around a definition and belongs to it, and for what says nothing alone.
_QUERIES = {
    "python": """
        [(function_definition) (class_definition)] @definition
        (class_definition) @container
        (decorated_definition) @wrapper
        (module [(import_statement) (import_from_statement) (future_import_statement)] @import)
        """,
}

_IDENTIFIER = re.compile(r"\w+")
#: Acronyms, capitalised and lower-case words, letters without case, and numbers.
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\d+")
#: Characters of the longest identifier that is a word.
_MAX_WORD = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `first` to `last` of a file, both included, with the lines that say where they belong."""

    #: The definition's name without those around it; "" between definitions.
    name: str
    first: int
    last: int
    text: str


@dataclass(slots=True)
class _Definition:
    """A definition at rows `first` to `last`, and the definitions in it that are chunks of their own."""

    name: str
    first: int
    last: int
    signature: list[str]
    #: Whether it may have `inner` ones.
    container: bool
    end_byte: int
    #: Whether it is no definition, but what is left out.
    is_import: bool = False
    inner: list[_Definition] = field(default_factory=list)


def language_of(path: str) -> str:
    """The language of a file of this name, "" where there is no grammar for it."""
    return LANGUAGES.get(path[path.rfind(".") :], "") if "." in path else ""


def cut(text: str, language: str) -> list[Chunk]:
    """The chunks of a file, by row. Never raises, however broken the text is."""
    source = text.encode("utf-8", "surrogatepass")
    lines = [line[:MAX_LINE] for line in text.split("\n")]
    tree = _parse(source, language)
    if tree is None:
        chunks = _windows(lines, 0, len(lines), ())
    else:
        captures = QueryCursor(_query(language)).captures(tree.root_node)
        parts = sorted(_nested(captures, source) + _imports(captures), key=lambda part: part.first)
        chunks = _chunks(lines, parts, 0, len(lines), ())
    return list(islice(chunks, MAX_CHUNKS))


def words(text: str) -> list[str]:
    """The words that a text is found by, lower case, in their order.

    An identifier counts as its parts (`parseHTTPDate2`: parse, http, date) and, where it has several, also as a whole,
    in whatever way it is written (parsehttpdate2). Single characters and numbers are left out.
    """
    found: list[str] = []
    for identifier in _IDENTIFIER.findall(text):
        found += _split(identifier)
    return found


@lru_cache(maxsize=1 << 14)
def _split(identifier: str) -> tuple[str, ...]:
    if len(identifier) > _MAX_WORD:
        return ()
    lower = [part.lower() for part in _PART.findall(identifier)]
    whole = "".join(lower)
    parts = [*lower, whole] if len(lower) > 1 else lower
    return tuple(part for part in parts if len(part) > 1 and not part.isdigit())


def _chunks(
    lines: Sequence[str], definitions: Sequence[_Definition], first: int, end: int, headers: Sequence[str]
) -> Iterator[Chunk]:
    """The chunks of rows `first` to `end` (not included), in which `definitions` stand, under `headers`."""
    for definition in definitions:
        yield from _windows(lines, first, definition.first, headers)
        if definition.is_import:
            pass
        elif definition.last - definition.first < WHOLE:
            yield _chunk(definition.name, lines, definition.first, definition.last, headers)
        elif definition.inner:
            yield _outline(lines, definition, headers)
            after = min(definition.first + WINDOW, definition.inner[0].first)
            yield from _chunks(lines, definition.inner, after, definition.last + 1, [*headers, *definition.signature])
        else:
            yield from _cut(lines, definition, headers)
        first = max(first, definition.last + 1)
    yield from _windows(lines, first, end, headers)


def _outline(lines: Sequence[str], definition: _Definition, headers: Sequence[str]) -> Chunk:
    """What the definition begins with, and the signatures of what is in it."""
    begin = lines[definition.first : min(definition.first + WINDOW, definition.inner[0].first)]
    inner = [line for each in definition.inner for line in each.signature]
    text = "\n".join([*headers, *(line for line in begin if line.strip()), *inner[: 2 * WINDOW]])
    return Chunk(definition.name, definition.first, definition.last, text)


def _cut(lines: Sequence[str], definition: _Definition, headers: Sequence[str]) -> Iterator[Chunk]:
    """A long definition in windows of about the same size, all but the first under its signature."""
    count = definition.last + 1 - definition.first
    size = ceil(count / ceil(count / WINDOW))
    for first in range(definition.first, definition.last + 1, size):
        last = min(first + size - 1, definition.last)
        above = headers if first == definition.first else [*headers, *definition.signature]
        yield _chunk(definition.name, lines, first, last, above)


def _windows(lines: Sequence[str], first: int, end: int, headers: Sequence[str]) -> Iterator[Chunk]:
    """Rows `first` to `end` (not included), cut every `WINDOW` lines, without blank lines at the windows' ends."""
    while first < end:
        if not lines[first].strip():
            first += 1
            continue
        last = min(first + WINDOW, end) - 1
        after = last + 1
        while not lines[last].strip():
            last -= 1
        if sum(1 for line in lines[first : last + 1] if line.strip()) >= SHORTEST:
            yield _chunk("", lines, first, last, headers)
        first = after


def _chunk(name: str, lines: Sequence[str], first: int, last: int, headers: Sequence[str]) -> Chunk:
    return Chunk(name, first, last, "\n".join([*headers, *lines[first : last + 1]]))


def _nested(captures: dict[str, list[Node]], source: bytes) -> list[_Definition]:
    """The outermost definitions, each with those in it; none of those in a function."""
    containers = {node.id for node in captures.get("container", ())}
    wrappers = {node.id for node in captures.get("wrapper", ())}
    outermost: list[_Definition] = []
    around: list[_Definition] = []
    for node in sorted(captures.get("definition", ()), key=lambda node: (node.start_byte, -node.end_byte)):
        while around and around[-1].end_byte <= node.start_byte:
            around.pop()
        if around and not around[-1].container:
            continue
        definition = _definition(node, wrappers, node.id in containers and len(around) < MAX_DEPTH, source)
        (around[-1].inner if around else outermost).append(definition)
        around.append(definition)
    return outermost


def _imports(captures: dict[str, list[Node]]) -> list[_Definition]:
    return [
        _Definition("", node.start_point.row, node.end_point.row, [], False, node.end_byte, is_import=True)
        for node in captures.get("import", ())
    ]


def _definition(node: Node, wrappers: set[int], container: bool, source: bytes) -> _Definition:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    line_start = source.rfind(b"\n", 0, node.start_byte) + 1
    header = source[line_start : body.start_byte if body is not None else node.end_byte]
    outer = node.parent if node.parent is not None and node.parent.id in wrappers else node
    return _Definition(
        name=_text(source[name.start_byte : name.end_byte]) if name is not None else "",
        first=outer.start_point.row,
        last=outer.end_point.row,
        signature=[line[:MAX_LINE] for line in _text(header).rstrip().split("\n")[:SIGNATURE]],
        container=container,
        end_byte=node.end_byte,
    )


def _text(source: bytes) -> str:
    return source.decode("utf-8", "surrogatepass")


def _parse(source: bytes, language: str) -> Tree | None:
    """None without a grammar, and where the parse takes too long."""
    found = grammar(language) if language in _QUERIES else None
    if found is None:
        return None
    return parse(Parser(found), source, PARSE_S)


@cache
def _query(language: str) -> Query:
    found = grammar(language)
    assert found is not None
    return Query(found, _QUERIES[language])
