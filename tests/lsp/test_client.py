"""The engine client against a socket that answers as the test says, and programs that do not start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from editor import until
from infill_engine import protocol
from infill_engine.protocol import (
    PROTOCOL,
    Candidate,
    Document,
    Documents,
    Event,
    Final,
    InfillRequest,
    Manifest,
    Paths,
    Status,
)
from peer import listening, plain

from infill_lsp import client as client_module
from infill_lsp.client import BATCH, MAX_DOCUMENT, EngineAway, EngineClient, EngineError

REQUEST = InfillRequest(client="c", document="d", head="x = ")
READY = Status(version="1", pid=1, state="ready", model="m")


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient("m")
    yield client
    await client.aclose()


def program(folder: Path, script: str) -> str:
    """An executable that stands for the Python with the engine in it."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


async def stream(writer: asyncio.StreamWriter, *pieces: bytes, end: bool = True) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for piece in pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    if end:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def events_of(client: EngineClient) -> list[Event]:
    return [event async for event in client.infill(REQUEST)]


async def test_events_arrive_in_order_however_the_lines_are_cut(engine: EngineClient) -> None:
    expected: list[Event] = [Candidate("é"), Candidate("é1"), Final("end")]
    wire = b"".join(protocol.encode(event) + b"\n" for event in expected)

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stream(writer, *(wire[i : i + 3] for i in range(0, len(wire), 3)))

    async with listening(answer) as peer:
        assert await events_of(engine) == expected
        assert protocol.decode_request(peer.bodies[0]) == REQUEST


async def test_a_connection_is_used_again(engine: EngineClient) -> None:
    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stream(writer, protocol.encode(Final("end")) + b"\n")

    async with listening(answer) as peer:
        for _ in range(3):
            assert await events_of(engine) == [Final("end")]
        assert peer.connections == 1


async def test_nobody_listening_means_starting_at_once(engine: EngineClient) -> None:
    (final,) = await events_of(engine)
    assert isinstance(final, Final)
    assert final.reason == "starting"
    assert await engine.status() is None


async def test_a_stale_socket_file_means_starting_too(engine: EngineClient) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(protocol.socket_path("m")))
    assert [event.reason for event in await events_of(engine) if isinstance(event, Final)] == ["starting"]


@pytest.mark.parametrize("rest", [b"", b'{"type":"fin'])
async def test_an_engine_that_dies_in_mid_answer_ends_in_an_error(engine: EngineClient, rest: bytes) -> None:
    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stream(writer, protocol.encode(Candidate("x")) + b"\n" + rest, end=False)
        writer.close()

    async with listening(answer):
        candidate, final = await events_of(engine)
    assert candidate == Candidate("x")
    assert isinstance(final, Final)
    assert final.reason == "error"
    assert "middle of an answer" in final.message


@pytest.mark.parametrize("sent", [None, b"", b'{"type":"can'])
async def test_an_engine_that_is_gone_before_it_said_anything_is_not_running(
    engine: EngineClient, sent: bytes | None
) -> None:
    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/v1/status":
            await plain(writer, protocol.encode(READY))
            return
        if sent is not None:
            await stream(writer, *[sent] if sent else [], end=False)
        writer.close()

    async with listening(answer) as peer:
        assert await engine.status() == READY
        (final,) = await events_of(engine)
        assert peer.connections == 1
    assert isinstance(final, Final)
    assert final.reason == "starting"


async def test_lines_that_are_no_events_end_in_an_error(engine: EngineClient) -> None:
    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stream(writer, b"hello\n")

    async with listening(answer):
        (final,) = await events_of(engine)
    assert isinstance(final, Final)
    assert final.reason == "error"
    assert "not an event" in final.message


async def test_a_refusal_is_given_in_the_engines_words(engine: EngineClient) -> None:
    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await plain(writer, b'{"error":"max_lines must be at least 1"}', "400 Bad Request")

    async with listening(answer):
        assert await events_of(engine) == [Final("error", "max_lines must be at least 1")]


async def test_a_hanging_engine_is_not_waited_for(engine: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "GRACE_S", 0.01)
    request = msgspec.structs.replace(REQUEST, deadline_ms=10)

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with listening(answer):
        (final,) = [event async for event in engine.infill(request)]
    assert isinstance(final, Final)
    assert (final.reason, final.message) == ("starting", "the engine did not answer in time")


async def test_an_engine_that_hangs_in_mid_answer_is_given_up_by_the_deadline(engine: EngineClient) -> None:
    """Each frame starts the wait for the next one anew, but not the deadline."""
    request = msgspec.structs.replace(REQUEST, deadline_ms=10)
    candidate = protocol.encode(Candidate("x")) + b"\n"

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stream(writer, candidate, end=False)
        while True:
            await asyncio.sleep(0.1)
            writer.write(b"%x\r\n%b\r\n" % (len(candidate), candidate))
            await writer.drain()

    async with listening(answer), asyncio.timeout(5):
        *candidates, final = [event async for event in engine.infill(request)]
    assert candidates
    assert set(candidates) == {Candidate("x")}
    assert final == Final("starting", "the engine did not answer in time")


async def test_many_fills_at_once_leave_the_engine_within_reach(engine: EngineClient) -> None:
    go_on = asyncio.Event()

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/v1/status":
            await plain(writer, protocol.encode(READY))
            return
        await go_on.wait()
        await stream(writer, protocol.encode(Final("end")) + b"\n")

    async with listening(answer) as peer:
        fills = [asyncio.create_task(events_of(engine)) for _ in range(16)]
        await until(lambda: peer.connections == 16)
        assert await engine.status() == READY
        go_on.set()
        assert all([await fill == [Final("end")] for fill in fills])


async def test_cancelling_closes_the_stream_and_leaves_the_client_usable(engine: EngineClient) -> None:
    closed = asyncio.Semaphore(0)
    started = asyncio.Semaphore(0)

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if b'"hang"' in body:
            await stream(writer, protocol.encode(Candidate("x")) + b"\n", end=False)
            started.release()
            with contextlib.suppress(ConnectionError):
                while True:  # Until the other side has closed: nothing else ends this.
                    writer.write(b"1\r\n\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.001)
            closed.release()
            raise ConnectionError
        await stream(writer, protocol.encode(Final("end")) + b"\n")

    async def consume() -> None:
        async for _ in engine.infill(msgspec.structs.replace(REQUEST, document="hang")):
            pass

    async with listening(answer):
        for _ in range(30):  # More than the pool has connections.
            task = asyncio.create_task(consume())
            await started.acquire()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await closed.acquire()
        assert await events_of(engine) == [Final("end")]


async def test_a_workspace_is_told_and_sent_in_parts(engine: EngineClient) -> None:
    documents = [Document(name, "1", text) for name, text in (("a", "x" * BATCH), ("b", "y"), ("c", "é"))]
    documents.insert(1, Document("long", "1", "x" * (MAX_DOCUMENT + 1)))

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        paths = ("b",) if b'"manifest"' in body or b'"y"' in body else ()
        await plain(writer, protocol.encode(Paths(paths)))

    async with listening(answer) as peer:
        assert await engine.sync("a b/c", {"b": "2"}) == ["b"]
        assert await engine.put("w", iter(documents)) == ["long", "b"]
        await engine.remove("w", ["a", "b"])
        await engine.forget("w")
        assert peer.targets == [
            "/v1/workspaces/a%20b%2fc/documents",
            *["/v1/workspaces/w/documents"] * 3,
            "/v1/workspaces/w",
        ]
        manifest, first, second, gone, _ = peer.bodies
        assert protocol.decode_documents(manifest) == Manifest({"b": "2"})
        assert protocol.decode_documents(first) == Documents((documents[0],))
        assert protocol.decode_documents(second) == Documents(tuple(documents[2:]))
        assert protocol.decode_paths(gone) == Paths(("a", "b"))


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        ("503 Service Unavailable", b'{"error":"the engine is starting"}', EngineAway, "starting"),
        ("413 Content Too Large", b'{"error":"too long"}', EngineError, "too long"),
        ("200 OK", b"[]", EngineError, "no list of paths"),
    ],
)
async def test_why_a_workspace_cannot_be_told_is_raised(
    engine: EngineClient, status: str, body: bytes, error: type[EngineError], says: str
) -> None:
    async def answer(target: str, _: bytes, writer: asyncio.StreamWriter) -> None:
        await plain(writer, body, status)

    with pytest.raises(EngineAway, match="not running"):
        await engine.sync("w", {})
    async with listening(answer):
        with pytest.raises(EngineError, match=says) as raised:
            await engine.sync("w", {})
    assert type(raised.value) is error


async def test_nothing_is_sent_to_another_users_process(engine: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "peer_uid", lambda connection: os.getuid() + 1)

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        raise AssertionError

    async with listening(answer) as peer:
        (final,) = await events_of(engine)
        with pytest.raises(EngineError, match=f"user {os.getuid() + 1}"):
            await engine.status()
        assert peer.bodies == []
    assert isinstance(final, Final)
    assert final.reason == "error"
    assert f"user {os.getuid() + 1}" in final.message


async def test_a_runtime_folder_open_to_others_is_refused_in_one_line(home: Path) -> None:
    (home / "run").mkdir(mode=0o755)
    (final,) = await events_of(EngineClient("m"))
    assert isinstance(final, Final)
    assert final.reason == "error"
    assert "mode 0700" in final.message


async def test_a_newer_engine_is_left_alone(engine: EngineClient) -> None:
    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await plain(writer, protocol.encode(msgspec.structs.replace(READY, protocol=PROTOCOL + 1)))

    async with listening(answer) as peer:
        with pytest.raises(EngineError, match=r"newer than infill-lsp.*`infill-engine stop --model m`"):
            await anext(engine.bring_up())
        assert "/v1/stop" not in peer.targets


async def test_an_older_engine_is_asked_to_stop_and_replaced(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All that is sure of an older engine's status is the protocol number.
    now = [b'{"protocol":%d}' % (PROTOCOL - 1)]

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/v1/stop":
            now[0] = protocol.encode(READY)
        await plain(writer, now[0])

    async with listening(answer) as peer:
        assert [status async for status in engine.bring_up()] == [READY]
        assert peer.targets.count("/v1/stop") == 1


async def test_bring_up_follows_the_engine_until_it_is_ready(engine: EngineClient) -> None:
    fetching = msgspec.structs.replace(READY, state="fetching", progress=0.5)
    answers = [msgspec.structs.replace(READY, state="starting"), fetching, READY]

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await plain(writer, protocol.encode(answers.pop(0)))

    async with listening(answer):
        assert [status.state async for status in engine.bring_up()] == ["starting", "fetching", "ready"]


async def test_a_start_that_fails_is_told_in_its_last_words(home: Path) -> None:
    client = EngineClient("m", program(home, "echo first; echo 'No module named infill_engine' >&2; exit 1"))
    with pytest.raises(EngineError, match=r"did not start: No module named infill_engine \(run"):
        await anext(client.bring_up())
    log = next((home / "cache" / "logs").iterdir())
    assert log.read_text() == "first\nNo module named infill_engine\n"


async def test_an_engine_that_is_kept_busy_while_it_starts_is_waited_for(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "STATUS_S", 0.05)
    asked = 0

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked < 4:
            await asyncio.sleep(5)  # Longer than the client listens.
        else:
            await plain(writer, protocol.encode(READY))

    async with listening(answer), asyncio.timeout(10):
        assert [status.state async for status in engine.bring_up()] == ["ready"]
    assert asked == 4


async def test_an_engine_that_hangs_is_told_of_in_the_end(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "STATUS_S", 0.05)
    monkeypatch.setattr(client_module, "START_S", 0.2)

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async with listening(answer), asyncio.timeout(10):
        with pytest.raises(EngineError, match="does not answer: end it with `infill-engine stop --model m`"):
            [status async for status in engine.bring_up()]


async def test_a_cache_that_cannot_be_written_does_not_stop_the_start(home: Path) -> None:
    (home / "cache").write_text("a file where the folder should be")
    client = EngineClient("m", program(home, "echo boom; exit 1"))
    with pytest.raises(EngineError, match="did not start: boom"):
        await anext(client.bring_up())


async def test_a_missing_python_is_named(home: Path) -> None:
    with pytest.raises(EngineError, match=r"no program /nowhere/python: set infill\.engine\.python"):
        await anext(EngineClient("m", "/nowhere/python").bring_up())


async def test_a_program_that_cannot_be_run_is_one_line(home: Path) -> None:
    (home / "python").write_bytes(b"\x7fELF no more")
    (home / "python").chmod(0o700)
    with pytest.raises(EngineError, match="cannot be started"):
        await anext(EngineClient("m", str(home / "python")).bring_up())


async def test_the_engine_is_started_detached_and_away_from_the_editors_folder(home: Path) -> None:
    script = 'echo "$@"; pwd; ps -o sid= -p $$; read line || echo closed; exit 1'
    client = EngineClient("m", program(home, script))
    with pytest.raises(EngineError, match="closed"):
        await anext(client.bring_up())
    arguments, folder, session, _ = next((home / "cache" / "logs").iterdir()).read_text().splitlines()
    assert arguments == "-m infill_engine serve --model m"
    assert folder == "/"
    assert int(session) != os.getsid(0)


async def test_starts_are_limited_and_back_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    waits: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += seconds
        await real_sleep(0.001)

    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(sleep=sleep))
    client = EngineClient("m", program(home, "echo x >> ${0%/*}/starts; echo boom >&2; exit 1"))
    for _ in range(4):
        with pytest.raises(EngineError, match="boom"):
            await anext(client.bring_up())
    with pytest.raises(EngineError, match="4 starts in 3 minutes"):
        await anext(client.bring_up())
    assert (home / "starts").read_text() == "x\n" * 4
    assert [round(wait) for wait in waits if wait > client_module.POLL_S] == [1, 4, 16]
    clock[0] += client_module.START_WINDOW_S
    with pytest.raises(EngineError, match="boom"):
        await anext(client.bring_up())


async def test_an_engine_that_met_another_one_is_no_failure(home: Path) -> None:
    os.mkfifo(home / "tried")
    client = EngineClient("m", program(home, "echo already served; echo > ${0%/*}/tried; exit 0"))

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await plain(writer, protocol.encode(READY))

    async def states() -> list[str]:
        return [status.state async for status in client.bring_up()]

    following = asyncio.create_task(states())
    await asyncio.to_thread((home / "tried").read_text)
    async with listening(answer):
        assert await following == ["ready"]
        await client.aclose()
