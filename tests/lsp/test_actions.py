"""Fill as an editor meets it: a real server process, and behind it a real engine with a model from a table."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from editor import Editor, engine_status, fake_model, ready
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from infill_lsp.actions import Answer, _edits
from infill_lsp.core import Filled
from infill_lsp.documents import Document, spans
from infill_lsp.items import Dialect

pytestmark = pytest.mark.process

TABLE = {"def f(a):\n    ": "return 2 * a", "    # sum\n    ": "return a"}


@pytest.fixture(scope="module")
def quick(shared_home: Path) -> str:
    return fake_model(shared_home, "fill", TABLE)


@pytest.fixture(scope="module")
def slow(shared_home: Path) -> str:
    """Writes a character each 20 ms, for more than a second."""
    return fake_model(shared_home, "slow-fill", {"return ": "a" * 64, "step_s": 0.02})


async def start(editor: Editor, model: str, versioned: bool = True, encodings: list[str] | None = None) -> list[Any]:
    """Starts the server; returns the edits that it will have applied, which `editor.takes` says yes or no to."""
    client, applied = editor.client, list[Any]()

    @client.feature(types.WORKSPACE_APPLY_EDIT)
    def apply(params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
        applied.append(params.edit)
        return types.ApplyWorkspaceEditResult(applied=len(applied) < 2)

    await client.start_io(sys.executable, "-m", "infill_lsp")
    await client.initialize_session(
        types.InitializeParams(
            process_id=os.getpid(),
            initialization_options={"model": await ready(model), "deadline": {"invoked": 20_000}},
            capabilities=types.ClientCapabilities(
                general=types.GeneralClientCapabilities(position_encodings=encodings),
                workspace=types.WorkspaceClientCapabilities(
                    apply_edit=True,
                    workspace_edit=types.WorkspaceEditClientCapabilities(document_changes=versioned),
                ),
                window=types.WindowClientCapabilities(work_done_progress=True),
            ),
        )
    )
    return applied


def range_of(start: tuple[int, int], end: tuple[int, int]) -> dict[str, Any]:
    return {
        "start": {"line": start[0], "character": start[1]},
        "end": {"line": end[0], "character": end[1]},
    }


async def fill(editor: Editor, mode: str = "holes", ranges: Sequence[Any] = (), **more: Any) -> Any:
    document = {"uri": editor.uri, "version": editor.version}
    return await editor.ask("infill/fill", {"textDocument": document, "ranges": [*ranges], "mode": mode, **more})


def texts(answer: Any) -> list[str]:
    return [edit.newText for edit in answer.edits]


async def actions(editor: Editor, start: tuple[int, int], end: tuple[int, int], only: Any = None) -> list[Any]:
    context = {"diagnostics": [], "only": only}
    params = {"textDocument": {"uri": editor.uri}, "range": range_of(start, end), "context": context}
    return list(await editor.ask("textDocument/codeAction", params))


async def run(editor: Editor, argument: Any) -> Any:
    return await editor.client.workspace_execute_command_async(
        types.ExecuteCommandParams("infill.server.fill", [argument])
    )


async def busy(model: str, live: bool) -> None:
    async with asyncio.timeout(20):
        while (status := await engine_status(model)) is None or bool(status.live) != live:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


HOLES = "def f(a):\n    ...\n\n\ndef g(a):\n    pass  # sum\n"


async def test_the_request_answers_with_edits_and_changes_nothing(editor: Editor, quick: str) -> None:
    applied = await start(editor, quick)
    editor.open(HOLES)
    answer = await fill(editor)
    assert answer.version == 1
    assert texts(answer) == ["return 2 * a", "# sum\n    return a"]
    first, second = (edit.range for edit in answer.edits)
    assert (first.start.line, first.start.character, first.end.character) == (1, 4, 7)
    assert (second.start.line, second.start.character, second.end.character) == (5, 4, 15)
    assert all(0 < edit.sure <= 1 for edit in answer.edits)
    assert applied == []
    answer = await fill(editor, "selection", [range_of((1, 0), (2, 0))])
    assert texts(answer) == ["return 2 * a"]
    answer = await fill(editor, "selection", [range_of((0, 0), (2, 0))], keep=[range_of((0, 0), (1, 0))])
    assert texts(answer) == ["return 2 * a"]


async def test_line_ends_are_the_documents(editor: Editor, quick: str) -> None:
    await start(editor, quick)
    editor.open(HOLES.replace("\n", "\r\n"))
    assert texts(await fill(editor)) == ["return 2 * a", "# sum\r\n    return a"]


async def test_the_progress_is_told_on_the_editors_token(editor: Editor, slow: str) -> None:
    await start(editor, slow)
    editor.open("return ???\n")
    editor.client.progress_reports["mine"] = []
    await fill(editor, workDoneToken="mine")
    reports = editor.client.progress_reports["mine"]
    assert reports[0].kind == "begin"
    assert reports[0].cancellable
    assert reports[-1].kind == "end"
    percentages = [report.percentage for report in reports[:-1]]
    assert percentages == sorted(percentages)
    assert percentages[-1] == 100


@pytest.mark.parametrize("by", ["request", "bar"])
async def test_cancelling_ends_it_in_the_engine_too(editor: Editor, slow: str, by: str) -> None:
    await start(editor, slow)
    editor.open("return ???\n" * 3)
    editor.client.progress_reports[7] = []
    params = {"textDocument": {"uri": editor.uri, "version": 1}, "ranges": [], "mode": "holes", "workDoneToken": 7}
    asked = asyncio.ensure_future(editor.client.protocol.send_request_async("infill/fill", params, "mine"))
    await busy(slow, True)
    if by == "request":
        editor.client.cancel_request(types.CancelParams("mine"))
    else:
        async with asyncio.timeout(20):
            while not editor.client.progress_reports[7]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        editor.client.window_work_done_progress_cancel(types.WorkDoneProgressCancelParams(7))
    with pytest.raises(JsonRpcException) as caught:
        await asked
    assert caught.value.code == types.LSPErrorCodes.RequestCancelled
    await busy(slow, False)
    assert editor.client.progress_reports[7][-1].kind == "end"
    assert editor.messages == []


async def test_a_document_that_moves_elsewhere_is_followed(editor: Editor, slow: str) -> None:
    await start(editor, slow)
    editor.open("import os\n\nreturn ???\n")
    asked = asyncio.ensure_future(fill(editor))
    await busy(slow, True)
    editor.edit((0, 0), (0, 0), "import re\n")
    answer = await asked
    assert answer.version == 2
    assert answer.edits[0].range.start.line == 3


async def test_a_place_that_changes_is_not_filled(editor: Editor, slow: str) -> None:
    await start(editor, slow)
    editor.open("return ???\n")
    asked = asyncio.ensure_future(fill(editor))
    await busy(slow, True)
    editor.edit((0, 0), (0, 0), " ")
    with pytest.raises(JsonRpcException) as caught:
        await asked
    assert caught.value.code == types.LSPErrorCodes.ContentModified
    await busy(slow, False)
    editor.version = 1  # What was meant is another text.
    with pytest.raises(JsonRpcException) as caught:
        await fill(editor)
    assert caught.value.code == types.LSPErrorCodes.ContentModified


@pytest.mark.parametrize("versioned", [True, False])
async def test_the_command_has_the_editor_apply_the_edits(editor: Editor, quick: str, versioned: bool) -> None:
    applied = await start(editor, quick, versioned)
    editor.open(HOLES)
    assert await run(editor, {"uri": editor.uri, "version": 1, "ranges": [], "mode": "holes"}) is None
    (edit,) = applied
    if versioned:
        (change,) = edit.document_changes
        assert (change.text_document.uri, change.text_document.version) == (editor.uri, 1)
        edits = change.edits
    else:
        edits = edit.changes[editor.uri]
    assert [one.new_text for one in edits] == ["return 2 * a", "# sum\n    return a"]
    assert editor.messages == []
    await run(editor, {"uri": editor.uri, "ranges": [], "mode": "holes"})  # The editor does not take this one.
    await editor.shown(1)
    assert editor.messages == ["Infill: the document changed where it was to be filled: ask again"]


async def test_what_cannot_be_filled_is_told(editor: Editor, quick: str) -> None:
    applied = await start(editor, quick)
    editor.open("y = 1\nz = ???\n")
    assert texts(await fill(editor, "selection")) == []
    assert texts(await fill(editor, "holes", [range_of((0, 0), (0, 0))])) == []
    assert texts(await fill(editor)) == []
    await run(editor, {"uri": editor.uri, "version": 0, "mode": "holes"})
    await editor.shown(4)
    assert editor.messages == [
        "Infill: there is nothing to fill: no text here",
        "Infill: there is nothing to fill: no hole here",
        "Infill: the model has nothing to write here",
        "Infill: the document changed where it was to be filled: ask again",
    ]
    assert applied == []


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"textDocument": {"uri": "file:///nowhere.py"}, "ranges": [], "mode": "holes"},
        {"textDocument": {"uri": "file:///project/module.py"}, "ranges": [], "mode": "none"},
        {"textDocument": {"uri": "file:///project/module.py"}, "ranges": [{"start": 1}], "mode": "holes"},
    ],
)
async def test_what_is_not_understood_is_one_line(editor: Editor, quick: str, params: Any) -> None:
    await start(editor, quick)
    editor.open("x = ???\n")
    with pytest.raises(JsonRpcException) as caught:
        await editor.ask("infill/fill", params)
    assert caught.value.code == -32602
    assert "\n" not in caught.value.message
    assert caught.value.data is None


async def test_code_actions_are_for_selections_and_holes_alone(editor: Editor, quick: str) -> None:
    applied = await start(editor, quick)
    editor.open(HOLES + "y = 1\n")
    assert await actions(editor, (6, 2), (6, 2)) == []
    assert await actions(editor, (2, 0), (3, 0)) == []
    assert await actions(editor, (1, 5), (1, 5), only=[types.CodeActionKind.QuickFix]) == []
    here, everywhere = await actions(editor, (1, 5), (1, 5), only=[types.CodeActionKind.Refactor])
    titles = [here["title"], everywhere["title"]]
    assert titles == ["Infill: fill this hole", "Infill: fill all 2 holes of the document"]
    assert here["kind"] == types.CodeActionKind.RefactorRewrite
    assert "edit" not in here
    await run(editor, here["command"]["arguments"][0])
    assert [edit.new_text for edit in applied[0].document_changes[0].edits] == ["return 2 * a"]
    titles = [action["title"] for action in await actions(editor, (0, 0), (6, 0))]
    assert titles == ["Infill: write the selection anew", "Infill: fill 2 holes"]


async def test_of_a_long_document_the_holes_are_not_counted_before_somebody_asks(editor: Editor, quick: str) -> None:
    await start(editor, quick)
    editor.open(HOLES + "y = 1\n" * 20_000)
    titles = [action["title"] for action in await actions(editor, (1, 5), (1, 5))]
    assert titles == ["Infill: fill this hole", "Infill: fill all holes of the document"]
    titles = [action["title"] for action in await actions(editor, (0, 0), (20_000, 0))]
    whole = ["Infill: fill the holes of the selection", "Infill: fill all holes of the document"]
    assert titles == ["Infill: write the selection anew", *whole]


async def test_in_a_secret_file_there_is_nothing_to_do(editor: Editor, quick: str) -> None:
    await start(editor, quick)
    editor.uri = "file:///project/.env"
    editor.open(HOLES)
    assert await actions(editor, (0, 0), (6, 0)) == []
    assert texts(await fill(editor)) == []
    assert editor.messages == ["Infill: .env may hold secrets"]


# In the editor's units.


def code_units(text: str, encoding: str) -> list[str]:
    """The text by code units: a character of several is followed by empty ones."""
    size = {"utf-8": lambda c: len(c.encode()), "utf-16": lambda c: len(c.encode("utf-16-le")) // 2}
    return [unit for c in text for unit in [c, *[""] * (size.get(encoding, lambda c: 1)(c) - 1)]]


TEXT = st.lists(st.sampled_from(["a", "é", "𝔘", " ", "\t", "\n", "\r\n", "\r", "\x0c", "\u2028"]), max_size=30).map(
    "".join
)


@settings(deadline=None)
@given(TEXT, st.sampled_from(["utf-8", "utf-16", "utf-32"]), st.text("ab\n", max_size=5), st.data())
def test_an_edit_replaces_what_was_meant_and_nothing_else(text: str, encoding: str, new: str, data: Any) -> None:
    """The client here is a strict one of its own: it counts lines and units by the specification."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    def place() -> types.Position:
        line = data.draw(st.integers(0, len(lines) - 1))
        characters = [len(code_units(lines[line][:end], encoding)) for end in range(len(lines[line]) + 1)]
        return types.Position(line, data.draw(st.sampled_from(characters)))

    start, end = sorted((place(), place()), key=lambda one: (one.line, one.character))
    snapshot = Document("file:///a.py", "python", 1, text).snapshot(0, 0, encoding)
    (span,) = spans(snapshot.lines, [types.Range(start, end)], encoding)
    server: Any = SimpleNamespace(dialect=Dialect(encoding))
    (edit,) = _edits(server, Answer(snapshot, [Filled(span, new, 1.0)]))
    assert edit.range == types.Range(start, end)
    assert edit.new_text.replace(snapshot.eol, "\n") == new
