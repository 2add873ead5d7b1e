"""Cuts a file into chunks: pieces that say something alone, to be found and shown beside another file's gap.

Where the language has a grammar a chunk is a definition with the comments above it, under the headers of the classes
around it; a long one is cut into windows, each under the definition's signature. A class too long for one chunk is an
outline of what it has, and chunks of its own for its methods. What stands between definitions, and a file without a
grammar, goes into windows.

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

from infill_lsp import languages
from infill_lsp.documents import of_bytes, parse

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

#: Endings of files that are no language's name, nor another name of one -> the language.
_ENDINGS = {
    "bash": "bash",
    "cts": "typescript",
    "hh": "cpp",
    "hxx": "cpp",
    "inl": "cpp",
    "ipp": "cpp",
    "mli": "ocaml",
    "mts": "typescript",
    "pyi": "python",
    "pyw": "python",
    "rake": "ruby",
}
#: Files without an ending.
_FILES = {"makefile": "make", "gnumakefile": "make", "rakefile": "ruby", "gemfile": "ruby"}
#: Endings that editors have a language id for, and the table has as another language.
_OWN_IDS = frozenset({"jsonc", "svelte", "vue"})
#: What also stands above a definition and belongs to it, where the grammar has it.
_ATTRIBUTES = ("attribute_item", "decorator", "annotation")
#: Lines of comments above a definition that belong to it.
COMMENTS = 12
#: The fields that lead to a definition's name, and how the nodes are called that do where there is none.
_NAMES = ("name", "declarator", "type", "pattern", "property", "field")
#: The body of a call that is a definition, the call's arguments, and what leads in them to the name.
_DO, _ARGUMENTS, _DEFINED = "do_block", "arguments", ("target", "left")
_SPECIFIES = ("_spec", "identifier", "declarator", "signature", "_head", "call_expression", "_binding", "_reference")

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
    """The language of a file of this name, "" where no definitions are known of it."""
    name = path.rpartition("/")[2].lower()
    _, dot, ending = name.rpartition(".")
    language = _ENDINGS.get(ending, languages.name_of(ending)) if dot else _FILES.get(name, "")
    return language if languages.of(language).definitions else ""


def language_id(path: str) -> str:
    """What an editor calls the language of a file of this name."""
    ending = path[path.rfind(".") + 1 :].lower()
    return ending if ending in _OWN_IDS else languages.lsp_id(language_of(path) or ending)


def cut(text: str, language: str) -> list[Chunk]:
    """The chunks of a file, by row. Never raises, however broken the text is."""
    source = text.encode("utf-8", "surrogatepass")
    lines = [line[:MAX_LINE] for line in text.split("\n")]
    query = _query(languages.name_of(language))
    tree = _parse(source, language) if query is not None else None
    if query is None or tree is None:
        chunks = _windows(lines, 0, len(lines), ())
    else:
        captures = QueryCursor(query).captures(tree.root_node)
        above = _rows_above(captures, source)
        known = languages.of(language)
        parts = sorted(_nested(captures, source, above, known) + _imports(captures), key=lambda part: part.first)
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


def _rows_above(captures: dict[str, list[Node]], source: bytes) -> set[int]:
    """The rows on which nothing but a comment stands, or an attribute of what is below."""
    rows: set[int] = set()
    for node in (*captures.get("comment", ()), *captures.get("attribute", ())):
        line_start = source.rfind(b"\n", 0, node.start_byte) + 1
        if not source[line_start : node.start_byte].strip():
            rows.update(range(node.start_point.row, node.end_point.row + (node.end_point.column > 0)))
    return rows


def _nested(
    captures: dict[str, list[Node]], source: bytes, above: set[int], language: languages.Language
) -> list[_Definition]:
    """The outermost definitions, each with those in it; none of those in a function."""
    containers = {node.id for node in captures.get("container", ()) if language.contains(node)}
    wrappers = {node.id for node in captures.get("wrapper", ())}
    outermost: list[_Definition] = []
    around: list[_Definition] = []
    definitions = filter(language.defines, captures.get("definition", ()))
    for node in sorted(definitions, key=lambda node: (node.start_byte, -node.end_byte)):
        while around and around[-1].end_byte <= node.start_byte:
            around.pop()
        if around and not around[-1].container:
            continue
        definition = _definition(node, wrappers, node.id in containers and len(around) < MAX_DEPTH, source, above)
        (around[-1].inner if around else outermost).append(definition)
        around.append(definition)
    return outermost


def _imports(captures: dict[str, list[Node]]) -> list[_Definition]:
    return [
        _Definition("", node.start_point.row, node.end_point.row, [], False, node.end_byte, is_import=True)
        for node in captures.get("import", ())
        if node.parent is not None and node.parent.parent is None
    ]


def _definition(node: Node, wrappers: set[int], container: bool, source: bytes, above: set[int]) -> _Definition:
    body = node.child_by_field_name("body") or _child(node, _DO)
    line_start = source.rfind(b"\n", 0, node.start_byte) + 1
    header = source[line_start : body.start_byte if body is not None else node.end_byte]
    outer = node.parent if node.parent is not None and node.parent.id in wrappers else node
    first = outer.start_point.row
    while first - 1 in above and outer.start_point.row - first < COMMENTS:
        first -= 1
    return _Definition(
        name=_name(node, source),
        first=first,
        last=outer.end_point.row - (outer.end_point.column == 0 and outer.end_point.row > outer.start_point.row),
        signature=[line[:MAX_LINE] for line in _text(header).rstrip().split("\n")[:SIGNATURE]],
        container=container,
        end_byte=node.end_byte,
    )


def _name(node: Node, source: bytes) -> str:
    """What a definition defines, "" where no field of it says so: in C the name is within declarators, in Go within a
    specification, and what Rust implements is a type; of a call it is what its first argument begins with."""
    given = _child(node, _ARGUMENTS) if node.type == "call" else None
    if given is not None and (named := given.named_child(0)) is not None:
        while inner := next(filter(None, map(named.child_by_field_name, _DEFINED)), None):
            named = inner
        return _text(source[named.start_byte : named.end_byte])
    for _ in range(MAX_DEPTH):
        for name in _NAMES:
            if (inner := node.child_by_field_name(name)) is not None:
                break
        else:
            inner = next((child for child in node.named_children if child.type.endswith(_SPECIFIES)), None)
        if inner is None:
            return ""
        if not inner.named_child_count or inner.type.endswith("identifier"):
            return _text(source[inner.start_byte : inner.end_byte]).rpartition("::")[2].strip()
        node = inner
    return ""


def _child(node: Node, kind: str) -> Node | None:
    return next((child for child in node.children if child.type == kind), None)


def _text(source: bytes) -> str:
    return source.decode("utf-8", "surrogatepass")


def _parse(source: bytes, language: str) -> Tree | None:
    """None without a grammar, and where the parse takes too long."""
    found = languages.grammar(language)
    return None if found is None else parse(Parser(found), of_bytes(source), PARSE_S)


@cache
def _query(language: str) -> Query | None:
    """What a language's definitions are, which of them hold others, what stands around one or above it and belongs to
    it, and what says nothing alone; None where none are known."""
    known, found = languages.of(language), languages.grammar(language)
    if not known.definitions or found is None:
        return None
    captured = {
        "definition": known.definitions,
        "container": known.containers,
        "wrapper": known.wrappers,
        "import": known.imports,
        "comment": known.comments,
        "attribute": _ATTRIBUTES,
    }
    patterns = []
    for capture, names in captured.items():
        known_names = [name for name in sorted(names) if found.id_for_node_kind(name, True) is not None]
        if known_names:
            patterns.append(f"[{' '.join(f'({name})' for name in known_names)}] @{capture}")
    return Query(found, "\n".join(patterns))
