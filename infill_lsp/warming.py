"""Context ahead of need: when a file is opened, and when the cursor rests, the engine is told what the next question
will need, and encodes it once nobody waits for anything else. A key stroke then encodes its own tokens alone.

LSP does not say where the cursor is: it is taken to be behind the last edit, or where the last question was asked; of a
file that was only opened, its beginning is prepared as far as a model reads. It does not know what is encoded, nor how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from lsprotocol import types

from infill_lsp.client import EngineError
from infill_lsp.core import Snapshot
from infill_lsp.ignore import lf

#: Seconds for which nothing may happen in a document before it is warmed: after a key, and after it was opened.
REST_S, OPENED_S = 0.4, 0.1
#: Documents that are warmed when an engine has become ready, those touched last.
MOST = 4
#: Characters that a model reads before the cursor, about.
READ = 3_500

#: What is known of where the cursor is: a question's place, the last change, or nothing.
Hint = types.Position | types.TextDocumentContentChangeEvent | None


class Warmer:
    """The documents of one editor. All methods belong to one event loop."""

    def __init__(self, warm: Callable[[str, Hint], Awaitable[None]]) -> None:
        """warm: does it for a document; may raise `EngineError`."""
        self._warm = warm
        self._hints: dict[str, Hint] = {}
        self._resting: dict[str, asyncio.Task[None]] = {}

    def opened(self, uri: str) -> None:
        self._touch(uri, None, OPENED_S)

    def changed(self, uri: str, hint: Hint) -> None:
        """The document was edited, or something was asked about it."""
        self._touch(uri, hint, REST_S)

    def closed(self, uri: str) -> None:
        self._hints.pop(uri, None)
        if (task := self._resting.pop(uri, None)) is not None:
            task.cancel()

    def ready(self) -> None:
        """There is an engine that knows nothing yet."""
        for uri in list(self._hints)[-MOST:]:
            self._touch(uri, self._hints[uri], OPENED_S)

    async def aclose(self) -> None:
        tasks = list(self._resting.values())
        for uri in list(self._hints):
            self.closed(uri)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _touch(self, uri: str, hint: Hint, after_s: float) -> None:
        self.closed(uri)
        self._hints[uri] = hint
        self._resting[uri] = asyncio.create_task(self._rest(uri, after_s))

    async def _rest(self, uri: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(EngineError):  # One that is away is told when it is ready.
            await self._warm(uri, self._hints[uri])


def cursor(snapshot: Callable[[types.Position], Snapshot | None], hint: Hint) -> Snapshot | None:
    """The document with the cursor where it probably is. snapshot: of the document as it is, with the cursor at a
    place; None where it is not open."""
    if isinstance(hint, types.Position):
        return snapshot(hint)
    if isinstance(hint, types.TextDocumentContentChangePartial):
        return _behind(snapshot(hint.range.start), hint.text)
    return _as_far_as_read(snapshot(types.Position(0, 0)))


def _behind(at: Snapshot | None, text: str) -> Snapshot | None:
    """The cursor behind a text that was just put there."""
    if at is None:
        return None
    *above, last = lf(text).split("\n")
    row = min(at.row + len(above), len(at.lines) - 1)
    column = len(last) + (0 if above else at.column)
    return replace(at, row=row, column=min(column, len(at.lines[row])))


def _as_far_as_read(at: Snapshot | None) -> Snapshot | None:
    """The cursor behind the first `READ` characters, at a line's end."""
    if at is None:
        return None
    row = characters = 0
    while row + 1 < len(at.lines) and characters < READ:
        characters += len(at.lines[row]) + 1
        row += 1
    return replace(at, row=row, column=len(at.lines[row]))
