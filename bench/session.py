"""An editor's side of the server: the real process, spoken to in LSP. Draws nothing and measures only elapsed time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpcore
from infill_engine import process, protocol
from infill_engine.protocol import Status
from lsprotocol import types
from pygls.lsp.client import LanguageClient

from infill_lsp.client import EngineClient


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    #: Milliseconds from sending the request to having its answer.
    ms: float
    items: list[types.InlineCompletionItem]
    #: `infill/timing` of the request, {} where none came.
    timing: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The suggestion, "" where there is none."""
        return str(self.items[0].insert_text) if self.items else ""


@dataclass(slots=True, eq=False)
class Asked:
    """A question that is not answered yet."""

    key: str
    #: The document's, when it was asked.
    version: int
    answer: asyncio.Future[Any]
    #: When it was asked, taken back and answered, in seconds of the performance counter.
    asked: float = field(default_factory=time.perf_counter)
    cancelled: float = 0.0
    answered: float = 0.0

    def note(self) -> None:
        self.answered = time.perf_counter()

    @property
    def items(self) -> list[types.InlineCompletionItem] | None:
        """What is offered; None before it is answered, and where it was not."""
        if not self.answer.done() or self.answer.cancelled() or self.answer.exception() is not None:
            return None
        result = self.answer.result()
        return list(result.items) if isinstance(result, types.InlineCompletionList) else None


class Session:
    """One server process with its documents. Use as an asynchronous context manager."""

    def __init__(self, options: dict[str, Any], canvas: bool = False) -> None:
        """options: initializationOptions, the model among them; canvas: ask for the frames of each request, too."""
        self._options = options
        self._experimental = {"infill": {"canvas": canvas, "timing": True}}
        self._client = LanguageClient("infill-session", "1")
        self._versions: dict[str, int] = {}
        self._timing: dict[str, Any] = {}
        self._timings: dict[tuple[str, int], dict[str, Any]] = {}
        self._asked = 0
        self._engine = EngineClient(options["model"])
        #: Called with each `infill/canvas` notification.
        self.on_frame: Callable[[Any], None] = lambda frame: None

    async def __aenter__(self) -> Session:
        client = self._client
        client.feature("infill/timing")(lambda timing: self._heard(timing))
        client.feature("infill/canvas")(lambda frame: self.on_frame(frame))
        client.feature(types.WINDOW_SHOW_MESSAGE)(lambda message: print(message.message, file=sys.stderr))
        await client.start_io(sys.executable, "-m", "infill_lsp")
        capabilities = types.ClientCapabilities(experimental=self._experimental)
        await client.initialize_async(types.InitializeParams(capabilities, initialization_options=self._options))
        client.initialized(types.InitializedParams())
        return self

    def _heard(self, timing: Any) -> None:
        plain = _plain(timing)
        self._timing.update(plain)
        self._timings[plain["textDocument"].uri, plain["version"]] = plain

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()
        await self._client.shutdown_async(None)
        self._client.exit(None)
        await self._client.stop()  # type: ignore[no-untyped-call]

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._client._server is not None
        return self._client._server.pid

    async def ready(self, told: Callable[[Status], None] = lambda status: None) -> Status:
        """Waits for the engine; `told` hears how it comes along. Raises `RuntimeError` with its fault."""
        while True:
            status = await self._engine.status()
            if status is not None:
                told(status)
                if status.state == "ready":
                    return status
                if status.state == "error":
                    raise RuntimeError(status.message)
            await asyncio.sleep(0.1)

    async def idle(self) -> None:
        """Waits until the engine neither answers nor encodes ahead."""
        while (status := await self._engine.status()) is not None and status.live + status.background:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def stop_engine(self) -> None:
        """Ends the resident engine of this session's model."""
        await asyncio.to_thread(process.stop, self._engine.model)

    def open(self, uri: str, text: str, language: str = "python") -> None:
        self._versions[uri] = 1
        item = types.TextDocumentItem(uri, language, 1, text)
        self._client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def close(self, uri: str) -> None:
        document = types.TextDocumentIdentifier(uri)
        self._client.text_document_did_close(types.DidCloseTextDocumentParams(document))

    def insert(self, uri: str, line: int, character: int, text: str) -> None:
        """An edit that puts `text` at a position."""
        at = types.Position(line, character)
        self.replace(uri, types.Range(at, at), text)

    def replace(self, uri: str, where: types.Range, text: str) -> None:
        """An edit that puts `text` in place of what is there."""
        self._versions[uri] += 1
        change = types.TextDocumentContentChangePartial(range=where, text=text)
        document = types.VersionedTextDocumentIdentifier(self._versions[uri], uri)
        self._client.text_document_did_change(types.DidChangeTextDocumentParams(document, [change]))

    async def complete(self, uri: str, line: int, character: int, invoked: bool = False) -> Answer:
        """One `textDocument/inlineCompletion`."""
        self._timing = {}
        began = time.perf_counter()
        result = await self._client.text_document_inline_completion_async(_params(uri, line, character, invoked))
        ms = (time.perf_counter() - began) * 1000
        items = result.items if isinstance(result, types.InlineCompletionList) else list(result or [])
        return Answer(ms, list(items), self._timing)

    def ask(self, uri: str, line: int, character: int, invoked: bool = False) -> Asked:
        """The same, not waited for."""
        self._asked += 1
        key = f"asked-{self._asked}"
        answer = self._client.protocol.send_request_async(
            types.TEXT_DOCUMENT_INLINE_COMPLETION, _params(uri, line, character, invoked), msg_id=key
        )
        asked = Asked(key, self._versions[uri], answer)
        answer.add_done_callback(lambda _: asked.note())
        return asked

    def cancel(self, asked: Asked) -> None:
        """Takes a question back."""
        asked.cancelled = time.perf_counter()
        self._client.cancel_request(types.CancelParams(asked.key))

    def timing(self, uri: str, version: int) -> dict[str, Any]:
        """`infill/timing` of the question about a version of a document; {} where the engine was not asked."""
        return self._timings.get((uri, version), {})

    async def metrics(self) -> str:
        """What the engine has counted so far."""
        async with httpcore.AsyncConnectionPool(uds=str(protocol.socket_path(self._engine.model))) as pool:
            return (await pool.request("GET", "http://engine/metrics")).content.decode()

    async def cancelled(self, uri: str, line: int, character: int, after_s: float) -> float | None:
        """Asks, cancels after `after_s` seconds, and returns the milliseconds from there until the engine works for
        nobody; None where the answer had come before."""
        asked = self.ask(uri, line, character, invoked=True)
        await asyncio.sleep(after_s)
        if asked.answer.done():
            return None
        self.cancel(asked)
        while (status := await self._engine.status()) is not None and status.live:
            pass
        ms = (time.perf_counter() - asked.cancelled) * 1000
        await asyncio.gather(asked.answer, return_exceptions=True)  # RequestCancelled, as it should be
        return ms


def _params(uri: str, line: int, character: int, invoked: bool) -> types.InlineCompletionParams:
    kind = types.InlineCompletionTriggerKind
    context = types.InlineCompletionContext(kind.Invoked if invoked else kind.Automatic)
    return types.InlineCompletionParams(context, types.TextDocumentIdentifier(uri), types.Position(line, character))


def _plain(params: Any) -> dict[str, Any]:
    """The attributes of a notification's parameters."""
    return params._asdict() if hasattr(params, "_asdict") else dict(vars(params))
