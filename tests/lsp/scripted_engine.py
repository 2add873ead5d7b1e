"""An engine in this process that writes what a test says, and a server in this process with it: nothing is started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import pytest
from editor import Editor
from infill_engine.protocol import Candidate, Event, Final, InfillRequest, Status
from pytest_lsp.client import make_test_lsp_client

from infill_lsp.client import EngineError
from infill_lsp.server import InfillServer, create_server
from infill_lsp.transport import HOST, serve_tcp

Writes = Callable[[InfillRequest], list[Event]]


def sure(text: str, prob: float = 0.999) -> Candidate:
    """A text of whose characters each is that probable."""
    return Candidate(text, (prob,) * len(text), tuple(range(1, len(text) + 1)))


def from_table(table: Mapping[str, str]) -> Writes:
    """Writes what the table has for the end of the text before the gap, as far as it is not to be avoided."""

    def write(request: InfillRequest) -> list[Event]:
        before = request.prefix + request.head
        for key, text in table.items():
            if before.endswith(key) and not any(text.split()[:1] == known.split()[:1] for known in request.avoid):
                return [sure(text), Final("end")]
        return [Final("end")]

    return write


class Scripted:
    """In place of an `EngineClient`."""

    def __init__(self, write: Writes) -> None:
        self.write = write
        self.requests: list[InfillRequest] = []
        #: Those that were closed before their end.
        self.cancelled: list[InfillRequest] = []
        self.left: list[str] = []
        self.stopped = 0
        #: What it was told to encode ahead.
        self.primed: list[InfillRequest] = []
        #: What is in the way of it where it does not answer: nobody listens, or an error.
        self.away: EngineError | bool = False
        #: While it is clear nothing is answered.
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.states: list[Status] = [status("ready")]

    def asked(self, priority: str) -> list[InfillRequest]:
        return [request for request in self.requests if request.priority == priority]

    async def infill(self, request: InfillRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        over = False
        try:
            await self.goes_on.wait()
            for event in self.write(request):
                over = over or isinstance(event, Final)
                yield event
        finally:
            if not over:
                self.cancelled.append(request)

    async def status(self) -> Status | None:
        if isinstance(self.away, EngineError):
            raise self.away
        return None if self.away else self.states[-1]

    async def bring_up(self) -> AsyncIterator[Status]:
        at = 0
        while True:
            one = self.states[min(at, len(self.states) - 1)]
            yield one
            if one.state in ("ready", "error"):
                return
            at += 1
            await asyncio.sleep(0.01)

    async def leave(self, client: str) -> None:
        self.left.append(client)

    async def stop(self) -> None:
        self.stopped += 1

    async def prime(self, request: InfillRequest) -> None:
        self.primed.append(request)

    async def aclose(self) -> None:
        pass


def status(state: str, message: str = "", progress: float | None = None, pid: int = 1) -> Status:
    return Status(version="1", pid=pid, state=state, message=message, progress=progress, model="m", device="cpu")  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def served(engine: Scripted) -> AsyncIterator[tuple[Editor, InfillServer]]:
    """An editor, and a server in this process that it has not said hello to."""
    server = create_server()
    heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infill_lsp.remote.engine_of", lambda _: engine)
        task = asyncio.create_task(serve_tcp(server, 0, heard.set_result))
        client = make_test_lsp_client()
        await client.start_tcp(HOST, await heard)
        editor = Editor(client)
        try:
            yield editor, server
        finally:
            editor.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, 10)
            await client.stop()
