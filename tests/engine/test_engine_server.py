"""The HTTP face, spoken to as ASGI: streams, refusals, disconnects, status, idleness."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from infill_engine import protocol
from infill_engine.config import EngineConfig
from infill_engine.endpoints import MAX_BODY
from infill_engine.metrics import Metrics
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.scheduler import Engine, Scheduler
from infill_engine.server import create_apps
from scripted import ScriptedEngine, Steps, ask, wait_for
from starlette.types import Message


class Service:
    """The app with its lifespan, and whether it has asked to be stopped."""

    def __init__(self, load: Callable[..., Engine], idle_exit_s: float = 900.0, error_exit_s: float = 30.0) -> None:
        self.stopped = asyncio.Event()
        metrics = Metrics()
        self.scheduler = Scheduler(load, observer=metrics)
        config = EngineConfig(model="test", idle_exit_s=idle_exit_s)
        self.app = create_apps(self.scheduler, config, metrics, self.stopped.set, error_exit_s).socket

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        async with self.app.router.lifespan_context(self.app):
            yield self

    async def ready(self) -> None:
        await asyncio.to_thread(wait_for, lambda: self.scheduler.phase.state in ("ready", "error"))


def serving(script: Callable[[InfillRequest], Steps], **options: float) -> Service:
    return Service(lambda report: ScriptedEngine(script), **options)


class Call:
    """One HTTP exchange as ASGI. The body arrives in the given chunks; the client may hang up."""

    def __init__(self, service: Service, method: str, path: str, *chunks: bytes) -> None:
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._chunks = list(chunks) or [b""]
        self._gone = asyncio.Event()
        self.read = 0
        scope: Message = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
        self._task = asyncio.create_task(service.app(scope, self._receive, self._sent.put))

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


def infill(service: Service, request: InfillRequest) -> Call:
    return Call(service, "POST", "/v1/infill", protocol.encode(request))


def answer(request: InfillRequest) -> Steps:
    yield Candidate("ret")
    yield None
    yield Candidate("return x")
    yield Final("end")


def endless(request: InfillRequest) -> Steps:
    yield Candidate("first")
    while True:
        time.sleep(0.001)
        yield None


async def test_an_answer_is_one_line_an_event() -> None:
    async with serving(answer).running() as service:
        await service.ready()
        call = infill(service, ask())
        assert await call.status() == 200
        lines = (await call.body()).splitlines()
    *candidates, final = [protocol.decode_event(line) for line in lines]
    assert candidates == [Candidate("ret"), Candidate("return x")]
    assert isinstance(final, Final)
    assert final.reason == "end"


async def test_a_line_is_sent_as_soon_as_it_exists() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = infill(service, ask())
        assert await call.status() == 200
        assert protocol.decode_event((await call.part()).removesuffix(b"\n")) == Candidate("first")
        call.hang_up()
        await call.done()


async def test_hanging_up_closes_the_generator() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = infill(service, ask())
        await call.status()
        await call.part()
        call.hang_up()
        await call.done()
        engine = service.scheduler.engine
        assert isinstance(engine, ScriptedEngine)
        assert await asyncio.to_thread(engine.closed.wait, 5)
        assert service.scheduler.live == 0


async def test_hanging_up_before_the_body_is_there_is_quiet() -> None:
    async with serving(answer).running() as service:
        call = Call(service, "POST", "/v1/infill", b"{", b"")
        call._chunks.pop()
        call.hang_up()
        await call.done()
        assert service.scheduler.requests == 0


async def test_before_the_model_is_ready_the_answer_says_so() -> None:
    service = serving(answer)
    call = infill(service, ask())
    assert await call.status() == 200
    assert protocol.decode_event((await call.body()).strip()) == Final("starting", "the engine is starting")
    status = Call(service, "GET", "/v1/status")
    assert await status.status() == 200
    assert protocol.decode_status(await status.body()).state == "starting"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not an infill request"),
        (b"\xff\xfe", "not an infill request"),
        (b"[" * 100_000, "not an infill request"),
        (b'{"nothing":' * 100_000, "not an infill request"),
        (b'{"client": "c"}', "document"),
        (b'{"client": "c", "document": "d", "head": "a\\nb"}', "hold no newline"),
        (b'{"client": "c", "document": "d", "protocol": 99}', "protocol 99"),
    ],
)
async def test_a_bad_request_is_refused_in_one_line(body: bytes, says: str) -> None:
    call = Call(serving(answer), "POST", "/v1/infill", body)
    assert await call.status() == 400
    error = json.loads(await call.body())["error"]
    assert says in error
    assert "\n" not in error


async def test_a_body_over_the_cap_is_not_read_to_its_end() -> None:
    chunk = b"x" * (MAX_BODY // 4)
    call = Call(serving(answer), "POST", "/v1/infill", *[chunk] * 100)
    assert await call.status() == 413
    assert str(MAX_BODY) in json.loads(await call.body())["error"]
    assert call.read <= MAX_BODY + len(chunk)


async def test_a_body_may_come_in_parts_up_to_the_cap() -> None:
    async with serving(answer).running() as service:
        await service.ready()
        data = protocol.encode(ask(head="x" * (MAX_BODY - 300)))
        assert len(data) <= MAX_BODY
        call = Call(service, "POST", "/v1/infill", data[:1000], data[1000:])
        assert await call.status() == 200
        assert b'"end"' in await call.body()


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/v1/infill", 405), ("GET", "/", 404), ("GET", "/v1/stop", 405)],
)
async def test_what_does_not_exist_is_refused_in_json(method: str, path: str, code: int) -> None:
    service = serving(answer)
    call = Call(service, method, path)
    assert await call.status() == code
    assert json.loads(await call.body())["error"]
    assert not service.stopped.is_set()


async def test_status_tells_of_engine_and_requests() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = infill(service, ask())
        await call.status()
        await call.part()
        status = Call(service, "GET", "/v1/status")
        assert await status.status() == 200
        told = protocol.decode_status(await status.body())
        assert told.rss_bytes > 1_000_000
        assert msgspec.structs.replace(told, pid=0, uptime_s=0.0, version="", rss_bytes=0) == protocol.Status(
            version="",
            pid=0,
            state="ready",
            model="test",
            device="cpu",
            dtype="float32",
            requests=1,
            live=1,
            cache_bytes=12_345,
        )
        call.hang_up()
        await call.done()


async def test_stop_asks_the_server_to_stop() -> None:
    service = serving(answer)
    call = Call(service, "POST", "/v1/stop")
    assert await call.status() == 202
    assert service.stopped.is_set()


async def test_the_engine_stops_when_idle() -> None:
    async with serving(answer, idle_exit_s=0.05).running() as service:
        await asyncio.wait_for(service.stopped.wait(), 5)


async def test_work_keeps_the_engine_from_being_idle() -> None:
    async with serving(endless, idle_exit_s=0.05).running() as service:
        await service.ready()
        call = infill(service, ask())
        await call.status()
        await call.part()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(service.stopped.wait(), 0.3)
        call.hang_up()
        await call.done()
        await asyncio.wait_for(service.stopped.wait(), 5)


async def test_an_engine_without_a_model_says_why_and_stops_soon() -> None:
    def load(report: object) -> Engine:
        raise RuntimeError("no such model: use embedded")

    async with Service(load, error_exit_s=0.2).running() as service:
        await service.ready()
        call = infill(service, ask())
        await call.status()
        final = protocol.decode_event((await call.body()).strip())
        assert final == Final("error", "no such model: use embedded")
        await asyncio.wait_for(service.stopped.wait(), 5)
