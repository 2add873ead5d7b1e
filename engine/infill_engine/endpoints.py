"""What an HTTP endpoint is: its route, what it takes and answers, how it refuses, and the OpenAPI document of a set.

Every endpoint is described once, by the types of its messages; routes and document follow from that. Also holds what
endpoints share: reading a body, the events of a job, noticing that the caller has gone. Knows no endpoint by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from infill_engine.protocol import Event, Final, InfillRequest
from infill_engine.scheduler import Scheduler

T = TypeVar("T")

#: Bytes a request may have; the largest context that is of use is far smaller.
MAX_BODY = 4 * 1024 * 1024

JSON, JSON_LINES, EVENT_STREAM = "application/json", "application/x-ndjson", "text/event-stream"


class Refusal(Protocol):
    """A type of error bodies: a msgspec struct that is made of a status and one line."""

    __struct_fields__: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, status: int, message: str) -> msgspec.Struct: ...


class Error(msgspec.Struct, frozen=True):
    """How our own endpoints refuse."""

    error: str

    @classmethod
    def of(cls, status: int, message: str) -> Error:
        return cls(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    summary: str
    handle: Callable[[Request], Awaitable[Response]]
    #: The body's type, where it takes one.
    body: Any = None
    #: Media types of a good answer, and the type of its JSON, of each message where it is a stream (None: text).
    answers: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    #: How it refuses, and with which statuses; a guard adds its own.
    refusal: type[Refusal] = Error
    refuses: tuple[int, ...] = ()
    #: Whether a guard lets it pass without a key.
    public: bool = False


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may call over TCP: nobody who was sent by a web page and, where there is a key, nobody without it."""

    key: str = field(default="", repr=False)
    #: Whether callers know us by another name than this machine's own. Then there has to be a key.
    named: bool = False

    def __post_init__(self) -> None:
        assert self.key or not self.named

    def check(self, request: Request, public: bool) -> None:
        """Raises `HTTPException` 401 or 403."""
        if not self.named and not _is_loopback(request.headers.get("host", "")):
            # The name of a web page may be made to point here: the browser then takes us for the page's own server.
            raise HTTPException(403, "the Host of a request must be localhost or a loopback address")
        if "origin" in request.headers:
            raise HTTPException(403, "web pages may not use this engine")
        if self.key and not public:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.key.encode()):
                raise HTTPException(401, "wrong or no API key: send it as `Authorization: Bearer KEY`")


def routes(endpoints: Sequence[Endpoint], guard: Guard | None = None) -> list[Route]:
    """A route for each endpoint. What a handler or the guard raises as `HTTPException` is told as the endpoint does."""

    def route(endpoint: Endpoint) -> Route:
        async def serve(request: Request) -> Response:
            try:
                if guard:
                    guard.check(request, endpoint.public)
                return await endpoint.handle(request)
            except HTTPException as error:
                return refuse(endpoint.refusal, error)
            except ClientDisconnect:
                return Response(status_code=400)  # Nobody reads it.

        return Route(endpoint.path, serve, methods=[endpoint.method])

    return [route(endpoint) for endpoint in endpoints]


def refuse(refusal: type[Refusal], error: HTTPException) -> Response:
    """The answer for everything that is refused: its body says why in one line."""
    headers = dict(error.headers or {})
    if error.status_code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return answer(refusal.of(error.status_code, error.detail), error.status_code, headers)


def answer(message: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(message), status, headers, media_type=JSON)


async def read(request: Request, body: type[T]) -> T:
    """The body as JSON of the given type. Raises `HTTPException` 400 or 413 with one line."""
    try:
        return msgspec.json.decode(await read_bytes(request), type=body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, str(error)) from None


async def read_bytes(request: Request, most: int = MAX_BODY) -> bytes:
    """The body, read no further than `most` bytes. Raises `HTTPException` 413."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise HTTPException(413, f"a request has at most {most} bytes")
    return bytes(body)


async def events(scheduler: Scheduler, request: InfillRequest, started: float) -> AsyncGenerator[Event, None]:
    """The events of a job, up to its `Final`. Closing the generator cancels the job, whatever it waits for."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event] = asyncio.Queue()

    def emit(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody reads any more.
            loop.call_soon_threadsafe(queue.put_nowait, event)

    job = scheduler.submit(request, emit, started)
    try:
        while True:
            event = await queue.get()
            yield event
            if isinstance(event, Final):
                return
    finally:
        scheduler.cancel(job)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises `ClientDisconnect`, with `work` cancelled, as soon as the caller hangs up."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def document(endpoints: Sequence[Endpoint], version: str, guard: Guard | None = None) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a set of endpoints (https://spec.openapis.org/oas/v3.1.1)."""
    types = [
        kind
        for endpoint in endpoints
        for kind in (endpoint.body, endpoint.refusal, *endpoint.answers.values())
        if kind is not None
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, guard)
    found: dict[str, Any] = {
        "openapi": "3.1.1",
        "info": {"title": "infill-engine", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if guard and guard.key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _operation(endpoint: Endpoint, schema_of: Mapping[Any, Any], guard: Guard | None) -> dict[str, Any]:
    refusal = schema_of[endpoint.refusal]
    content = {
        media: {"schema": _schema(media, schema_of.get(kind), refusal)} for media, kind in endpoint.answers.items()
    }
    refused = {JSON: {"schema": refusal}}
    keyed = guard is not None and bool(guard.key) and not endpoint.public
    statuses = {*endpoint.refuses, *([403] if guard else []), *([401] if keyed else [])}
    if endpoint.body:
        statuses |= {400, 413}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            str(endpoint.status): {"description": "what was asked for", "content": content},
            **{str(status): {"description": _MEANINGS[status], "content": refused} for status in sorted(statuses)},
        },
    }
    if names := re.findall(r"{(\w+)}", endpoint.path):
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[endpoint.body]}}}
    if keyed:
        operation["security"] = [{"key": []}]
    return operation


def _schema(media: str, message: Any, refused: Any) -> Any:
    """The schema of an answer; of one event or line of a stream, which OpenAPI 3.1 has no word for."""
    if media == JSON:
        return message
    text: dict[str, Any] = {"type": "string"}
    if message is None:
        return text
    if media == EVENT_STREAM:
        told = {"contentMediaType": JSON, "contentSchema": {"anyOf": [message, refused]}}
        return {
            "type": "object",
            "required": ["data"],
            "properties": {"data": {**text, "anyOf": [told, {"const": "[DONE]"}]}},
        }
    return {**text, "contentMediaType": JSON, "contentSchema": message}


_MEANINGS = {
    400: "the body does not fit, or asks for what cannot be served",
    401: "wrong or no API key",
    403: "the request comes from a web page",
    409: "this engine does not do so",
    413: "the body is too long",
    500: "the request failed",
    503: "the engine is starting, stopping, busy, or could not load its model",
}


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
