"""The engine's HTTP face: `POST /v1/infill`, `GET /v1/status`, `POST /v1/stop`.

Translates between HTTP and the scheduler, and watches for idleness. Knows neither sockets nor models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from importlib import metadata

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from infill_engine import protocol
from infill_engine.config import EngineConfig
from infill_engine.protocol import Event, Final, InfillRequest, ProtocolError, Status
from infill_engine.scheduler import Scheduler

#: Bytes a request may have; the largest context that is of use is far smaller.
MAX_BODY = 4 * 1024 * 1024
#: Seconds for which an engine that could not load its model stays to say so; the next start tries again.
ERROR_EXIT_S = 30.0
#: Seconds the step that is running at shutdown may take.
JOIN_S = 5.0
#: Seconds between two looks at the idle time.
IDLE_POLL_S = 1.0


def create_app(
    scheduler: Scheduler,
    config: EngineConfig,
    stop: Callable[[], None],
    error_exit_s: float = ERROR_EXIT_S,
) -> Starlette:
    """The ASGI app. Its lifespan starts and ends `scheduler`; `stop` makes the server begin its shutdown."""
    born = time.monotonic()

    async def infill(request: Request) -> Response:
        started = time.monotonic()
        try:
            gap = protocol.decode_request(await _read_body(request))
        except ProtocolError as error:
            raise HTTPException(400, str(error)) from None
        except ClientDisconnect:
            return Response(status_code=400)
        return StreamingResponse(_answer(scheduler, gap, started), media_type="application/x-ndjson")

    async def status(_: Request) -> Response:
        engine, phase = scheduler.engine, scheduler.phase
        answer = Status(
            version=_version(),
            pid=os.getpid(),
            state=phase.state,
            progress=phase.progress,
            message=phase.message,
            model=config.model,
            device=engine.device if engine else "",
            dtype=engine.dtype if engine else "",
            uptime_s=time.monotonic() - born,
            requests=scheduler.requests,
            live=scheduler.live,
            background=scheduler.background,
            cache_bytes=engine.cache_bytes if engine else 0,
        )
        return Response(protocol.encode(answer), media_type="application/json")

    async def stop_engine(_: Request) -> Response:
        stop()
        return Response(b"{}", status_code=202, media_type="application/json")

    async def exit_when_idle() -> None:
        while True:
            limit = error_exit_s if scheduler.phase.state == "error" else config.idle_exit_s
            left = limit - scheduler.idle_s()
            if left <= 0:
                stop()
                return
            await asyncio.sleep(min(left, IDLE_POLL_S))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        scheduler.start()
        watch = asyncio.create_task(exit_when_idle())
        yield
        watch.cancel()
        scheduler.close()
        await asyncio.to_thread(scheduler.join, JOIN_S)

    return Starlette(
        routes=[
            Route("/v1/infill", infill, methods=["POST"]),
            Route("/v1/status", status, methods=["GET"]),
            Route("/v1/stop", stop_engine, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _error},
        lifespan=lifespan,
    )


async def _answer(scheduler: Scheduler, request: InfillRequest, started: float) -> AsyncIterator[bytes]:
    """The lines of an answer. A closed stream cancels the job, whatever it waits for."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def emit(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody reads any more.
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = scheduler.submit(request, emit, started)
    try:
        while True:
            event = await events.get()
            yield protocol.encode(event) + b"\n"
            if isinstance(event, Final):
                return
    finally:
        scheduler.cancel(job)


async def _read_body(request: Request) -> bytes:
    """The body, read no further than `MAX_BODY`. Raises `HTTPException` 413."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a request has at most {MAX_BODY} bytes")
    return bytes(body)


async def _error(_: Request, error: Exception) -> Response:
    """`{"error": one line}` for everything that is refused."""
    assert isinstance(error, HTTPException)
    body = msgspec.json.encode({"error": error.detail})
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


def _version() -> str:
    try:
        return metadata.version("infill-lsp")
    except metadata.PackageNotFoundError:  # Run from a source tree that is not installed.
        return "unknown"
