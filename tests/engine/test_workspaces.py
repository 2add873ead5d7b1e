"""The documents of workspaces on their way into the memory: the queue alone, then over HTTP and through restarts."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from infill_engine import workspace
from infill_engine import workspaces as module
from infill_engine.config import EngineConfig
from infill_engine.engine import Engine
from infill_engine.fake import VOCAB, FakeDenoiser
from infill_engine.memory import Memory
from infill_engine.protocol import (
    Candidate,
    Document,
    Documents,
    InfillRequest,
    Manifest,
    Paths,
    Remembered,
    decode_event,
    decode_status,
    encode,
)
from infill_engine.scheduler import Scheduler, Unavailable
from infill_engine.tokenizer import ByteCodec
from infill_engine.workspaces import Full, Workspaces
from scripted import ask, endless, wait_for
from service import Call, Service, serving
from test_remembering import TRUSTED


def document(path: str, text: str) -> Document:
    return Document(path, str(hash(text)), text)


def digested(workspaces: Workspaces) -> None:
    while workspaces.digest():
        pass


A, B, C = document("a.py", "box.width\n"), document("b.py", "box.size\n"), document("c.py", "box.area\n")
ALL = {one.path: one.hash for one in (A, B, C)}


@pytest.fixture
def some(tmp_path: Path) -> Any:
    workspaces = Workspaces(tmp_path, ByteCodec())
    yield workspaces
    workspaces.close()


def test_only_what_is_missing_or_changed_or_does_not_wait_is_wanted(some: Workspaces) -> None:
    assert some.sync("w", ALL) == ["a.py", "b.py", "c.py"]
    done = some.put("w", [A, B])
    assert some.sync("w", ALL) == ["c.py"]
    digested(some)
    assert done.result(0) == []
    assert some.sync("w", ALL) == ["c.py"]
    assert some.sync("w", {**ALL, "a.py": "changed"}) == ["a.py", "c.py"]
    assert some.sync("other", ALL) == ["a.py", "b.py", "c.py"]
    assert some.remembered.files == 2


def test_what_is_removed_or_replaced_while_it_waits_is_not_taken_in(some: Workspaces) -> None:
    done = some.put("w", [A, B, C])
    some.remove("w", ["a.py", "never there"])
    newer = document("b.py", "box.depth\n")
    replaced = some.put("w", [newer])
    digested(some)
    assert sorted(done.result(0)) == ["a.py", "b.py"]
    assert replaced.result(0) == []
    assert some.sync("w", {"b.py": newer.hash, "c.py": C.hash}) == []
    assert some.remembered.files == 2
    done = some.put("w", [A])
    some.sync("w", {"c.py": C.hash})
    assert done.result(0) == ["a.py"]
    assert some.remembered.files == 1


def test_a_long_document_is_taken_in_by_pieces(some: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIGEST_S", 0.0)
    done = some.put("w", [document("long", "line\n" * 50)])
    steps = 0
    while some.digest():
        steps += 1
        assert not done.done()
    assert steps >= 50
    assert done.result(0) == []


def test_one_document_that_cannot_be_taken_in_does_not_hold_up_the_others(
    some: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILE", 1000)
    done = some.put("w", [document("broken", "\ud800\n"), document("too long", "x\n" * 2000), A])
    digested(some)
    assert done.result(0) == ["broken", "too long"]
    assert some.remembered.files == 1


def test_more_than_there_is_room_for_is_refused(some: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 25)
    some.put("w", [A, B])
    with pytest.raises(Full, match="in a moment"):
        some.put("w", [C])
    digested(some)
    some.put("w", [C])


def test_what_was_just_taken_in_survives_a_restart(tmp_path: Path) -> None:
    first = Workspaces(tmp_path, ByteCodec())
    first.put("w", [A, B])
    digested(first)
    late = first.put("w", [C])
    first.close()
    assert late.result(0) == ["c.py"]
    second = Workspaces(tmp_path, ByteCodec())
    assert second.sync("w", ALL) == ["c.py"]
    second.remove("w", ["a.py"])
    second.close()
    third = Workspaces(tmp_path, ByteCodec())
    assert third.sync("w", ALL) == ["a.py", "c.py"]
    third.close()
    other = Workspaces(tmp_path, ByteCodec(specials=4))  # another tokenizer's ids mean something else
    assert other.sync("w", ALL) == ["a.py", "b.py", "c.py"]
    other.close()


def test_a_workspace_that_is_forgotten_leaves_the_disk(tmp_path: Path) -> None:
    some = Workspaces(tmp_path, ByteCodec())
    some.put("w", [A])
    digested(some)
    some.close()
    assert any(b"\0w\0i\0d\0t\0h" in file.read_bytes() for file in tmp_path.rglob("*.segment"))
    some.forget("w")
    assert not list(tmp_path.rglob("*.segment"))
    assert some.sync("w", ALL) == ["a.py", "b.py", "c.py"]
    some.close()


def test_a_workspace_that_is_forgotten_while_another_engine_writes_leaves_the_disk_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "NOTED_S", 0.01)
    monkeypatch.setattr(workspace, "MERGED_S", 0.01)
    monkeypatch.setattr(workspace, "AGAIN_S", 0.01)
    some = Workspaces(tmp_path, ByteCodec())
    some.put("w", [A])
    digested(some)
    some.close()
    holds = lambda: any(b"\0w\0i\0d\0t\0h" in file.read_bytes() for file in tmp_path.rglob("*.segment"))
    (lock_path,) = tmp_path.rglob("lock")
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        some.forget("w")
        assert some.remembered.files == 0
        assert holds()
    wait_for(lambda: not holds(), 30.0)
    some.close()


def test_a_workspace_that_makes_room_is_closed_while_the_engine_goes_on(
    some: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 1)
    some.put("w", [A])
    digested(some)
    go_on, close = threading.Event(), workspace.Workspace.close

    def slow(of: workspace.Workspace) -> None:
        assert go_on.wait(30.0)
        close(of)

    monkeypatch.setattr(workspace.Workspace, "close", slow)
    assert some.sync("other", {}) == []  # does not wait
    threading.Timer(0.05, go_on.set).start()
    assert some.sync("w", {A.path: A.hash}) == []  # waits until what was new is on disk


def test_warming_up_leaves_nothing_behind(some: Workspaces, tmp_path: Path) -> None:
    some.warm_up()
    assert some.remembered == Remembered()
    assert not list(tmp_path.iterdir())


def test_of_many_workspaces_only_some_are_open(some: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 2)
    some.put("w0", [A])
    digested(some)
    for i in range(1, 4):
        some.of(f"w{i}")
    assert some.remembered.files == 0
    assert some.sync("w0", ALL) == ["b.py", "c.py"]


# Over HTTP.


def engine(home: Path) -> Callable[..., Engine]:
    """As a fake model is loaded, with a memory."""

    def load(report: object) -> Engine:
        config, codec = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16), ByteCodec()
        workspaces = Workspaces(home / "memory", codec)
        denoiser = FakeDenoiser({"box.": "?", "box.w": "idth"})
        return Engine("fake", denoiser, codec, config, memory=Memory(VOCAB, TRUSTED), workspaces=workspaces)

    return load


async def put(service: Service, message: Any, workspace: str = "w") -> list[str]:
    call = Call(service.app, "PUT", f"/v1/workspaces/{workspace}/documents", encode(message))
    assert await call.status() == 200
    paths: list[str] = (await call.json())["paths"]
    return paths


async def written(service: Service, workspace: str = "w", client: str = "c", path: str = "") -> str:
    request = InfillRequest(
        client=client, document="d", head="box.", workspace=workspace, path=path, deadline_ms=10_000
    )
    call = Call(service.app, "POST", "/v1/infill", encode(request))
    assert await call.status() == 200
    events = [decode_event(line) for line in (await call.body()).splitlines()]
    return [event.text for event in events if isinstance(event, Candidate)][-1]


async def test_a_client_tells_what_there_is_and_sends_what_is_wanted(tmp_path: Path) -> None:
    async with Service(engine(tmp_path)).running() as service:
        await service.ready()
        assert await put(service, Manifest(ALL)) == ["a.py", "b.py", "c.py"]
        assert await put(service, Documents((A,))) == []
        assert await put(service, Manifest({"a.py": A.hash})) == []
        assert await written(service) == "width"
        assert await written(service, path="a.py") == "?"
        assert await written(service, "another") == "?"
        status = Call(service.app, "GET", "/v1/status")
        assert await status.status() == 200
        memory = decode_status(await status.body()).memory
        assert (memory.files, memory.waiting) == (1, 0)
        assert memory.tokens > len(A.text)
        metrics = Call(service.app, "GET", "/metrics")
        assert await metrics.status() == 200
        exposed = (await metrics.body()).decode()
        assert "infill_memory_files 1.0" in exposed
        assert "a.py" not in exposed


async def test_what_is_deleted_is_known_no_more_once_that_is_answered(tmp_path: Path) -> None:
    async with Service(engine(tmp_path)).running() as service:
        await service.ready()
        await put(service, Documents((A,)))
        assert await written(service) == "width"
        call = Call(service.app, "DELETE", "/v1/workspaces/w/documents", encode(Paths(("a.py",))))
        assert await call.status() == 200
        assert await written(service) == "?"
        await put(service, Documents((B,)))
        call = Call(service.app, "DELETE", "/v1/workspaces/w")
        assert await call.status() == 200
        assert await written(service) == "?"


async def test_two_clients_share_a_workspace(tmp_path: Path) -> None:
    async with Service(engine(tmp_path)).running() as service:
        await service.ready()
        await put(service, Documents((A,)))
        assert await put(service, Manifest({"a.py": A.hash})) == []
        assert await written(service, client="one") == await written(service, client="other") == "width"


async def test_an_engine_that_starts_again_knows_what_it_was_sent(tmp_path: Path) -> None:
    async with Service(engine(tmp_path)).running() as service:
        await service.ready()
        await put(service, Documents((A, B)))
    async with Service(engine(tmp_path)).running() as service:
        await service.ready()
        assert await put(service, Manifest({"a.py": A.hash})) == []
        assert await written(service) == "width"


async def test_an_engine_that_was_let_go_is_loaded_for_it(tmp_path: Path) -> None:
    service = Service(engine(tmp_path))
    service.scheduler._release_s = 0.05
    async with service.running():
        await service.ready()
        await put(service, Documents((A,)))
        await service.until(lambda: service.scheduler.engine is None)
        assert await put(service, Manifest({"a.py": A.hash})) == []


async def test_an_engine_without_a_memory_wants_nothing() -> None:
    async with serving(endless).running() as service:
        await service.ready()
        assert await put(service, Manifest(ALL)) == []
        assert await put(service, Documents((A,))) == []


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "says"),
    [
        ("PUT", "w/documents", b"{}", 400, "neither"),
        ("PUT", "w/documents", b'{"type":"documents","documents":{}}', 400, "neither"),
        ("PUT", "w/documents", encode(Documents((Document("a", "1", "x" * (1 << 22)),))), 413, "in parts"),
        ("DELETE", "w/documents", b"", 400, "no list"),
    ],
)
async def test_what_does_not_fit_is_refused(method: str, target: str, body: bytes, status: int, says: str) -> None:
    async with serving(endless).running() as service:
        await service.ready()
        call = Call(service.app, method, f"/v1/workspaces/{target}", body)
        assert await call.status() == status
        assert says in (await call.json())["error"]


async def test_before_the_model_is_ready_the_client_is_told_to_come_again(tmp_path: Path) -> None:
    service = Service(engine(tmp_path))
    call = Call(service.app, "PUT", "/v1/workspaces/w/documents", encode(Manifest(ALL)))
    assert await call.status() == 503
    assert "starting" in (await call.json())["error"]


# In the scheduler.


class Fed:
    """Workspaces of which all that is known is how many pieces wait."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def digest(self) -> bool:
        self.left -= 1
        return self.left > 0


def scheduled(pieces: int) -> tuple[Scheduler, Fed, Any]:
    from scripted import ScriptedEngine

    scripted, fed = ScriptedEngine(endless), Fed(pieces)
    scripted.workspaces = fed  # type: ignore[assignment]
    scheduler = Scheduler(lambda report: scripted)
    scheduler.start()
    wait_for(lambda: scheduler.phase.state == "ready")
    return scheduler, fed, scripted


def test_documents_are_taken_in_when_nobody_waits_and_now_and_then_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from infill_engine import scheduler as scheduling

    monkeypatch.setattr(scheduling, "DIGEST_AFTER_S", 1000.0)
    scheduler, fed, _ = scheduled(3)
    scheduler.call(lambda engine: None).result(5)
    wait_for(lambda: fed.left == 0)
    wait_for(lambda: not scheduler._has_work)
    fed.left = 1000
    job = scheduler.submit(ask(deadline_ms=60_000), lambda event: None, time.monotonic())
    scheduler.call(lambda engine: None).result(5)
    turns = scheduler._rounds
    wait_for(lambda: scheduler._rounds > turns + 20)
    assert fed.left == 1000
    monkeypatch.setattr(scheduling, "DIGEST_AFTER_S", 0.0)
    wait_for(lambda: fed.left < 990)
    assert scheduler.idle_s() == 0
    scheduler.cancel(job)
    wait_for(lambda: fed.left == 0)
    scheduler.close()
    assert scheduler.join(5)


def test_what_the_engine_raises_is_the_callers() -> None:
    scheduler, _, _ = scheduled(0)

    def fail(engine: object) -> None:
        raise Full("too much")

    with pytest.raises(Full, match="too much"):
        scheduler.call(fail).result(5)
    assert scheduler.call(lambda engine: engine.name).result(5) == "scripted"
    scheduler.close()
    with pytest.raises(Unavailable, match="stopping"):
        scheduler.call(lambda engine: engine.name)


def test_an_engine_is_closed_once_before_it_is_let_go_and_at_the_end() -> None:
    from scripted import ScriptedEngine

    closed: list[int] = []

    class Closed(ScriptedEngine):
        def close(self) -> None:
            assert threading.current_thread().name == "infill-engine"
            closed.append(id(self))

    engines: Sequence[Closed] = [Closed(endless), Closed(endless)]
    fresh = iter(engines)
    scheduler = Scheduler(lambda report: next(fresh), release_s=0.02)
    scheduler.start()
    wait_for(lambda: closed == [id(engines[0])])
    scheduler._release_s = 60.0
    assert scheduler.call(lambda engine: id(engine)).result(5) == id(engines[1])
    scheduler.close()
    assert scheduler.join(5)
    assert closed == [id(one) for one in engines]
