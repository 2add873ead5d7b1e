"""The server as an editor meets it: a real process, and behind it a real engine with a model from a table."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from editor import Editor, engine_status, fake_model, ready, until
from infill_engine import catalogue, process, protocol
from infill_engine.protocol import Documents, Event, Final, InfillRequest, Manifest, Paths, Status
from lsprotocol import types
from peer import listening, plain
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.io_ import StdoutWriter

from infill_lsp.documents import Document
from infill_lsp.server import create_server
from infill_lsp.suggestions import Question

pytestmark = pytest.mark.process

TABLE = {"return ": "a + b", "x = [": "\n    1,\n]", "'é𝔘' + ": "name", "if a:\n": "    pass"}


@pytest.fixture(scope="module")
def quick(shared_home: Path) -> str:
    return fake_model(shared_home, "quick", TABLE)


@pytest.fixture(scope="module")
def slow(shared_home: Path) -> str:
    """Writes a character each 20 ms, for more than a second."""
    return fake_model(shared_home, "slow", {"return ": "a" * 64, "step_s": 0.02})


def patient(model: str) -> dict[str, object]:
    """Settings with which only the model's end or the editor ends a request."""
    return {"model": model, "deadline": {"invoked": 60_000}}


async def busy(model: str, live: int) -> Status:
    """Waits until the engine answers that many requests."""
    while (status := await engine_status(model)) is None or status.live != live:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return status


# Coming and going.


async def test_initialize_says_what_the_server_does(editor: Editor, home: Path) -> None:
    result = await editor.start("--stdio", options={"enabled": False})
    sync = result.capabilities.text_document_sync
    assert isinstance(sync, types.TextDocumentSyncOptions)
    assert sync.change == types.TextDocumentSyncKind.Incremental
    assert result.capabilities.inline_completion_provider is not None
    assert result.capabilities.notebook_document_sync is not None
    assert result.capabilities.completion_provider is None
    assert result.capabilities.execute_command_provider is not None
    assert all(name.startswith("infill.server.") for name in result.capabilities.execute_command_provider.commands)
    await editor.client.shutdown_async(None)
    editor.client.exit(None)
    assert await editor.exit_code() == 0


async def test_exit_without_shutdown_is_1(editor: Editor, home: Path) -> None:
    await editor.start(options={"enabled": False})
    editor.client.exit(None)
    assert await editor.exit_code() == 1


async def test_the_server_ends_when_its_stdin_closes(editor: Editor, home: Path) -> None:
    await editor.start(options={"enabled": False})
    editor.stdin.close()
    assert await editor.exit_code() == 0


async def test_the_server_ends_when_the_editor_is_killed(editor: Editor, home: Path) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    await editor.start(options={"enabled": False}, process_id=process.pid)
    process.kill()
    await process.wait()
    assert await editor.exit_code() == 0


async def test_an_editor_elsewhere_whose_process_is_not_here_is_served(editor: Editor, home: Path) -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    await editor.start(options={"enabled": False}, process_id=process.pid)
    editor.open("return ")
    assert await editor.complete(0, 7) == []


# What is offered.


async def test_the_completion_is_exact_and_carries_its_range(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.open("def f(a, b):\n    return \n")
    item = await editor.item(1, 11)
    assert item.insert_text == "a + b"
    assert item.range == types.Range(types.Position(1, 11), types.Position(1, 11))


@pytest.mark.parametrize(("encoding", "column"), [("utf-8", 11), ("utf-16", 8), ("utf-32", 7)])
async def test_columns_are_in_the_editors_units(editor: Editor, quick: str, encoding: str, column: int) -> None:
    """é has 2, 1 and 1 units, 𝔘 has 4, 2 and 1."""
    result = await editor.start(options={"model": await ready(quick)}, encodings=[encoding])
    assert result.capabilities.position_encoding == encoding
    editor.open("'é𝔘' + ")
    item = await editor.item(0, column)
    assert item.insert_text == "name"
    assert item.range == types.Range(types.Position(0, column), types.Position(0, column))


async def test_the_answer_is_for_the_edited_text(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.open("def f(a, b):\n    retrn 𝔘\x0c\u2028\n    pass\n")
    editor.edit((1, 7), (1, 7), "u")
    editor.edit((1, 11), (1, 13), "")
    editor.edit((1, 11), (2, 8), "")
    assert (await editor.item(1, 11)).insert_text == "a + b"


async def test_insertions_have_the_documents_line_ends(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.open("y = 1\r\nx = [\r\n")
    assert (await editor.item(1, 5)).insert_text == "\r\n    1,\r\n]"


async def test_the_selected_menu_entry_is_extended_in_its_range(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.open("def f(a, b):\n    re\n")
    where = types.Range(types.Position(1, 4), types.Position(1, 6))
    items = await editor.complete(1, 6, selected=types.SelectedCompletionInfo(where, "return "))
    assert items is not None
    assert [(item.insert_text, item.range) for item in items] == [("return a + b", where)]


async def test_nothing_is_offered_where_nothing_is_known_or_wanted(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick), "enabled": False})
    assert await editor.complete(0, 0) == []  # Not open.
    editor.open("return ")
    assert await editor.complete(0, 7) == []  # Switched off.
    editor.configure({"infill": {"model": quick, "enabled": True}})
    async with asyncio.timeout(20):
        while not await editor.complete(0, 7):  # noqa: ASYNC110 - settings take effect a moment later
            await asyncio.sleep(0.02)
    editor.edit((0, 0), (0, 7), "pass ")
    assert await editor.complete(0, 5) == []  # The model has nothing to say.


async def test_settings_of_others_leave_ours_alone(editor: Editor, quick: str) -> None:
    await editor.start(options={"infill": {"model": await ready(quick)}})
    editor.configure({"python": {"enabled": False}})
    editor.configure(None)
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert editor.messages == []


# Questions that are out of date.


async def test_a_cancelled_request_ends_in_the_engine_too(editor: Editor, slow: str) -> None:
    await editor.start(options=patient(await ready(slow)))
    editor.open("return ")
    request = asyncio.create_task(editor.complete(0, 7, msg_id="mine"))
    await busy(slow, 1)
    editor.client.cancel_request(types.CancelParams("mine"))
    with pytest.raises(JsonRpcException) as caught:
        await request
    assert caught.value.code == types.LSPErrorCodes.RequestCancelled
    assert caught.value.data is None
    await busy(slow, 0)
    assert (await editor.item(0, 7)).insert_text == "a" * 64
    assert editor.messages == []


async def test_a_newer_request_supersedes_the_older_of_its_document(editor: Editor, slow: str) -> None:
    await editor.start(options=patient(await ready(slow)))
    editor.open("return ")
    older = asyncio.create_task(editor.complete(0, 7))
    await busy(slow, 1)
    newer = asyncio.create_task(editor.complete(0, 7))
    assert await older is None
    assert not newer.done()
    items = await newer
    assert items is not None
    assert len(items) == 1


async def test_a_request_overtaken_by_an_edit_is_null(editor: Editor, slow: str) -> None:
    await editor.start(options=patient(await ready(slow)))
    editor.open("return ")
    request = asyncio.create_task(editor.complete(0, 7))
    await busy(slow, 1)
    editor.edit((0, 7), (0, 7), "b")
    assert await request is None
    await busy(slow, 0)


async def test_an_edit_in_the_same_packet_does_not_mix_with_the_request(editor: Editor, quick: str) -> None:
    """The position of a request counts in the text of its moment, also if the next edit has arrived already."""
    await editor.start(options={"model": await ready(quick)})
    editor.open("return ")
    request = asyncio.create_task(editor.complete(0, 7))
    await asyncio.sleep(0)  # It is on its way, and nothing can have been read of it yet.
    editor.edit((0, 0), (0, 0), "𝔘" * 9 + "\n")
    assert await request is None


# What goes wrong.


async def test_wrong_settings_are_shown_once_and_the_rest_is_used(editor: Editor, quick: str) -> None:
    options = {"model": await ready(quick), "maxLine": 3, "deadline": {"automatic": "soon"}}
    await editor.start(options=options)
    editor.configure({"infill": options})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    (message,) = editor.messages
    assert "infill.maxLine: no such setting; did you mean maxLines?" in message
    assert 'infill.deadline.automatic: got "soon"' in message


async def test_parameters_that_do_not_fit_get_an_error_without_a_traceback(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.open("return ")
    for params in [{}, {"textDocument": 3, "position": {"line": -1, "character": "x"}}, [1], "x", None]:
        with pytest.raises(JsonRpcException) as caught:
            await editor.ask(types.TEXT_DOCUMENT_INLINE_COMPLETION, params)
        assert caught.value.code == JsonRpcInvalidParams.CODE
        assert caught.value.data is None
        assert "\n" not in caught.value.message
    with pytest.raises(JsonRpcException, match="Method Not Found"):
        await editor.ask("infill/nothing", {})
    editor.tell(types.TEXT_DOCUMENT_DID_CHANGE, {"textDocument": {}})
    editor.tell(types.TEXT_DOCUMENT_DID_OPEN, None)
    editor.write(b"{]\xff!!")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert editor.messages == []


@pytest.mark.parametrize("method", [types.TEXT_DOCUMENT_INLINE_COMPLETION, "infill/why"])
async def test_a_fault_of_our_own_is_answered_without_internals(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A completion never fails: some editors show any error with each key."""
    server = create_server()
    out = io.BytesIO()
    server.protocol.set_writer(StdoutWriter(out), include_headers=False)
    monkeypatch.setattr(server, "snapshot", lambda uri, position: {}["secret"])
    where = {"textDocument": {"uri": "u"}, "position": {"line": 0, "character": 0}}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**where, "context": {"triggerKind": 1}}}
    text = json.dumps(message)
    server.protocol.handle_message(json.loads(text, object_hook=server.protocol.structure_message))
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    answer = json.loads(out.getvalue())
    if method == "infill/why":
        assert answer["error"] == {"code": -32603, "message": "a fault in infill-lsp: see its log"}
    else:
        assert answer["result"] == {"items": []}


async def test_a_change_of_a_document_that_is_not_open_is_no_fault(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.edit((0, 0), (0, 0), "x")
    editor.close()
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert editor.messages == []


async def test_an_engine_that_cannot_start_is_told_once_and_the_server_lives(editor: Editor, home: Path) -> None:
    await editor.start(options={"engine": {"python": "/nowhere/python"}})
    editor.open("return ")
    for _ in range(3):
        assert await editor.complete(0, 7) == []
    await editor.shown(1)
    assert editor.messages == ["no program /nowhere/python: set infill.engine.python to a Python interpreter"]


async def test_a_model_that_cannot_be_loaded_is_told_once(editor: Editor, home: Path) -> None:
    model = fake_model(home, "broken", {})
    (home / "broken.json").write_text("no json")
    await editor.start(options={"model": model})
    await editor.shown(1)
    editor.open("return ")
    assert await editor.complete(0, 7) == []
    (message,) = editor.messages
    assert "cannot read the fake model's table" in message


async def test_a_cold_start_answers_at_once_and_a_killed_engine_comes_back(editor: Editor, home: Path) -> None:
    model = fake_model(home, "slow", {"return ": "a" * 64, "step_s": 0.02})
    await editor.start(options=patient(model))
    editor.open("return ")
    assert await editor.complete(0, 7) == []
    await ready(model)

    request = asyncio.create_task(editor.complete(0, 7))
    os.kill((await busy(model, 1)).pid, signal.SIGKILL)
    assert await request is not None  # What was written by then, if anything.

    await ready(model)
    assert (await editor.item(0, 7)).insert_text == "a" * 64
    for bar in editor.client.progress_reports.values():
        assert isinstance(bar[0], types.WorkDoneProgressBegin)
        assert isinstance(bar[-1], types.WorkDoneProgressEnd)
    assert editor.client.progress_reports


@pytest.mark.parametrize("answers", [True, False])
async def test_an_editor_that_gives_no_progress_bar_gets_its_killed_engine_back(
    editor: Editor, home: Path, answers: bool
) -> None:
    async def create(params: types.WorkDoneProgressCreateParams) -> None:
        if answers:
            raise JsonRpcInvalidParams("no bars here")
        await over.wait()

    over = asyncio.Event()
    editor.client.protocol.fm.features[types.WINDOW_WORK_DONE_PROGRESS_CREATE] = create
    model = fake_model(home, "quick", TABLE)
    await editor.start(options=patient(model))
    editor.open("return ")
    os.kill((await busy(model, 0)).pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while await editor.complete(0, 7) == []:  # noqa: ASYNC110 - a person types on
            await asyncio.sleep(0.05)
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert not editor.client.progress_reports
    over.set()


async def test_an_idle_engine_that_was_killed_is_replaced_without_a_word(editor: Editor, home: Path) -> None:
    model = fake_model(home, "quick", TABLE)
    await editor.start(options=patient(await ready(model)))
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    os.kill((await busy(model, 0)).pid, signal.SIGKILL)
    editor.edit((0, 0), (0, 0), "y = 1\n")  # What was offered is known without an engine.
    assert await editor.complete(1, 7) == []
    await busy(model, 0)
    assert editor.messages == []


async def test_the_deadline_runs_from_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    async def infill(request: InfillRequest) -> AsyncIterator[Event]:
        sent.append(request.deadline_ms)
        yield Final("end")

    server = create_server()
    monkeypatch.setattr(server.engine, "infill", infill)
    monkeypatch.setattr(server, "settled", lambda: asyncio.sleep(0))
    snapshot = Document("file:///x", "python", 1, "return ").snapshot(0, 7, "utf-8")
    for spent_s in (1.0, 60.0):
        await server.suggestions.ask(Question(snapshot, "invoked", time.monotonic() - spent_s))
    assert 1500 < sent[0] <= 2000
    assert sent[1] == 1


@pytest.mark.parametrize(("name", "eol"), [("Visual Studio Code", "\r\n"), ("Neovim", "\n")])
async def test_line_ends_are_those_of_the_document_or_of_the_editors_buffers(
    editor: Editor, quick: str, name: str, eol: str
) -> None:
    await editor.start(options={"model": await ready(quick)}, name=name)
    editor.open("a = 1\r\nx = [\r\n")
    assert (await editor.item(1, 5)).insert_text == f"{eol}    1,{eol}]"


# The workspace.


class Remembering:
    """Answers for an engine, and remembers documents as one does."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.hashes: dict[str, str] = {}
        self.requests: list[InfillRequest] = []
        self.primed: list[InfillRequest] = []
        self.forgotten = False

    async def __call__(self, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await plain(writer, protocol.encode(self.answer(target, body)) + b"\n")

    def answer(self, target: str, body: bytes) -> Status | Final | Paths:
        if target == "/v1/status":
            return Status(version="1", pid=1, state="ready", model="m")
        if target == "/v1/infill":
            self.requests.append(protocol.decode_request(body))
            return Final("end")
        if target == "/v1/prime":
            self.primed.append(protocol.decode_request(body))
        elif not target.endswith("/documents"):
            self.forgotten = True
            self.drop(list(self.texts))
        elif not body.startswith(b'{"type"'):
            self.drop(protocol.decode_paths(body).paths)
        elif isinstance(given := protocol.decode_documents(body), Manifest):
            self.drop(self.texts.keys() - given.documents.keys())
            return Paths(tuple(path for path, hash in given.documents.items() if self.hashes.get(path) != hash))
        else:
            assert isinstance(given, Documents)
            self.texts |= {document.path: document.text for document in given.documents}
            self.hashes |= {document.path: document.hash for document in given.documents}
        return Paths(())

    def drop(self, paths: Iterable[str]) -> None:
        for path in list(paths):
            self.texts.pop(path, None)
            self.hashes.pop(path, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.py").write_text("a = 1\n")
    return tmp_path / "project"


async def test_the_engine_remembers_the_workspace_as_it_is(editor: Editor, home: Path, folder: Path) -> None:
    editor.uri = (folder / "b.py").as_uri()
    engine = Remembering()
    async with listening(engine):
        await editor.start(options={"model": "m"}, folders=[folder])
        editor.open("x = ")
        assert await editor.complete(0, 4) == []
        await until(lambda: engine.texts == {"a.py": "a = 1\n", "b.py": "x = "})
        assert await editor.complete(0, 4) == []
        request = engine.requests[-1]
        assert request.path == "b.py"
        assert request.workspace
        assert "project" not in request.workspace
        editor.edit((0, 4), (0, 4), "1\n")
        (folder / "a.py").unlink()
        await until(lambda: engine.texts == {"b.py": "x = 1\n"})
        editor.close()
        await until(lambda: engine.texts == {})
        await editor.client.shutdown_async(None)
        editor.client.exit(None)
        assert await editor.exit_code() == 0
    assert editor.messages == []


async def test_requests_carry_snippets_and_what_they_need_is_encoded_ahead(
    editor: Editor, home: Path, folder: Path
) -> None:
    text = "def area_of(width):\n    return width * width\n"
    (folder / "shape.py").write_text(text)
    editor.uri = (folder / "b.py").as_uri()
    engine = Remembering()
    async with listening(engine):
        await editor.start(options={"model": "m"}, folders=[folder])
        editor.open("from shape import area_of\n\nx = area_of(\n")
        await until(lambda: any(request.head == "" and request.prefix for request in engine.primed))  # was opened
        editor.edit((2, 4), (2, 12), "")
        editor.edit((2, 4), (2, 4), "area_of(")
        await until(lambda: engine.primed[-1].head == "x = area_of(")  # the cursor rests
        primed = engine.primed[-1]
        await editor.complete(2, 12)
        asked = engine.requests[-1]
        assert [(one.path, one.text) for one in asked.snippets] == [("shape.py", text.rstrip("\n"))]
        assert asked.snippets == primed.snippets
        assert (asked.client, asked.document, asked.workspace) == (primed.client, primed.document, primed.workspace)
    assert editor.messages == []


async def test_folders_come_and_go(editor: Editor, home: Path, folder: Path) -> None:
    engine = Remembering()
    async with listening(engine):
        await editor.start(options={"model": "m"}, folders=[])
        editor.uri = (folder / "b.py").as_uri()
        editor.open("x = ")
        assert await editor.complete(0, 4) == []
        assert (engine.requests[-1].workspace, engine.requests[-1].path) == ("", "")
        editor.change_folders(added=[folder])
        await until(lambda: engine.texts == {"a.py": "a = 1\n", "b.py": "x = "})
        editor.change_folders(removed=[folder])
        await until(lambda: engine.texts == {"a.py": "a = 1\n"})  # What is not saved is forgotten.
        assert await editor.complete(0, 4) == []
        assert engine.requests[-1].workspace == ""


async def test_without_priming_nothing_is_remembered(editor: Editor, home: Path, folder: Path) -> None:
    engine = Remembering()
    async with listening(engine):
        await editor.start(options={"model": "m", "priming": {"exclude": ["b.py"]}}, folders=[folder])
        editor.uri = (folder / "b.py").as_uri()
        editor.open("x = ")
        assert await editor.complete(0, 4) == []
        await until(lambda: engine.texts == {"a.py": "a = 1\n"})
        editor.configure({"infill": {"model": "m", "priming": {"enabled": False}}})
        await until(lambda: engine.forgotten)
        assert await editor.complete(0, 4) == []
        assert engine.requests[-1].workspace == ""
        assert engine.texts == {}


async def test_switched_off_nothing_is_indexed_nor_started(editor: Editor, home: Path, folder: Path) -> None:
    await editor.start(options={"model": "m", "enabled": False}, folders=[folder])
    editor.uri = (folder / "b.py").as_uri()
    editor.open("x = ")
    assert await editor.complete(0, 4) == []
    editor.configure({"infill": {"model": "m", "enabled": False, "priming": {"enabled": False}}})
    assert await editor.complete(0, 4) == []
    assert not (home / "cache").exists()
    assert not list((home / "run").glob("*"))


async def test_an_index_that_takes_its_time_shows_progress(editor: Editor, home: Path, folder: Path) -> None:
    for i in range(1_000):
        (folder / f"f{i}.py").write_text(f"def f{i}(x):\n    return x\n" * 10)
    async with listening(Remembering()):
        await editor.start(options={"model": "m"}, folders=[folder])
        bars = editor.client.progress_reports
        await until(lambda: any(bar and isinstance(bar[-1], types.WorkDoneProgressEnd) for bar in bars.values()))
    # What was written this moment is looked at again, which may give a second bar.
    assert {bar[0].message for bar in bars.values() if bar} == {"indexing project"}
    assert editor.messages == []


async def test_a_folder_that_is_not_indexed_is_told_once(
    editor: Editor, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    engine = Remembering()
    async with listening(engine):
        await editor.start(options={"model": "m"}, folders=[folder])
        await editor.shown(1)
        editor.configure({"infill": {"model": "m", "priming": {"exclude": ["x"]}}})
        editor.uri = (folder / "b.py").as_uri()
        editor.open("x = ")
        assert await editor.complete(0, 4) == []
    (message,) = editor.messages
    assert message == f"{folder} is too much to index: open a project's folder"
    assert engine.texts == {}


# Beyond LSP.


async def test_the_canvas_is_sent_to_an_editor_that_draws_it(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)}, canvas=True)
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert [frame.version for frame in editor.frames] == [1] * len(editor.frames)
    assert {frame.textDocument.uri for frame in editor.frames} == {editor.uri}
    assert "".join(slot.text for slot in editor.frames[-1].slots if slot.state == "committed") == "a + b"
    (timing,) = editor.timings
    assert timing.reason == "end"
    assert timing.steps >= len("a + b")
    assert timing.denoiseMs > 0


async def test_no_canvas_is_sent_unasked(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert editor.frames == editor.timings == []


async def test_the_canvas_is_sent_while_it_is_watched(editor: Editor, quick: str) -> None:
    await editor.start(options={"model": await ready(quick)})
    editor.tell("infill/watch", {"canvas": True})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    assert "".join(slot.text for slot in editor.frames[-1].slots if slot.state == "committed") == "a + b"
    editor.tell("infill/watch", {"canvas": False})
    editor.frames.clear()
    editor.edit((0, 0), (0, 0), "x = 1\n")
    assert (await editor.item(1, 7)).insert_text == "a + b"
    assert editor.frames == []


async def test_the_status_of_the_engine_can_be_asked_for(editor: Editor, home: Path, quick: str) -> None:
    model = fake_model(home, "other", TABLE)
    await editor.start(options={"model": model, "enabled": False})
    assert await editor.complete(0, 0) == []  # The settings have taken effect.
    status = await editor.client.protocol.send_request_async("infill/status", None)
    assert (status.state, status.model) == ("off", model)
    assert "infill.enabled" in status.message
    assert await engine_status(model) is None
    editor.configure({"infill": {"model": model, "enabled": True}})
    async with asyncio.timeout(60):
        while status.state != "ready":
            await asyncio.sleep(0.05)
            status = await editor.client.protocol.send_request_async("infill/status", {})
    assert (status.model, status.progress, status.folders) == (model, None, [])


async def test_another_model_is_told_of_and_answers(editor: Editor, home: Path) -> None:
    catalogue.choose(fake_model(home, "former", TABLE))
    other = fake_model(home, "other", {"return ": "c - d"})
    await ready("auto")
    await editor.client.start_io(sys.executable, "-m", "infill_lsp")
    await editor.initialize(declares={"infill": {"status": True}})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    await asyncio.to_thread(process.change, other, lambda message, progress: None)
    await until(lambda: editor.statuses[-1].model == other)
    assert editor.statuses[-1].state == "ready"
    assert (await editor.item(0, 7)).insert_text == "c - d"
    with pytest.raises(process.EngineError, match="goes on"):
        await asyncio.to_thread(process.change, "/nowhere", lambda message, progress: None)
    status = await editor.ask("infill/status", None)
    assert (status.state, status.model) == ("ready", other)
    assert status.message.startswith("/nowhere is not used: there is no model")
    process.stop("auto")


async def test_switched_off_the_model_is_given_back(editor: Editor, home: Path) -> None:
    model = fake_model(home, "given", TABLE)
    await editor.start(options={"model": await ready(model)})
    editor.open("return ")
    assert (await editor.item(0, 7)).insert_text == "a + b"
    editor.configure({"infill": {"model": model, "enabled": False}})
    async with asyncio.timeout(10):
        while "not in memory" not in (await busy(model, 0)).message:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)
    editor.configure({"infill": {"model": model, "enabled": True}})
    async with asyncio.timeout(20):
        while not await editor.complete(0, 7):  # noqa: ASYNC110 - settings take effect a moment later
            await asyncio.sleep(0.05)


async def test_over_tcp_one_editor_is_served_and_others_are_turned_away(editor: Editor, home: Path) -> None:
    command = [sys.executable, "-m", "infill_lsp", "--tcp"]
    server = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    assert server.stderr is not None
    match = re.search(rb"listening on 127\.0\.0\.1:(\d+)\n$", await server.stderr.readline())
    assert match
    port = int(match[1])
    late = await asyncio.create_subprocess_exec(*command, str(port), stderr=subprocess.PIPE)
    _, words = await late.communicate()
    assert late.returncode == 2
    assert words.count(b"\n") == 1
    assert words == b"infill-lsp: port %d of 127.0.0.1 is in use: choose another, or 0 for any free one\n" % port

    await editor.client.start_tcp("127.0.0.1", port)
    await editor.initialize(options={"enabled": False})
    second, _ = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(second.read(), 10) == b""
    editor.open("return ")
    assert await editor.complete(0, 7) == []
    editor.stdin.close()
    assert await asyncio.wait_for(server.wait(), 10) == 0


def test_wrong_usage_is_one_line() -> None:
    for arguments in (["--tcp", "99999"], ["--bogus"], ["--log-level", "loud"]):
        command = [sys.executable, "-m", "infill_lsp", *arguments]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1


def test_a_stdin_that_is_no_editor_is_one_line() -> None:
    command = [sys.executable, "-m", "infill_lsp"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "infill-lsp: stdin is no pipe: an editor starts this, see infill-lsp --help\n"


def test_a_reader_that_has_seen_enough_is_no_fault(home: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "infill_lsp", "settings"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=20)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")
