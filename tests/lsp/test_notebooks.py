"""Notebooks, other documents that are no files, and editors that draw nothing inline, by the server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from editor import Editor, until
from infill_engine.protocol import Event, Final, InfillRequest
from lsprotocol import types
from scripted_engine import Scripted, from_table, served, sure

from infill_lsp import notebooks
from infill_lsp.cache import MOST
from infill_lsp.server import InfillServer

NOTEBOOK = "file:///project/book.ipynb"
CODE, MARKUP = types.NotebookCellKind.Code, types.NotebookCellKind.Markup


@pytest.fixture
async def engine() -> Scripted:
    return Scripted(from_table({"return ": "first + second", "= ": "1"}))


@pytest.fixture
async def both(home: Path, engine: Scripted) -> AsyncIterator[tuple[Editor, InfillServer]]:
    async with served(engine) as (editor, server):
        await editor.initialize(options={"model": "m"})
        yield editor, server


def uri(name: str) -> str:
    return f"vscode-notebook-cell:/project/book.ipynb#{name}"


def cell(name: str, kind: types.NotebookCellKind = CODE) -> types.NotebookCell:
    return types.NotebookCell(kind, uri(name))


def item(name: str, text: str, language: str = "python") -> types.TextDocumentItem:
    return types.TextDocumentItem(uri(name), language, 1, text)


def open_book(editor: Editor) -> None:
    """An explanation, code, code of another language, code, code."""
    cells = [cell("m", MARKUP), cell("a"), cell("s"), cell("b"), cell("c")]
    book = types.NotebookDocument(NOTEBOOK, "jupyter-notebook", 1, cells)
    texts = [
        item("m", "# Load\n\nall of it", "markdown"),
        item("a", "import os\r\nx = os.name"),
        item("s", "ls", "shellscript"),
        item("b", "return "),
        item("c", "y = 2"),
    ]
    editor.client.notebook_document_did_open(types.DidOpenNotebookDocumentParams(book, texts))
    editor.uri = uri("b")


def change(editor: Editor, cells: types.NotebookDocumentCellChanges) -> None:
    event = types.NotebookDocumentChangeEvent(cells=cells)
    book = types.VersionedNotebookDocumentIdentifier(2, NOTEBOOK)
    editor.client.notebook_document_did_change(types.DidChangeNotebookDocumentParams(book, event))


def splice(editor: Editor, start: int, removed: int, cells: Sequence[types.NotebookCell] = (), **docs: object) -> None:
    array = types.NotebookCellArrayChange(start, removed, list(cells))
    structure = types.NotebookDocumentCellChangeStructure(array, **docs)  # type: ignore[arg-type]
    change(editor, types.NotebookDocumentCellChanges(structure=structure))


async def around(editor: Editor, engine: Scripted, line: int = 0, character: int = 7) -> tuple[str, str]:
    """What the engine is shown before and after the cell's own text."""
    engine.requests.clear()
    await editor.complete(line, character)
    request = engine.requests[0]
    return request.prefix, request.suffix


BEFORE = "# # Load\n#\n# all of it\n\nimport os\nx = os.name\n\n"


async def test_all_cells_are_read_around_the_one_that_is_written_in(
    both: tuple[Editor, InfillServer], engine: Scripted
) -> None:
    editor, _ = both
    open_book(editor)
    assert await around(editor, engine) == (BEFORE, "\n\ny = 2")
    assert engine.requests[0].head == "return "


async def test_an_explanation_sees_code_as_blocks(both: tuple[Editor, InfillServer], engine: Scripted) -> None:
    editor, _ = both
    open_book(editor)
    editor.uri = uri("m")
    _, suffix = await around(editor, engine, 2, 9)
    assert suffix.startswith("\n\n```python\nimport os\nx = os.name\n```\n\n```shellscript\nls\n```")


async def test_cells_move_come_change_and_go(both: tuple[Editor, InfillServer], engine: Scripted) -> None:
    editor, server = both
    open_book(editor)
    splice(editor, 4, 1)  # c moves
    splice(editor, 0, 0, [cell("c")])
    assert await around(editor, engine) == ("y = 2\n\n" + BEFORE, "")
    splice(editor, 5, 0, [cell("d")], did_open=[item("d", "z = 3")])
    assert (await around(editor, engine))[1] == "\n\nz = 3"
    where = types.Range(types.Position(0, 4), types.Position(0, 5))
    content = types.NotebookDocumentCellContentChanges(
        types.VersionedTextDocumentIdentifier(2, uri("d")), [types.TextDocumentContentChangePartial(where, "4")]
    )
    change(editor, types.NotebookDocumentCellChanges(text_content=[content]))
    assert (await around(editor, engine))[1] == "\n\nz = 4"
    change(editor, types.NotebookDocumentCellChanges(data=[cell("d", MARKUP)]))
    splice(editor, 0, 3, did_close=[types.TextDocumentIdentifier(uri(name)) for name in "cma"])
    assert await around(editor, engine) == ("", "\n\nz = 4")
    splice(editor, 0, 1, [cell("s")], did_close=[], did_open=[item("s", "now = 1")])  # of another language now
    assert (await around(editor, engine))[0] == "now = 1\n\n"
    again = [types.TextDocumentIdentifier(uri("s"))]
    splice(editor, 0, 1, [cell("s")], did_close=again, did_open=[item("s", "then = 2")])
    assert (await around(editor, engine))[0] == "then = 2\n\n"
    params = types.DidCloseNotebookDocumentParams(types.NotebookDocumentIdentifier(NOTEBOOK), [])
    editor.client.notebook_document_did_close(params)
    assert await editor.complete(0, 7) == []
    assert server.documents == server.notebooks._notebook == server.notebooks._cells == {}


async def test_an_edit_of_another_cell_asks_anew_and_leaves_the_waiting_alone(
    both: tuple[Editor, InfillServer], engine: Scripted
) -> None:
    editor, _ = both
    open_book(editor)
    assert await editor.complete(0, 7, automatic=True)
    assert await editor.complete(0, 7, automatic=True)
    assert len(engine.asked("typed")) == 1
    editor.uri = uri("c")
    editor.edit((0, 4), (0, 5), "3")
    editor.uri = uri("b")
    assert await editor.complete(0, 7, automatic=True)
    assert len(engine.asked("typed")) == 2
    assert engine.requests[-1].document == engine.requests[0].document  # What is encoded of the others serves all.


async def test_of_many_cells_the_nearest_are_read(
    both: tuple[Editor, InfillServer], engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor, _ = both
    monkeypatch.setattr(notebooks, "MAX_PREFIX", 30)
    monkeypatch.setattr(notebooks, "MAX_SUFFIX", 5)
    open_book(editor)
    assert await around(editor, engine) == ("import os\nx = os.name\n\n", "")


async def test_nonsense_about_notebooks_is_no_fault(both: tuple[Editor, InfillServer], engine: Scripted) -> None:
    editor, _ = both
    splice(editor, 7, 9, [cell("x")])
    open_book(editor)
    splice(editor, 99, 99)
    splice(editor, 0, 0, [cell("nowhere")])
    editor.tell("notebookDocument/didChange", {"notebookDocument": {"uri": NOTEBOOK, "version": 3}, "change": {}})
    editor.tell("notebookDocument/didSave", {"notebookDocument": {"uri": NOTEBOOK}})
    editor.tell("notebookDocument/didOpen", {})
    assert await around(editor, engine) == (BEFORE, "\n\ny = 2")
    assert editor.messages == []


@pytest.mark.parametrize("where", ["untitled:Untitled-1", "vscode-remote://ssh-remote+host/home/a.py"])
async def test_documents_that_are_no_files_here_are_completed(both: tuple[Editor, InfillServer], where: str) -> None:
    editor, _ = both
    editor.uri = where
    editor.open("return \n")
    assert (await editor.complete(0, 7, automatic=True) or [])[0].insert_text == "first + second"


@pytest.mark.parametrize("where", ["output:task", "git:/a.py?HEAD", "vscode-chat:1"])
async def test_what_nobody_writes_code_in_is_not(both: tuple[Editor, InfillServer], where: str) -> None:
    editor, _ = both
    editor.uri = where
    editor.open("return \n")
    assert await editor.complete(0, 7) == []
    assert "scheme" in (await editor.ask("infill/status", {"textDocument": {"uri": where}})).message


async def test_much_is_open_and_changes_often_and_little_is_kept(
    both: tuple[Editor, InfillServer], engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infill_lsp.documents.MOST_PARSED", 200)
    editor, server = both
    for i in range(200):
        editor.uri = f"file:///project/{i}.py"
        editor.open(f"a = {i}\nreturn \n")
        assert await editor.complete(1, 7, automatic=True)
    for i in range(1000):
        editor.edit((0, 4), (0, 5), str(i % 10))
    assert await editor.complete(1, 7, automatic=True)
    assert len(server.documents) == 200
    assert len(server.suggestions._cache._entries) <= MOST
    assert len(server.suggestions._ahead) <= 200
    assert sum(bool(document._syntaxes) for document in server.documents.values()) < 20
    assert all(question.snapshot.tree is None for question in server.suggestions._newest.values())
    for i in range(200):
        editor.uri = f"file:///project/{i}.py"
        editor.close()
    assert await editor.complete(1, 7) == []
    assert server.documents == {}
    assert server._trees is not None
    assert not server._trees._used
    assert not server.warmer._hints
    assert server.suggestions._newest == server.suggestions._answers == server.suggestions._ahead == {}
    assert not server.suggestions._cache._entries


# Editors without inline completion.

MENU = types.TextDocumentClientCapabilities(
    completion=types.CompletionClientCapabilities(
        completion_item=types.ClientCompletionItemOptions(
            insert_text_mode_support=types.ClientCompletionItemInsertTextModeOptions([types.InsertTextMode.AsIs])
        )
    )
)


async def menu(editor: Editor, line: int, character: int) -> list[types.CompletionItem]:
    where = types.CompletionParams(types.TextDocumentIdentifier(editor.uri), types.Position(line, character))
    result = await editor.client.text_document_completion_async(where)
    assert isinstance(result, types.CompletionList)
    assert result.is_incomplete
    return list(result.items)


async def test_without_inline_completion_the_text_is_one_entry_of_the_menu(home: Path, engine: Scripted) -> None:
    engine.write = from_table({"if a:\n": "    pass\n    more()", "𝔘 = fi": "rst(a)"})
    async with served(engine) as (editor, _):
        result = await editor.initialize(options={"model": "m"}, text_document=MENU)
        assert result.capabilities.completion_provider is not None
        editor.open("𝔘 = fi\nif a:\n")
        (entry,) = await menu(editor, 0, 7)
        span = types.Range(types.Position(0, 5), types.Position(0, 7))
        assert entry.text_edit == types.TextEdit(span, "first(a)")
        assert (entry.label, entry.filter_text) == ("first(a)", "first(a)")
        (entry,) = await menu(editor, 2, 0)
        assert entry.label == "pass …"
        assert entry.text_edit is not None
        assert entry.text_edit.new_text == "    pass\n    more()"
        assert entry.insert_text_mode == types.InsertTextMode.AsIs
        assert await menu(editor, 1, 0) == []
        editor.configure({"infill": {"model": "m", "completion": {"fallback": "off"}}})
        while await menu(editor, 0, 7):
            pass


async def test_an_editor_that_draws_inline_completions_has_nothing_in_its_menu(home: Path, engine: Scripted) -> None:
    inline = types.TextDocumentClientCapabilities(
        completion=MENU.completion, inline_completion=types.InlineCompletionClientCapabilities()
    )
    async with served(engine) as (editor, _):
        result = await editor.initialize(options={"model": "m"}, text_document=inline)
        assert result.capabilities.completion_provider is None


async def test_cells_are_filled_apart_and_see_one_another(both: tuple[Editor, InfillServer], engine: Scripted) -> None:
    editor, _ = both
    open_book(editor)
    for name, text in (("a", "def f():\n    ...\nx ="), ("c", "def g():\n    ...")):
        part = types.TextDocumentContentChangeWholeDocument(text)
        document = types.VersionedTextDocumentIdentifier(2, uri(name))
        content = types.NotebookDocumentCellContentChanges(document, [part])
        change(editor, types.NotebookDocumentCellChanges(text_content=[content]))
    engine.goes_on.clear()
    engine.write = lambda _: [sure("first"), Final("end")]

    async def fill(name: str) -> list[str]:
        document = {"uri": uri(name), "version": 2}
        answer = await editor.ask("infill/fill", {"textDocument": document, "ranges": [], "mode": "holes"})
        return [edit.newText for edit in answer.edits]

    both_cells = asyncio.gather(fill("a"), fill("c"))
    await until(lambda: len(engine.requests) == 2)
    engine.goes_on.set()
    assert await both_cells == [["first"], ["first"]]
    first, second = engine.requests
    assert first.document != second.document
    assert second.prefix == BEFORE.partition("import")[0] + "def f():\n    ...\nx =\n\nreturn \n\ndef g():\n"


async def test_a_cell_sees_snippets_of_the_notebooks_folder(
    home: Path, engine: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "shapes.py").write_text("def area_of_polygon(polygon):\n    return polygon.area\n")
    book, code = (project / "book.ipynb").as_uri(), f"vscode-notebook-cell:{project}/book.ipynb#a"
    async with served(engine) as (editor, _):
        await editor.initialize(options={"model": "m", "priming": {"enabled": True}}, folders=[project])
        cells = [types.NotebookCell(CODE, code)]
        text = "from shapes import area_of_polygon\nreturn area_of_polygon(polygon)"
        editor.client.notebook_document_did_open(
            types.DidOpenNotebookDocumentParams(
                types.NotebookDocument(book, "jupyter-notebook", 1, cells),
                [types.TextDocumentItem(code, "python", 1, text)],
            )
        )
        editor.uri = code
        async with asyncio.timeout(20):
            while not (engine.requests and engine.requests[-1].snippets):
                await editor.complete(1, 7, automatic=False)
                await asyncio.sleep(0.05)
    assert [one.path for one in engine.requests[-1].snippets] == ["shapes.py"]


async def test_what_is_prepared_in_one_cell_takes_no_answer_from_another(
    both: tuple[Editor, InfillServer], engine: Scripted
) -> None:
    """To the engine a notebook is one document, in which the newest request ends the one before it."""
    editor, _ = both
    open_book(editor)

    def cut_short(request: InfillRequest) -> list[Event]:
        engine.goes_on.clear()  # What comes next is held.
        return [sure("first"), Final("deadline")]

    engine.write = cut_short
    assert await editor.complete(0, 7, automatic=True)
    await until(lambda: len(engine.asked("speculation")) == 1)
    (prepared,) = engine.asked("speculation")
    editor.uri = uri("c")
    asked = asyncio.create_task(editor.complete(0, 5, automatic=True))
    await until(lambda: prepared in engine.cancelled)
    await until(lambda: len(engine.requests) == 3)
    engine.write = from_table({"= 2": " + first"})
    engine.goes_on.set()
    assert await asked
    await until(lambda: len(engine.requests) > 3)
    assert all(request.head.startswith("y = 2") for request in engine.requests[2:])
