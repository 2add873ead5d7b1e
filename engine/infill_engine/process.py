"""The resident process: one a user and model, behind a Unix socket that nobody else can reach.

Knows locks, sockets, peers and signals; of the engine it knows only that it is loaded and scheduled. Also
holds the two calls with which a command line asks a running engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import logging.handlers
import os
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpcore
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from infill_engine import catalogue, protocol
from infill_engine.config import EngineConfig
from infill_engine.fetch import Report
from infill_engine.metrics import Metrics
from infill_engine.protocol import ProtocolError, Status
from infill_engine.scheduler import Engine, Scheduler
from infill_engine.server import create_apps

log = logging.getLogger(__name__)

#: Seconds that live requests have to finish once the engine is asked to stop.
DRAIN_S = 2.0
#: How much the engine yields to the editor and everything else the person runs.
NICENESS = 5
LOG_BYTES = 1024 * 1024
BACKLOG = 128
#: Seconds within which a running engine answers a question about itself.
ASK_S = 5.0
#: Seconds that a signal has to end an engine that does not stop when asked.
SIGNAL_S = 3.0
#: Seconds between two tries for a lock that another process holds.
POLL_S = 0.05


class EngineError(RuntimeError):
    """What a person has to know about a running engine, in one line."""


class _NoAnswer(EngineError):
    """An engine runs but hangs."""


def serve(
    config: EngineConfig, failed: Callable[[str], None], listening: Callable[[str], None] = lambda url: None
) -> str | None:
    """Runs the engine until it is stopped or idle. `failed` gets a line, in another thread, where the model cannot
    be loaded; the engine then stays for a while to tell editors so. `listening` gets the URL for other plugins, and
    that for editors elsewhere, where the config asks for one.

    Returns None in the end, or at once a line that says who serves this model already. Raises `OSError` where a
    socket cannot be had, or a certificate not be used.
    """
    path = protocol.socket_path(config.model)
    give_up = time.monotonic() + 2 * DRAIN_S
    while True:
        with _lock(path) as holder:
            if holder is None:
                _run(config, path, failed, listening)
                return None
        # A holder that does not listen is about to begin, or draining: then we take its place.
        if _listens(path) or time.monotonic() > give_up:
            return f"{config.model} is served already by process {holder} at {path}"
        time.sleep(POLL_S)


def status(model: str) -> Status | None:
    """What the engine of `model` says of itself, None where none runs. Raises `EngineError`."""
    answer = _ask(model, "GET", "/v1/status")
    try:
        return None if answer is None else protocol.decode_status(answer)
    except ProtocolError as error:
        raise EngineError(f"the engine of {model} is of another version ({error}): stop it") from None


def change(name: str, report: Report) -> str | None:
    """Has the engine of `AUTO` serve another model, and waits until it does.

    Returns what answers then; None where none runs. Raises `EngineError` where the other one cannot be loaded, and the
    former goes on.
    """
    if _ask(catalogue.AUTO, "PUT", "/v1/model", protocol.encode(protocol.Choice(name))) is None:
        return None
    while (found := status(catalogue.AUTO)) is not None:
        if not found.next:
            if found.model == name:
                return name
            raise EngineError(f"{found.message or 'another model was chosen meanwhile'}: {found.model} goes on")
        report(found.message, found.progress)
        time.sleep(POLL_S)
    raise EngineError(f"the engine ended while it loaded {name}: its log is in {protocol.cache_dir()}")


def metrics(model: str) -> str | None:
    """What the engine of `model` measured, as Prometheus reads it; None where none runs. Raises `EngineError`."""
    answer = _ask(model, "GET", "/metrics")
    return None if answer is None else answer.decode()


def stop(model: str, timeout: float = 10.0) -> str | None:
    """Ends the engine of `model`, by signals if it has not ended `timeout` seconds after it was asked.

    Returns how it ended, in words, once it is gone; None if none runs. Raises `EngineError`.
    """
    path = protocol.socket_path(model)
    with _lock(path) as engine:
        pass
    try:
        if _ask(model, "POST", "/v1/stop") is None:
            return None
        if _is_gone(path, engine, timeout):
            return "stopped"
    except _NoAnswer:
        if engine is None:  # Whatever hangs there is no engine of ours.
            raise
    for number in (signal.SIGTERM, signal.SIGKILL):
        if engine and engine.isdecimal():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(engine), number)
        if _is_gone(path, engine, SIGNAL_S):
            return f"process {engine} did not stop when asked: ended by {number.name}"
    raise EngineError(f"the engine of {model} (process {engine}) cannot be ended: look for it with `ps`")


def _is_gone(path: Path, engine: str | None, timeout: float) -> bool:
    """Waits up to `timeout` seconds until the process `engine` no longer holds the lock; the next one may."""
    give_up = time.monotonic() + timeout
    while True:
        with _lock(path) as holder:
            if holder is None or holder != engine:
                return True
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)


def _run(config: EngineConfig, path: Path, failed: Callable[[str], None], listening: Callable[[str], None]) -> None:
    with contextlib.ExitStack() as stack:
        listeners = []
        remote = None
        if address := config.http_address:
            listeners.append(stack.enter_context(_listening_tcp(*address, "--http")))
        if address := config.listen_address:
            tls = _tls(config)
            remote = _Remote(stack.enter_context(_listening_tcp(*address, "--listen")), tls)
        listeners.append(stack.enter_context(_listening(path)))
        _log_to(protocol.cache_dir() / f"engine-{path.stem}.log")
        os.nice(NICENESS)
        log.info("process %d serves %s at %s", os.getpid(), config.model, path)
        if config.http:
            listening(_url("http", listeners[0]))
        if remote:
            listening(_url("https" if remote.tls else "http", remote.listener))
        asyncio.run(_serve(config, listeners, remote, failed))
        log.info("process %d ends", os.getpid())


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Remote(NamedTuple):
    """Where editors on other machines connect."""

    listener: socket.socket
    tls: ssl.SSLContext | None


def _tls(config: EngineConfig) -> ssl.SSLContext | None:
    """None where no certificate is given. Raises `OSError` with a line where it cannot be used."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", "") or getattr(error, "strerror", "") or error
        raise OSError(f"{config.tls_cert} and {config.tls_key} are no certificate and its key ({why})") from None
    return context


async def _serve(
    config: EngineConfig, listeners: list[socket.socket], remote: _Remote | None, failed: Callable[[str], None]
) -> None:
    def load(report: Report, name: str = config.model) -> Engine:
        # Torch takes seconds to import; in the scheduler's thread, so that the socket answers meanwhile.
        try:
            from infill_engine import models

            engine = models.load(replace(config, model=name), report)
        except ModuleNotFoundError as error:
            missing = f"{error.name} is not installed in {sys.executable}"
            raise EngineError(f"{missing}: run `infill-lsp doctor`") from error
        keep()
        return engine

    def change(name: str) -> None:
        if scheduler.engine is not None and scheduler.engine.name == name:
            scheduler.stay()
            catalogue.choose(name)
            return
        settle: Callable[[str], None] | None = None

        def other(report: Report) -> Engine:
            nonlocal settle
            engine = load(report, name)
            from infill_engine import models

            settle = models.moved()
            return engine

        def serves() -> None:
            assert settle
            assert scheduler.engine
            settle(scheduler.engine.device)
            try:
                catalogue.choose(name)
            except OSError as error:
                log.error("the choice of %s cannot be kept (%s)", name, error.strerror)

        scheduler.succeed(name, other, serves)

    def stop() -> None:
        server.should_exit = True

    measured = Metrics()
    scheduler = Scheduler(load, failed=failed, observer=measured, release_s=config.idle_release_s, freed=keep)
    changing = change if config.model == catalogue.AUTO else None
    apps = create_apps(scheduler, config, measured, stop, change=changing)
    server = _Server(
        uvicorn.Config(
            apps.socket,
            http=_protocol(apps.tcp),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(DRAIN_S) + 1,
        ),
        scheduler,
        remote,
        apps.remote,
    )
    await server.serve(sockets=listeners)


def keep() -> None:
    """Keeps what is there now from the garbage collector: to go through it again took 0.1 s each time, in the middle of
    somebody's answer. What was kept and is not needed any more goes, such as an engine, which refers to itself."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class _Server(uvicorn.Server):
    """uvicorn, but what is live after `DRAIN_S` ends with a proper last line, and signals end the loop.

    It also serves editors elsewhere, with an app of their own: uvicorn would have TLS for all sockets or none.
    """

    def __init__(
        self, config: uvicorn.Config, scheduler: Scheduler, remote: _Remote | None, app: ASGIApp | None
    ) -> None:
        super().__init__(config)
        self._scheduler = scheduler
        self._remote = remote
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._remote:
            loop = asyncio.get_running_loop()
            listener, tls = self._remote
            self.servers.append(await loop.create_server(self._speak, sock=listener, ssl=tls, backlog=BACKLOG))

    def _speak(self) -> H11Protocol:
        speaker = H11Protocol(self.config, self.server_state, self.lifespan.state)
        assert self._app
        speaker.app = self._app
        return speaker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(DRAIN_S, self._scheduler.close)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn's own raises a signal again in the end, which kills us before the socket is removed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, setattr, self, "should_exit", True)
        yield


class _OwnPeerProtocol(H11Protocol):
    """HTTP with processes of our own user only: any other is hung up on before a byte of it is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not _is_own(transport.get_extra_info("socket")):
            log.warning("a process of another user tried to connect")
            transport.abort()


def _protocol(over_tcp: ASGIApp) -> type[asyncio.Protocol]:
    """HTTP with our own processes over the Unix socket; over TCP, where nobody has a uid, with `over_tcp` alone."""

    class Faces(_OwnPeerProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if transport.get_extra_info("socket").family == socket.AF_UNIX:
                super().connection_made(transport)
            else:
                H11Protocol.connection_made(self, transport)
                self.app = over_tcp

    return Faces


class _OwnPeerBackend(httpcore.SyncBackend):
    """Connects to engines of our own user only."""

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = super().connect_unix_socket(path, timeout, socket_options)
        if not _is_own(stream.get_extra_info("socket")):
            stream.close()
            raise EngineError(f"{path} is another user's: set INFILL_RUNTIME_DIR to a folder of your own")
        return stream


def _is_own(connection: socket.socket) -> bool:
    try:
        return protocol.peer_uid(connection) == os.getuid()
    except OSError:
        return False


def _ask(model: str, method: str, url: str, body: bytes = b"") -> bytes | None:
    """The body of the engine's answer, None where no engine listens. Raises `EngineError`."""
    path = protocol.socket_path(model)
    try:
        with httpcore.ConnectionPool(uds=str(path), network_backend=_OwnPeerBackend()) as pool:
            timeouts = {"connect": ASK_S, "read": ASK_S, "write": ASK_S}
            response = pool.request(method, f"http://engine{url}", content=body, extensions={"timeout": timeouts})
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
        # Nobody listens; but a queue that is full of callers is an engine that hangs.
        if isinstance(error, httpcore.ConnectError) and not isinstance(error.__context__, BlockingIOError):
            return None
        raise _NoAnswer(
            f"the engine at {path} does not answer: end it with `infill-engine stop --model {model}`"
        ) from None
    if response.status >= 300:
        raise EngineError(_refusal(response.content) or f"the engine at {path} refuses {url} (HTTP {response.status})")
    return response.content


def _refusal(body: bytes) -> str:
    """The engine's own words for why it refused, where it has some."""
    with contextlib.suppress(msgspec.MsgspecError):
        return str(msgspec.json.decode(body, type=dict[str, Any]).get("error", ""))
    return ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[str | None]:
    """Takes the lock of a socket. Gives None while we hold it, else the id of the process that does."""
    file = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield os.pread(file, 32, 0).decode("ascii", "replace") or "unknown"
            return
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield None
    finally:
        os.close(file)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """The socket, 0600 from its first moment, in place of one left by a killed process. Needs the lock."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is not a socket: remove it")
        path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        try:
            listener.listen(BACKLOG)
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _listening_tcp(host: str, port: int, option: str) -> Iterator[socket.socket]:
    """A TCP socket at an address of this machine. Raises `OSError` with a line that says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise OSError(f"cannot listen at {host} port {port} ({error.strerror}): choose another {option}") from None
        yield listener


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ASK_S)
        return probe.connect_ex(str(path)) == 0


def _log_to(path: Path) -> None:
    """Sends the package's log to a file that stays small, or to stderr where no file can be had."""
    handler: logging.Handler
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    except OSError:
        handler = logging.StreamHandler()
    logging.raiseExceptions = False  # a line that a full disk does not take is lost, without a stack trace for each
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("infill_engine").setLevel(logging.INFO)
