"""An editor that takes the protocol at its word, written without anything of the server's or pygls' in it.

It keeps its own buffers and counts positions by encoding characters, answers what a server asks, and checks each item
as the editor would that draws it: `StrictEditor.complete`. The engine behind the server is a script: `ScriptedEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from infill_engine import protocol
from infill_engine.protocol import Candidate, Documents, End, Final, InfillRequest, Manifest, Paths, Status
from peer import Peer, listening, plain

from infill_lsp.server import InfillServer, create_server
from infill_lsp.transport import serve_tcp

Place = tuple[int, int]

_CODECS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}


class Refused(Exception):
    """An error for an answer."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]
        assert set(error) <= {"code", "message"}, "an editor may show what else there is"
        assert "\n" not in error["message"]
        assert "Traceback" not in error["message"]


class Buffer:
    """A document as its editor has it."""

    def __init__(self, uri: str, language: str, text: str, encoding: str) -> None:
        self.uri = uri
        self.language = language
        self.text = text
        self.version = 1
        self._codec, self._unit = _CODECS[encoding]

    def units(self, text: str) -> int:
        return len(text.encode(self._codec, "surrogatepass")) // self._unit

    def lines(self) -> list[tuple[int, str]]:
        """Where each line begins, and its text without its end."""
        found, start = [], 0
        for end in re.finditer("\r\n|\n|\r", self.text):
            found.append((start, self.text[start : end.start()]))
            start = end.end()
        return [*found, (start, self.text[start:])]

    def offset(self, place: Place) -> int:
        """The code point at a place, which has to be one of the text, between two characters."""
        start, line = self.lines()[place[0]]
        before = line.encode(self._codec, "surrogatepass")[: place[1] * self._unit]
        head = before.decode(self._codec, "surrogatepass")
        assert line.startswith(head)
        assert self.units(head) == place[1], "the line is shorter"
        return start + len(head)

    def place(self, offset: int) -> Place:
        row, (start, _) = max((i, line) for i, line in enumerate(self.lines()) if line[0] <= offset)
        return row, self.units(self.text[start:offset])

    def replace(self, start: Place, end: Place, text: str) -> None:
        a, b = self.offset(start), self.offset(end)
        assert a <= b
        self.text = self.text[:a] + text + self.text[b:]


class StrictEditor:
    """One editor at a server. `cursor` is where its person is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())
        self.buffers: dict[str, Buffer] = {}
        self.buffer: Buffer
        self.cursor: Place = 0, 0
        #: The server at the other end, to look into.
        self.server: InfillServer
        self.encoding = "utf-16"
        self.capabilities: dict[str, Any] = {}
        #: What the server said unasked, and what it asked for.
        self.told: list[tuple[str, Any]] = []
        self.asked: list[tuple[str, Any]] = []
        #: What is asked for under `infill` by `workspace/configuration`.
        self.configuration: object = None

    # Messages.

    def write(self, body: bytes) -> None:
        """Sends a body as it is."""
        self._writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def send(self, message: Mapping[str, Any]) -> None:
        # JSON can carry half of a surrogate pair, escaped.
        self.write(json.dumps({"jsonrpc": "2.0", **message}).encode())

    def notify(self, method: str, params: object) -> None:
        self.send({"method": method, "params": params})

    def ask(self, method: str, params: object) -> tuple[int, asyncio.Future[Any]]:
        """The request's id, and its answer to come."""
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.send({"id": number, "method": method, "params": params})
        return number, answer

    async def request(self, method: str, params: object) -> Any:
        """Raises `Refused`."""
        async with asyncio.timeout(30):
            return await self.ask(method, params)[1]

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode("ascii").lower()
                size = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
                message = json.loads(await self._reader.readexactly(size))
                assert message["jsonrpc"] == "2.0"
                if "method" not in message:
                    self._take(message)
                elif "id" in message:
                    self.asked.append((message["method"], message["params"]))
                    self.send({"id": message["id"], "result": self._answer(message["method"], message["params"])})
                else:
                    self.told.append((message["method"], message.get("params")))
        for answer in self._answers.values():
            answer.cancel()

    def _take(self, message: Mapping[str, Any]) -> None:
        answer = self._answers.pop(message["id"], None)
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(Refused(message["error"]))
        else:
            answer.set_result(message["result"])

    def _answer(self, method: str, params: Any) -> object:
        if method == "workspace/configuration":
            return [self.configuration if item.get("section") == "infill" else None for item in params["items"]]
        return None

    # Coming and going.

    async def start(
        self,
        options: object = None,
        encodings: Sequence[str] = (),
        folders: Iterable[Path] = (),
        experimental: object = None,
        capabilities: Mapping[str, Any] | None = None,
        name: str = "strict",
    ) -> None:
        result = await self.request(
            "initialize",
            {
                "processId": None,
                "clientInfo": {"name": name},
                "rootUri": None,
                "initializationOptions": options,
                "workspaceFolders": [{"uri": folder.as_uri(), "name": folder.name} for folder in folders],
                "capabilities": {
                    "general": {"positionEncodings": list(encodings)} if encodings else {},
                    "window": {"workDoneProgress": True},
                    "textDocument": {"inlineCompletion": {}},
                    "experimental": {"infill": experimental or {}},
                    **(capabilities or {}),
                },
            },
        )
        self.capabilities = result["capabilities"]
        self.encoding = self.capabilities.get("positionEncoding", "utf-16")
        self.notify("initialized", {})

    async def close(self) -> None:
        self._writer.close()
        await self._listening

    # Documents.

    def open(
        self, text: str, language: str = "python", uri: str = "file:///project/module.py", mark: str = "|"
    ) -> None:
        """Opens a document with its cursor where the text has its first mark, else at its start."""
        before, bar, after = text.partition(mark)
        self.buffer = self.buffers[uri] = Buffer(uri, language, before + after if bar else text, self.encoding)
        item = {"uri": uri, "languageId": language, "version": 1, "text": self.buffer.text}
        self.notify("textDocument/didOpen", {"textDocument": item})
        self.cursor = self.buffer.place(len(before)) if bar else (0, 0)

    def edit(self, start: Place, end: Place, text: str) -> None:
        """Replaces text; the cursor comes to stand behind it."""
        a = self.buffer.offset(start)
        self.buffer.replace(start, end, text)
        self.buffer.version += 1
        document = {"uri": self.buffer.uri, "version": self.buffer.version}
        change = {"range": span(start, end), "text": text}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [change]})
        self.cursor = self.buffer.place(a + len(text))

    def type(self, text: str) -> None:
        """Types at the cursor, key by key."""
        for key in text:
            self.edit(self.cursor, self.cursor, key)

    def shut(self) -> None:
        """Closes the document."""
        self.notify("textDocument/didClose", {"textDocument": {"uri": self.buffer.uri}})
        del self.buffers[self.buffer.uri]

    # Completions.

    def begin(self, invoked: bool = False, selected: object = None) -> tuple[int, asyncio.Future[Any]]:
        """Asks for a completion at the cursor: the request's id, and its answer to come."""
        line, character = self.cursor
        params = {
            "textDocument": {"uri": self.buffer.uri},
            "position": {"line": line, "character": character},
            "context": {"triggerKind": 1 if invoked else 2}
            | ({} if selected is None else {"selectedCompletionInfo": selected}),
        }
        return self.ask("textDocument/inlineCompletion", params)

    async def complete(self, invoked: bool = False, selected: Any = None) -> list[dict[str, Any]] | None:
        """The items at the cursor, each checked; None for the answer null. Raises `Refused`."""
        async with asyncio.timeout(30):
            result = await self.begin(invoked, selected)[1]
        if result is None:
            return None
        assert isinstance(result["items"], list)
        for item in result["items"]:
            self.check(item, selected)
        return list(result["items"])

    async def item(self, invoked: bool = False, selected: Any = None) -> dict[str, Any]:
        """The first item, which has to be there."""
        items = await self.complete(invoked, selected)
        assert items, f"nothing is offered in {self.buffer.text!r} at {self.cursor}"
        return items[0]

    async def accepted(self, invoked: bool = False) -> str | None:
        """The text with the first item accepted; None where nothing is offered."""
        items = await self.complete(invoked)
        if not items:
            return None
        self.accept(items[0])
        return self.buffer.text

    def check(self, item: Mapping[str, Any], selected: Any = None) -> None:
        """What an editor wants of an item to draw it as text behind the cursor and nothing else."""
        assert set(item) <= {"insertText", "filterText", "range", "command"}
        text = item["insertText"]
        assert isinstance(text, str), "a plain text, in which no $ means anything"
        start, end = (place(item["range"][name]) for name in ("start", "end"))
        assert start[0] == end[0] == self.cursor[0], "the range lies on the cursor's line"
        assert start <= self.cursor <= end
        a, b, at = (self.buffer.offset(where) for where in (start, end, self.cursor))
        if selected is not None:
            assert item["range"] == selected["range"]
            assert text.startswith(selected["text"])
            return
        assert item.get("filterText", text).startswith(self.buffer.text[a:at]), "what was typed stays"
        rest = iter(text)
        assert all(character in rest for character in self.buffer.text[a:b]), "what is replaced comes again, in order"
        assert text[at - a :].strip(), "there is something to see"

    def accept(self, item: Mapping[str, Any]) -> None:
        """Puts the item's text in, and the cursor behind it."""
        start, end = (place(item["range"][name]) for name in ("start", "end"))
        self.edit(start, end, item["insertText"])


def place(position: Mapping[str, int]) -> Place:
    return position["line"], position["character"]


def span(start: Place, end: Place) -> dict[str, Any]:
    return {
        "start": {"line": start[0], "character": start[1]},
        "end": {"line": end[0], "character": end[1]},
    }


def written(text: str, prob: float = 0.999) -> Candidate:
    """A candidate as an engine has it, each token as probable as that, its last end the best."""
    offsets = tuple(found.end() for found in re.finditer(r"\s*\w+|\s*[^\w\s]|\s+", text))
    ends = [End(found.start(), -1.0, 0.001) for found in re.finditer("\n", text) if found.start()]
    ends += [End(len(text), -1.0, 0.9)] if ends else []
    return Candidate(text, (prob,) * len(offsets), offsets, tuple(ends))


#: What a script writes into a gap.
Script = Callable[[InfillRequest], Candidate | str]


class ScriptedEngine:
    """What listens on the engine's socket. It remembers documents as an engine does."""

    def __init__(self, script: Script | str = "") -> None:
        self.script = script
        self.requests: list[InfillRequest] = []
        #: While it is clear, answers go on without an end. Those that nobody waited for any more, and those under way.
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.dropped = self.live = 0
        #: What an answer ends with.
        self.final = Final("end")
        #: By workspace: what is remembered, and the sizes of the batches it came in.
        self.texts: dict[str, dict[str, str]] = {}
        self.batches: list[int] = []

    @property
    def asked(self) -> list[InfillRequest]:
        """The requests that somebody waits for."""
        return [request for request in self.requests if request.priority != "speculation"]

    async def __call__(self, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/v1/infill":
            await self._fill(protocol.decode_request(body), writer)
        elif target == "/v1/status":
            await plain(writer, protocol.encode(Status(version="1", pid=1, state="ready", model="m")) + b"\n")
        elif target.startswith("/v1/workspaces/"):
            await plain(writer, protocol.encode(self._remember(target.split("/")[3], body)) + b"\n")
        else:
            await plain(writer, b"{}", "202 Accepted")

    async def _fill(self, request: InfillRequest, writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        said = self.script(request) if callable(self.script) else self.script
        candidate = written(said) if isinstance(said, str) else said
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.live += 1
        try:
            while not self.let_go.is_set():
                await self._line(writer, candidate)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.let_go.wait(), 0.005)
            await self._line(writer, candidate)
            await self._line(writer, self.final)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            self.dropped += 1
            raise
        finally:
            self.live -= 1

    async def _line(self, writer: asyncio.StreamWriter, event: Candidate | Final) -> None:
        line = protocol.encode(event) + b"\n"
        writer.write(b"%x\r\n%b\r\n" % (len(line), line))
        await writer.drain()

    def _remember(self, workspace: str, body: bytes) -> Paths:
        texts = self.texts.setdefault(workspace, {})
        if not body:
            texts.clear()
            return Paths(())
        if not body.startswith(b'{"type"'):
            for path in protocol.decode_paths(body).paths:
                texts.pop(path, None)
            return Paths(())
        given = protocol.decode_documents(body)
        if isinstance(given, Manifest):
            for path in texts.keys() - given.documents.keys():
                del texts[path]
            return Paths(tuple(given.documents.keys() - texts.keys()))
        assert isinstance(given, Documents)
        self.batches.append(len(given.documents))
        texts |= {document.path: document.text for document in given.documents}
        return Paths(())


@contextlib.asynccontextmanager
async def meeting() -> AsyncIterator[StrictEditor]:
    """An editor connected to a server in this process, which ends with it."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = create_server()
    serving = asyncio.create_task(serve_tcp(server, 0, port.set_result))
    editor = StrictEditor(*await asyncio.open_connection("127.0.0.1", await port))
    editor.server = server
    try:
        yield editor
    finally:
        await editor.close()
        await asyncio.wait_for(serving, 20)


@contextlib.asynccontextmanager
async def scripted(engine: ScriptedEngine) -> AsyncIterator[Peer]:
    """The engine of the model "m", for as long as that lasts."""
    async with listening(engine) as peer:
        yield peer
