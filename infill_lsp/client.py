"""The resident engine as the language server sees it: ask it, watch it, start it where none runs.

Knows HTTP over a Unix socket and processes. Does not know editors or documents, what is in a request, nor
how the engine answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpcore
import msgspec
from infill_engine import protocol
from infill_engine.protocol import (
    PROTOCOL,
    Document,
    Documents,
    Event,
    Explanation,
    Final,
    InfillRequest,
    Manifest,
    Paths,
    ProtocolError,
    Status,
)

if find_spec("sniffio") is None:
    # httpcore tries to import it four times a request. That it is not there is now known, and not looked for in all
    # folders of `sys.path`: a millisecond of each key.
    sys.modules.setdefault("sniffio", None)  # type: ignore[arg-type]

#: Starts allowed within the window, and the seconds between one start and the next.
MAX_STARTS = 4
START_WINDOW_S = 180.0
BACK_OFF_S = (0.0, 1.0, 4.0, 16.0)
#: Seconds that a started engine may take until it answers, and a stopped one until it is gone.
START_S = 60.0
STOP_S = 10.0
POLL_S = 0.1
#: Seconds for connecting and for sending, for what the engine answers at once, and what a completion may take beyond
#: its own deadline: the step that is under way then.
CONNECT_S = 1.0
CONTROL_S = 2.0
#: How long the engine may say nothing of itself before it is taken to hang. While it loads torch on a busy machine,
#: whatever else runs in its process waits for seconds.
STATUS_S = 10.0
GRACE_S = 0.5
#: Seconds for a manifest, and for documents to be taken in behind everything else.
SYNC_S = 10.0
TAKE_IN_S = 120.0
#: Characters of the documents that are sent at once, and of one document at most.
BATCH, MAX_DOCUMENT = 256 * 1024, 512 * 1024
#: Seconds an idle connection is kept: fewer than the engine's five, so that it never closes under a request.
KEEP_ALIVE_S = 3.0

URL = "http://engine/v1"
CURE = "run `infill-lsp doctor`"
BROKEN_OFF = "the engine ended in the middle of an answer"


class EngineError(Exception):
    """Why there is no engine to ask: one line that says what to do."""


class EngineAway(EngineError):
    """No engine listens, or it has to start first: what was asked may be asked again once its status is "ready"."""


class HangingEngine(EngineError):
    """An engine runs, and says nothing of itself."""


class OutdatedEngine(EngineError):
    """The engine that runs is older than this client."""


class EngineClient:
    """One engine, that of this user and `model`. All methods belong to one event loop."""

    def __init__(self, model: str, python: str = sys.executable, device: str = "auto") -> None:
        self.model = model
        self.python = python
        self.device = device
        self._url = URL
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._connections: httpcore.AsyncConnectionPool | None = None

    async def infill(self, request: InfillRequest) -> AsyncGenerator[Event, None]:
        """The events of an answer, the last of them a `Final`; whatever fails is a `Final` too.

        Never waits for an engine to start: where none listens, or it went before its first event, the only event
        is `Final("starting")`. Ends 0.5 s after the request's deadline at the latest, with `Final("starting")` too if
        the engine has not answered by then.
        Closing the iterator closes the connection, which cancels the request in the engine.
        """
        begun = answered = False
        failure = Final("error", BROKEN_OFF)
        patience_s = request.deadline_ms / 1000 + GRACE_S
        give_up = asyncio.get_running_loop().time() + patience_s
        try:
            async with self._pool().stream(
                "POST",
                f"{self._url}/infill",
                headers=self._headers,
                content=protocol.encode(self._named(request)),
                extensions=_timeouts(patience_s),
            ) as response:
                if response.status != 200:
                    raise EngineError(self._refusal(response.status, await response.aread()))
                # To the end of the stream, not only to the final event: then the connection is used again.
                async for line in _lines(response.aiter_stream(), give_up):
                    event = protocol.decode_event(line)
                    begun = True
                    answered = answered or isinstance(event, Final)
                    yield event
        except (EngineError, ProtocolError) as error:
            failure = Final("error", str(error))
        except (httpcore.TimeoutException, TimeoutError):
            # A machine under load is no fault to tell of. Whether the engine hangs, whoever looks after it will see.
            failure = Final("starting", "the engine did not answer in time")
        except (httpcore.NetworkError, httpcore.ProtocolError):
            if not begun:  # None listens, or the connection kept from the last request was to one that has ended.
                failure = Final("starting", "the engine is not running yet")
        if not answered:
            yield failure

    async def prime(self, request: InfillRequest) -> None:
        """Lets the engine encode what a request will need, once nothing else is to be done. Raises as `sync`."""
        await self._ask("POST", "/prime", protocol.encode(self._named(request)), CONTROL_S, accepted=202)

    async def explain(self, request: InfillRequest) -> Explanation:
        """What the engine would answer a request from. Raises as `sync`."""
        try:
            return protocol.decode_explanation(
                await self._ask("POST", "/context", protocol.encode(self._named(request)), SYNC_S)
            )
        except ProtocolError as error:
            raise EngineError(str(error)) from None

    async def sync(self, workspace: str, manifest: Mapping[str, str]) -> list[str]:
        """Tells the engine which documents a workspace has, path -> hash of its text: it forgets all others.

        Returns the paths whose text it wants, to be `put`. Raises `EngineAway`, or `EngineError` where it refuses.
        """
        return await self._documents("PUT", workspace, Manifest(dict(manifest)), SYNC_S)

    async def put(self, workspace: str, documents: Iterable[Document]) -> list[str]:
        """Gives the engine the text of documents, LF-only, to be remembered; in parts, so that `documents` may read
        them as it goes. Returns when all are taken in, which comes after everybody's requests.

        Returns the paths of those that are too long, that the engine has no room for, or that were removed or replaced
        meanwhile. Raises as `sync`.
        """
        refused: list[str] = []
        for batch in _batches(documents, refused):
            refused += await self._documents("PUT", workspace, Documents(batch), TAKE_IN_S)
        return refused

    async def remove(self, workspace: str, paths: Iterable[str]) -> None:
        """Lets the engine forget documents at once, also those that it is taking in. Raises as `sync`."""
        await self._documents("DELETE", workspace, Paths(tuple(paths)), CONTROL_S)

    async def forget(self, workspace: str) -> None:
        """Lets the engine forget a whole workspace at once. Raises as `sync`."""
        await self._ask("DELETE", self._path_of(workspace), b"", SYNC_S)

    async def _documents(self, method: str, workspace: str, message: msgspec.Struct, patience_s: float) -> list[str]:
        body = await self._ask(method, f"{self._path_of(workspace)}/documents", protocol.encode(message), patience_s)
        try:
            return list(protocol.decode_paths(body).paths) if method == "PUT" else []
        except ProtocolError as error:
            raise EngineError(str(error)) from None

    async def _ask(self, method: str, path: str, content: bytes, patience_s: float, accepted: int = 200) -> bytes:
        try:
            response = await self._pool().request(
                method,
                f"{self._url}{path}",
                headers=self._headers,
                content=content,
                extensions=_timeouts(patience_s),
            )
        except httpcore.TimeoutException:
            raise EngineAway("the engine did not answer in time") from None
        except (httpcore.NetworkError, httpcore.ProtocolError):
            raise EngineAway("the engine is not running yet") from None
        if response.status == 503:
            raise EngineAway(self._refusal(response.status, response.content))
        if response.status != accepted:
            raise EngineError(self._refusal(response.status, response.content))
        return response.content

    async def status(self, patience_s: float | None = None) -> Status | None:
        """What the engine says of itself; None where none listens.

        Raises `HangingEngine` after `patience_s` seconds (by default `STATUS_S`), `OutdatedEngine`, and `EngineError`
        where a newer engine listens or something else.
        """
        patience_s = STATUS_S if patience_s is None else patience_s
        try:
            response = await self._pool().request(
                "GET", f"{self._url}/status", headers=self._headers, extensions=_timeouts(patience_s)
            )
        except httpcore.TimeoutException:
            raise HangingEngine(f"the engine does not answer: {self._end_it}") from None
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            self._look_into(error)
            return None
        if response.status == 401:
            raise EngineError(self._refusal(response.status, response.content))
        return self._status(response.content)

    async def bring_up(self) -> AsyncIterator[Status]:
        """Starts the engine where none runs; yields its status every 0.1 s until it is "ready" or "error".

        An older engine is replaced. Raises `EngineError` where it cannot be started, which includes the fifth
        start within three minutes, and `HangingEngine` where it has said nothing for a minute.
        """
        process: subprocess.Popen[bytes] | None = None
        heard = time.monotonic()
        while True:
            try:
                status = await self.status()
                heard = time.monotonic()
            except HangingEngine:
                if time.monotonic() - heard > START_S:
                    raise
                continue
            except OutdatedEngine:
                if process is not None:
                    raise EngineError(f"{self.python} has an older infill-lsp: update it there") from None
                await self._retire()
                continue
            if status is not None:
                yield status
                if status.state in ("ready", "error"):
                    return
            elif process is None:
                await asyncio.sleep(self._seconds_to_next_start())
                process = self._spawn()
            elif process.poll() is None:
                if time.monotonic() - self._starts[-1] > START_S:
                    raise EngineError(f"the engine has not answered within {START_S:.0f} s: {CURE}")
            elif process.returncode:
                raise EngineError(f"the engine did not start: {_last_line(self._start_log())} ({CURE})")
            else:
                process = None  # It met another one, which has ended since.
            await asyncio.sleep(POLL_S)

    async def leave(self, client: str) -> None:
        """Tells the engine that a client of `InfillRequest` asks nothing more for now: without others it gives back the
        model's memory. An engine that is away needs to hear nothing."""
        with contextlib.suppress(EngineError):
            await self._ask("DELETE", f"/clients/{quote(client, safe='')}", b"", CONTROL_S)

    async def stop(self) -> None:
        """Ends the engine, if one runs, once it has answered what it was asked. Raises `EngineError` where it stays."""
        await self._post_stop()
        give_up = time.monotonic() + STOP_S
        while time.monotonic() < give_up:
            with contextlib.suppress(OutdatedEngine, HangingEngine):
                if await self.status(CONTROL_S) is None:
                    return
            await asyncio.sleep(POLL_S)
        raise EngineError(f"the engine does not stop: {self._end_it}")

    async def aclose(self) -> None:
        """Closes the connections; the engine stays."""
        if self._connections is not None:
            await self._connections.aclose()
            self._connections = None

    @property
    def _headers(self) -> dict[bytes | str, bytes | str]:
        return {"content-type": "application/json"}

    @property
    def _end_it(self) -> str:
        """What a person does with an engine that is in the way."""
        named = "" if self.model == "auto" else f" --model {shlex.quote(self.model)}"
        return f"end it with `infill-engine stop{named}`"

    def _workspace(self, name: str) -> str:
        """What a workspace is called in the engine."""
        return name

    def _named(self, request: InfillRequest) -> InfillRequest:
        name = self._workspace(request.workspace)
        return request if name == request.workspace else msgspec.structs.replace(request, workspace=name)

    def _path_of(self, workspace: str) -> str:
        return f"/workspaces/{quote(self._workspace(workspace), safe='')}"

    def _look_into(self, error: Exception) -> None:
        """Raises `EngineError` where a connection failed for another reason than that nobody listens."""

    def _refusal(self, code: int, body: bytes) -> str:
        """The engine's own words for why it refused, where it has some."""
        try:
            return str(msgspec.json.decode(body, type=dict[str, str])["error"])
        except (msgspec.MsgspecError, KeyError):
            return f"the engine refused the request (HTTP {code})"

    def _status(self, body: bytes) -> Status:
        """Looks at the protocol number first: the rest of another version's status may not fit ours."""

        class Version(msgspec.Struct):
            protocol: int

        try:
            spoken = msgspec.json.decode(body, type=Version).protocol
            if spoken < PROTOCOL:
                raise OutdatedEngine(f"the engine is older than infill-lsp: {self._end_it}")
            if spoken > PROTOCOL:
                raise EngineError(f"the engine is newer than infill-lsp: update infill-lsp, or {self._end_it}")
            return protocol.decode_status(body)
        except (msgspec.MsgspecError, ProtocolError):
            raise EngineError("what listens on the engine's socket is no engine: end it and try again") from None

    def _pool(self) -> httpcore.AsyncConnectionPool:
        if self._connections is None:
            self._connections = httpcore.AsyncConnectionPool(
                uds=str(self._socket()),
                network_backend=_OwnPeerBackend(),
                keepalive_expiry=KEEP_ALIVE_S,
                max_connections=None,  # Each hole of a fill holds one for seconds; the engine refuses what is too much.
            )
        return self._connections

    def _socket(self) -> Path:
        try:
            return protocol.socket_path(self.model)
        except OSError as error:
            raise EngineError(str(error)) from None

    async def _retire(self) -> None:
        """Ends an engine of an older version."""
        await self._post_stop()
        give_up = time.monotonic() + STOP_S
        while time.monotonic() < give_up:
            try:
                await self.status()
                return
            except OutdatedEngine:
                await asyncio.sleep(POLL_S)
        raise EngineError(f"an engine of an older version does not stop: {self._end_it}")

    async def _post_stop(self) -> None:
        with contextlib.suppress(httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            await self._pool().request("POST", f"{self._url}/stop", extensions=_timeouts(CONTROL_S))

    def _seconds_to_next_start(self) -> float:
        now = time.monotonic()
        recent = [start for start in self._starts if now - start < START_WINDOW_S]
        if len(recent) == MAX_STARTS:
            minutes = START_WINDOW_S / 60
            raise EngineError(f"the engine did not stay up, {MAX_STARTS} starts in {minutes:.0f} minutes: {CURE}")
        return max(0.0, recent[-1] + BACK_OFF_S[len(recent)] - now) if recent else 0.0

    def _spawn(self) -> subprocess.Popen[bytes]:
        """A detached engine process, which outlives this one."""
        program = interpreter(self.python)
        command = [program, "-m", "infill_engine", "serve", "--model", self.model]
        if self.device != "auto":
            command += ["--device", self.device]
        self._starts.append(time.monotonic())
        try:
            with self._start_log().open("ab") as log:
                log.truncate(0)
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",  # `python -m` looks for modules here first, and the editor's folder may hold anything.
                )
        except OSError as error:
            raise EngineError(f"the engine cannot be started ({error}): {CURE}") from None

    def _start_log(self) -> Path:
        """Where a starting engine writes before it has a log of its own: the cache, or beside the socket."""
        socket = self._socket()
        folder = protocol.cache_dir() / "logs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = socket.parent
        return (folder if os.access(folder, os.W_OK) else socket.parent) / f"start-{socket.stem}.log"


def interpreter(python: str) -> str:
    """The absolute path of a program given by path or name. Raises `EngineError` if there is none."""
    program = shutil.which(os.path.expanduser(python))
    if program is None:
        raise EngineError(f"no program {python}: set infill.engine.python to a Python interpreter")
    return os.path.abspath(program)


class _OwnPeerBackend(httpcore.AsyncNetworkBackend):
    """Connects to processes of this user alone: what a person writes goes to nobody else."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.connect_unix_socket(path, timeout, socket_options)
        uid = protocol.peer_uid(stream.get_extra_info("socket"))
        if uid != os.getuid():
            await stream.aclose()
            raise EngineError(f"{path} belongs to user {uid}: set INFILL_RUNTIME_DIR to a folder of your own")
        return stream

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _batches(documents: Iterable[Document], refused: list[str]) -> Iterator[tuple[Document, ...]]:
    """Some at a time, so that none waits long. The paths of those that are too long are added to `refused`."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if len(document.text) > MAX_DOCUMENT:
            refused.append(document.path)
            continue
        if batch and size + len(document.text) > BATCH:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield tuple(batch)


def _timeouts(read_s: float) -> dict[str, Any]:
    return {"timeout": {"connect": CONNECT_S, "write": CONNECT_S, "pool": CONNECT_S, "read": read_s}}


async def _lines(chunks: AsyncIterable[bytes], give_up: float) -> AsyncIterator[bytes]:
    """Whole lines without their newline; what is left at the end is not one.

    Raises `TimeoutError` where the stream goes on beyond `give_up`, in the loop's time.
    """
    rest = b""
    pieces = aiter(chunks)
    while True:
        try:
            async with asyncio.timeout_at(give_up):
                chunk = await anext(pieces)
        except StopAsyncIteration:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
