"""The nouns of the language server, in the order in which a key stroke meets them.

Everything here is immutable and knows neither LSP types, nor the engine, nor tensors. Columns and offsets count Unicode
code points; rows and columns start at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from tree_sitter import Tree

Trigger = Literal["automatic", "invoked"]

#: A longer document (characters) is generated or data: nothing is offered there, and it is not parsed.
MAX_CHARACTERS = 2_000_000

#: How a gap lies in its lines: the rest of a line that has begun, a whole line, several lines (a body), or a place
#: inside a line with more after it.
Shape = Literal["rest", "line", "lines", "span"]

#: What a person wants there: code of such a shape; something of a list of arguments or parameters; text in a string,
#: a comment, or in what documents a definition; something else in place of a selection.
Kind = Literal["rest", "line", "lines", "span", "arguments", "string", "comment", "docstring", "selection"]

#: The shape that a gap of each kind has, or is nearest to: what is fitted knows shapes alone.
SHAPES: Mapping[Kind, Shape] = {
    "rest": "rest",
    "line": "line",
    "lines": "lines",
    "span": "span",
    "arguments": "span",
    "string": "span",
    "comment": "rest",
    "docstring": "rest",
    "selection": "lines",
}

#: Where a gap is over by itself: with its line; before the bracket, quote or keyword that closes what it is in (or
#: with it, where that is missing: `Gap.closer`); before the next part of the same block or list; before the first line
#: that is indented less than `Gap.min_indent`; at the document's end.
Closes = Literal["line", "closer", "sibling", "dedent", "file"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A document at one moment, with a cursor. Safe to hand to any thread."""

    uri: str
    version: int
    #: The editor's id of the language at the cursor: of a fence or a script where the cursor stands in one.
    language: str
    #: Lines without their line ends; always at least one (an empty document is one empty line).
    lines: tuple[str, ...]
    #: The document's own line end, "\n" or "\r\n" or "\r": the most frequent one, "\n" where there is none.
    eol: str
    row: int
    column: int
    #: Code points of all lines together, which is not counted anew with each key.
    characters: int
    #: The syntax tree over `"\n".join(lines)` in UTF-8, or over the rows of `within` in it; None where the language
    #: has no grammar, or its parse is not ready.
    tree: Tree | None = None
    #: First and last row of the language at the cursor where it is embedded in another one.
    within: tuple[int, int] | None = None
    #: Of a notebook's cell, what the cells before and after it say, LF only, as `Gap.prefix` and `Gap.suffix` have it.
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.row < len(self.lines)
        assert 0 <= self.column <= len(self.lines[self.row])

    @property
    def head(self) -> str:
        """The cursor line before the cursor."""
        return self.lines[self.row][: self.column]

    @property
    def tail(self) -> str:
        """The cursor line after the cursor."""
        return self.lines[self.row][self.column :]

    def text(self, span: Span) -> str:
        """What stands in a part of the document, LF only."""
        (first, start), (last, end) = span
        lines = [*self.lines[first : last + 1]]
        lines[-1] = lines[-1][:end]
        return "\n".join(lines)[start:]


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missing at the cursor, cut for a model: `prefix + head | gap | tail + suffix`, LF only.

    `prefix` holds whole lines, each with its newline; `suffix` begins with a newline or is empty.
    """

    kind: Kind
    prefix: str
    head: str
    tail: str
    suffix: str
    #: Lines the gap may have at most.
    max_lines: int
    #: Columns (tab = 8): a later line indented by less ends the gap; None where indentation says nothing.
    min_indent: int | None
    #: Where the gap is over by itself.
    closes: Closes = "line"
    #: What the gap has to bring itself to close what it is in: a bracket, a quote, a keyword; "" where none is missing.
    closer: str = ""
    #: What the string or comment around the gap ends with, behind the gap on its own line; "" elsewhere.
    quote: str = ""
    #: Lines a gap of one line may have after all where that line opens what it does not close: one statement, or one
    #: entry of a list. 0: it stays one line.
    open_lines: int = 0
    #: What the document indents by: spaces, or a tab.
    indent_unit: str = "    "
    #: First and last row of the innermost definition around the gap, None outside of definitions.
    definition: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of the workspace that may help to fill a gap."""

    #: LF only. May begin with lines that stand further up in the file: the headers of what it is in.
    text: str
    #: Where it is: a path relative to the workspace folder, and its rows, both included.
    path: str
    first_line: int
    last_line: int
    #: The higher the better; comparable within one retrieval.
    score: float
    #: Says why it was chosen, in words a person understands; called only for who asks, for it takes a tenth of a ms.
    why: Callable[[], str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Silence:
    """Why nothing is offered at the cursor, in words a person understands."""

    reason: str


class Span(NamedTuple):
    """A part of a document's text between two places (row, column); the two are the same between two characters."""

    start: tuple[int, int]
    end: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Site:
    """A place whose text is to be written: a selection, a cursor, or a hole that somebody left in their code."""

    span: Span
    #: What is written ahead of the text in any case, LF only: a remark on it that stays, a new line's indentation.
    lead: str = ""
    #: The lines there should be room for, and the columns (tab = 8) that a later line is indented by at least; None: as
    #: at a cursor there.
    lines: int | None = None
    min_indent: int | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """What belongs in place of a site's text."""

    span: Span
    #: LF only.
    text: str
    #: The probability that it is right as far as it goes.
    sure: float


@dataclass(frozen=True, slots=True)
class Edit:
    """The text to put in place of `[start, end)` on the cursor line, in the document's own line ends."""

    row: int
    start: int
    end: int
    text: str


def utf8(text: str) -> bytes:
    """As syntax trees count it. A client may send half a surrogate pair (JSON can), which must not stop a parse."""
    return text.encode("utf-8", "surrogatepass")
