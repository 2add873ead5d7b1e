"""The engine's HTTP faces, spoken to as ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from infill_engine.config import EngineConfig
from infill_engine.metrics import Metrics
from infill_engine.protocol import InfillRequest
from infill_engine.scheduler import Engine, Scheduler
from infill_engine.server import create_apps
from scripted import ScriptedEngine, Steps, wait_for
from starlette.types import ASGIApp, Message


class Service:
    """The app with its lifespan, and whether it has asked to be stopped."""

    def __init__(
        self,
        load: Callable[..., Engine],
        idle_exit_s: float = 900.0,
        error_exit_s: float = 30.0,
        api_key: str = "",
        token: str = "",
        max_live: int = 64,
    ) -> None:
        self.stopped = asyncio.Event()
        self.metrics = Metrics()
        self.scheduler = Scheduler(load, observer=self.metrics, max_live=max_live)
        config = EngineConfig(model="test", idle_exit_s=idle_exit_s, api_key=api_key, token=token)
        apps = create_apps(self.scheduler, config, self.metrics, self.stopped.set, error_exit_s)
        self.app, self.tcp, self.remote = apps

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        async with self.app.router.lifespan_context(self.app):
            yield self

    async def ready(self) -> None:
        await self.until(lambda: self.scheduler.phase.state in ("ready", "error"))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something the scheduler's thread does is seen."""
        await asyncio.to_thread(wait_for, condition)


def serving(script: Callable[[InfillRequest], Steps], **options: Any) -> Service:
    return Service(lambda report: ScriptedEngine(script), **options)


class Call:
    """One HTTP exchange as ASGI. The body arrives in the given chunks; the client may hang up."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        *chunks: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._chunks = list(chunks) or [b""]
        self._gone = asyncio.Event()
        self.read = 0
        #: Of the answer, once its status is there.
        self.headers: dict[str, str] = {}
        scope: Message = {"type": "http", "method": method, "path": path, "query_string": b""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
        self._task = asyncio.ensure_future(app(scope, self._receive, self._sent.put))

    async def _receive(self) -> Message:
        if self._chunks:
            chunk = self._chunks.pop(0)
            self.read += len(chunk)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def hang_up(self) -> None:
        self._gone.set()

    async def status(self) -> int:
        message = await asyncio.wait_for(self._sent.get(), 5)
        assert message["type"] == "http.response.start"
        self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        return int(str(message["status"]))

    async def part(self) -> bytes:
        message = await asyncio.wait_for(self._sent.get(), 5)
        return bytes(message["body"])

    async def body(self) -> bytes:
        await asyncio.wait_for(self._task, 5)
        parts = [self._sent.get_nowait() for _ in range(self._sent.qsize())]
        return b"".join(bytes(part["body"]) for part in parts)

    async def done(self) -> None:
        await asyncio.wait_for(self._task, 5)

    async def json(self) -> Any:
        return json.loads(await self.body())
