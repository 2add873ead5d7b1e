"""Cuts the gap around the cursor: what kind of text is missing there, what surrounds it, where it must end.

The rules read indentation, brackets and a few kinds of syntax nodes named in a table by language; a language
without a table gets the rules that need none. Code is broken while it is typed, so a tree is evidence, not a
condition.

It does not know LSP, settings, or what a model can see: its caps are in characters, tokens are the engine's.

What a person wants at a cursor, one rule a line of `_shape`:

| cursor | kind | lines | min_indent |
|---|---|---|---|
| code or a closer after it on the line | span | 1 | - |
| after something that opens a body which is not there yet | lines | 8 | deeper than the opener |
| blank line of an empty body | lines | 8 | deeper than the opener, or the docstring's |
| any other place in a line that has begun | rest | 1 | - |
| blank line with a statement of its block below | line | 1 | - |
| blank line at its block's end, or before a definition | lines | 3 | the block's |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from infill_lsp.core import Gap, Kind, Silence, Snapshot, Trigger
from infill_lsp.ignore import is_secret

if TYPE_CHECKING:
    from tree_sitter import Node

#: A longer document, and a longer cursor line (characters), are generated or data: nothing is offered there.
MAX_CHARACTERS = 2_000_000
MAX_LINE = 2_000
#: Caps of the text around the gap (characters); the engine takes of it what its budget allows.
MAX_PREFIX = 64 * 1024
MAX_SUFFIX = 8 * 1024
#: Lines of an empty body, and of a place where a block could go on or end.
BODY_LINES = 8
BLOCK_END_LINES = 3

#: Documents that people write code in; not output panels, diffs, commit boxes or chats.
SCHEMES = frozenset({"file", "untitled", "vscode-notebook-cell", "vscode-remote"})


@dataclass(frozen=True, slots=True)
class _Syntax:
    """What a language's tree calls the things the rules ask for."""

    #: What ends the header of a body, and the nodes it is a part of then.
    opener: str = ""
    bodies: frozenset[str] = frozenset()
    #: First words of such a header, for code too broken to have a node.
    words: frozenset[str] = frozenset()
    #: Definitions, which stand apart from the statements around them.
    definitions: frozenset[str] = frozenset()
    comments: frozenset[str] = frozenset({"comment"})


_PLAIN = _Syntax()
_SYNTAX = {
    "python": _Syntax(
        opener=":",
        bodies=frozenset(
            {
                "function_definition",
                "class_definition",
                "if_statement",
                "elif_clause",
                "else_clause",
                "for_statement",
                "while_statement",
                "try_statement",
                "except_clause",
                "finally_clause",
                "with_statement",
                "match_statement",
                "case_clause",
            }
        ),
        words=frozenset(
            {
                "async",
                "case",
                "class",
                "def",
                "elif",
                "else",
                "except",
                "finally",
                "for",
                "if",
                "match",
                "try",
                "while",
                "with",
            }
        ),
        definitions=frozenset({"function_definition", "class_definition", "decorated_definition"}),
    ),
}

_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def cut(snapshot: Snapshot, trigger: Trigger) -> Gap | Silence:
    """The gap at the cursor, or why nothing is offered there. Never raises, however broken the code is."""
    reason = _silence(snapshot, trigger)
    if reason:
        return Silence(reason)
    kind, max_lines, min_indent = _shape(snapshot)
    return Gap(
        kind=kind,
        prefix=_prefix(snapshot),
        head=_whole(snapshot.head),
        tail=_whole(snapshot.tail),
        suffix=_suffix(snapshot),
        max_lines=max_lines,
        min_indent=min_indent,
    )


def indentation(line: str) -> int:
    """Columns before the line's first character that is no space; a tab goes to the next multiple of 8."""
    return len(line[: _start(line)].expandtabs(8))


def is_word(character: str) -> bool:
    """Whether the character (or "") is a part of names and words."""
    return character.isalnum() or character == "_"


def _silence(snapshot: Snapshot, trigger: Trigger) -> str | None:
    scheme, _, path = snapshot.uri.partition(":")
    path = unquote(path.partition("#")[0].partition("?")[0])
    if scheme not in SCHEMES:
        return f"documents of the scheme {scheme or '(none)'} are not completed"
    if is_secret(path):
        return f"{path.rpartition('/')[2]} may hold secrets"
    if len(snapshot.lines[snapshot.row]) > MAX_LINE:
        return f"the line is longer than {MAX_LINE:,} characters"
    if sum(map(len, snapshot.lines)) + len(snapshot.lines) > MAX_CHARACTERS:
        return f"the document is longer than {MAX_CHARACTERS:,} characters"
    if trigger == "automatic" and is_word(snapshot.head[-1:]) and is_word(snapshot.tail[:1]):
        return "the cursor is in the middle of a word"
    return None


def _shape(snapshot: Snapshot) -> tuple[Kind, int, int | None]:
    """Kind, max_lines and min_indent of the gap."""
    begun = bool(snapshot.head.strip())
    tail = snapshot.tail.strip()
    if tail and not (begun and set(tail) <= set(":;, ")):
        return "span", 1, None
    if tail:
        return "rest", 1, None
    above = snapshot.row if begun else _code_row(snapshot, -1)
    below = _code_row(snapshot, +1)
    column = len(snapshot.head.expandtabs(8))
    body = _empty_body(snapshot, above, below, column)
    if body is not None:
        return "lines", BODY_LINES, body
    if begun:
        return "rest", 1, None
    next_column = -1 if below is None else indentation(snapshot.lines[below])
    if next_column >= column and not _begins_definition(snapshot, below):
        return "line", 1, None
    return "lines", BLOCK_END_LINES, max(column, next_column)


def _empty_body(snapshot: Snapshot, above: int | None, below: int | None, column: int) -> int | None:
    """The least indentation of the body that is missing at the cursor; None where none is missing.

    `above` and `below` are the rows with code around the gap, `column` is the cursor's.
    """
    if above is None:
        return None
    last = _last_token(snapshot, above)
    header = _header_row(snapshot, above, last)
    documented = _documented_row(snapshot, last) if header is None else None
    opener = header if header is not None else documented
    if opener is None:
        return None
    outer = indentation(snapshot.lines[opener])
    if below is not None and indentation(snapshot.lines[below]) > outer:
        return None
    if documented is not None:
        # A docstring is a body already: only a cursor that stands deeper than the definition asks for more.
        return indentation(snapshot.lines[above]) if column > outer else None
    closer = _BRACKETS.get(last.text)
    if closer and not (below is not None and snapshot.lines[below].lstrip().startswith(closer)):
        # The closing bracket is missing too, and usually stands where the opener's line begins.
        return outer
    return outer + 1


@dataclass(frozen=True, slots=True)
class _Token:
    """The last character of a line that is neither space nor comment, with its node where there is a tree."""

    text: str
    node: Node | None


def _last_token(snapshot: Snapshot, row: int) -> _Token:
    line = snapshot.lines[row].rstrip()
    node = _leaf(snapshot, row, len(line) - 1)
    if row != snapshot.row and node is not None and node.type in _syntax(snapshot).comments:
        start = len(_utf8(line)[: node.start_point.column].decode("utf-8", "surrogatepass"))
        line = line[:start].rstrip()
        node = _leaf(snapshot, row, len(line) - 1) if line else None
    return _Token(line[-1:], node)


def _header_row(snapshot: Snapshot, row: int, last: _Token) -> int | None:
    """The row on which the header begins that ends, at the end of line `row`, with what opens a body."""
    syntax = _syntax(snapshot)
    if last.node is not None and last.node.type != last.text:
        return None  # It stands in a string or a comment.
    if last.text in _BRACKETS:
        return row
    if not last.text or last.text != syntax.opener:
        return None
    parent = last.node.parent if last.node is not None else None
    if parent is not None and parent.type in syntax.bodies:
        return parent.start_point.row
    broken = parent is None or parent.type == "ERROR"
    first_word = snapshot.lines[row].replace(syntax.opener, " ").split()[:1]
    return row if broken and not syntax.words.isdisjoint(first_word) else None


def _documented_row(snapshot: Snapshot, last: _Token) -> int | None:
    """The row of the definition whose body is nothing but the docstring that ends with `last`."""
    syntax = _syntax(snapshot)
    for node in _ancestors(last.node):
        definition = node.parent
        if definition is not None and node == definition.child_by_field_name("body"):
            statement = node.named_child(0) if node.named_child_count == 1 else None
            if statement is None or statement.type != "expression_statement":
                return None
            value = statement.named_child(0)
            documented = definition.type in syntax.definitions and value is not None and value.type == "string"
            return definition.start_point.row if documented else None
    return None


def _begins_definition(snapshot: Snapshot, row: int | None) -> bool:
    if row is None:
        return False
    definitions = _syntax(snapshot).definitions
    leaf = _leaf(snapshot, row, _start(snapshot.lines[row]))
    return leaf is not None and any(
        node.type in definitions and node.start_byte == leaf.start_byte for node in _ancestors(leaf)
    )


def _leaf(snapshot: Snapshot, row: int, column: int) -> Node | None:
    """The smallest node at a character."""
    if snapshot.tree is None:
        return None
    line = snapshot.lines[row]
    start, end = len(_utf8(line[:column])), len(_utf8(line[: column + 1]))
    return snapshot.tree.root_node.descendant_for_point_range((row, start), (row, end))


def _ancestors(node: Node | None) -> Iterator[Node]:
    """The node itself, its parent, and so on to the root."""
    while node is not None:
        yield node
        node = node.parent


def _code_row(snapshot: Snapshot, step: int) -> int | None:
    """The nearest row above (-1) or below (+1) the cursor's that is neither blank nor only a comment."""
    row = snapshot.row + step
    while 0 <= row < len(snapshot.lines):
        if snapshot.lines[row].strip():
            first = _leaf(snapshot, row, _start(snapshot.lines[row]))
            if first is None or first.type not in _syntax(snapshot).comments:
                return row
        row += step
    return None


def _prefix(snapshot: Snapshot) -> str:
    size, row = 0, snapshot.row
    while row > 0 and size + len(snapshot.lines[row - 1]) + 1 <= MAX_PREFIX:
        row -= 1
        size += len(snapshot.lines[row]) + 1
    return _whole("".join(line + "\n" for line in snapshot.lines[row : snapshot.row]))


def _suffix(snapshot: Snapshot) -> str:
    size, row = 0, snapshot.row + 1
    while row < len(snapshot.lines) and size + len(snapshot.lines[row]) + 1 <= MAX_SUFFIX:
        size += len(snapshot.lines[row]) + 1
        row += 1
    return _whole("".join("\n" + line for line in snapshot.lines[snapshot.row + 1 : row]))


def _start(line: str) -> int:
    """The column (code points) of the line's first character that is no space."""
    return len(line) - len(line.lstrip())


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _whole(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot carry to a model."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _syntax(snapshot: Snapshot) -> _Syntax:
    return _SYNTAX.get(snapshot.language, _PLAIN)
