"""The names that are visible at a cursor: parameters, locals, and what is imported and defined around it.

They are found by how grammars name the parts of a node (`name`, `pattern`, `parameters`), not by rules for each
language: what a name is bound to is not known, nor whether it is hidden again. It costs a walk of a bounded number of
nodes, and only who asks for it pays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from infill_lsp.core import Snapshot

#: Nodes that are looked at, and names that are given, at most.
MAX_NODES = 1_000
MAX_NAMES = 200
#: Levels of nodes below a statement that are looked at.
MAX_DEPTH = 6

#: Parts of a node that hold the names it binds, and those that hold none though they stand in such a part.
_BINDING = frozenset({"name", "left", "pattern", "parameters", "parameter", "declarator", "alias", "bound_identifier"})
_BOUND_TO = frozenset(
    {"type", "return_type", "returns", "value", "right", "default_value", "body", "path", "source", "module_name"}
)
#: Nodes that may bind names, and those that hold them without giving their parts a name.
_BINDER = re.compile(
    r"param|import|declar|bind|assign|defin|item|spec|clause|statement|propert|variable|export|decorat|let|with|as_"
)
_HOLDER = re.compile(r"param|import|variable_decl|variable_list|pattern|bind|use_list|scoped")
#: Leaves that are names of values, and nodes whose names are of something else.
_NAME = re.compile(r"(simple_|variable_|value_|property_)?(identifier|name)|constant|variable|.*identifier_pattern")
_OTHER = re.compile(
    r"(^|_)type(_|$)|member|attribute|subscript|index|field_expr|selector|call|invocation|string|comment"
)
_WORD = re.compile(r"[^\W\d]\w*")


def visible(snapshot: Snapshot) -> tuple[str, ...]:
    """The names bound before the cursor in what surrounds it, and at the top level also behind it; nearest first.

    Empty without a tree.
    """
    if snapshot.tree is None:
        return ()
    left = MAX_NODES
    found: dict[str, None] = {}
    for statement in _statements(snapshot):
        for node in _names(statement, MAX_DEPTH):
            left -= 1
            text = (node.text or b"").decode("utf-8", "replace") if node.child_count == 0 else ""
            if _WORD.fullmatch(text):
                found.setdefault(text)
            if left <= 0 or len(found) == MAX_NAMES:
                return tuple(found)
    return tuple(found)


def _statements(snapshot: Snapshot) -> Iterator[Node]:
    """What stands before the cursor in each node around it, the nearest first; at the top, then what stands behind."""
    assert snapshot.tree is not None
    row = snapshot.row
    while row > 0 and not (snapshot.head if row == snapshot.row else snapshot.lines[row]).strip():
        row -= 1
    line = snapshot.head if row == snapshot.row else snapshot.lines[row]
    end = len(line.rstrip().encode("utf-8", "surrogatepass"))
    top = snapshot.tree.root_node
    node = top.descendant_for_point_range((row, max(end - 1, 0)), (row, end))
    while node is not None and node != top:
        before = node.prev_sibling
        yield node
        while before is not None:
            yield before
            before = before.prev_sibling
        if node.parent == top:
            behind = node.next_sibling
            while behind is not None:
                yield behind
                behind = behind.next_sibling
        node = node.parent


def _names(node: Node, depth: int, bound: bool = False, whole: bool | None = None) -> Iterator[Node]:
    """The leaves that are names bound by a node, and every node that was looked at, for it counts.

    Of a `whole` definition, which is one with its body, the parameters are visible in it alone.
    """
    if node.child_count == 0:
        if bound and _NAME.fullmatch(node.type):
            yield node
        return
    if depth == 0 or not (bound or _BINDER.search(node.type)) or _OTHER.search(node.type):
        return
    if whole is None:
        whole = node.child_by_field_name("body") is not None
    holds = bool(_HOLDER.search(node.type))
    for at in range(node.child_count):
        child, part = node.child(at), node.field_name_for_child(at)
        if (
            child is None
            or not child.is_named
            or (part in _BOUND_TO and child.type != "as_pattern")
            or (whole and "param" in child.type)
        ):
            continue
        if child.child_count:
            yield child
        yield from _names(child, depth - 1, part in _BINDING or (part is None and (bound or holds)), whole)
