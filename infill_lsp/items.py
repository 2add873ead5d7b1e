"""What an editor is given: suggestions in its units and line ends, and what the engine said of them in its words.

Functions of a snapshot and of how an editor counts and inserts. It does not know how an answer came about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lsprotocol import types

from infill_lsp.core import Edit, Snapshot

if TYPE_CHECKING:
    from infill_engine.protocol import Final, Frame

    from infill_lsp.cache import Suggestion

ACCEPTED = "infill.server.accepted"
#: An empty list takes away what is shown; null would leave it.
NOTHING = types.InlineCompletionList([])
#: Characters of a suggestion that the completion menu shows.
LABEL = 60

_WORD = re.compile(r"\w+$")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an editor counts and inserts."""

    #: The position encoding agreed on.
    encoding: str = "utf-16"
    #: Whether its buffers hold LF whatever the file has.
    holds_lf: bool = False
    #: Whether its completion menu can insert a text without indenting it.
    as_is: bool = False

    def eol(self, snapshot: Snapshot) -> str:
        """The line end that it wants in texts for a document."""
        return "\n" if self.holds_lf else snapshot.eol

    def position(self, snapshot: Snapshot, row: int, column: int) -> types.Position:
        from infill_lsp.documents import position

        return position(snapshot.lines, row, column, self.encoding)

    def range(self, edit: Edit, snapshot: Snapshot) -> types.Range:
        """Where the edit is."""
        start, end = (self.position(snapshot, edit.row, column) for column in (edit.start, edit.end))
        return types.Range(start, end)

    def text(self, edit: Edit, snapshot: Snapshot) -> str:
        """The edit's text."""
        return edit.text.replace(snapshot.eol, self.eol(snapshot))


def inline(
    suggestions: Iterable[Suggestion], snapshot: Snapshot, dialect: Dialect, entry: types.SelectedCompletionInfo | None
) -> types.InlineCompletionList:
    """What is drawn at the cursor. Where the snapshot has an `entry` of a menu accepted, items go on from there."""
    items = []
    for suggestion in suggestions:
        edit = suggestion.edit
        text, where = dialect.text(edit, snapshot), dialect.range(edit, snapshot)
        if entry is not None:
            if edit.start != edit.end:
                continue
            text, where = entry.text + text, entry.range
        items.append(types.InlineCompletionItem(text, range=where, command=_accepted(suggestion)))
    return types.InlineCompletionList(items) if items else NOTHING


def menu(suggestion: Suggestion, snapshot: Snapshot, dialect: Dialect) -> types.CompletionItem:
    """A suggestion as an entry of the completion menu, which goes by the word before the cursor."""
    edit, word = suggestion.edit, _WORD.search(snapshot.head)
    begun = word[0] if word else ""
    text = begun + dialect.text(edit, snapshot)
    first, *more = text.strip().splitlines()
    return types.CompletionItem(
        label=first if len(first) <= LABEL and not more else f"{first[:LABEL]} …",
        kind=types.CompletionItemKind.Text,
        detail="infill",
        documentation=text if more else None,
        filter_text=text,
        insert_text_format=types.InsertTextFormat.PlainText,
        insert_text_mode=types.InsertTextMode.AsIs if dialect.as_is else None,
        text_edit=types.TextEdit(dialect.range(replace(edit, start=edit.start - len(begun)), snapshot), text),
        command=_accepted(suggestion),
    )


def with_entry(snapshot: Snapshot, entry: types.SelectedCompletionInfo, encoding: str) -> Snapshot | None:
    """The document with an entry of the menu accepted, and the cursor behind it; None where that is not on one line.

    Lines that stand there already are no entry of a menu but what Neovim has selected in visual mode: the snapshot
    stays.
    """
    from infill_lsp.documents import reparsed, spans

    (span,) = spans(snapshot.lines, [entry.range], encoding)
    (row, start), (last, end) = span
    text = entry.text.replace("\r\n", "\n")
    if row != last and text == snapshot.text(span):
        return snapshot
    if row != last or "\n" in text or "\r" in text:
        return None
    line = snapshot.lines[row]
    lines = (*snapshot.lines[:row], line[:start] + text + line[end:], *snapshot.lines[row + 1 :])
    return replace(
        snapshot,
        lines=lines,
        row=row,
        column=start + len(text),
        characters=snapshot.characters + len(text) - (end - start),
        tree=snapshot.tree and reparsed(snapshot.tree, snapshot.lines, lines),
    )


def canvas(frame: Frame, snapshot: Snapshot) -> dict[str, Any]:
    """The parameters of `infill/canvas`."""
    slots = [{"text": slot.text, "prob": slot.prob, "state": slot.state} for slot in frame.slots]
    return {**_document(snapshot), "step": frame.step, "ms": frame.ms, "slots": slots}


def timing(final: Final, snapshot: Snapshot) -> dict[str, Any]:
    """Those of `infill/timing`."""
    timing = final.timing
    return {
        **_document(snapshot),
        "reason": final.reason,
        "queueMs": timing.queue_ms,
        "encodeMs": timing.encode_ms,
        "denoiseMs": timing.denoise_ms,
        "steps": timing.steps,
        "committed": timing.committed,
        "encoded": timing.encoded,
        "reused": timing.reused,
    }


def place(snapshot: Snapshot, dialect: Dialect) -> dict[str, Any]:
    """Those of `infill/refresh`: the cursor."""
    where = dialect.position(snapshot, snapshot.row, snapshot.column)
    return {**_document(snapshot), "position": {"line": where.line, "character": where.character}}


def _accepted(suggestion: Suggestion) -> types.Command:
    return types.Command("accepted", ACCEPTED, arguments=[suggestion.id])


def _document(snapshot: Snapshot) -> dict[str, Any]:
    return {"textDocument": {"uri": snapshot.uri}, "version": snapshot.version}
