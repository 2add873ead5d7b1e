"""What a test needs to be an editor, and to choose what the engine writes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from infill_engine.protocol import Status
from lsprotocol import types
from pytest_lsp.client import LanguageClient

from infill_lsp.client import EngineClient


def fake_model(home: Path, name: str, table: dict[str, Any]) -> str:
    """A model that writes what `table` says; stopped when the home goes."""
    path = home / f"{name}.json"
    path.write_text(json.dumps(table))
    return f"fake:{path}"


async def ready(model: str) -> str:
    """Waits until the engine of `model` can answer."""
    engine = EngineClient(model)
    states = [status.state async for status in engine.bring_up()]
    await engine.aclose()
    assert states[-1] == "ready"
    return model


async def engine_status(model: str) -> Status | None:
    engine = EngineClient(model)
    status = await engine.status()
    await engine.aclose()
    return status


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for what other threads or processes do."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.02)


class Editor:
    """An editor process as the server sees it, with one document."""

    def __init__(self, client: LanguageClient) -> None:
        self.client = client
        self.uri = "file:///project/module.py"
        self.version = 0
        #: What `infill/canvas`, `infill/timing`, `infill/status` and `infill/refresh` brought.
        self.frames: list[Any] = []
        self.timings: list[Any] = []
        self.statuses: list[Any] = []
        self.refreshes: list[Any] = []
        client.feature("infill/canvas")(lambda frame: self.frames.append(frame))
        client.feature("infill/timing")(lambda timing: self.timings.append(timing))
        client.feature("infill/status")(lambda status: self.statuses.append(status))
        client.feature("infill/refresh")(lambda refresh: self.refreshes.append(refresh))

    async def start(
        self,
        *arguments: str,
        options: object = None,
        encodings: list[str] | None = None,
        canvas: bool = False,
        process_id: int | None = None,
        name: str = "test",
        folders: Sequence[Path] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> types.InitializeResult:
        """Starts the server and shakes hands with it."""
        await self.client.start_io(sys.executable, "-m", "infill_lsp", *arguments)
        return await self.initialize(options, encodings, canvas, process_id, name, folders, settings=settings)

    async def initialize(
        self,
        options: object = None,
        encodings: list[str] | None = None,
        canvas: bool = False,
        process_id: int | None = None,
        name: str = "test",
        folders: Sequence[Path] | None = None,
        declares: object = None,
        text_document: types.TextDocumentClientCapabilities | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> types.InitializeResult:
        """declares: `experimental` capabilities beside `canvas`; text_document: what it can do, by default to draw
        inline completions; settings: those that it may be asked for, by the URI of a folder, "" for all others."""
        for scope, section in (settings or {}).items():
            self.client.set_configuration(section, section="infill", scope_uri=scope)
        inline = types.TextDocumentClientCapabilities(inline_completion=types.InlineCompletionClientCapabilities())
        return await self.client.initialize_session(
            types.InitializeParams(
                process_id=process_id or os.getpid(),
                client_info=types.ClientInfo(name),
                initialization_options=options,
                workspace_folders=None if folders is None else _folders(folders),
                capabilities=types.ClientCapabilities(
                    general=types.GeneralClientCapabilities(position_encodings=encodings),
                    window=types.WindowClientCapabilities(work_done_progress=True),
                    workspace=types.WorkspaceClientCapabilities(
                        configuration=settings is not None,
                        did_change_configuration=types.DidChangeConfigurationClientCapabilities(
                            dynamic_registration=settings is not None
                        ),
                    ),
                    text_document=text_document or inline,
                    notebook_document=types.NotebookDocumentClientCapabilities(
                        types.NotebookDocumentSyncClientCapabilities()
                    ),
                    experimental={"infill": {"canvas": canvas, "timing": canvas}} if declares is None else declares,
                ),
            )
        )

    def open(self, text: str, uri: str = "") -> None:
        self.uri = uri or self.uri
        self.version = 1
        item = types.TextDocumentItem(self.uri, "python", self.version, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def edit(self, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        """Replaces the text between two positions."""
        self.version += 1
        where = types.Range(types.Position(*start), types.Position(*end))
        self.client.text_document_did_change(
            types.DidChangeTextDocumentParams(
                types.VersionedTextDocumentIdentifier(self.version, self.uri),
                [types.TextDocumentContentChangePartial(range=where, text=text)],
            )
        )

    async def complete(
        self,
        line: int,
        character: int,
        msg_id: str | None = None,
        selected: types.SelectedCompletionInfo | None = None,
        automatic: bool = False,
    ) -> list[types.InlineCompletionItem] | None:
        """The items offered there; None for the answer null."""
        kinds = types.InlineCompletionTriggerKind
        context = types.InlineCompletionContext(kinds.Automatic if automatic else kinds.Invoked, selected)
        document = types.TextDocumentIdentifier(self.uri)
        params = types.InlineCompletionParams(context, document, types.Position(line, character))
        result = await self.client.protocol.send_request_async(types.TEXT_DOCUMENT_INLINE_COMPLETION, params, msg_id)
        return None if result is None else list(result.items)

    async def item(self, line: int, character: int) -> types.InlineCompletionItem:
        """The one item of a completion there."""
        items = await self.complete(line, character)
        assert items is not None
        (item,) = items
        return item

    def close(self) -> None:
        document = types.TextDocumentIdentifier(self.uri)
        self.client.text_document_did_close(types.DidCloseTextDocumentParams(document))

    def change_folders(self, added: Iterable[Path] = (), removed: Iterable[Path] = ()) -> None:
        event = types.WorkspaceFoldersChangeEvent(_folders(added), _folders(removed))
        self.client.workspace_did_change_workspace_folders(types.DidChangeWorkspaceFoldersParams(event))

    def configure(self, settings: object) -> None:
        """Sends all settings of the editor, ours under "infill"."""
        self.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(settings))

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """The server's, or the connection to it."""
        writer = self.client.protocol.writer
        assert isinstance(writer, asyncio.StreamWriter)
        return writer

    def write(self, body: bytes) -> None:
        """Sends a message as it is."""
        self.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    async def ask(self, method: str, params: object) -> Any:
        """Sends a request whose parameters need not fit; raises `JsonRpcException`."""
        msg_id = uuid.uuid4().hex
        answer: Future[Any] = Future()
        self.client.protocol._request_futures[msg_id] = answer
        message = {"jsonrpc": "2.0", "id": msg_id, "method": method, "params": params}
        self.write(json.dumps(message).encode())
        return await asyncio.wrap_future(answer)

    def tell(self, method: str, params: object) -> None:
        """Sends a notification whose parameters need not fit."""
        self.write(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode())

    async def shown(self, count: int) -> None:
        """Waits until that many messages were shown."""
        while len(self.client.messages) < count:
            await self.client.wait_for_notification(types.WINDOW_SHOW_MESSAGE)

    @property
    def messages(self) -> list[str]:
        """What was shown to the person."""
        return [message.message for message in self.client.messages]

    async def exit_code(self) -> int:
        """Waits for the server's end."""
        assert self.client._server is not None
        return await asyncio.wait_for(self.client._server.wait(), 20)


def _folders(paths: Iterable[Path]) -> list[types.WorkspaceFolder]:
    return [types.WorkspaceFolder(path.as_uri(), path.name) for path in paths]
