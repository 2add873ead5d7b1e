"""The engine's HTTP faces: all of it over its own socket; over TCP what other plugins speak, and editors elsewhere.

Translates between HTTP and the scheduler, and watches for idleness. Knows neither sockets nor models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infill_engine import catalogue, protocol
from infill_engine.compat import Gateway
from infill_engine.config import EngineConfig
from infill_engine.endpoints import (
    JSON,
    JSON_LINES,
    MAX_BODY,
    Endpoint,
    Error,
    Guard,
    answer,
    document,
    events,
    read_bytes,
    refuse,
    routes,
)
from infill_engine.metrics import Metrics
from infill_engine.protocol import (
    Choice,
    Documents,
    Event,
    Explanation,
    InfillRequest,
    Manifest,
    Paths,
    ProtocolError,
    Remembered,
    Status,
)
from infill_engine.scheduler import Engine, Scheduler, Unavailable

if TYPE_CHECKING:  # they bring torch
    from infill_engine.workspaces import Workspaces

T = TypeVar("T")

#: Bytes a manifest may have: 200,000 documents with long paths.
MAX_MANIFEST = 32 * 1024 * 1024
#: Seconds for which an engine that could not load its model stays to say so; the next start tries again.
ERROR_EXIT_S = 30.0
#: Seconds the step that is running at shutdown may take.
JOIN_S = 5.0
#: Seconds between two looks at the idle time.
IDLE_POLL_S = 1.0


class Apps(NamedTuple):
    """The ASGI apps of one engine. Nobody but the user must reach `socket`, whose lifespan is the engine's."""

    socket: Starlette
    tcp: Starlette
    #: For this user's editors on other machines; None where the config has no token for them.
    remote: Starlette | None


class Accepted(msgspec.Struct, frozen=True):
    """What was asked for is under way."""


def create_apps(
    scheduler: Scheduler,
    config: EngineConfig,
    metrics: Metrics,
    stop: Callable[[], None],
    error_exit_s: float = ERROR_EXIT_S,
    change: Callable[[str], None] | None = None,
) -> Apps:
    """The lifespan of `Apps.socket` starts and ends `scheduler`; `stop` makes the server begin its shutdown, `change`
    has another model loaded and may raise `Unavailable`. None: this engine serves one model for good."""
    born = time.monotonic()

    def model() -> str:
        """What answers, or is to."""
        return scheduler.engine.name if scheduler.engine else catalogue.meant(config.model)

    async def infill(request: Request) -> Response:
        started = time.monotonic()
        gap = await _read_gap(request)
        return StreamingResponse(_lines(scheduler, gap, started), media_type=JSON_LINES)

    async def prime(request: Request) -> Response:
        scheduler.prime(await _read_gap(request))
        return answer(Accepted(), 202)

    async def asked(function: Callable[[Engine], T]) -> T:
        """Asks the engine, which is loaded first where it was let go."""
        try:
            return await asyncio.wrap_future(scheduler.call(function))
        except Unavailable as error:
            raise HTTPException(503, str(error)) from None

    async def explain(request: Request) -> Response:
        gap = await _read_gap(request)
        return answer(await asked(lambda engine: engine.explain(gap)))

    async def of_workspaces(function: Callable[[Workspaces], T], otherwise: T) -> T:
        """Asks what the engine remembers; `otherwise` where that is nothing."""
        return await asked(lambda engine: function(engine.workspaces) if engine.workspaces else otherwise)

    async def put_documents(request: Request) -> Response:
        name, body = request.path_params["id"], await read_bytes(request, MAX_MANIFEST)
        given = _decoded(protocol.decode_documents, body)
        if isinstance(given, Manifest):
            manifest = given.documents
            return answer(Paths(tuple(await of_workspaces(lambda workspaces: workspaces.sync(name, manifest), []))))
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"documents have at most {MAX_BODY} bytes together: send them in parts")
        documents = given.documents
        taken_in = await of_workspaces(lambda workspaces: workspaces.put(name, documents), None)
        refused: list[str] = await asyncio.wrap_future(taken_in) if taken_in else []
        return answer(Paths(tuple(refused)))

    async def forget_documents(request: Request) -> Response:
        name, paths = request.path_params["id"], _decoded(protocol.decode_paths, await read_bytes(request)).paths
        await of_workspaces(lambda workspaces: workspaces.remove(name, paths), None)
        return answer(Accepted())

    async def forget_workspace(request: Request) -> Response:
        name = request.path_params["id"]
        await of_workspaces(lambda workspaces: workspaces.forget(name), None)
        return answer(Accepted())

    def remembered() -> Remembered:
        engine = scheduler.engine
        return engine.workspaces.remembered if engine and engine.workspaces else Remembered()

    async def status(_: Request) -> Response:
        engine, successor = scheduler.engine, scheduler.successor
        phase, told = scheduler.phase, successor.phase if successor else scheduler.phase
        return answer(
            Status(
                version=_version(),
                pid=os.getpid(),
                state=phase.state,
                progress=told.progress,
                message=told.message,
                model=model(),
                next=successor.name if successor else "",
                device=engine.device if engine else "",
                dtype=engine.dtype if engine else "",
                kernels=engine.kernels if engine else "",
                uptime_s=time.monotonic() - born,
                requests=scheduler.requests,
                live=scheduler.live,
                background=scheduler.background,
                cache_bytes=engine.cache_bytes if engine else 0,
                rss_bytes=_rss_bytes(),
                memory=remembered(),
            )
        )

    async def choose_model(request: Request) -> Response:
        choice = _decoded(protocol.decode_choice, await read_bytes(request))
        if change is None:
            raise HTTPException(409, f"this engine serves {config.model} alone: set infill.model to auto")
        try:
            change(choice.model)
        except Unavailable as error:
            raise HTTPException(503, str(error)) from None
        return answer(Accepted(), 202)

    async def leave(request: Request) -> Response:
        scheduler.leave(request.path_params["id"])
        return answer(Accepted())

    async def stop_engine(_: Request) -> Response:
        stop()
        return answer(Accepted(), 202)

    async def measured(_: Request) -> Response:
        cached = scheduler.engine.cache_bytes if scheduler.engine else 0
        text = metrics.exposition(
            live=scheduler.live, background=scheduler.background, cache_bytes=cached, memory=remembered()
        )
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

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

    own = [
        Endpoint(
            method="POST",
            path="/v1/infill",
            summary="Fills a gap; the answer is newline-delimited JSON, an event a line, the last one a Final",
            handle=infill,
            body=InfillRequest,
            answers={JSON_LINES: Event},
        ),
        Endpoint(
            method="POST",
            path="/v1/prime",
            summary="Encodes the contexts of a gap once nothing else is to be done",
            handle=prime,
            body=InfillRequest,
            answers={JSON: Accepted},
            status=202,
        ),
        Endpoint(
            method="POST",
            path="/v1/context",
            summary="Says what a request would be answered from: context pieces, and what the memory knows",
            handle=explain,
            body=InfillRequest,
            answers={JSON: Explanation},
            refuses=(503,),
        ),
        Endpoint(
            method="PUT",
            path="/v1/workspaces/{id}/documents",
            summary="Takes which documents a workspace has, or some with text; answers which texts are still wanted",
            handle=put_documents,
            body=Manifest | Documents,
            answers={JSON: Paths},
            refuses=(503,),
        ),
        Endpoint(
            method="DELETE",
            path="/v1/workspaces/{id}/documents",
            summary="Forgets documents at once",
            handle=forget_documents,
            body=Paths,
            answers={JSON: Accepted},
            refuses=(503,),
        ),
        Endpoint(
            method="DELETE",
            path="/v1/workspaces/{id}",
            summary="Forgets a whole workspace at once",
            handle=forget_workspace,
            answers={JSON: Accepted},
            refuses=(503,),
        ),
        Endpoint(
            method="DELETE",
            path="/v1/clients/{id}",
            summary="A client asks nothing more for now; once all have left, the model's memory is given back",
            handle=leave,
            answers={JSON: Accepted},
        ),
        Endpoint(
            method="GET",
            path="/v1/status",
            summary="What the engine says of itself",
            handle=status,
            answers={JSON: Status},
        ),
    ]
    ending = [
        Endpoint(
            method="PUT",
            path="/v1/model",
            summary="Loads another model, which takes over once it is there; until then the former answers",
            handle=choose_model,
            body=Choice,
            answers={JSON: Accepted},
            status=202,
            refuses=(409, 503),
        ),
        Endpoint(
            method="POST",
            path="/v1/stop",
            summary="Lets live requests finish for up to 2 s, then ends the engine",
            handle=stop_engine,
            answers={JSON: Accepted},
            status=202,
        ),
    ]
    seen = [
        Endpoint(
            method="GET",
            path="/metrics",
            summary="What the engine measured, as Prometheus reads it",
            handle=measured,
            answers={"text/plain": None},
        ),
    ]
    foreign = Gateway(scheduler, model, config.prefix_tokens + config.suffix_tokens).endpoints()
    return Apps(
        _app([*own, *ending, *foreign, *seen], lifespan=lifespan),
        _app([*foreign, *seen], Guard(config.api_key)),
        # Whoever is elsewhere could not start it again.
        _app([*own, *seen], Guard(config.token, named=True)) if config.token else None,
    )


def _app(endpoints: Sequence[Endpoint], guard: Guard | None = None, lifespan: Any = None) -> Starlette:
    async def describe(_: Request) -> Response:
        return answer(document(everything, _version(), guard))

    description = Endpoint(
        method="GET",
        path="/openapi.json",
        summary="This document",
        handle=describe,
        answers={JSON: dict[str, Any]},
        public=True,
    )
    everything = [*endpoints, description]

    async def not_there(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return refuse(Error, error)

    return Starlette(routes=routes(everything, guard), exception_handlers={HTTPException: not_there}, lifespan=lifespan)


async def _read_gap(request: Request) -> InfillRequest:
    return _decoded(protocol.decode_request, await read_bytes(request))


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except ProtocolError as error:
        raise HTTPException(400, str(error)) from None


async def _lines(scheduler: Scheduler, request: InfillRequest, started: float) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(events(scheduler, request, started)) as stream:
        async for event in stream:
            yield protocol.encode(event) + b"\n"


def _rss_bytes() -> int:
    """Memory that the process holds; where the system does not say, the most that it held so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _version() -> str:
    try:
        return metadata.version("infill-lsp")
    except metadata.PackageNotFoundError:  # Run from a source tree that is not installed.
        return "unknown"
