"""The language server: from an editor's message to the domain and back.

Handlers translate; what a gap is, how it is filled and what of it is worth showing is decided elsewhere. Of
pygls it uses the message loop and the types, not the mirror of documents: that splits lines where LSP does
not, and rebuilds the whole text for each change.

What is not needed to answer `initialize` is imported where it is used: an editor waits for that answer, and
lsprotocol alone takes half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInternalError, JsonRpcInvalidParams
from pygls.io_ import StdoutWriter, run_async
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

from infill_lsp import __version__
from infill_lsp.core import Edit, Gap, Silence, Snapshot, Trigger
from infill_lsp.settings import LogLevel, Settings, parse

if TYPE_CHECKING:
    from infill_engine.protocol import Candidate, Final, Frame
    from pygls.io_ import AsyncWriter, Writer

    from infill_lsp.client import EngineClient
    from infill_lsp.documents import Document
    from infill_lsp.filling import Status as IndexStatus
    from infill_lsp.folders import Folders
    from infill_lsp.index import Index

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the editor's process still lives.
EDITOR_POLL_S = 2.0
#: Seconds an editor may take to agree to a progress bar: some never answer, and the engine's start waits for it.
BAR_S = 2.0
#: Seconds between two looks at how far an index is.
INDEX_POLL_S = 0.25
#: The only address served over TCP.
HOST = "127.0.0.1"
#: Editors that put an item into their buffers as it is, which hold LF in a CRLF file, too: Neovim 0.12 would show and
#: keep each CR as a character.
LF_EDITORS = frozenset({"Neovim"})
#: An empty list takes away what is shown; null would leave it.
NOTHING = types.InlineCompletionList([])


def create_server() -> InfillServer:
    """A server with its features, not yet on any transport."""
    server = InfillServer()
    server.feature(types.INITIALIZE)(initialize)
    server.feature(types.INITIALIZED)(initialized)
    server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)(configuration_changed)
    server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)(folders_changed)
    server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())(inline_completion)
    server.feature("infill/status")(engine_status)
    return server


async def inline_completion(
    ls: InfillServer, params: types.InlineCompletionParams
) -> types.InlineCompletionList | None:
    """One suggestion, an empty list where there is none, null where the question is out of date by then."""
    from infill_lsp.extraction import cut
    from infill_lsp.postprocess import edit

    asked = time.monotonic()
    trigger = _trigger(params.context)
    snapshot = ls.snapshot(params)
    if snapshot is None:
        return NOTHING
    gap = cut(snapshot, trigger)
    if isinstance(gap, Silence):
        log.debug("nothing is offered: %s", gap.reason)
        return NOTHING
    candidate = await ls.fill(gap, snapshot, trigger, asked)
    if not ls.is_current(snapshot):
        return None
    if candidate is None:
        return NOTHING
    return ls.answer(edit(snapshot, gap, candidate), snapshot, params.context.selected_completion_info)


def initialize(ls: InfillServer, params: types.InitializeParams) -> None:
    """Takes the settings in; what is wrong with them is told once the editor listens."""
    options = params.initialization_options
    ls.settings, ls.problems = parse(options.get("infill", options) if isinstance(options, dict) else options)
    ls.holds_lf = params.client_info is not None and params.client_info.name in LF_EDITORS
    experimental = params.capabilities.experimental
    infill = experimental.get("infill") if isinstance(experimental, dict) else None
    ls.wants_canvas = isinstance(infill, dict) and infill.get("canvas") is True
    ls.wants_timing = isinstance(infill, dict) and infill.get("timing") is True
    if params.workspace_folders is None and ls.workspace.root_uri:  # An editor from before there were several.
        ls.workspace.add_folder(types.WorkspaceFolder(ls.workspace.root_uri, ""))
    ls.watch_editor()


async def initialized(ls: InfillServer, _: types.InitializedParams) -> None:
    """From now on the editor can be told things."""
    await ls.settle()


async def configuration_changed(ls: InfillServer, params: types.DidChangeConfigurationParams) -> None:
    """Settings of other sections, or none at all, leave ours as they are."""
    if isinstance(params.settings, dict) and "infill" in params.settings:
        ls.settings, ls.problems = parse(params.settings["infill"])
        await ls.settle()


async def folders_changed(ls: InfillServer, _: types.DidChangeWorkspaceFoldersParams) -> None:
    """pygls has taken them in."""
    await ls.settle_folders()


async def engine_status(ls: InfillServer, _: object) -> dict[str, Any]:
    """`infill/status`: looks at the engine, and does not start it."""
    from infill_lsp.client import EngineError

    try:
        status = await ls.engine.status()
    except EngineError as error:
        return _status("error", ls.settings.model, str(error))
    if status is None:
        return _status("stopped", ls.settings.model)
    return _status(status.state, status.model, status.message, status.progress, status.device)


async def serve_stdio(server: InfillServer) -> None:
    """Serves the editor at the other end of stdin and stdout, until it goes.

    Raises `ValueError` if stdin is nothing an editor can be at the other end of, such as a file.
    """
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty()):
        raise ValueError("stdin is no pipe")
    reader = _MessageReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    writer = StdoutWriter(sys.stdout.buffer)
    with contextlib.redirect_stdout(sys.stderr):  # A stray print would be taken for a message.
        await _serve(server, reader, writer)


async def serve_tcp(server: InfillServer, port: int, listening: Callable[[int], None]) -> None:
    """Serves the first editor that connects to `port` of this machine (0: any), until it goes.

    `listening` is told the port. Further editors are turned away: a server holds one editor's documents.
    Raises `OSError` if the port cannot be had.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first.done():
            log.warning("another editor was turned away: it needs an infill-lsp of its own")
            writer.close()
        else:
            first.set_result((reader, writer))

    listener = await loop.create_server(lambda: asyncio.StreamReaderProtocol(_MessageReader(), accept), HOST, port)
    listening(listener.sockets[0].getsockname()[1])
    try:
        await _serve(server, *await first)
    finally:
        listener.close()


async def _serve(server: InfillServer, reader: asyncio.StreamReader, writer: AsyncWriter | Writer) -> None:
    server.protocol.set_writer(writer)
    try:
        await run_async(threading.Event(), reader, server.protocol, log, server.report_server_error)
    except (asyncio.IncompleteReadError, ConnectionError):
        log.warning("the editor went away in the middle of a message")
    finally:
        await server.leave_folders()
        await server.leave_engine()


def set_log_level(level: LogLevel) -> None:
    """What goes to the log. At "info" pygls would log whole messages, which hold the person's text."""
    logging.getLogger().setLevel(level.upper())
    logging.getLogger("pygls").setLevel("WARNING" if level == "info" else level.upper())


class InfillServer(LanguageServer):
    """One editor's documents and settings, and its way to the engine."""

    protocol: _Protocol

    def __init__(self) -> None:
        super().__init__(
            "infill-lsp",
            __version__,
            text_document_sync_kind=types.TextDocumentSyncKind.Incremental,
            protocol_cls=_Protocol,
        )
        self.settings = Settings()
        #: What is wrong with the settings and not told yet.
        self.problems: list[str] = []
        #: Whether the editor draws the canvas as it denoises.
        self.wants_canvas = False
        #: Whether the editor's buffers hold LF whatever the file has.
        self.holds_lf = False
        #: Whether it wants to know where a request's time went.
        self.wants_timing = False
        self.documents: dict[str, Document] = {}
        #: The snapshot of each document's newest request.
        self._newest: dict[str, Snapshot] = {}
        self._client_id = uuid.uuid4().hex
        self._engine: EngineClient | None = None
        self._shown: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._folders: Folders | None = None
        #: Those that show how far the index of a folder is.
        self._filling: dict[Index, asyncio.Task[None]] = {}
        #: The engine's process that was last seen ready.
        self._engine_pid: int | None = None

    @property
    def encoding(self) -> str:
        """The position encoding agreed on with the editor."""
        return types.PositionEncodingKind(self.server_capabilities.position_encoding).value

    @property
    def engine(self) -> EngineClient:
        """The engine of the model that is set; made when first needed."""
        from infill_lsp.client import EngineClient

        if self._engine is None:
            self._engine = EngineClient(self.settings.model, self.settings.engine.python)
        return self._engine

    def open_document(self, item: types.TextDocumentItem) -> None:
        from infill_lsp.documents import Document

        self._newest.pop(item.uri, None)
        document = self.documents[item.uri] = Document(item.uri, item.language_id, item.version, item.text)
        if self._folders is not None:
            self._folders.open(item.uri, partial(getattr, document, "text"))

    def change_document(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self.documents.get(params.text_document.uri)
        if document is None:
            log.warning("a change of a document that is not open is ignored")
        else:
            document.change(params.content_changes, params.text_document.version, self.encoding)
            if self._folders is not None:
                self._folders.edit(document.uri)

    def close_document(self, uri: str) -> None:
        self._newest.pop(uri, None)
        self.documents.pop(uri, None)
        if self._folders is not None:
            self._folders.close(uri)

    def snapshot(self, params: types.InlineCompletionParams) -> Snapshot | None:
        """The document as the request sees it, None where nothing is to be offered.

        The document's older requests are superseded. Where an entry of the completion menu is selected, the
        snapshot is of the text with that entry accepted.
        """
        document = self.documents.get(params.text_document.uri)
        if document is None or not self.settings.enabled:
            return None
        snapshot = document.snapshot(params.position.line, params.position.character, self.encoding)
        if (selected := params.context.selected_completion_info) is not None:
            start, end = selected.range.start, selected.range.end
            accepted = _accepted(
                document.snapshot(start.line, start.character, self.encoding),
                document.snapshot(end.line, end.character, self.encoding),
                selected.text,
            )
            if accepted is None:
                return None
            snapshot = accepted
        self._newest[snapshot.uri] = snapshot
        return snapshot

    def is_current(self, snapshot: Snapshot) -> bool:
        """Whether no newer request, no edit and no close came after the request of `snapshot`."""
        document = self.documents.get(snapshot.uri)
        return (
            document is not None and document.version == snapshot.version and self._newest.get(snapshot.uri) is snapshot
        )

    async def fill(self, gap: Gap, snapshot: Snapshot, trigger: Trigger, asked: float) -> Candidate | None:
        """The engine's best text for the gap; None without one, or once the request is out of date.

        The deadline runs from `asked`, in seconds of the monotonic clock. An engine that fails leaves the best text
        so far, as the deadline does.
        """
        from infill_engine.protocol import Candidate, Final, Frame, InfillRequest

        deadline = self.settings.deadline
        deadline_ms = deadline.invoked if trigger == "invoked" else deadline.automatic
        workspace = path = ""
        if self._folders is not None:
            workspace, path = self._folders.place(snapshot.uri)
            self._folders.ask()
        spent_ms = round(1000 * (time.monotonic() - asked))
        request = InfillRequest(
            client=self._client_id,
            document=hashlib.sha256(snapshot.uri.encode(errors="replace")).hexdigest(),
            version=snapshot.version,
            language=snapshot.language,
            prefix=gap.prefix,
            head=gap.head,
            tail=gap.tail,
            suffix=gap.suffix,
            workspace=workspace,
            path=path,
            max_lines=min(gap.max_lines, self.settings.max_lines),
            min_indent=gap.min_indent,
            priority="explicit" if trigger == "invoked" else "typed",
            deadline_ms=max(1, deadline_ms - spent_ms),
            frames=self.wants_canvas,
        )
        best = None
        async with contextlib.aclosing(self.engine.infill(request)) as events:
            async for event in events:
                if not self.is_current(snapshot):
                    return None
                match event:
                    case Candidate():
                        best = event
                    case Frame():
                        self.protocol.notify("infill/canvas", _canvas(event, snapshot))
                    case Final("end" | "limit" | "deadline"):
                        if self.wants_timing:
                            self.protocol.notify("infill/timing", _timing(event, snapshot))
                    case Final("error", message):
                        self.show(message, types.MessageType.Error)
                        self.follow_engine()
                    case Final("starting"):
                        self.follow_engine()
                    case Final():
                        best = None
        return best

    def answer(
        self, edit: Edit | None, snapshot: Snapshot, selected: types.SelectedCompletionInfo | None
    ) -> types.InlineCompletionList:
        """The edit in the editor's units. With an entry selected in its menu, it must go on from there."""
        from infill_lsp.documents import position

        if edit is None or (selected is not None and edit.start != edit.end):
            return NOTHING
        text = edit.text.replace(snapshot.eol, "\n") if self.holds_lf else edit.text
        if selected is not None:
            item = types.InlineCompletionItem(selected.text + text, range=selected.range)
        else:
            start = position(snapshot.lines, edit.row, edit.start, self.encoding)
            end = position(snapshot.lines, edit.row, edit.end, self.encoding)
            item = types.InlineCompletionItem(text, range=types.Range(start, end))
        return types.InlineCompletionList([item])

    async def settle(self) -> None:
        """Makes new settings take effect, and says what is wrong with them."""
        if self.settings.log_level is not None:
            set_log_level(self.settings.log_level)
        wanted = (self.settings.model, self.settings.engine.python)
        if self._engine is not None and (self._engine.model, self._engine.python) != wanted:
            if self._folders is not None:
                await self._folders.tell_again()
            await self.leave_engine()
        if self.problems:
            self.show("\n".join(self.problems), types.MessageType.Warning)
        if self.settings.enabled:
            self.follow_engine()
        await self.settle_folders()

    async def settle_folders(self) -> None:
        """Sees to it that the editor's folders are indexed, as the settings say."""
        uris = [folder.uri for folder in self.workspace.folders.values()] if self.settings.enabled else []
        if self._folders is None:
            if not uris:
                return
            # In a thread, for the message loop must not wait for it.
            module = await asyncio.to_thread(import_module, "infill_lsp.folders")
            if self._folders is None:
                self._folders = module.Folders(lambda: self.engine, self._show_index)
                for uri, document in self.documents.items():
                    self._folders.open(uri, partial(getattr, document, "text"))
                if self._newest:
                    self._folders.ask()  # Somebody did so before.
        priming = self.settings.priming
        await self._folders.settle(uris, indexed=priming.enabled, exclude=priming.exclude)

    async def leave_folders(self) -> None:
        """Ends the indexes; what they know stays."""
        folders, self._folders = self._folders, None
        for task in self._filling.values():
            task.cancel()
        if folders is not None:
            await folders.aclose()

    def follow_engine(self) -> None:
        """Sees to it, in the background, that an engine runs; the editor shows progress till it is ready."""
        if self._following is not None and not self._following.done():
            return
        self._following = asyncio.create_task(self._follow(self.engine))

    def watch_editor(self) -> None:
        """Ends this process when the editor's is gone: a child of the editor may hold our stdin open.

        An editor in another container or on another machine gives a process that is not here: it is not watched.
        """
        if self.process_id is not None and _is_alive(self.process_id):
            self._watching = asyncio.create_task(self._watch(self.process_id))

    def show(self, message: str, kind: types.MessageType) -> None:
        """Shows a message in the editor, each one once."""
        if message not in self._shown:
            self._shown.add(message)
            self.window_show_message(types.ShowMessageParams(kind, message))

    def report_server_error(self, error: Exception, source: object) -> None:
        """pygls would show its internals in a pop-up."""
        log.error("%s: %s", type(error).__name__, error)

    async def leave_engine(self) -> None:
        """Closes the way to the engine, which itself stays for other editors."""
        engine, following = self._engine, self._following
        self._engine = self._following = None
        if following is not None:
            following.cancel()
        if engine is not None:
            await engine.aclose()

    async def _follow(self, engine: EngineClient) -> None:
        from infill_lsp.client import EngineError

        progress = _Progress(self)
        try:
            async for status in engine.bring_up():
                if status.state == "error":
                    self.show(status.message, types.MessageType.Error)
                elif status.state != "ready":
                    await progress.report(status.message, status.progress)
                elif status.pid != self._engine_pid:
                    self._engine_pid = status.pid
                    if self._folders is not None:
                        await self._folders.tell_again()
        except EngineError as error:
            self.show(str(error), types.MessageType.Error)
        finally:
            progress.end()

    def _show_index(self, index: Index, status: IndexStatus) -> None:
        if status.error:
            self.show(status.error, types.MessageType.Warning)
        elif status.state == "filling" and status.total and index not in self._filling:
            task = self._filling[index] = asyncio.create_task(self._follow_index(index))
            task.add_done_callback(lambda _: self._filling.pop(index, None))

    async def _follow_index(self, index: Index) -> None:
        progress = _Progress(self)
        try:
            while (status := index.status).state == "filling" and status.total:
                await progress.report(f"indexing {os.path.basename(index.root)}", status.done / status.total)
                await asyncio.sleep(INDEX_POLL_S)
        finally:
            progress.end()

    async def _watch(self, editor: int) -> None:
        while _is_alive(editor):  # noqa: ASYNC110 - no event tells of another process' end everywhere
            await asyncio.sleep(EDITOR_POLL_S)
        log.warning("the editor (process %d) is gone", editor)
        raise SystemExit(0)


class _Progress:
    """A progress bar in the editor, from the first report."""

    def __init__(self, server: InfillServer) -> None:
        window = server.client_capabilities.window
        self._wanted = window is not None and bool(window.work_done_progress)
        self._bar = server.work_done_progress
        self._token: str | None = None
        self._told = ""

    async def report(self, message: str, progress: float | None) -> None:
        """What is under way, and how much of it is done, 0 to 1; None where that is not known."""
        if not self._wanted:
            return
        percentage = None if progress is None else round(100 * progress)
        told = f"{message} {percentage}"
        if self._token is None:
            token = uuid.uuid4().hex
            try:
                # Shielded, for pygls takes an answer to what was cancelled for a fault.
                await asyncio.wait_for(asyncio.shield(self._bar.create_async(token)), BAR_S)
            except (TimeoutError, JsonRpcException) as error:
                log.warning("the editor gives no progress bar: %s", str(error) or "no answer")
                self._wanted = False
                return
            self._token = token
            begin = types.WorkDoneProgressBegin("Infill", message=message, percentage=percentage)
            self._bar.begin(token, begin)
        elif told != self._told:
            self._bar.report(self._token, types.WorkDoneProgressReport(message=message, percentage=percentage))
        self._told = told

    def end(self) -> None:
        if self._token is not None:
            self._bar.end(self._token, types.WorkDoneProgressEnd())


class _Protocol(LanguageServerProtocol):
    """pygls' protocol with our documents in place of its own, and without internals in its answers."""

    _server: InfillServer

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        self._server.open_document(params.text_document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        self._server.change_document(params)

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self._server.close_document(params.text_document.uri)

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Answers a request whose parameters do not fit: pygls drops it, and the editor would wait."""
        if "jsonrpc" in data and "method" in data and self.get_message_type(data["method"]) is None:
            data.setdefault("params", None)  # pygls insists on the key in methods that it does not know.
        try:
            return super().structure_message(data)
        except JsonRpcException:
            if "id" in data and "method" in data:
                message = f"{data['method']}: the parameters do not fit the protocol"
                error = types.ResponseError(JsonRpcInvalidParams.CODE, message)
                self._send_response(data["id"], error=error)
            raise

    def _send_response(self, msg_id: str | int, result: Any = None, error: types.ResponseError | None = None) -> None:
        """Every answer goes through here. pygls' errors carry tracebacks, which belong in the log."""
        if error is not None:
            internal = error.code == JsonRpcInternalError.CODE
            message = "a fault in infill-lsp: see its log" if internal else error.message
            error = types.ResponseError(error.code, message)
        super()._send_response(msg_id, result, error)


class _MessageReader(asyncio.StreamReader):
    """Lets each message take effect before the next is read.

    pygls runs a request's handler as a task. Were the next message here already, say an edit, it would be
    handled before that task's first step, and the snapshot would be of a text other than the request's.
    """

    async def readline(self) -> bytes:
        await asyncio.sleep(0)
        return await super().readline()


def _trigger(context: types.InlineCompletionContext) -> Trigger:
    invoked = context.trigger_kind == types.InlineCompletionTriggerKind.Invoked
    return "invoked" if invoked else "automatic"


def _accepted(start: Snapshot, end: Snapshot, text: str) -> Snapshot | None:
    """The document with `text` in place of what is between two cursors on one line, and the cursor after it.

    Without the syntax tree, which is of the text as it is.
    """
    if start.row != end.row or "\n" in text or "\r" in text:
        return None
    lines = list(start.lines)
    lines[start.row] = start.head + text + end.tail
    return replace(start, lines=tuple(lines), column=start.column + len(text), tree=None)


def _canvas(frame: Frame, snapshot: Snapshot) -> dict[str, Any]:
    slots = [{"text": slot.text, "prob": slot.prob, "state": slot.state} for slot in frame.slots]
    return {**_document(snapshot), "step": frame.step, "ms": frame.ms, "slots": slots}


def _timing(final: Final, snapshot: Snapshot) -> dict[str, Any]:
    timing = final.timing
    return {
        **_document(snapshot),
        "reason": final.reason,
        "queueMs": timing.queue_ms,
        "encodeMs": timing.encode_ms,
        "denoiseMs": timing.denoise_ms,
        "steps": timing.steps,
        "committed": timing.committed,
        "encoded": timing.encoded,
        "reused": timing.reused,
    }


def _document(snapshot: Snapshot) -> dict[str, Any]:
    return {"textDocument": {"uri": snapshot.uri}, "version": snapshot.version}


def _status(
    state: str, model: str, message: str = "", progress: float | None = None, device: str = ""
) -> dict[str, Any]:
    return {"state": state, "progress": progress, "message": message, "model": model, "device": device}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It is another user's, and alive.
    return True
