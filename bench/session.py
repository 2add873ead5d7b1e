"""An editor's side of the server: the real process, spoken to in LSP. Draws nothing and measures only elapsed time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from infill_engine import process
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


class Session:
    """One server process with its documents. Use as an asynchronous context manager."""

    def __init__(self, options: dict[str, Any], canvas: bool = False) -> None:
        """options: initializationOptions; canvas: ask for the frames of each request, too."""
        self._options = options
        self._experimental = {"infill": {"canvas": canvas, "timing": True}}
        self._client = LanguageClient("infill-session", "1")
        self._versions: dict[str, int] = {}
        self._timing: dict[str, Any] = {}
        self._engine = EngineClient(options.get("model", "embedded"))
        #: Called with each `infill/canvas` notification.
        self.on_frame: Callable[[Any], None] = lambda frame: None

    async def __aenter__(self) -> Session:
        client = self._client
        client.feature("infill/timing")(lambda timing: self._timing.update(_plain(timing)))
        client.feature("infill/canvas")(lambda frame: self.on_frame(frame))
        client.feature(types.WINDOW_SHOW_MESSAGE)(lambda message: print(message.message, file=sys.stderr))
        await client.start_io(sys.executable, "-m", "infill_lsp")
        capabilities = types.ClientCapabilities(experimental=self._experimental)
        await client.initialize_async(types.InitializeParams(capabilities, initialization_options=self._options))
        client.initialized(types.InitializedParams())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()
        await self._client.shutdown_async(None)
        self._client.exit(None)
        await self._client.stop()

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
        self._versions[uri] += 1
        at = types.Position(line, character)
        change = types.TextDocumentContentChangePartial(range=types.Range(at, at), text=text)
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

    async def cancelled(self, uri: str, line: int, character: int, after_s: float) -> float | None:
        """Asks, cancels after `after_s` seconds, and returns the milliseconds from there until the engine works for
        nobody; None where the answer had come before."""
        key = f"cancelled-{time.monotonic_ns()}"
        asked = self._client.protocol.send_request_async(
            types.TEXT_DOCUMENT_INLINE_COMPLETION, _params(uri, line, character, True), msg_id=key
        )
        await asyncio.sleep(after_s)
        if asked.done():
            return None
        began = time.perf_counter()
        self._client.cancel_request(types.CancelParams(key))
        while (status := await self._engine.status()) is not None and status.live:
            pass
        ms = (time.perf_counter() - began) * 1000
        await asyncio.gather(asked, return_exceptions=True)  # RequestCancelled, as it should be
        return ms


def _params(uri: str, line: int, character: int, invoked: bool) -> types.InlineCompletionParams:
    kind = types.InlineCompletionTriggerKind
    context = types.InlineCompletionContext(kind.Invoked if invoked else kind.Automatic)
    return types.InlineCompletionParams(context, types.TextDocumentIdentifier(uri), types.Position(line, character))


def _plain(params: Any) -> dict[str, Any]:
    """The attributes of a notification's parameters."""
    return params._asdict() if hasattr(params, "_asdict") else dict(vars(params))
