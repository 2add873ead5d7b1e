"""How much of a document does not read as its language says, with a text at the cursor.

Where there is a syntax tree, the text is put into the document and what changed is parsed again: what the parser could
not read is counted, and of the brackets that are tokens (not those in strings and comments) those without a partner.
Where there is none, or no time for it, brackets and quotes of the lines around the cursor are counted as characters,
up to a blank line. Either figure means little alone, since code is broken while it is typed and a count may misread an
apostrophe in a comment; two of them, of the same place, can be compared.

It does not know which texts are tried, nor why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from time import thread_time
from typing import NamedTuple

from tree_sitter import Node, Parser, Range, Tree

from infill_lsp import languages
from infill_lsp.core import Snapshot, utf8
from infill_lsp.documents import of_bytes, of_lines, parse
from infill_lsp.extraction import MAX_LINE

#: CPU seconds that all parses of one document's texts may take together. A try takes 1 to 3 ms in 5,000 lines.
BUDGET_S = 0.02
#: Characters of a document that is parsed from its beginning: 10 ms or so.
MAX_PARSED = 64 * 1024
#: Lines read above and below the cursor line.
NEIGHBOURS = 16

_OPENERS = {")": "(", "]": "[", "}": "{"}
_BRACKETS = frozenset("()[]{}")
#: Strings, so that their brackets do not count, and brackets.
_TOKENS = re.compile(
    r"""
      (?P<long>\"{3}|'{3}) (?: \\. | (?!(?P=long)). )* (?P<long_end>(?P=long))?
    | (?P<short>["']) (?: \\. | (?!(?P=short))[^\\\n] )* (?P<short_end>(?P=short))?
    | [()\[\]{}]
    """,
    re.VERBOSE | re.DOTALL,
)


class Damage(NamedTuple):
    """What does not read; less is better, in the order of the fields."""

    #: Places that the parser could not read, or filled in itself, and headers without a body around the cursor; 0 where
    #: nothing is parsed.
    faults: int
    #: Brackets (and, counted as characters, quotes) around the cursor without a partner.
    unmatched: int


class TooSlow(Exception):
    """The document takes too long to parse."""


class ByCounting:
    """Counts brackets and quotes of the paragraph around the cursor."""

    def __init__(self, snapshot: Snapshot) -> None:
        row, lines = snapshot.row, snapshot.lines
        above = lines[max(0, row - NEIGHBOURS) : row][::-1]
        below = lines[row + 1 : row + 1 + NEIGHBOURS]
        self._before = "\n".join([*reversed(list(takewhile(_is_code, above))), snapshot.head])
        self._tail = snapshot.tail
        self._below = "".join(f"\n{line}" for line in takewhile(_is_code, below))

    @property
    def parsable(self) -> bool:
        """Whether the document is known to be without faults."""
        return False

    def damage(self, text: str, replaced: int = 0) -> Damage:
        """With `text` in place of the first `replaced` code points behind the cursor."""
        after = self._tail[replaced:] + self._below
        return Damage(0, sum(None in pair for pair in pairs(self._before + text + after)))


class ByTree:
    """Parses the document with the text in it, from the tree that the snapshot has of it."""

    def __init__(self, snapshot: Snapshot, tree: Tree) -> None:
        row, lines = snapshot.row, snapshot.lines
        self._tree = tree
        self._parser = Parser(tree.language)
        self._row = row
        self._tail = snapshot.tail
        self._before = utf8("\n".join([*lines[:row], snapshot.head]))
        self._column = len(utf8(snapshot.head))
        self._after = utf8("\n".join([snapshot.tail, *lines[row + 1 :]]))
        #: Whether the tree is of a piece of the text, in a language that is embedded in another.
        self._is_piece = snapshot.within is not None
        self._by_indentation = languages.of(snapshot.language).block == "indentation"
        self._left_s = BUDGET_S
        self._known: dict[tuple[str, int], Damage] = {}

    @property
    def parsable(self) -> bool:
        """Whether the document is known to be without faults."""
        return not self._tree.root_node.has_error and not self.damage("").faults

    def damage(self, text: str, replaced: int = 0) -> Damage:
        """With `text` in place of the first `replaced` code points behind the cursor. Raises `TooSlow`."""
        key = text, replaced
        if key not in self._known:
            began = thread_time()
            tree = self._parsed(text, replaced) if text or replaced else self._tree
            rows = self._row - NEIGHBOURS, self._row + text.count("\n") + NEIGHBOURS
            faults = _faults(tree) + (_bodiless(tree, *rows) if self._by_indentation else 0)
            self._known[key] = Damage(faults, _unmatched(tree, *rows))
            self._left_s -= thread_time() - began
        return self._known[key]

    def _parsed(self, text: str, replaced: int) -> Tree:
        written, gone = utf8(text), len(utf8(self._tail[:replaced]))
        start = len(self._before)
        last = written.rpartition(b"\n")[2]
        column = len(last) + (0 if b"\n" in written else self._column)
        edited = self._tree.copy()
        edited.edit(
            start,
            start + gone,
            start + len(written),
            (self._row, self._column),
            (self._row, self._column + gone),
            (self._row + written.count(b"\n"), column),
        )
        tree = None
        if self._left_s > 0:
            if self._is_piece:
                self._parser.included_ranges = _around(start, self._tree.included_ranges, edited.included_ranges)
            source = self._before + written + self._after[gone:]
            tree = parse(self._parser, of_bytes(source), self._left_s, edited)
        if tree is None:
            raise TooSlow
        return tree


Measure = ByTree | ByCounting


def measures(snapshot: Snapshot) -> Iterator[Measure]:
    """Ways to measure, the best first; the last is never too slow. A snapshot of a text that nobody has typed yet has
    no tree, so that it is parsed here."""
    tree = snapshot.tree
    if tree is None and snapshot.within is None and (language := languages.grammar(snapshot.language)) is not None:
        is_short = snapshot.characters <= MAX_PARSED
        tree = parse(Parser(language), of_lines(snapshot.lines), BUDGET_S) if is_short else None
    if tree is not None:
        yield ByTree(snapshot, tree)
    yield ByCounting(snapshot)


def pairs(text: str) -> Iterator[tuple[int | None, int | None]]:
    """Offsets of each opener and its closer, None for the one that is missing; a string that ends is no pair."""
    opened: list[tuple[str, int]] = []
    for token in _TOKENS.finditer(text):
        if token["long"] or token["short"]:
            if not (token["long_end"] or token["short_end"]):
                yield token.start(), None
        elif token[0] not in _OPENERS:
            opened.append((token[0], token.start()))
        elif opened and opened[-1][0] == _OPENERS[token[0]]:
            yield opened.pop()[1], token.start()
        else:
            yield None, token.start()
    yield from ((offset, None) for _, offset in opened)


def _around(start: int, old: Sequence[Range], new: Sequence[Range]) -> list[Range]:
    """The ranges after an edit at byte `start`. What is put in where a range begins is inside of it; editing a tree
    takes it to stand before."""
    return [
        Range(before.start_point, after.end_point, before.start_byte, after.end_byte)
        if before.start_byte <= start
        else after
        for before, after in zip(old, new, strict=True)
    ]


def _faults(tree: Tree) -> int:
    """Nodes that are errors or were filled in; what is inside one of them does not count again."""
    count, nodes = 0, [tree.root_node]
    while nodes:
        node = nodes.pop()
        if node.is_error or node.is_missing:
            count += 1
        elif node.has_error:
            faulty = [child for child in node.children if child.has_error]
            nodes += faulty
            count += not faulty  # What was filled in has no name, such as the end of a line.
    return count


def _bodiless(tree: Tree, first: int, last: int) -> int:
    """Headers in the rows `first` to `last` behind which nothing is indented: Python's grammar takes that for a block,
    which Python does not."""
    return sum(node.type == "block" and node.start_byte == node.end_byte for node in _leaves(tree, max(0, first), last))


def _unmatched(tree: Tree, first: int, last: int) -> int:
    """Brackets without a partner among the tokens of the rows `first` to `last`: `(`, but also `${` and `#[`."""
    opened: list[str] = []
    strays = 0
    for node in _leaves(tree, max(0, first), last):
        if node.is_named or node.is_missing or _BRACKETS.isdisjoint(node.type):
            continue
        for character in node.type:
            if character not in _BRACKETS:
                continue
            if character not in _OPENERS:
                opened.append(character)
            elif opened and opened[-1] == _OPENERS[character]:
                opened.pop()
            else:
                strays += 1
    return strays + len(opened)


def _leaves(tree: Tree, first: int, last: int) -> Iterator[Node]:
    """The leaves in some rows, in order."""
    cursor = tree.walk()
    while True:
        node = cursor.node
        assert node is not None
        inside = node.start_point.row <= last and node.end_point.row >= first
        if inside and cursor.goto_first_child_for_point((first, 0)) is not None:
            continue
        if inside and not node.child_count:
            yield node
        while node.start_point.row > last or not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            node = cursor.node
            assert node is not None


def _is_code(line: str) -> bool:
    """Whether the line belongs to a paragraph whose brackets are counted."""
    return bool(line.strip()) and len(line) <= MAX_LINE
