"""Finds the holes that people leave in their code, to be filled when they ask for it.

| hole | where | what is written |
|---|---|---|
| `...` | a statement, what is returned, what a variable in a function is set to | in its place |
| `...  # why`, `pass  # why` | a statement, as below | the remark above, then the code |
| `???`, `todo!()`, `TODO()` | code of any language, of Rust, of Kotlin | in its place |
| `# TODO why` | alone on its lines, where a statement is missing | below it; it stays |
| `pass` | right below such a remark | in its place |
| a marker of one's own | anywhere | in its place |

What is complete as it is, is none: an Ellipsis in a type, an index, an argument or a string, a stub file, the body of
an overload, an abstract or a protocol's method, an exception's class; `pass` with a remark that says why nothing is
done, unless the remark is a TODO or all there is of a function. A TODO is a remark on the code that follows it at once,
and a hole where its block ends, or a blank line follows; whoever points at it, with a range on its line alone, wants it
filled in any case.

Holes are found by lines, and confirmed by the syntax tree where there is one. It does not know LSP, nor how a hole is
filled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infill_lsp import languages
from infill_lsp.core import Site, Snapshot, Span, utf8
from infill_lsp.extraction import ancestors, first_column, indentation, leaf_at

if TYPE_CHECKING:
    from tree_sitter import Node

    from infill_lsp.documents import Document

#: Lines there should be room for in place of a statement.
STATEMENT_LINES = 8

#: Languages that are prose, where only markers are holes, and those in which three dots are text or syntax.
_PROSE = frozenset({"asciidoc", "latex", "markdown", "mdx", "plaintext", "restructuredtext", "tex"})
_DOTTED = frozenset({"html", "svelte", "vue", "xml", "yaml"})
#: Calls that stand for code that is not written yet, beside `???`.
_CALLS = {"rust": r"|\b(?:todo|unimplemented)!\([^()]*\)", "kotlin": r"|\bTODO\([^()]*\)"}
_ELLIPSIS = re.compile(r"(?<!\.)\.{3}(?!\.)")
_QUESTION = r"(?<!\?)\?{3}(?!\?)"
#: A remark that is a task, alone on its line.
_TASK = re.compile(r"\s*(?:#+|//+|--+|;+|%+|/\*+|\{-|\(\*|<!--)\s*(?:TODO|FIXME|XXX)\b")
_REMARK = re.compile(r"\s*(?:#|//|--|;|%|/\*|\*|\{-|\(\*|<!--)")
#: What keeps a block open until it is written, with a remark behind it or without.
_PASS = re.compile(r"\s*(?P<code>pass|\.{3}|raise NotImplementedError(?:\(.*?\))?)\s*(?:#+\s*(?P<remark>.*))?")
_TASK_WORDS = re.compile(r"(?:TODO|FIXME|XXX)\b|\.{3}|\?{3}|$")
#: Remarks that are for tools.
_DIRECTIVE = re.compile(r"(?:noqa|type:|pragma|pylint|mypy|pyright|ruff|fmt)\b")
#: Parts of the names that grammars give to nodes whose text is no code.
_TEXT = ("comment", "string", "char", "heredoc")
_QUOTED = re.compile(r"""("|'|`)(?:\\.|(?!\1).)*\1?""")

#: Decorators and base classes by which a body of `...` is complete.
_COMPLETE_METHODS = re.compile(r"(?:\w+\.)*(?:overload|abstract\w*)\b")
_COMPLETE_CLASSES = re.compile(r"\bProtocol\b|\b\w*(?:Error|Exception|Warning)\b")


def holes(
    snapshot: Snapshot,
    spans: Sequence[Span] = (),
    markers: Sequence[str] = (),
    document: Document | None = None,
) -> list[Site]:
    """The holes that touch `spans`, of the whole document where there are none, from first to last.

    A span on one line stands for the line. The snapshot's cursor does not matter. With the `document` each row is read
    by the language that is embedded there, which waits for the parses.
    """
    sites: list[Site] = []
    here = snapshot
    mixed = document if document is not None and languages.of(document.language).injections else None
    for row in _rows(snapshot, spans):
        if mixed is not None and not (here.within and here.within[0] <= row <= here.within[1]):
            here = mixed.snapshot(row, 0, "utf-32", wait=True)
        pointed = any(span.start[0] == row == span.end[0] for span in spans)
        for site in _of_row(here, row, pointed, markers):
            if not sites or site.span.start >= sites[-1].span.end:
                sites.append(site)
    return sites


def _rows(snapshot: Snapshot, spans: Sequence[Span]) -> Sequence[int]:
    if not spans:
        return range(len(snapshot.lines))
    within = {row for (first, _), (last, _) in spans for row in range(first, min(last, len(snapshot.lines) - 1) + 1)}
    return sorted(within)


def _of_row(snapshot: Snapshot, row: int, pointed: bool, markers: Sequence[str]) -> Iterator[Site]:
    line = snapshot.lines[row]
    own = sorted(
        (found.start(), found.end()) for mark in markers if mark for found in re.finditer(re.escape(mark), line)
    )
    if own:
        yield from (_in_place(snapshot, row, start, end) for start, end in own)
    elif snapshot.language in _PROSE:
        return
    elif _TASK.match(line):
        if (site := _task(snapshot, row, pointed)) is not None:
            yield site
    else:
        if (site := _statement(snapshot, row)) is not None:
            yield site
            return
        for found in _ELLIPSIS.finditer(line):
            if _is_value(snapshot, row, found.start()):
                yield _in_place(snapshot, row, *found.span())
        for found in re.finditer(_QUESTION + _CALLS.get(snapshot.language, ""), line):
            if _is_code(snapshot, row, found.start()):
                yield _in_place(snapshot, row, *found.span())


def _in_place(snapshot: Snapshot, row: int, start: int, end: int) -> Site:
    """What replaces a piece of a line: a statement where there is nothing else, else what its line has room for."""
    line = snapshot.lines[row]
    alone = not line[:start].strip() and not line[end:].strip(" \t;")
    if line[:start].rstrip().endswith(":") and not line[end:].strip():
        start = len(line[:start].rstrip())  # A body on its header's line may as well begin on the next one.
    return Site(
        Span((row, start), (row, end)),
        lines=STATEMENT_LINES if alone else None,
        min_indent=indentation(line) if alone else None,
    )


def _statement(snapshot: Snapshot, row: int) -> Site | None:
    """Where a line keeps a block open for code that is to come: what replaces it, its remark kept above."""
    line = snapshot.lines[row]
    if snapshot.language != "python" or not (found := _PASS.fullmatch(line)):
        return None
    code, remark = found["code"], found["remark"]
    node = leaf_at(snapshot, row, found.start("code"))
    below_task = _is_below_task(snapshot, row)
    if code == "...":
        if not _is_value(snapshot, row, found.start("code")):
            return None
    elif code != "pass" or remark is None:
        if not below_task:
            return None
    elif not (_TASK_WORDS.match(remark) or below_task or _is_all_of_function(node)):
        return None
    if not _is_code(snapshot, row, found.start("code")):
        return None
    start, end = found.start("code"), found.end("code")
    lead = ""
    if remark is not None and not _DIRECTIVE.match(remark):
        kept = line[line.index("#", end) :].rstrip()
        end = len(line)
        if remark.strip() not in ("", "...", "???"):
            lead = f"{kept}\n{line[:start]}"
    elif remark is not None:
        return _in_place(snapshot, row, start, end) if code == "..." else None
    return Site(Span((row, start), (row, end)), lead, STATEMENT_LINES, indentation(line))


def _task(snapshot: Snapshot, row: int, pointed: bool) -> Site | None:
    """What is written below a remark that is a task, where no statement is there that it may be about."""
    lines, line = snapshot.lines, snapshot.lines[row]
    if not _is_remark(snapshot, row):
        return None
    last = _end_of_remark(snapshot, row)
    below = next((at for at in range(last + 1, len(lines)) if lines[at].strip()), None)
    column = indentation(line)
    if below is not None and indentation(lines[below]) == column and (hole := _statement(snapshot, below)):
        return hole if pointed else None  # It is found on its own row.
    ends = below is None or indentation(lines[below]) < column
    apart = last + 1 < len(lines) and not lines[last + 1].strip()
    if not (pointed or (column and (ends or apart))):
        return None
    indent = line[: first_column(line)]
    end = (last, len(lines[last]))
    return Site(Span(end, end), lead="\n" + indent, lines=STATEMENT_LINES, min_indent=column)


def _end_of_remark(snapshot: Snapshot, row: int) -> int:
    """The last row of a remark that begins on a row, with the lines of remarks that go on from it."""
    lines = snapshot.lines
    column = indentation(lines[row])
    node = leaf_at(snapshot, row, first_column(lines[row]))
    last = max(row, node.end_point.row if node is not None and node.end_point.column else row)
    while last + 1 < len(lines):
        after = lines[last + 1]
        if _TASK.match(after) or not _REMARK.match(after) or indentation(after) != column:
            break
        if not _is_remark(snapshot, last + 1):
            break
        last += 1
    return last


def _is_below_task(snapshot: Snapshot, row: int) -> bool:
    """Whether a remark that is a task stands right above, at the same indentation."""
    column = indentation(snapshot.lines[row])
    for above in range(row - 1, -1, -1):
        line = snapshot.lines[above]
        if not _REMARK.match(line) or indentation(line) != column:
            return False
        if _TASK.match(line):
            return _is_remark(snapshot, above)
    return False


def _is_remark(snapshot: Snapshot, row: int) -> bool:
    """Whether a line that looks like a remark is one, as far as there is a tree to tell."""
    leaf = leaf_at(snapshot, row, first_column(snapshot.lines[row]))
    return leaf is None or any("comment" in node.type for node in ancestors(leaf))


def _is_code(snapshot: Snapshot, row: int, column: int) -> bool:
    """Whether a place is neither in a string nor in a comment; by the line alone where there is no tree."""
    leaf = leaf_at(snapshot, row, column)
    if leaf is None:
        line = snapshot.lines[row]
        quoted = any(found.start() < column < found.end() for found in _QUOTED.finditer(line))
        return not (quoted or _REMARK.match(line) or re.search(r"\s(?:#|//|--)\s", line[:column]))
    return not any(word in node.type for node in _up_to_code(leaf) for word in _TEXT)


def _is_value(snapshot: Snapshot, row: int, column: int) -> bool:
    """Whether three dots stand for code: a statement, what is returned, or what a variable of a function is set to."""
    leaf = leaf_at(snapshot, row, column)
    if snapshot.language != "python" or leaf is None:
        alone = snapshot.lines[row].strip(" \t;") == "..." and snapshot.language not in _DOTTED
        return alone and _is_code(snapshot, row, column)
    if snapshot.uri.partition("#")[0].partition("?")[0].endswith(".pyi"):
        return False
    parent = leaf.parent
    if leaf.type != "ellipsis" or parent is None:
        return False
    if parent.type == "assignment":
        plain = parent.child_by_field_name("type") is None and parent.child_by_field_name("right") == leaf
        return plain and any(node.type == "function_definition" for node in ancestors(parent))
    return parent.type == "return_statement" or (
        parent.type == "expression_statement" and not _is_complete(snapshot, parent)
    )


def _is_complete(snapshot: Snapshot, statement: Node) -> bool:
    """Whether `...` as a statement of Python is the whole body that a definition is meant to have."""
    for node in ancestors(statement):
        if node.type == "function_definition":
            above = node.parent
            if above is not None and above.type == "decorated_definition":
                decorators = (child.named_child(0) for child in above.children if child.type == "decorator")
                if any(name is not None and _COMPLETE_METHODS.match(_text(snapshot, name)) for name in decorators):
                    return True
            return any(_is_complete_class(snapshot, outer) for outer in ancestors(node))
        if node.type == "class_definition":
            return _is_complete_class(snapshot, node)
    return False


def _is_complete_class(snapshot: Snapshot, node: Node) -> bool:
    if node.type != "class_definition":
        return False
    bases = node.child_by_field_name("superclasses")
    return bases is not None and _COMPLETE_CLASSES.search(_text(snapshot, bases)) is not None


def _is_all_of_function(node: Node | None) -> bool:
    """Whether the statement that begins with a node is all a function of Python does."""
    statement = node.parent if node is not None else None
    block = statement.parent if statement is not None else None
    if block is None or block.parent is None or block.parent.type != "function_definition":
        return False
    others = [child for child in block.named_children if child.type != "comment" and child != statement]
    return all(
        child.type == "expression_statement" and [part.type for part in child.named_children] == ["string"]
        for child in others
    )


def _up_to_code(node: Node) -> Iterator[Node]:
    """A node and those around it, up to one in which code stands inside a string."""
    for one in ancestors(node):
        if one.type in ("interpolation", "template_substitution"):
            return
        yield one


def _text(snapshot: Snapshot, node: Node) -> str:
    """The node's text on its first line; trees do not hold their document."""
    start, end = node.start_point, node.end_point
    line = utf8(snapshot.lines[start.row])
    return line[start.column : end.column if end.row == start.row else None].decode("utf-8", "replace")
