"""What was offered, kept by the text it belongs to: whoever types into it is given the rest of it at once.

A suggestion stands for a whole text: what is before its cursor, its own text, what is after it. It belongs wherever
the document as it is now, with some of the suggestion's end put in, is that text. So typing into it, deleting that
again and accepting a part of it all lead to the same end, also where the editor closes brackets by itself; an edit
anywhere else does not.

It knows neither the engine nor who asks. A plain list is looked through, the newest first: all but the entries of this
place fall out by a comparison of numbers, and lines that did not change are compared by identity.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import count

from infill_lsp.core import Edit, Snapshot

#: Suggestions kept, and characters of all their documents together: mostly the same lines again and again, but those of
#: an editor that sends the whole text with each key are new ones each time.
MOST, MOST_CHARACTERS = 256, 16_000_000

#: What editors insert by themselves behind the cursor.
_CLOSERS = frozenset(")]}>\"'`")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """An edit that is offered. `id` names it, however much of it has been typed."""

    id: str
    edit: Edit


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str
    snapshot: Snapshot
    #: What it inserts, LF only, and what stays of the cursor line behind it.
    text: str
    replaced: str
    tail: str
    characters: int

    def rest(self, now: Snapshot) -> Edit | None:
        """What is left of it to be put in; None where it does not belong, or nothing is left."""
        then = self.snapshot
        if now.row < then.row or len(now.lines) - now.row != len(then.lines) - then.row:
            return None
        before, whole = "\n".join((*now.lines[then.row : now.row], now.head)), then.head + self.text
        if not len(then.head) <= len(before) < len(whole) or not whole.startswith(before):
            return None
        text = whole[len(before) :]
        replaced = now.tail[: len(now.tail) - len(self.tail)]
        if not now.tail.endswith(self.tail) or not (replaced == self.replaced or _closes(replaced, text)):
            return None
        if (now.before, now.after) != (then.before, then.after) or now.lines[: then.row] != then.lines[: then.row]:
            return None
        if now.lines[now.row + 1 :] != then.lines[then.row + 1 :]:
            return None
        return Edit(now.row, now.column, now.column + len(replaced), text.replace("\n", now.eol))


class Cache:
    """The newest suggestions of all documents of an editor."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._characters = 0
        self._ids = count(1)

    def find(self, snapshot: Snapshot) -> list[Suggestion]:
        """What of the kept ones belongs at the cursor, the last used first, each text once."""
        found: dict[str, Suggestion] = {}
        for entry in reversed(self._entries.values()):
            if entry.snapshot.uri == snapshot.uri and (edit := entry.rest(snapshot)) is not None:
                found.setdefault(edit.text, Suggestion(entry.id, edit))
        return list(found.values())

    def put(self, snapshot: Snapshot, edit: Edit) -> Suggestion:
        """Keeps an edit that is offered at the cursor of `snapshot`."""
        known = next((one for one in self.find(snapshot) if one.edit == edit), None)
        if known is not None:
            self.use(known)
            return known
        end = edit.end - snapshot.column
        entry = _Entry(
            id=str(next(self._ids)),
            snapshot=replace(snapshot, tree=None),
            text=edit.text.replace(snapshot.eol, "\n"),
            replaced=snapshot.tail[:end],
            tail=snapshot.tail[end:],
            characters=snapshot.characters + len(snapshot.before) + len(snapshot.after),
        )
        self._entries[entry.id] = entry
        self._characters += entry.characters
        while len(self._entries) > MOST or (self._characters > MOST_CHARACTERS and len(self._entries) > 1):
            self._characters -= self._entries.popitem(last=False)[1].characters
        return Suggestion(entry.id, edit)

    def use(self, suggestion: Suggestion) -> None:
        """From now on it goes before others that belong at the same place."""
        if suggestion.id in self._entries:
            self._entries.move_to_end(suggestion.id)

    def drop(self, uri: str | None = None) -> None:
        """Forgets what belongs to a document; None: everything."""
        for id, entry in list(self._entries.items()):
            if uri in (None, entry.snapshot.uri):
                del self._entries[id]
                self._characters -= entry.characters


def _closes(typed: str, text: str) -> bool:
    """Whether `typed` are closers that an editor puts behind the cursor by itself, and `text` brings them, too."""
    rest = iter(text)
    return _CLOSERS.issuperset(typed) and all(character in rest for character in typed)
