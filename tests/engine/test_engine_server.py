"""The HTTP face, spoken to as ASGI: streams, refusals, disconnects, status, idleness."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from infill_engine import protocol
from infill_engine.endpoints import MAX_BODY
from infill_engine.fetch import FetchError
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.scheduler import Engine
from scripted import ScriptedEngine, Steps, ask, endless
from service import Call, Service, serving


def infill(service: Service, request: InfillRequest) -> Call:
    return Call(service.app, "POST", "/v1/infill", protocol.encode(request))


def answer(request: InfillRequest) -> Steps:
    yield Candidate("ret")
    yield None
    yield Candidate("return x")
    yield Final("end")


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
        call = Call(service.app, "POST", "/v1/infill", b"{", b"")
        call._chunks.pop()
        call.hang_up()
        await call.done()
        assert service.scheduler.requests == 0


async def test_before_the_model_is_ready_the_answer_says_so() -> None:
    service = serving(answer)
    call = infill(service, ask())
    assert await call.status() == 200
    assert protocol.decode_event((await call.body()).strip()) == Final("starting", "the engine is starting")
    status = Call(service.app, "GET", "/v1/status")
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
    call = Call(serving(answer).app, "POST", "/v1/infill", body)
    assert await call.status() == 400
    error = json.loads(await call.body())["error"]
    assert says in error
    assert "\n" not in error


async def test_a_body_over_the_cap_is_not_read_to_its_end() -> None:
    chunk = b"x" * (MAX_BODY // 4)
    call = Call(serving(answer).app, "POST", "/v1/infill", *[chunk] * 100)
    assert await call.status() == 413
    assert str(MAX_BODY) in json.loads(await call.body())["error"]
    assert call.read <= MAX_BODY + len(chunk)


async def test_a_body_may_come_in_parts_up_to_the_cap() -> None:
    async with serving(answer).running() as service:
        await service.ready()
        data = protocol.encode(ask(head="x" * (MAX_BODY - 300)))
        assert len(data) <= MAX_BODY
        call = Call(service.app, "POST", "/v1/infill", data[:1000], data[1000:])
        assert await call.status() == 200
        assert b'"end"' in await call.body()


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/v1/infill", 405), ("GET", "/", 404), ("GET", "/v1/stop", 405)],
)
async def test_what_does_not_exist_is_refused_in_json(method: str, path: str, code: int) -> None:
    service = serving(answer)
    call = Call(service.app, method, path)
    assert await call.status() == code
    assert json.loads(await call.body())["error"]
    assert not service.stopped.is_set()


async def test_priming_is_taken_at_once_and_done_in_the_background() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = Call(service.app, "POST", "/v1/prime", protocol.encode(ask("later")))
        assert await call.status() == 202
        assert await call.json() == {}
        engine = service.scheduler.engine
        assert isinstance(engine, ScriptedEngine)
        await service.until(lambda: ("prime", "later") in engine.turns)
        assert service.scheduler.requests == 0
        refused = Call(service.app, "POST", "/v1/prime", b'{"client": "c"}')
        assert await refused.status() == 400
        assert "document" in (await refused.json())["error"]


async def test_status_tells_of_engine_and_requests() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = infill(service, ask())
        await call.status()
        await call.part()
        status = Call(service.app, "GET", "/v1/status")
        assert await status.status() == 200
        told = protocol.decode_status(await status.body())
        assert told.rss_bytes > 1_000_000
        assert msgspec.structs.replace(told, pid=0, uptime_s=0.0, version="", rss_bytes=0) == protocol.Status(
            kernels="torch",
            version="",
            pid=0,
            state="ready",
            model="scripted",
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
    call = Call(service.app, "POST", "/v1/stop")
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
        raise FetchError("no such model: use embedded")

    async with Service(load, error_exit_s=0.2).running() as service:
        await service.ready()
        call = infill(service, ask())
        await call.status()
        final = protocol.decode_event((await call.body()).strip())
        assert final == Final("error", "no such model: use embedded")
        await asyncio.wait_for(service.stopped.wait(), 5)
