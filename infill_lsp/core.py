"""The nouns of the language server, in the order in which a key stroke meets them.

Everything here is immutable and knows neither LSP types, nor the engine, nor tensors. Columns and offsets count Unicode
code points; rows and columns start at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tree_sitter import Tree

Trigger = Literal["automatic", "invoked"]

#: What a person wants there: the rest of a line that has begun, a whole line, several lines (a body), or a place
#: inside a line with more after it.
Kind = Literal["rest", "line", "lines", "span"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A document at one moment, with a cursor. Safe to hand to any thread."""

    uri: str
    version: int
    language: str
    #: Lines without their line ends; always at least one (an empty document is one empty line).
    lines: tuple[str, ...]
    #: The document's own line end, "\n" or "\r\n" or "\r": the most frequent one, "\n" where there is none.
    eol: str
    row: int
    column: int
    #: The document's syntax tree over `"\n".join(lines)` in UTF-8, None where the language has no grammar.
    tree: Tree | None = None

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
    #: Why it was chosen, in words a person understands.
    why: str


@dataclass(frozen=True, slots=True)
class Silence:
    """Why nothing is offered at the cursor, in words a person understands."""

    reason: str


@dataclass(frozen=True, slots=True)
class Edit:
    """The text to put in place of `[start, end)` on the cursor line, in the document's own line ends."""

    row: int
    start: int
    end: int
    text: str
