"""The language server: from an editor's message to the domain and back, and one editor's life from hello to goodbye.

Handlers translate; what a gap is, how it is filled and what of it is worth showing is decided elsewhere. Of
pygls it uses the message loop and the types, not the mirror of documents: that splits lines where LSP does
not, and rebuilds the whole text for each change.

What is not needed to answer `initialize` is imported where it is used: an editor waits for that answer, and
lsprotocol alone takes half a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer

from infill_lsp import __version__, actions, items
from infill_lsp.configuration import Configuration
from infill_lsp.core import Gap, Silence, Snapshot, Trigger
from infill_lsp.messages import Messages
from infill_lsp.settings import Engine, LogLevel, Settings
from infill_lsp.status import Board, Progress

if TYPE_CHECKING:
    from infill_engine.protocol import Final, Frame, Snippet
    from infill_engine.protocol import Status as EngineStatus

    from infill_lsp.client import EngineClient
    from infill_lsp.documents import Document, Trees
    from infill_lsp.filling import Status as IndexStatus
    from infill_lsp.folders import Folders
    from infill_lsp.index import Index
    from infill_lsp.notebooks import Notebooks
    from infill_lsp.statistics import Statistics
    from infill_lsp.suggestions import Answer, Question, Suggestions
    from infill_lsp.warming import Hint, Warmer

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the editor's process still lives.
EDITOR_POLL_S = 2.0
#: Seconds between two looks at how far an index is.
INDEX_POLL_S = 0.25
#: Seconds between two looks at the engine, which may end, and whose model a person may change; and while one is loaded.
ENGINE_POLL_S, LOADING_POLL_S = 5.0, 0.5
#: Editors that put an item into their buffers as it is, which hold LF in a CRLF file, too: Neovim 0.12 would show and
#: keep each CR as a character.
LF_EDITORS = frozenset({"Neovim"})
#: All cells of all notebooks.
NOTEBOOKS = types.NotebookDocumentSyncOptions([types.NotebookDocumentFilterWithNotebook("*")])

CODE_ACTIONS = types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.RefactorRewrite])

WHY, STATS, RESTART = "infill.server.why", "infill.server.stats", "infill.server.restartEngine"


def create_server(log_level: LogLevel = "warning") -> InfillServer:
    """A server with its features, not yet on any transport; log_level: where no setting says another."""
    server = InfillServer(log_level)
    server.feature(types.INITIALIZE)(initialize)
    server.feature(types.INITIALIZED)(initialized)
    server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)(configuration_changed)
    server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)(folders_changed)
    server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())(inline_completion)
    server.feature("infill/status")(status)
    server.feature("infill/why")(why)
    server.feature("infill/fill")(actions.requested)
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, CODE_ACTIONS)(actions.offered)
    server.command(actions.FILL)(actions.commanded)
    server.feature("infill/watch")(watch)
    server.feature("infill/offered")(offered)
    server.feature("infill/accepted")(accepted)
    server.feature("infill/partiallyAccepted")(partially_accepted)
    server.command(items.ACCEPTED)(taken)
    server.command(WHY)(because)
    server.command(STATS)(stats)
    server.command(RESTART)(restart_engine)
    return server


async def inline_completion(
    ls: InfillServer, params: types.InlineCompletionParams
) -> types.InlineCompletionList | None:
    """What is offered at the cursor, an empty list where nothing is, null where the question is out of date by then."""
    try:
        question = ls.question(params.text_document.uri, params.position, params.context)
        if question is None:
            return items.NOTHING
        answer = await ls.ask(question)
        entry = None if question.own is None else params.context.selected_completion_info
        return None if answer is None else items.inline(answer.suggestions, question.snapshot, ls.dialect, entry)
    except Exception as error:  # An editor shows any error to the person, with each key.
        ls.report_fault(error)
        return items.NOTHING


async def completion(ls: InfillServer, params: types.CompletionParams) -> types.CompletionList | None:
    """The same as one entry of the completion menu, for editors that draw no inline completions."""
    entries: list[types.CompletionItem] = []
    try:
        automatic = types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic)
        question = ls.question(params.text_document.uri, params.position, automatic)
        if question is not None and ls.settings_of(params.text_document.uri).completion.fallback != "off":
            answer = await ls.ask(question)
            if answer is None:
                return None
            entries = [items.menu(one, question.snapshot, ls.dialect) for one in answer.suggestions[:1]]
    except Exception as error:
        ls.report_fault(error)
    return types.CompletionList(is_incomplete=True, items=entries)


def initialize(ls: InfillServer, params: types.InitializeParams) -> None:
    """Takes the settings in; what is wrong with them is told once the editor listens."""
    ls.configuration.sources.initialize(params.initialization_options)
    ls.holds_lf = params.client_info is not None and params.client_info.name in LF_EDITORS
    experimental = params.capabilities.experimental
    infill = experimental.get("infill") if isinstance(experimental, dict) else None
    ls.wants_canvas = isinstance(infill, dict) and infill.get("canvas") is True
    ls.wants_timing = isinstance(infill, dict) and infill.get("timing") is True
    ls.wants_status = isinstance(infill, dict) and infill.get("status") is True
    ls.wants_refresh = isinstance(infill, dict) and infill.get("refresh") is True
    ls.says_what_it_draws = isinstance(infill, dict)
    of_text = params.capabilities.text_document
    if of_text is not None and of_text.inline_completion is None and of_text.completion is not None:
        ls.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions())(completion)
    if params.workspace_folders is None and ls.workspace.root_uri:  # An editor from before there were several.
        ls.workspace.add_folder(types.WorkspaceFolder(ls.workspace.root_uri, ""))
    ls.watch_editor()


async def initialized(ls: InfillServer, _: types.InitializedParams) -> None:
    """From now on the editor can be told things, and asked."""
    await ls.configuration.start()


async def configuration_changed(ls: InfillServer, params: types.DidChangeConfigurationParams) -> None:
    """Settings of other sections, or none at all, leave ours as they are."""
    await ls.configuration.pushed(params.settings)


async def folders_changed(ls: InfillServer, _: types.DidChangeWorkspaceFoldersParams) -> None:
    """pygls has taken them in. Each has settings of its own."""
    await ls.configuration.refresh()


async def status(ls: InfillServer, params: Any = None) -> dict[str, Any]:
    """`infill/status`: looks at the engine, and does not start it."""
    await asyncio.gather(ls.look_at_engine(), ls.settled())
    uri = _field(params, "textDocument", "uri")
    reason = ls.silence(uri) if isinstance(uri, str) else ""
    return {**ls.board.status, "state": "off", "message": reason} if reason else ls.board.status


async def why(ls: InfillServer, params: Any) -> dict[str, Any]:
    """`infill/why`: what is offered at a place, or why nothing is."""
    uri, position = _field(params, "textDocument", "uri"), _field(params, "position")
    line, character = _field(position, "line"), _field(position, "character")
    if not (
        isinstance(uri, str) and isinstance(line, int) and isinstance(character, int) and min(line, character) >= 0
    ):
        raise JsonRpcInvalidParams("infill/why takes {textDocument: {uri}, position}")
    return await ls.why(uri, types.Position(line, character))


async def because(ls: InfillServer, *arguments: Any) -> str:
    """The command `infill.server.why` [{uri, position}], for editors without our plugin: shows the reason, too."""
    where = arguments[0] if arguments else None
    document = {"uri": _field(where, "uri")}
    found = await why(ls, {"textDocument": document, "position": _field(where, "position")})
    ls.window_show_message(types.ShowMessageParams(types.MessageType.Info, f"Infill: {found['reason']}"))
    return str(found["reason"])


def watch(ls: InfillServer, params: Any) -> None:
    """`infill/watch`: somebody looks at the canvas from now on, or no longer."""
    ls.wants_canvas = _field(params, "canvas") is True


def offered(ls: InfillServer, params: Any) -> None:
    """`infill/offered`: a suggestion was drawn."""
    ls.statistics.offered(str(_field(params, "id")))


def accepted(ls: InfillServer, params: Any) -> None:
    """`infill/accepted`: it was taken whole."""
    ls.statistics.accepted(str(_field(params, "id")))


def partially_accepted(ls: InfillServer, params: Any) -> None:
    """`infill/partiallyAccepted`: a part of it was taken."""
    if isinstance(length := _field(params, "length"), int):
        ls.statistics.partially_accepted(str(_field(params, "id")), length)


def taken(ls: InfillServer, *arguments: Any) -> None:
    """The command `infill.server.accepted` [id], which comes with each suggestion."""
    ls.statistics.accepted(str(arguments[0]) if arguments else "")


async def stats(ls: InfillServer, *_: Any) -> str:
    """The command `infill.server.stats`."""
    return await ls.statistics.text()


async def restart_engine(ls: InfillServer, *_: Any) -> None:
    """The command `infill.server.restartEngine`."""
    await ls.restart_engine()


def set_log_level(level: LogLevel) -> None:
    """What goes to the log. At "info" pygls would log whole messages, which hold the person's text."""
    logging.getLogger().setLevel(level.upper())
    logging.getLogger("pygls").setLevel("WARNING" if level == "info" else level.upper())


class InfillServer(LanguageServer):
    """One editor's documents and settings, and its way to the engine."""

    protocol: Messages

    def __init__(self, log_level: LogLevel) -> None:
        """log_level: where no setting says another."""
        self.log_level = log_level
        super().__init__(
            "infill-lsp",
            __version__,
            text_document_sync_kind=types.TextDocumentSyncKind.Incremental,
            notebook_document_sync=NOTEBOOKS,
            protocol_cls=Messages,
        )
        self.configuration = Configuration(self, self.settle)
        #: Whether the editor draws the canvas as it denoises.
        self.wants_canvas = False
        #: Whether the editor's buffers hold LF whatever the file has.
        self.holds_lf = False
        #: Whether it wants to know where a request's time went, how things are, and when to ask again.
        self.wants_timing = self.wants_status = self.wants_refresh = False
        #: Whether it tells which suggestions it draws; of another each one that it gets counts as drawn.
        self.says_what_it_draws = False
        self.client_id = uuid.uuid4().hex
        self.documents: dict[str, Document] = {}
        self._trees: Trees | None = None
        self.board = Board(self._tell_status)
        self._engine: EngineClient | None = None
        #: The settings that it was made by.
        self._engine_of: tuple[str, Engine, str] | None = None
        self._suggestions: Suggestions | None = None
        self._has_settled = False
        self._warmer: Warmer | None = None
        self._statistics: Statistics | None = None
        self._notebooks: Notebooks | None = None
        self._shown: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self._engine_watch: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._folders: Folders | None = None
        self._asked = False
        #: Those that show how far the index of a folder is.
        self._filling: dict[Index, asyncio.Task[None]] = {}
        #: The engine's process that was last seen ready.
        self._engine_pid: int | None = None

    @property
    def settings(self) -> Settings:
        """What holds for all folders together: the engine, the log, statistics."""
        return self.configuration.sources.general

    def settings_of(self, uri: str) -> Settings:
        """What holds for a document."""
        return self.configuration.sources.for_document(uri)

    def silence_of(self, uri: str, language: str, trigger: Trigger) -> Silence | None:
        """Why the settings let nothing be offered in a document; None where they do."""
        document = self.documents.get(uri)
        around = document.language if document else ""
        if (silence := self.configuration.sources.silence(uri, language, trigger, around)) is not None:
            return silence
        if self._folders is not None and self._folders.ignores(self._file_of(uri)):
            return Silence("the file is ignored (.gitignore, .ignore)")
        return None

    async def settled(self) -> None:
        """Waits until the settings are known."""
        await self.configuration.settled()

    @property
    def encoding(self) -> str:
        """The position encoding agreed on with the editor."""
        return types.PositionEncodingKind(self.server_capabilities.position_encoding).value

    @property
    def dialect(self) -> items.Dialect:
        """How the editor counts and inserts."""
        of_text = self.client_capabilities.text_document
        of_item = of_text.completion.completion_item if of_text and of_text.completion else None
        modes = of_item.insert_text_mode_support if of_item else None
        as_is = modes is not None and types.InsertTextMode.AsIs in modes.value_set
        return items.Dialect(self.encoding, self.holds_lf, as_is)

    @property
    def engine(self) -> EngineClient:
        """The engine that is set; made when first needed."""
        from infill_lsp.remote import engine_of

        if self._engine is None:
            self._engine_of = self._engine_wanted
            self._engine = engine_of(self.settings)
        return self._engine

    @property
    def suggestions(self) -> Suggestions:
        """Made when first needed."""
        from infill_lsp.suggestions import Suggestions

        if self._suggestions is None:
            self._suggestions = Suggestions(self)
        return self._suggestions

    @property
    def warmer(self) -> Warmer:
        """Made when first needed."""
        from infill_lsp.warming import Warmer

        if self._warmer is None:
            self._warmer = Warmer(self.warm)
        return self._warmer

    @property
    def statistics(self) -> Statistics:
        """Made when first needed."""
        from infill_lsp.statistics import Statistics

        if self._statistics is None:
            self._statistics = Statistics(self._lines)
            self._statistics.enabled = self.settings.statistics
        return self._statistics

    # Documents.

    @property
    def notebooks(self) -> Notebooks:
        """Made when first needed."""
        from infill_lsp.notebooks import Notebooks

        if self._notebooks is None:
            self._notebooks = Notebooks(self.documents)
        return self._notebooks

    def _lines(self, uri: str) -> Sequence[str] | None:
        document = self.documents.get(uri)
        return None if document is None else document.lines

    def open_document(self, item: types.TextDocumentItem) -> None:
        from infill_lsp.documents import Document, Trees

        if self._suggestions is not None:
            self._suggestions.closed(item.uri)
        if self._trees is None:
            self._trees = Trees()
        elif item.uri in self.documents:
            self._trees.drop(self.documents[item.uri])
        document = self.documents[item.uri] = Document(item.uri, item.language_id, item.version, item.text)
        if self._folders is not None:
            self._folders.open(item.uri, partial(getattr, document, "text"))
        self.warmer.opened(item.uri)

    def change_document(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self.documents.get(params.text_document.uri)
        if document is None:
            log.warning("a change of a document that is not open is ignored")
            return
        document.change(params.content_changes, params.text_document.version, self.encoding)
        if self._suggestions is not None:
            self._suggestions.changed(document.uri)
        if self._folders is not None:
            self._folders.edit(document.uri)
        if params.content_changes:
            self.warmer.changed(document.uri, params.content_changes[-1])

    def close_document(self, uri: str) -> None:
        document = self.documents.pop(uri, None)
        if document is not None and self._trees is not None:
            self._trees.drop(document)
        self.warmer.closed(uri)
        if self._suggestions is not None:
            self._suggestions.closed(uri)
        if self._folders is not None:
            self._folders.close(uri)

    def change_notebook(self, uri: str, change: types.NotebookDocumentChangeEvent) -> None:
        """Cells came, went, moved, or changed."""
        cells = change.cells
        if cells is None:
            return
        if (structure := cells.structure) is not None:
            # One that gets another language may be closed and opened at once.
            for document in structure.did_close or ():
                self.close_document(document.uri)
            for item in structure.did_open or ():
                self.open_document(item)
            array = structure.array
            self.notebooks.splice(uri, array.start, array.delete_count, array.cells or ())
        self.notebooks.update(uri, cells.data or ())
        for content in cells.text_content or ():
            self.change_document(types.DidChangeTextDocumentParams(content.document, content.changes))

    def snapshot(self, uri: str, position: types.Position) -> Snapshot | None:
        """The document as it is, with the cursor at the editor's position; None where it is not open."""
        document = self.documents.get(uri)
        if document is None:
            return None
        snapshot = document.snapshot(position.line, position.character, self.encoding)
        if self._trees is not None:
            self._trees.use(document)
        if self._notebooks is None or self._notebooks.of(uri) is None:
            return snapshot
        before, after = self._notebooks.around(uri)
        return replace(snapshot, before=before, after=after)

    # Completions.

    def question(self, uri: str, position: types.Position, context: types.InlineCompletionContext) -> Question | None:
        """What the editor asks, None where nothing is to be offered.

        Where an entry of the completion menu is selected, the snapshot is of the text with that entry accepted.
        """
        from infill_lsp.suggestions import Question

        asked = time.monotonic()
        snapshot = own = self.snapshot(uri, position)
        selected = context.selected_completion_info
        if own is not None and selected is not None:
            snapshot = items.with_entry(own, selected, self.encoding)
        if snapshot is None:
            return None
        self.warmer.changed(uri, position)
        invoked = context.trigger_kind == types.InlineCompletionTriggerKind.Invoked
        behind = None if own is None or snapshot is own else replace(own, tree=None)
        return Question(snapshot, "invoked" if invoked else "automatic", asked, behind)

    async def ask(self, question: Question) -> Answer | None:
        """The answer, counted; None where the question is out of date by then."""
        answer = await self.suggestions.ask(question)
        if answer is not None and answer.suggestions and self.settings_of(question.snapshot.uri).statistics:
            snapshot, statistics = question.snapshot, self.statistics
            statistics.answered("known" if answer.known else "written", time.monotonic() - question.asked)
            for suggestion in answer.suggestions:
                edit = suggestion.edit
                statistics.offer(suggestion.id, snapshot.uri, edit.row, edit.text.replace(snapshot.eol, "\n"))
            if not self.says_what_it_draws:
                statistics.offered(answer.suggestions[0].id)
        return answer

    async def why(self, uri: str, position: types.Position) -> dict[str, Any]:
        """What is offered at a place, or why nothing is, in words."""
        snapshot = self.snapshot(uri, position)
        if snapshot is None:
            return {"reason": "the document is not open", "shown": False}
        answer = await self.suggestions.why(snapshot)
        return {"reason": answer.reason, "shown": bool(answer.suggestions)}

    def silence(self, uri: str) -> str:
        """Why nothing is offered in a document at all; "" where something may be."""
        from infill_lsp import extraction

        snapshot = self.snapshot(uri, types.Position(0, 0))
        if snapshot is None:
            return "the document is not open"
        reason = self.silence_of(uri, snapshot.language, "invoked") or extraction.silence(snapshot)
        return "" if reason is None else reason.reason

    # What suggestions need of their host.

    def place(self, uri: str) -> tuple[str, str]:
        self._asked = True
        if self._folders is None:
            return "", ""
        self._folders.ask()
        return self._folders.place(self._file_of(uri))

    async def snippets(self, snapshot: Snapshot, gap: Gap) -> tuple[Snippet, ...]:
        if self._folders is None:
            return ()
        from infill_lsp.priming import sent

        return tuple(map(sent, await self._folders.snippets(snapshot, gap, self._file_of(snapshot.uri))))

    def _file_of(self, uri: str) -> str:
        """The document itself, or the notebook that it is a cell of."""
        notebook = self._notebooks.of(uri) if self._notebooks is not None else None
        return notebook or uri

    async def warm(self, uri: str, hint: Hint) -> None:
        """Lets the engine encode what a question about a document will need. Raises `EngineError`."""
        from infill_lsp.warming import cursor

        if (snapshot := cursor(partial(self.snapshot, uri), hint)) is not None:
            await self.suggestions.warm(snapshot)

    def busy(self) -> AbstractContextManager[None]:
        return self.board.busy()

    def heard(self, event: Frame | Final, snapshot: Snapshot) -> None:
        from infill_engine.protocol import ANSWERED, Frame

        if isinstance(event, Frame):
            self.protocol.notify("infill/canvas", items.canvas(event, snapshot))
        elif event.reason in ANSWERED:
            if self.wants_timing:
                self.protocol.notify("infill/timing", items.timing(event, snapshot))
        elif event.reason in ("starting", "error"):
            if event.reason == "error":
                self.show(event.message, types.MessageType.Error)
            self.follow_engine()

    def improved(self, question: Question) -> None:
        if self.wants_refresh:
            self.protocol.notify("infill/refresh", items.place(question.own or question.snapshot, self.dialect))

    # The engine, the folders, and the end.

    async def settle(self) -> None:
        """Makes new settings take effect, and says what is wrong with them."""
        set_log_level(self.settings.log_level or self.log_level)
        if self._suggestions is not None and self._has_settled:
            self._suggestions.forget()
        self._has_settled = True
        if self._statistics is not None:
            self._statistics.enabled = self.settings.statistics
        if self._engine is not None and self._engine_of and self._engine_of != self._engine_wanted:
            if self._engine_of[:2] == self._engine_wanted[:2] and not self.settings.engine.address:
                await self._end_engine()  # It would go on where it runs.
            if self._folders is not None:
                await self._folders.tell_again()
            await self.leave_engine()
        if news := self.configuration.news():
            self.show("\n".join(news), types.MessageType.Warning)
        self.board.off(self._off)
        if not self._off:
            self.follow_engine()
        await self.settle_folders()
        if self._off and self._engine is not None:  # Last, for to forget unsaved text needs the model, too.
            await self._engine.leave(self.client_id)

    @property
    def _off(self) -> str:
        """Why nothing is offered in any document; "" where something may be."""
        silence = self.configuration.sources.off
        return silence.reason if silence is not None else ""

    @property
    def _engine_wanted(self) -> tuple[str, Engine, str]:
        return self.settings.model, self.settings.engine, self.settings.device

    async def settle_folders(self) -> None:
        """Sees to it that the editor's folders are indexed, as the settings say."""
        folders = {
            uri: settings.priming.exclude if settings.priming.enabled else None
            for uri in (folder.uri for folder in self.workspace.folders.values())
            if (settings := self.configuration.sources.effective(uri).settings).off is None
        }
        if self._folders is None:
            if not folders:
                return
            # In a thread, for the message loop must not wait for it.
            module = await asyncio.to_thread(import_module, "infill_lsp.folders")
            if self._folders is None:
                self._folders = module.Folders(lambda: self.engine, self._show_index)
                for uri, document in self.documents.items():
                    self._folders.open(uri, partial(getattr, document, "text"))
                if self._asked:
                    self._folders.ask()
        await self._folders.settle(folders)
        if self._folders is not None:  # The editor may have gone meanwhile.
            self.board.keep(self._folders.indexed)

    async def leave(self) -> None:
        """The editor is gone."""
        await self.configuration.aclose()
        if self._warmer is not None:
            await self._warmer.aclose()
        if self._suggestions is not None:
            await self._suggestions.aclose()
        if self._statistics is not None:
            await self._statistics.aclose()
        await self.leave_folders()
        await self.leave_engine()

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

    def report_fault(self, error: Exception) -> None:
        """A fault of ours, in the log: where it was, and not its text, which may quote a document's."""
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("a fault in infill-lsp: %s\n%s", type(error).__name__, where.rstrip())

    async def leave_engine(self) -> None:
        """Closes the way to the engine, which itself stays for other editors."""
        engine, tasks = self._engine, (self._following, self._engine_watch)
        self._engine = self._following = self._engine_watch = None
        for task in tasks:
            if task is not None:
                task.cancel()
        if engine is not None:
            await engine.aclose()

    async def look_at_engine(self) -> None:
        """Brings the status up to date, and does not start an engine."""
        from infill_lsp.client import EngineError

        try:
            self._note(await self.engine.status())
        except EngineError as error:
            self.board.engine("error", self.settings.model, str(error))

    async def restart_engine(self) -> None:
        """Ends the engine, which another one takes the place of."""
        if await self._end_engine():
            self._shown.clear()
            if not self._off:
                self.follow_engine()

    async def _end_engine(self) -> bool:
        """Whether it has ended; the person hears where it has not."""
        from infill_lsp.client import EngineError

        if self._following is not None:
            self._following.cancel()
            self._following = None
        try:
            await self.engine.stop()
        except EngineError as error:
            self.window_show_message(types.ShowMessageParams(types.MessageType.Error, str(error)))
            return False
        self.board.engine("stopped", self.settings.model)
        return True

    def _note(self, status: EngineStatus | None) -> None:
        if status is None:
            if self.board.status["state"] != "error":  # Why it could not be started is told until it is tried again.
                self.board.engine("stopped", self.settings.model)
        else:
            self.board.engine(status.state, status.model, status.message, status.progress, status.device)

    async def _follow(self, engine: EngineClient) -> None:
        from infill_lsp.client import EngineError

        progress = Progress(self)
        try:
            async for status in engine.bring_up():
                self._note(status)
                if status.state == "error":
                    self.show(status.message, types.MessageType.Error)
                elif status.state != "ready":
                    await progress.report(status.message, status.progress)
                else:
                    if self._engine_watch is None or self._engine_watch.done():
                        self._engine_watch = asyncio.create_task(self._watch_engine(engine, status.model))
                    self.suggestions.ready()
                    await self._meet(status)
        except EngineError as error:
            self.board.engine("error", self.settings.model, str(error))
            self.show(str(error), types.MessageType.Error)
        finally:
            progress.end()

    async def _watch_engine(self, engine: EngineClient, model: str) -> None:
        """Tells whether the engine is there, which model answers, and how far another is that takes its place; also of
        one that another editor has started."""
        from infill_lsp.client import EngineError

        loading = False
        while True:
            await asyncio.sleep(LOADING_POLL_S if loading else ENGINE_POLL_S)
            try:
                status = await engine.status()
            except EngineError as error:
                self.board.engine("error", self.settings.model, str(error))
                continue
            self._note(status)
            loading = status is not None and bool(status.next)
            if status is None or status.state != "ready":
                continue
            if status.model != model:
                model = status.model
                self.suggestions.forget()
                await self._tell_again()
            await self._meet(status)

    async def _meet(self, status: EngineStatus) -> None:
        """The engine answers. Another process knows nothing yet."""
        if status.pid != self._engine_pid:
            self._engine_pid = status.pid
            await self._tell_again()

    async def _tell_again(self) -> None:
        """An engine, or another model of it, knows of no document and of no folder yet."""
        self.warmer.ready()
        if self._folders is not None:
            await self._folders.tell_again()

    def _tell_status(self, status: dict[str, Any]) -> None:
        if self.wants_status:
            self.protocol.notify("infill/status", status)

    def _show_index(self, index: Index, status: IndexStatus) -> None:
        self.board.folder(index.root, status.state, status.files, status.message)
        if status.error:
            self.show(status.error, types.MessageType.Warning)
        elif status.state == "filling" and status.total and index not in self._filling:
            task = self._filling[index] = asyncio.create_task(self._follow_index(index))
            task.add_done_callback(lambda _: self._filling.pop(index, None))

    async def _follow_index(self, index: Index) -> None:
        progress = Progress(self)
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


def _field(value: Any, *names: str) -> Any:
    """What is in a message of ours under these names, one in the other; None where nothing is."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It is another user's, and alive.
    return True
