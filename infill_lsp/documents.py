"""A mirror of one open document, and immutable snapshots of it.

The mirror holds the client's text byte for byte. Only `\\n`, `\\r\\n` and `\\r` end a line, as LSP says;
whatever else Python's `splitlines` would split at is text. It also keeps a syntax tree, parsed when a
snapshot is taken, and only where the lines differ from those parsed before.

It does not know which documents are open, nor what a gap is. It is not thread-safe; the snapshots are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate, compress, count
from operator import ne
from time import thread_time

from lsprotocol import types
from pygls.workspace.position_codec import PositionCodec
from tree_sitter import Language, Parser, Tree

from infill_lsp.core import Snapshot

#: Language id -> the grammar's package and the function in it that returns the grammar.
GRAMMARS = {
    "python": ("tree_sitter_python", "language"),
}

#: CPU seconds a parse may take: the first one of a document, and the one after a key stroke. A key stroke in
#: 5,000 lines of Python takes 1 to 3 ms, but 260 ms while a brace opened at the top changes all below it.
FIRST_PARSE_S = 0.25
PARSE_S = 0.006

_LINE_END = re.compile(r"(\r\n|\n|\r)")
#: Bytes handed to the parser at a time.
_CHUNK = 4096


def position(lines: Sequence[str], row: int, column: int, encoding: str) -> types.Position:
    """The place as the client counts it: `column` code points of line `row` in units of `encoding`."""
    return types.Position(row, PositionCodec(encoding).client_num_units(lines[row][:column]))


class Document:
    """One open document. `encoding` is always the negotiated position encoding: utf-8, utf-16 or utf-32."""

    def __init__(self, uri: str, language: str, version: int, text: str) -> None:
        self.uri = uri
        self.language = language
        self.version = version
        self._lines, self._ends = _split(text)
        self._eol = _most_frequent(self._ends)
        found = grammar(language)
        self._syntax = _Syntax(found) if found else None

    @property
    def text(self) -> str:
        """The client's text, line ends included."""
        return "".join(line + end for line, end in zip(self._lines, self._ends, strict=True))

    def change(self, changes: Sequence[types.TextDocumentContentChangeEvent], version: int, encoding: str) -> None:
        """Applies a `textDocument/didChange` in order; a position outside the text is its nearest place."""
        for change in changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                self._replace(change.range, change.text, encoding)
            else:
                self._lines, self._ends = _split(change.text)
                self._eol = _most_frequent(self._ends)
        self.version = version

    def snapshot(self, line: int, character: int, encoding: str) -> Snapshot:
        """The document as it is now, with the cursor at the client's position."""
        row, column = _place(self._lines, types.Position(line, character), encoding)
        lines = tuple(self._lines)
        return Snapshot(
            uri=self.uri,
            version=self.version,
            language=self.language,
            lines=lines,
            eol=self._eol,
            row=row,
            column=column,
            tree=self._syntax.tree(lines) if self._syntax else None,
        )

    def _replace(self, span: types.Range, text: str, encoding: str) -> None:
        (first, start), (last, end) = sorted(_place(self._lines, at, encoding) for at in (span.start, span.end))
        text = self._lines[first][:start] + text + self._lines[last][end:] + self._ends[last]
        if first > 0 and self._ends[first - 1] == "\r":
            # A "\n" that comes to stand behind a lone "\r" becomes one line end with it.
            first -= 1
            text = self._lines[first] + "\r" + text
        lines, ends = _split(text)
        if last + 1 < len(self._lines):
            # The text ended with the last line's end: what follows it is the next line, which stays.
            del lines[-1], ends[-1]
        self._lines[first : last + 1] = lines
        if ends != self._ends[first : last + 1]:
            self._ends[first : last + 1] = ends
            self._eol = _most_frequent(self._ends)


class _Syntax:
    """The syntax tree of one document, kept from one parse to the next. A tree handed out is never edited."""

    def __init__(self, language: Language) -> None:
        self._parser = Parser(language)
        self._lines: tuple[str, ...] = ("",)
        self._tree = self._parser.parse(b"")
        self._budget_s = FIRST_PARSE_S

    def tree(self, lines: tuple[str, ...]) -> Tree | None:
        """None where the parse would take too long; the next one starts from the last tree there was."""
        if lines != self._lines:
            tree = parse(self._parser, _utf8(lines), self._budget_s, _edited(self._tree, self._lines, lines))
            self._budget_s = PARSE_S
            if tree is None:
                return None
            self._tree, self._lines = tree, lines
        return self._tree


def parse(parser: Parser, source: bytes, budget_s: float, old: Tree | None = None) -> Tree | None:
    """The tree of UTF-8, begun from the edited tree `old` where there is one; None if it takes more CPU seconds."""
    end = thread_time() + budget_s

    def read(offset: int, _: object) -> bytes:
        return source[offset : offset + _CHUNK]

    def is_late(_offset: int, _has_error: bool) -> bool:
        return thread_time() > end

    try:
        if old is None:  # The binding takes no None for it.
            return parser.parse(read, progress_callback=is_late)
        return parser.parse(read, old, progress_callback=is_late)
    except ValueError:  # What the binding raises when the callback stops it.
        parser.reset()
        return None


def _edited(tree: Tree, old: tuple[str, ...], new: tuple[str, ...]) -> Tree:
    """A copy of `old`'s tree that knows which lines `new` replaces.

    One comparison of all lines (0.1 ms for 5,000) instead of an edit for each change: any number of changes,
    or a whole new text, cost a parse of what differs.
    """
    shortest = min(len(old), len(new))
    # At least one line counts as changed, so that the change starts at the start of a line in both.
    above = min(next(compress(count(), map(ne, old, new)), shortest), shortest - 1)
    below = min(next(compress(count(), map(ne, reversed(old), reversed(new))), shortest), shortest - above)
    start_byte, start_point = _line_start(old, above)
    old_end_byte, old_end_point = _line_start(old, len(old) - below)
    new_end_byte, new_end_point = _line_start(new, len(new) - below)
    edited = tree.copy()
    edited.edit(start_byte, old_end_byte, new_end_byte, start_point, old_end_point, new_end_point)
    return edited


def _line_start(lines: tuple[str, ...], row: int) -> tuple[int, tuple[int, int]]:
    """Byte offset and point of the start of line `row`; the end of the text for the row after the last."""
    size = len(_utf8(lines[:row]))
    if row == len(lines):
        return size, (row - 1, len(_utf8(lines[-1:])))
    return size + 1 if row else 0, (row, 0)


def _utf8(lines: Sequence[str]) -> bytes:
    # A client may send half a surrogate pair (JSON can); it must not stop the parse.
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _most_frequent(ends: list[str]) -> str:
    return max(("\n", "\r\n", "\r"), key=ends.count)


def _split(text: str) -> tuple[list[str], list[str]]:
    """Lines and their ends; the last line always has the end ""."""
    parts = _LINE_END.split(text)
    return parts[::2], [*parts[1::2], ""]


def _place(lines: Sequence[str], at: types.Position, encoding: str) -> tuple[int, int]:
    """Row and column of a client's position: beyond a line's end is its end, beyond the last line the text's.

    Not pygls' codec, which puts a character beyond the line's end before the line's last character.
    """
    if at.line >= len(lines):
        return len(lines) - 1, len(lines[-1])
    line = lines[at.line]
    head = line[: at.character]
    if head.isascii():
        return at.line, len(head)
    units = accumulate(map(PositionCodec(encoding).impl.code_units_for_char, head))
    return at.line, bisect_right(list(units), at.character)


@cache
def grammar(language: str) -> Language | None:
    """None without an entry, without the package, or with one this tree-sitter cannot load."""
    if language not in GRAMMARS:
        return None
    package, function = GRAMMARS[language]
    try:
        return Language(getattr(import_module(package), function)())
    except (ImportError, ValueError):
        return None
