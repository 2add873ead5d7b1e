"""Cuts the gap around the cursor: what kind of text is missing there, what surrounds it, where it must end.

The rules read indentation, brackets and the syntax tree, by the names that `languages` has for what they ask for; a
language without a grammar gets the rules that need none. Code is broken while it is typed, so a tree is evidence, not
a condition.

It does not know LSP, settings, or what a model can see: its caps are in characters, tokens are the engine's.

What a person wants at a cursor, one rule a line of `_shape`:

| cursor | kind | lines | min_indent | ends |
|---|---|---|---|---|
| in a string or a comment | string, comment, docstring | 1 | - | before its end, or with the line |
| code or a closer after it on the line | span, or arguments | 1 | - | before the closer, the next part, with the line |
| after something that opens a body which is not there yet | lines | 12 | deeper than the opener | dedent, closer |
| blank line of an empty body | lines | 12 | deeper than the opener, or the docstring's | the same |
| any other place in a line that has begun | rest, or arguments | 1 | - | with the line |
| blank line with a statement of its block below | line | 1 | - | before the sibling |
| blank line at its block's end, or before a definition | lines | 8 | the block's | closer, dedent, sibling, file |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, takewhile
from typing import TYPE_CHECKING
from urllib.parse import unquote

from infill_lsp import languages
from infill_lsp.core import MAX_CHARACTERS, Closes, Gap, Kind, Silence, Snapshot, Trigger, utf8
from infill_lsp.ignore import leads_to_secret
from infill_lsp.languages import Language

if TYPE_CHECKING:
    from tree_sitter import Node

#: A longer cursor line (characters) is generated or data: nothing is offered there.
MAX_LINE = 2_000
#: Caps of the text around the gap (characters); the engine takes of it what its budget allows. What is over a cap is
#: left out in strides of a quarter of it, so that not each new line changes where the text begins or ends: the
#: engine would have to begin anew with each.
MAX_PREFIX = 64 * 1024
MAX_SUFFIX = 32 * 1024
#: Lines of an empty body, and of a place where a block could go on or end.
BODY_LINES = 12
BLOCK_END_LINES = 8
#: Of a line that opens something above its sibling.
STATEMENT_LINES = 8
#: Lines on each side of the cursor that say what the document indents by.
INDENTED_LINES = 200
#: Lines of comments that are looked behind for code, 10 us each; in a longer comment its own lines stand for that.
COMMENT_LINES = 100

#: Documents that people write code in; not output panels, diffs, commit boxes or chats.
SCHEMES = frozenset({"file", "untitled", "vscode-notebook-cell", "vscode-remote"})

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
#: What begins a line that closes something.
_CLOSERS = (")", "]", "}", "</")
#: How comments of several lines begin and end, in any language.
_BLOCK_COMMENTS = {
    "/*": "*/", "<!--": "-->", "{-": "-}", "(*": "*)", "#=": "=#", "--[": "]]", "=begin": "=end",
}  # fmt: skip
#: How a line begins that belongs to the definition below it, in any language.
_ATTRIBUTES = ("@", "#[", "[<")
#: Openers that a line goes on after, where the cursor is still in it: `x = |`.
_GOES_ON = frozenset({"=", "->", "=>"})
#: Code in a string that has begun and not ended, in any language.
_INTERPOLATED = re.compile(r"[$#\\][{(][^{}()]*$|[$f]\"[^\"]*\{[^{}]*$")
_WORD = re.compile(r"\w+")
#: Strings that end. What an escape may be, nothing else may: lines of TeX took minutes where it was either.
_STRINGS = re.compile(r"\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])*'")
#: How a string ends whose grammar has no name for that.
_QUOTE = re.compile(r"[\"'`]+#*$|[^\w\s]$")


def cut(snapshot: Snapshot, trigger: Trigger) -> Gap | Silence:
    """The gap at the cursor, or why nothing is offered there. Never raises, however broken the code is."""
    reason = silence(snapshot) or _silence_at(snapshot, trigger)
    if reason is not None:
        return reason
    shape = _shape(snapshot)
    prefix, suffix = _around(snapshot)
    return Gap(
        kind=shape.kind,
        prefix=prefix,
        head=_whole(snapshot.head),
        tail=_whole(snapshot.tail),
        suffix=suffix,
        max_lines=shape.max_lines,
        min_indent=shape.min_indent,
        closes=shape.closes,
        closer=shape.closer,
        quote=shape.quote,
        open_lines=shape.open_lines,
        indent_unit=_indent_unit(snapshot),
        definition=_definition(snapshot),
    )


def indentation(line: str) -> int:
    """Columns before the line's first character that is no space; a tab goes to the next multiple of 8."""
    return len(line[: first_column(line)].expandtabs(8))


def is_word(character: str) -> bool:
    """Whether the character (or "") is a part of names and words."""
    return character.isalnum() or character == "_"


def first_column(line: str) -> int:
    """The column (code points) of the line's first character that is no space."""
    return len(line) - len(line.lstrip())


def leaf_at(snapshot: Snapshot, row: int, column: int) -> Node | None:
    """The smallest node at a character."""
    if snapshot.tree is None:
        return None
    line = snapshot.lines[row]
    start, end = len(utf8(line[:column])), len(utf8(line[: column + 1]))
    return snapshot.tree.root_node.descendant_for_point_range((row, start), (row, end))


def ancestors(node: Node | None) -> Iterator[Node]:
    """The node itself, its parent, and so on to the root."""
    while node is not None:
        yield node
        node = node.parent


def silence(snapshot: Snapshot) -> Silence | None:
    """Why nothing is offered in a document, wherever the cursor stands; None where something may be."""
    scheme, _, path = snapshot.uri.partition(":")
    path = unquote(path.partition("#")[0].partition("?")[0])
    if scheme not in SCHEMES:
        return Silence(f"documents of the scheme {scheme or '(none)'} are not completed")
    if leads_to_secret(path):
        return Silence(f"{path.rpartition('/')[2]} may hold secrets")
    if snapshot.characters + len(snapshot.lines) > MAX_CHARACTERS:
        return Silence(f"the document is longer than {MAX_CHARACTERS:,} characters")
    return None


def _silence_at(snapshot: Snapshot, trigger: Trigger) -> Silence | None:
    """Why nothing is offered at the cursor."""
    if len(snapshot.lines[snapshot.row]) > MAX_LINE:
        return Silence(f"the line is longer than {MAX_LINE:,} characters")
    if trigger == "automatic" and is_word(snapshot.head[-1:]) and is_word(snapshot.tail[:1]):
        return Silence("the cursor is in the middle of a word")
    return None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What `Gap` says of itself, in the same words."""

    kind: Kind
    max_lines: int
    min_indent: int | None
    closes: Closes
    closer: str = ""
    quote: str = ""
    open_lines: int = 0


def _shape(snapshot: Snapshot) -> _Shape:
    begun = bool(snapshot.head.strip())
    tail = snapshot.tail.strip()
    if (text := _text_shape(snapshot)) is not None:
        return text
    kind: Kind = "arguments" if _is_argument(snapshot) else "rest"
    if tail:
        ends: Closes = "closer" if tail.startswith(_CLOSERS) else "sibling" if tail[0] == "," else "line"
        if kind == "rest" and not (begun and set(tail) <= set(":;, ")):
            kind = "span"
        return _Shape(kind, 1, None, ends)
    above = snapshot.row if begun else _code_row(snapshot, -1)
    below = _code_row(snapshot, +1)
    column = len(snapshot.head.expandtabs(8))
    closes = below is not None and _closes(snapshot, below)
    body = _empty_body(snapshot, above, below, column)
    if body is not None:
        return body
    if begun:
        return _Shape(kind, 1, None, "closer" if kind == "arguments" and closes else "line", _unclosed(snapshot, below))
    next_column = -1 if below is None else indentation(snapshot.lines[below])
    definition = _begins_definition(snapshot, below)
    if next_column >= column and not definition and not closes:
        # Above its sibling a line may open what it closes again; above what stands deeper it opens that.
        opens = next_column == column and snapshot.tree is not None
        return _Shape("line", 1, None, "sibling", open_lines=STATEMENT_LINES if opens else 0)
    if closes:
        ends = "closer"
    elif below is None and not column:
        ends = "file"
    else:
        ends = "sibling" if definition and next_column >= column else "dedent"
    return _Shape("lines", BLOCK_END_LINES, max(column, next_column + closes), ends)


def _text_shape(snapshot: Snapshot) -> _Shape | None:
    """Of a gap in a string or a comment; None in code."""
    language = languages.of(snapshot.language)
    node = _text_node(snapshot)
    kind: Kind
    quote = ""
    if node is None:
        opened = _open_text(snapshot)
        if not opened:
            return None
        if opened == language.line_comment:
            kind, closer = "comment", ""
        else:
            kind, closer = "string", opened
        first, ends_here = snapshot.lines[snapshot.row], False
    else:
        kind, closer = "comment" if node.type in language.comments else "string", ""
        first = snapshot.lines[node.start_point.row]
        ends_here = node.end_point.row == snapshot.row and not (kind == "comment" and _is_line_comment(node))
        quote = _quote(node) if ends_here else ""
    if first.lstrip().startswith(language.docs):
        kind = "docstring"
    return _Shape(kind, 1, None, "closer" if ends_here else "line", closer, quote)


def _empty_body(snapshot: Snapshot, above: int | None, below: int | None, column: int) -> _Shape | None:
    """Of the body that is missing at the cursor; None where none is missing.

    `above` and `below` are the rows with code around the gap, `column` is the cursor's.
    """
    if above is None:
        return None
    last = _last_token(snapshot, above)
    header = _header(snapshot, above, last)
    documented = _documented_row(snapshot, last) if header is None else None
    row = header.row if header is not None else documented
    if row is None:
        return None
    outer = indentation(snapshot.lines[row])
    closed = (
        header is not None
        and bool(header.closer)
        and below is not None
        and indentation(snapshot.lines[below]) >= outer
        and _closes(snapshot, below, header.closer)
    )
    if not closed and below is not None and indentation(snapshot.lines[below]) > outer:
        return None
    if header is None:
        # A docstring is a body already: only a cursor that stands deeper than the definition asks for more.
        return _Shape("lines", BODY_LINES, indentation(snapshot.lines[above]), "dedent") if column > outer else None
    if not header.closer:
        return _Shape("lines", BODY_LINES, outer + 1, "dedent")
    if closed:
        return _Shape("lines", BODY_LINES, outer + 1, "closer")
    # The closer is missing too, and usually stands where the opener's line begins.
    return _Shape("lines", BODY_LINES, outer, "closer", header.closer)


@dataclass(frozen=True, slots=True)
class _Token:
    """The last character of a line that is neither space nor comment, with its node where there is a tree."""

    #: The line up to it.
    line: str
    node: Node | None

    @property
    def text(self) -> str:
        return self.line[-1:]


@dataclass(frozen=True, slots=True)
class _Header:
    """Where what opens a body begins, and what closes the body; "" for a dedent."""

    row: int
    closer: str


def _last_token(snapshot: Snapshot, row: int) -> _Token:
    line = (snapshot.head if row == snapshot.row else snapshot.lines[row]).rstrip()
    node = leaf_at(snapshot, row, len(line) - 1)
    comments = languages.of(snapshot.language).comments
    comment = next((node for node in ancestors(node) if node.type in comments), None)
    if row != snapshot.row and comment is not None and comment.start_point.row == row:
        line = utf8(line)[: comment.start_point.column].decode("utf-8", "surrogatepass").rstrip()
        node = leaf_at(snapshot, row, len(line) - 1) if line else None
    return _Token(line, node)


def _header(snapshot: Snapshot, row: int, last: _Token) -> _Header | None:
    """The header that ends, at the end of line `row`, with what opens a body."""
    language = languages.of(snapshot.language)
    if not last.line or (last.node is not None and _text_ancestor(last.node, language) is not None):
        return None
    if last.text in _BRACKETS:
        return _Header(row, _BRACKETS[last.text])
    opener = max((one for one in language.openers if _ends_with(last.line, one)), key=len, default="")
    if opener and row == snapshot.row and (opener in _GOES_ON or snapshot.head[-1:].isspace()):
        return None
    for node in ancestors(last.node):
        parent = node.parent
        if parent is None or not _ends_in_row(snapshot, node, row):
            break
        closer = language.openers.get(node.type) if node == last.node else language.headers.get(node.type)
        if closer is None or not (parent.type in language.bodies or not language.bodies or parent.type == "ERROR"):
            continue
        if parent.type == "ERROR" and node == last.node:
            break  # The words have to say it.
        # Where a keyword or a tag closes bodies, what has none has no body: `<br>`.
        if parent.type != "ERROR" and language.block == "end" and parent.child(parent.child_count - 1) == node:
            return None
        alone = last.line.lstrip() == opener  # `where` on a line of its own.
        return _Header(row if alone else parent.start_point.row, closer)
    broken = any(node.type == "ERROR" for node in islice(ancestors(last.node), 2)) or (
        last.node is None or last.node.parent is None
    )
    words = _WORD.findall(last.line)
    word = next((word for word in words[:2] if word in language.words), "")
    if opener and broken and (word or not language.words or language.block == "end"):
        return _Header(row, language.openers[opener])
    if language.block == "end" and word and language.words[word] not in words:
        return _Header(row, language.words[word])
    return None


def _ends_with(line: str, opener: str) -> bool:
    return line.endswith(opener) and not (is_word(opener[:1]) and is_word(line[: -len(opener)][-1:]))


def _ends_in_row(snapshot: Snapshot, node: Node, row: int) -> bool:
    """Whether nothing of the node but spaces stands below the row."""
    end = node.end_point
    if end.row == row:
        return True
    *whole, last = snapshot.lines[row + 1 : end.row + 1]
    return not any(map(str.strip, whole)) and not utf8(last)[: end.column].strip()


def _documented_row(snapshot: Snapshot, last: _Token) -> int | None:
    """The row of the definition whose body is nothing but the docstring that ends with `last`."""
    language = languages.of(snapshot.language)
    for node in ancestors(last.node) if language.docstrings else ():
        definition = node.parent
        if definition is not None and node == definition.child_by_field_name("body"):
            statement = node.named_child(0) if node.named_child_count == 1 else None
            if statement is None or statement.type != "expression_statement":
                return None
            value = statement.named_child(0)
            documented = language.defines(definition) and value is not None and value.type in language.strings
            return definition.start_point.row if documented else None
    return None


def _begins_definition(snapshot: Snapshot, row: int | None) -> bool:
    if row is None:
        return False
    language = languages.of(snapshot.language)
    line = snapshot.lines[row]
    if language.definitions and line.lstrip().startswith(_ATTRIBUTES):
        return True
    leaf = leaf_at(snapshot, row, first_column(line))
    return leaf is not None and any(
        (language.defines(node) or node.type in language.wrappers) and node.start_byte == leaf.start_byte
        for node in ancestors(leaf)
    )


def _closes(snapshot: Snapshot, row: int, closer: str = "") -> bool:
    """Whether the line begins with what closes something, or goes on with another part of it (`else`)."""
    language = languages.of(snapshot.language)
    line = snapshot.lines[row].lstrip()
    if closer and line.startswith(closer):
        return True
    word = re.match(r"\w*", line)
    words = {*language.openers.values(), *language.words.values(), *language.clauses} - {""}
    return line.startswith(_CLOSERS) or (word is not None and word[0] in words) or line.startswith(";;")


def _text_node(snapshot: Snapshot) -> Node | None:
    """The string or comment that the cursor stands in."""
    language = languages.of(snapshot.language)
    head = snapshot.head.rstrip()
    if head:  # What is behind a line comment belongs to it, also where its node ends before.
        node = _text_ancestor(leaf_at(snapshot, snapshot.row, len(head) - 1), language)
        if node is not None and node.type in language.comments and _is_line_comment(node):
            return node
    point = snapshot.row, len(utf8(snapshot.head))
    leaf = leaf_at(snapshot, snapshot.row, max(snapshot.column - 1, 0))
    for node in ancestors(leaf):
        if not node.start_point < point < node.end_point:
            continue
        if node.type in language.interpolations:
            return None
        if leaf is not None and leaf.parent == node and leaf.type[-1:] in _BRACKETS and language.interpolations:
            return None  # Code that is not there yet.
        if node.type in language.comments or (node.type in language.strings and _is_quoted(node)):
            return node
    return None


def _text_ancestor(node: Node | None, language: Language) -> Node | None:
    """The string or comment that a node is a part of, but not as code in it."""
    for one in ancestors(node):
        if one.type in language.interpolations:
            return None
        if one.type in language.comments or (one.type in language.strings and _is_quoted(one)):
            return one
    return None


def _is_quoted(node: Node) -> bool:
    """Some grammars have one name for strings and numbers."""
    return not (node.text or b"0")[:1].isalnum() or node.child_count > 0


def _is_line_comment(node: Node) -> bool:
    return not languages.text_of(node).startswith(tuple(_BLOCK_COMMENTS))


def _quote(node: Node) -> str:
    """What a string, or a comment of several lines, ends with."""
    text = languages.text_of(node)
    for opener, closer in _BLOCK_COMMENTS.items():
        if text.startswith(opener):
            return closer
    token = languages.text_of(node.child(node.child_count - 1) if node.child_count else None)
    if token and not any(map(is_word, token)):
        return token
    quote = _QUOTE.search(text)
    return quote[0] if quote else ""


def _open_text(snapshot: Snapshot) -> str:
    """The quote or the line comment that is open at the cursor, by its line alone; "" in code or where nodes tell."""
    head = snapshot.head
    if snapshot.tree is not None:
        ends = (snapshot.row, len(utf8(head[: first_column(head)]))), (snapshot.row, len(utf8(head)))
        line = snapshot.tree.root_node.descendant_for_point_range(*ends)
        if line is None or not line.has_error:
            return ""
    language = languages.of(snapshot.language)
    if language.interpolations and _INTERPOLATED.search(head):
        return ""
    at, quote = 0, ""
    while at < len(head):
        if quote:
            if head.startswith(quote, at):
                at, quote = at + len(quote) - 1, ""
            elif head[at] == "\\":
                at += 1
        elif language.line_comment and head.startswith(language.line_comment, at) and not head[at - 1 : at].strip():
            return language.line_comment
        elif head[at] in language.quotes:
            quote = head[at] * 3 if head.startswith(head[at] * 3, at) else head[at]
            at += len(quote) - 1
        at += 1
    return quote


def _unclosed(snapshot: Snapshot, below: int | None) -> str:
    """What closes the innermost bracket that is opened on the cursor line and closed nowhere; "" without one."""
    if snapshot.tree is not None and not snapshot.tree.root_node.has_error:
        return ""
    opened: list[str] = []
    for character in _STRINGS.sub("", snapshot.head):
        if character in _BRACKETS:
            opened.append(_BRACKETS[character])
        elif opened and character == opened[-1]:
            opened.pop()
    if not opened or (below is not None and snapshot.lines[below].lstrip().startswith(opened[-1])):
        return ""
    return opened[-1]


def _is_argument(snapshot: Snapshot) -> bool:
    """Whether the innermost brackets around the cursor are those of arguments or parameters."""
    language = languages.of(snapshot.language)
    point = snapshot.row, len(utf8(snapshot.head))
    for node in ancestors(leaf_at(snapshot, snapshot.row, max(snapshot.column - 1, 0))):
        if node.start_point < point < node.end_point and _is_open(node, point):
            return node.type in language.arguments
    return False


def _is_open(node: Node, point: tuple[int, int]) -> bool:
    """Whether the node has brackets around the point. Some grammars have what is called in the same node."""
    first = [child for at in range(min(node.child_count, 8)) if (child := node.child(at)) is not None]
    opener = next((child for child in first if child.type in _BRACKETS and child.end_point <= point), None)
    if opener is None:
        return False
    last = node.child(node.child_count - 1)
    closer = _BRACKETS[opener.type]
    if last is not None and last.type == closer:
        return last.start_point >= point
    return not any(child.type == closer and child.end_point <= point for child in first)


def _definition(snapshot: Snapshot) -> tuple[int, int] | None:
    """First and last row of the innermost definition around the cursor.

    Where indentation holds a block together, the tree ends it with its last statement: a cursor below that, but deeper
    than the definition, is in it.
    """
    language = languages.of(snapshot.language)
    row = snapshot.row if snapshot.head.strip() else _code_row(snapshot, -1)
    if row is None:
        return None
    line = snapshot.head if row == snapshot.row else snapshot.lines[row]
    column = len(snapshot.head.expandtabs(8))
    for node in ancestors(leaf_at(snapshot, row, max(len(line.rstrip()) - 1, 0))):
        if not language.defines(node):
            continue
        first, last = node.start_point.row, node.end_point.row - (node.end_point.column == 0)
        if snapshot.row <= last:
            return first, last
        if language.block == "indentation" and column > indentation(snapshot.lines[first]):
            return first, snapshot.row
    return None


def _indent_unit(snapshot: Snapshot) -> str:
    """What the lines around the cursor indent by, the language's habit where they do not say."""
    first = max(0, snapshot.row - INDENTED_LINES)
    lines = [line for line in snapshot.lines[first : snapshot.row + INDENTED_LINES] if line.strip()]
    tabs = sum(line[0] == "\t" for line in lines)
    spaces = sum(line[0] == " " for line in lines)
    if tabs > spaces:
        return "\t"
    steps = [b - a for a, b in pairwise(map(first_column, lines)) if 2 <= b - a <= 8]
    if not spaces or not steps:
        return languages.of(snapshot.language).indent
    return " " * max(sorted(set(steps)), key=steps.count)


def _code_row(snapshot: Snapshot, step: int) -> int | None:
    """The nearest row above (-1) or below (+1) the cursor's that is neither blank nor only a comment."""
    first, last = snapshot.within or (0, len(snapshot.lines) - 1)
    comments = languages.of(snapshot.language).comments
    row, left = snapshot.row + step, COMMENT_LINES
    while first <= row <= last:
        if snapshot.lines[row].strip():
            leaf = leaf_at(snapshot, row, first_column(snapshot.lines[row]))
            if not left or not any(node.type in comments for node in islice(ancestors(leaf), 3)):
                return row
            left -= 1
        row += step
    return None


def _around(snapshot: Snapshot) -> tuple[str, str]:
    """What stands above and below the cursor line, of each as much as its cap allows."""
    lines, row = snapshot.lines, snapshot.row
    # The one sum over lines of a key stroke: what is below follows from it.
    written = sum(map(len, lines[:row])) + row
    rest = snapshot.characters + len(lines) - written - len(lines[row]) - 1
    above = [*snapshot.before.split("\n")[:-1], *lines[:row]]
    below = [*lines[row + 1 :], *snapshot.after.split("\n")[1:]]
    first = _left_out(above, written + len(snapshot.before), MAX_PREFIX, to_block=True)
    last = len(below) - _left_out(below[::-1], rest + len(snapshot.after), MAX_SUFFIX)
    prefix = "".join(line + "\n" for line in above[first:])
    return _whole(prefix), _whole("".join("\n" + line for line in below[:last]))


def _left_out(lines: Sequence[str], size: int, cap: int, to_block: bool = False) -> int:
    """How many of the first lines to leave out, so that at most `cap` characters stay of `size`, their line ends
    included.

    That number moves in strides, with `to_block` each to where a block begins: of the lines near there the least
    indented one, the first after a blank line among those.
    """
    stride = cap // 4
    least = -(-(size - cap) // stride) * stride
    if least <= 0:
        return 0
    first, kept = len(lines), 0
    while first and kept + len(lines[first - 1]) < size - least:  # From the end, since most lines are left out.
        first, kept = first - 1, kept + len(lines[first - 1]) + 1
    if not to_block:
        return first
    before = accumulate((len(lines[row]) + 1 for row in range(first, len(lines))), initial=size - kept)
    near = takewhile(lambda row: next(before) < least + stride // 4, range(first, len(lines)))
    begins = (row for row in near if lines[row].strip())
    return min(
        begins, key=lambda row: (indentation(lines[row]), bool(row and lines[row - 1].strip()), row), default=first
    )


def _whole(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot carry to a model."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
