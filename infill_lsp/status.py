"""How things are with the engine and the indexes, as one status for the editor, and bars for what takes long.

Knows what a person is told, neither how the engine is asked nor how an index fills.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lsprotocol import types
from pygls.exceptions import JsonRpcException

if TYPE_CHECKING:
    from pygls.lsp.server import LanguageServer

log = logging.getLogger(__name__)

#: Seconds an editor may take to agree to a progress bar: some never answer, and the engine's start waits for it.
BAR_S = 2.0


class Board:
    """The status as it is now; `changed` gets each new one."""

    def __init__(self, changed: Callable[[dict[str, Any]], None]) -> None:
        self._changed = changed
        #: Why nothing is offered at all; "" where something may be.
        self._off = ""
        self._engine: dict[str, Any] = {}
        self._waiting = 0
        self._folders: dict[str, dict[str, Any]] = {}
        self._last: dict[str, Any] | None = None
        self.engine("stopped", "")

    @property
    def status(self) -> dict[str, Any]:
        """An `InfillStatus` of docs/protocol.md."""
        status = {**self._engine, "folders": list(self._folders.values())}
        if self._off:
            return {**status, "state": "off", "message": self._off, "progress": None}
        if self._waiting and status["state"] == "ready":
            return {**status, "state": "busy"}
        return status

    def off(self, reason: str) -> None:
        """Nothing is offered any more, and why; "": it is again."""
        self._off = reason
        self._tell()

    def engine(
        self, state: str, model: str, message: str = "", progress: float | None = None, device: str = ""
    ) -> None:
        """The engine said so of itself, or nobody is there to say anything."""
        self._engine = {
            "state": state,
            "progress": progress,
            "message": message,
            "model": model,
            "device": device,
        }
        self._tell()

    def folder(self, root: str, state: str, files: int, message: str) -> None:
        """How an index is."""
        name = root.rstrip("/").rpartition("/")[2]
        self._folders[root] = {"name": name, "state": state, "files": files, "message": message}
        self._folders = dict(sorted(self._folders.items()))
        self._tell()

    def keep(self, roots: Collection[str]) -> None:
        """Only these folders are left."""
        self._folders = {root: folder for root, folder in self._folders.items() if root in roots}
        self._tell()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Somebody waits for the engine."""
        self._waiting += 1
        self._tell()
        try:
            yield
        finally:
            self._waiting -= 1
            self._tell()

    def _tell(self) -> None:
        status = self.status
        if status != self._last:
            self._last = status
            self._changed(status)


class Progress:
    """A progress bar in the editor, from the first report.

    token: of the bar that the editor shows already; cancel: what happens when the person cancels.
    """

    def __init__(
        self,
        server: LanguageServer,
        token: int | str | None = None,
        title: str = "Infill",
        cancel: Callable[[], object] | None = None,
    ) -> None:
        window = server.client_capabilities.window
        self._wanted = token is not None or (window is not None and bool(window.work_done_progress))
        self._bar = server.work_done_progress
        self._given, self._title, self._cancel = token, title, cancel
        self._token: int | str | None = None
        self._begun = False
        self._told = ""

    async def report(self, message: str, progress: float | None) -> None:
        """What is under way, and how much of it is done, 0 to 1; None where that is not known."""
        if not self._wanted:
            return
        percentage = None if progress is None else round(100 * progress)
        told = f"{message} {percentage}"
        if not self._begun:
            self._begun = True
            token = await self._create() if self._given is None else self._given
            if token is None:
                self._wanted = False
                return
            self._token = token
            begin = types.WorkDoneProgressBegin(self._title, message=message, percentage=percentage)
            if (cancel := self._cancel) is not None:
                begin.cancellable = True
            self._bar.begin(token, begin)
            if cancel is not None:
                self._bar.tokens[token].add_done_callback(lambda future: future.cancelled() and cancel())
        elif self._token is not None and told != self._told:
            self._bar.report(self._token, types.WorkDoneProgressReport(message=message, percentage=percentage))
        self._told = told

    def end(self) -> None:
        self._wanted = False
        if self._token is not None:
            self._bar.end(self._token, types.WorkDoneProgressEnd())
            self._bar.tokens.pop(self._token, None)

    async def _create(self) -> str | None:
        token = uuid.uuid4().hex
        try:
            # Shielded, for pygls takes an answer to what was cancelled for a fault.
            await asyncio.wait_for(asyncio.shield(self._bar.create_async(token)), BAR_S)
        except (TimeoutError, JsonRpcException) as error:
            log.warning("the editor gives no progress bar: %s", str(error) or "no answer")
            return None
        return token
