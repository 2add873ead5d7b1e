"""A mirror of one open document, and immutable snapshots of it.

The mirror holds the client's text byte for byte. Only `\\n`, `\\r\\n` and `\\r` end a line, as LSP says;
whatever else Python's `splitlines` would split at is text. It also keeps a syntax tree, parsed when a snapshot is
taken, and only where the lines differ from those parsed before. A parse that is long goes on in a thread, and the
tree is there for a later snapshot. Where the cursor stands in a piece of another language (a fence, a script, a script
in a fence), the snapshot is of that language, with a tree of the piece.

It does not know which documents are open, nor what a gap is. It is not thread-safe; the snapshots are.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, count, takewhile
from math import inf
from operator import ne
from time import thread_time

from lsprotocol import types
from tree_sitter import Language, Node, Parser, Range, Tree

from infill_lsp import languages
from infill_lsp.core import MAX_CHARACTERS, Snapshot, Span, utf8
from infill_lsp.languages import Injection

#: CPU seconds a snapshot may wait for a parse: for the first one of a document, and for one after a key stroke. A key
#: stroke in 5,000 lines of Python takes 1 to 3 ms, but 260 ms while a brace opened at the top changes all below it.
FIRST_PARSE_S = 0.02
PARSE_S = 0.006

#: Characters of all documents that keep their trees, some 24 bytes of tree for each.
MOST_PARSED = 4_000_000
#: Languages in one another, beyond the document's own: a fence with HTML, and a script in that.
MAX_DEPTH = 2

#: Row, and bytes of it.
Point = tuple[int, int]
Piece = tuple[Point, Point]

_LINE_END = re.compile(r"(\r\n|\n|\r)")
#: Bytes, and lines, handed to the parser at a time.
_CHUNK, _LINES = 4096, 64


def position(lines: Sequence[str], row: int, column: int, encoding: str) -> types.Position:
    """The place as the client counts it: `column` code points of line `row` in units of `encoding`."""
    return types.Position(row, _units(lines[row][:column], encoding))


def spans(lines: Sequence[str], ranges: Sequence[types.Range], encoding: str) -> list[Span]:
    """The client's ranges in code points; a place outside the text is its nearest one."""
    return [Span(*sorted(_place(lines, place, encoding) for place in (one.start, one.end))) for one in ranges]


class Document:
    """One open document. `encoding` is always the negotiated position encoding: utf-8, utf-16 or utf-32."""

    def __init__(self, uri: str, language: str, version: int, text: str) -> None:
        self.uri = uri
        self.language = language
        self.version = version
        self._take(text)
        #: The trees of the document's own language (depth 0) and of those embedded in it, where they have a grammar.
        self._syntaxes: dict[tuple[int, str], _Syntax | None] = {}

    @property
    def lines(self) -> Sequence[str]:
        """The lines as they are now, without their ends."""
        return self._lines

    @property
    def characters(self) -> int:
        """Code points of all lines."""
        return self._characters

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
                self._take(change.text)
        self.version = version

    def snapshot(self, line: int, character: int, encoding: str, wait: bool = False) -> Snapshot:
        """The document as it is now, with the cursor at the client's position.

        `wait` for the tree however long the parse takes; else a late one is missing from the snapshot.
        """
        row, column = _place(self._lines, types.Position(line, character), encoding)
        lines = tuple(self._lines)
        language, within = self.language, None
        is_long = self._characters + len(lines) > MAX_CHARACTERS
        tree = None if is_long else self._tree(0, language, lines, None, wait)
        for depth in range(1, MAX_DEPTH + 1):
            found = tree and _embedded(language, tree, lines, row, column)
            if not found:
                break
            language = found.language
            within = found.piece[0][0], found.piece[1][0]
            tree = self._tree(depth, language, lines, found.piece, wait)
        return Snapshot(
            uri=self.uri,
            version=self.version,
            language=language,
            lines=lines,
            eol=self._eol,
            row=row,
            column=column,
            characters=self._characters,
            tree=tree,
            within=within,
        )

    def forget_trees(self) -> None:
        """They are made anew when they are needed."""
        self._syntaxes.clear()

    def _tree(self, depth: int, language: str, lines: tuple[str, ...], piece: Piece | None, wait: bool) -> Tree | None:
        if (depth, language) not in self._syntaxes:
            grammar = languages.grammar(language)
            self._syntaxes[depth, language] = _Syntax(grammar) if grammar else None
        syntax = self._syntaxes[depth, language]
        return syntax.tree(lines, piece, wait) if syntax else None

    def _take(self, text: str) -> None:
        self._lines, self._ends = _split(text)
        self._eol = _most_frequent(self._ends)
        self._characters = sum(map(len, self._lines))

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
        self._characters += sum(map(len, lines)) - sum(map(len, self._lines[first : last + 1]))
        self._lines[first : last + 1] = lines
        if ends != self._ends[first : last + 1]:
            self._ends[first : last + 1] = ends
            self._eol = _most_frequent(self._ends)


class Trees:
    """Which documents of an editor keep their syntax trees: those that were used last."""

    def __init__(self) -> None:
        #: Characters of each of them.
        self._used: OrderedDict[Document, int] = OrderedDict()

    def use(self, document: Document) -> None:
        """A snapshot of the document was taken."""
        self._used[document] = document.characters
        self._used.move_to_end(document)
        while sum(self._used.values()) > MOST_PARSED and len(self._used) > 1:
            self._used.popitem(last=False)[0].forget_trees()

    def drop(self, document: Document) -> None:
        """The document is no longer open."""
        self._used.pop(document, None)


class _Syntax:
    """The syntax tree of one text, or of a piece of it, kept from one parse to the next.

    A tree handed out is never edited. While a parse goes on in the thread, it alone uses the parser.
    """

    def __init__(self, grammar: Language) -> None:
        self._parser = Parser(grammar)
        self._parsed: _Parsed | None = None
        self._late: _LateParse | None = None

    def tree(self, lines: tuple[str, ...], piece: Piece | None, wait: bool) -> Tree | None:
        """None where the parse takes too long: it goes on in a thread, and the next one starts from its tree."""
        if self._late is not None:
            if wait:
                self._late.join()
            if self._late.is_alive():
                return None
            self._parsed, self._late = self._late.parsed, None
        old = self._parsed
        if old is not None and old.lines == lines and old.piece == piece:
            return old.tree
        # What a piece holds may have nothing to do with what another one held.
        edited = (
            _edited(old.tree, old.lines, lines)
            if old and (old.piece and old.piece[0]) == (piece and piece[0])
            else None
        )
        self._parser.included_ranges = [_range(lines, piece)] if piece else []
        budget_s = None if wait else FIRST_PARSE_S if edited is None else PARSE_S
        tree = parse(self._parser, of_lines(lines), budget_s, edited)
        if tree is None:
            self._late = _LateParse(self._parser, edited, lines, piece)
            self._late.start()
            return None
        self._parsed = _Parsed(tree, lines, piece)
        return tree


@dataclass(frozen=True, slots=True)
class _Parsed:
    tree: Tree
    lines: tuple[str, ...]
    piece: Piece | None


class _LateParse(threading.Thread):
    """Brings a parse to its end that has taken too long. Other threads run meanwhile: reading the text lets them."""

    def __init__(self, parser: Parser, old: Tree | None, lines: tuple[str, ...], piece: Piece | None) -> None:
        super().__init__(name="parse", daemon=True)
        self.parsed: _Parsed | None = None
        self._parser, self._old = parser, old
        self._lines, self._piece = lines, piece

    def run(self) -> None:
        tree = parse(self._parser, of_lines(self._lines), None, self._old)
        if tree is not None:
            self.parsed = _Parsed(tree, self._lines, self._piece)


@dataclass(frozen=True, slots=True)
class _Embedded:
    """A piece of another language, from one point (row, bytes of it) to another."""

    language: str
    piece: Piece


def _embedded(language: str, tree: Tree, lines: tuple[str, ...], row: int, column: int) -> _Embedded | None:
    """The piece of another language that the cursor stands in."""
    injections = {injection.node: injection for injection in languages.of(language).injections}
    if not injections:
        return None
    by_tag = {injection.tag: injection for injection in injections.values() if injection.tag}
    point = row, len(_utf8([lines[row][:column]]))
    # At the end of the text the smallest node at a point is the whole one; with the character before it, it is not.
    before = row, len(_utf8([lines[row][: max(column - 1, 0)]]))
    if row and not column:
        before = row - 1, len(_bytes(lines, row - 1))
    for start in (point, before):
        node = tree.root_node.descendant_for_point_range(start, point)
        while node is not None:
            injection, children = injections.get(node.type), node.children if node.is_named else []
            if node.type == "ERROR" and [child.type for child in children[-2:]] == ["start_tag", "raw_text"]:
                children = children[-2:]
                tag = re.match(r"<([\w-]+)", lines[children[0].start_point.row][_column(lines, children[0]) :])
                injection = by_tag.get(tag[1].lower()) if tag else None
            if injection is not None:
                found = _content(node, children, injection, lines)
                if found.piece[0] <= point <= found.piece[1]:
                    return found
            node = node.parent
    return None


def _content(node: Node, children: Sequence[Node], injection: Injection, lines: tuple[str, ...]) -> _Embedded:
    """What stands between the opening and the closing of a node, which are among these of its children; on lines of its
    own, where those are."""
    opening = list(takewhile(lambda child: child.type in injection.opening, children))
    rest = children[len(opening) :]
    closing = next((child for child in reversed(rest) if child.type in injection.closing), None)
    start: Point = (
        opening[-1].end_point if opening else (node.start_point.row, len(_bytes(lines, node.start_point.row)))
    )
    above = start[0]
    if closing is None and opening:
        end: Point = node.end_point
    else:  # Without an opening the last line closes it.
        last = node.end_point.row - (node.end_point.column == 0)
        end = closing.start_point if closing is not None else (last, 0)
        if above < end[0] and not _bytes(lines, end[0])[: end[1]].strip():
            end = end[0] - 1, len(_bytes(lines, end[0] - 1))
    if above < node.end_point.row and not _bytes(lines, above)[start[1] :].strip():
        start = above + 1, 0
    header = "\n".join(lines[(opening[0] if opening else node).start_point.row : above + 1])
    named = re.search(injection.named, header) if injection.named else None
    return _Embedded(languages.lsp_id(named["id"]) if named else injection.default or "plaintext", (start, end))


def _column(lines: Sequence[str], node: Node) -> int:
    """The code point that a node begins at in its line."""
    return len(_bytes(lines, node.start_point.row)[: node.start_point.column].decode("utf-8", "surrogatepass"))


def reparsed(tree: Tree, old: tuple[str, ...], new: tuple[str, ...]) -> Tree | None:
    """The tree of other lines, begun from that of `old`; None where it takes as long as none may after a key stroke."""
    edited = _edited(tree, old, new)
    parser = Parser(tree.language)
    parser.included_ranges = edited.included_ranges  # Of a piece it is that alone.
    return parse(parser, of_lines(new), PARSE_S, edited)


#: What gives a parser its text in UTF-8, a piece of it from a byte on, which is also given as a point.
Read = Callable[[int, Point], bytes]


def of_bytes(source: bytes) -> Read:
    """Reads a text that is UTF-8 already."""
    return lambda offset, _: source[offset : offset + _CHUNK]


def of_lines(lines: Sequence[str]) -> Read:
    """Reads lines, of which those alone are encoded that the parser looks at: after a key stroke these are few."""

    def read(_: int, point: Point) -> bytes:
        row, column = point
        goes_on = [""] if row + _LINES < len(lines) else []
        return _utf8([*lines[row : row + _LINES], *goes_on])[column:]

    return read


def parse(parser: Parser, read: Read, budget_s: float | None, old: Tree | None = None) -> Tree | None:
    """The tree of a text, begun from the edited tree `old` where there is one; None if it takes more CPU seconds.

    Other threads run meanwhile, since the text is read in pieces.
    """
    end = inf if budget_s is None else thread_time() + budget_s

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
    (old_size, old_end), (new_size, new_end) = (_line_start(lines, len(lines) - below, above) for lines in (old, new))
    edited = tree.copy()
    edited.edit(start_byte, start_byte + old_size, start_byte + new_size, start_point, old_end, new_end)
    return edited


def _range(lines: tuple[str, ...], piece: Piece) -> Range:
    """The piece of the text as the parser counts it."""
    start, end = (_line_start(lines, row)[0] + column for row, column in piece)
    return Range(*piece, start, end)


def _line_start(lines: tuple[str, ...], row: int, first: int = 0) -> tuple[int, Point]:
    """Bytes from the start of line `first` to that of line `row`, and where that is; the end of the text for the row
    after the last."""
    size = len(_utf8(lines[first:row]))
    if row == len(lines):
        return size, (row - 1, len(_utf8(lines[-1:])))
    return size + (row > first), (row, 0)


def _bytes(lines: Sequence[str], row: int) -> bytes:
    return _utf8(lines[row : row + 1])


def _utf8(lines: Sequence[str]) -> bytes:
    return utf8("\n".join(lines))


def _most_frequent(ends: list[str]) -> str:
    return max(("\n", "\r\n", "\r"), key=ends.count)


def _split(text: str) -> tuple[list[str], list[str]]:
    """Lines and their ends; the last line always has the end ""."""
    parts = _LINE_END.split(text)
    return parts[::2], [*parts[1::2], ""]


def _place(lines: Sequence[str], at: types.Position, encoding: str) -> tuple[int, int]:
    """Row and column of a client's position: beyond a line's end is its end, beyond the last line the text's.

    Not pygls' codec, which puts a character beyond the line's end before the line's last character, and counts
    character by character in Python: 0.2 s of a line of a megabyte.
    """
    if at.line >= len(lines):
        return len(lines) - 1, len(lines[-1])
    line = lines[at.line]
    head = line[: at.character]
    if head.isascii():
        return at.line, len(head)
    column, last, left = 0, len(head), at.character
    while column < last:  # Halves the piece that the place is in, and counts the first half of it only.
        middle = (column + last + 1) // 2
        units = _units(head[column:middle], encoding)
        if units <= left:
            column, left = middle, left - units
        else:
            last = middle - 1
    return at.line, column


def _units(text: str, encoding: str) -> int:
    """How many code units of a position encoding a text has."""
    if text.isascii() or encoding == types.PositionEncodingKind.Utf32:
        return len(text)
    if encoding == types.PositionEncodingKind.Utf8:
        return len(utf8(text))
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
