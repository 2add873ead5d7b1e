"""One thread that owns the engine and divides its time, a step at a time, among the live requests.

A request is a generator: each `next` is one bounded piece of work (a chunk of context encoded, or one denoise
step) and may give an event to send. Between two steps anything can be ended, so cancelling costs at most one.
The scheduler does not know what a step does, nor how events travel: it calls `emit` from its own thread.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from infill_engine import protocol
from infill_engine.fetch import Report
from infill_engine.protocol import Candidate, Event, Final, Frame, InfillRequest, State

log = logging.getLogger(__name__)

#: Turns that go to more urgent requests before a waiting one gets one all the same.
PATIENCE = 3
#: Documents whose contexts wait for idle time; of more the oldest is dropped.
MAX_PRIMES = 8


class Engine(Protocol):
    """What the scheduler needs of `infill_engine.engine.Engine`."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def cache_bytes(self) -> int: ...

    def infill(self, request: InfillRequest, started: float) -> Iterator[Candidate | Frame | Final | None]:
        """The steps of one answer; the last event is a `Final`. `started`: `time.monotonic()` at receipt."""
        ...

    def prime(self, request: InfillRequest) -> Iterator[None]:
        """Steps that encode the contexts of `request` for the next one of its document."""
        ...


class Observer(Protocol):
    """Hears what the scheduler does, from whichever thread did it; must neither block nor raise."""

    def finished(self, request: InfillRequest, final: Final) -> None:
        """A request ended: once for each that was submitted, refused ones too."""

    def stepped(self, canvases: int, rows: int, seconds: float) -> None:
        """One denoise pass over so many canvases and rows."""

    def encoded(self, tokens: int, seconds: float) -> None:
        """One step of encoding, which completed so many tokens of context: 0 within a chunk's layers."""


class Phase(NamedTuple):
    """How far the model is."""

    state: State
    message: str = ""
    #: 0..1 while fetching.
    progress: float | None = None

    @property
    def line(self) -> str:
        """`message` with the percentage, where there is one."""
        return self.message if self.progress is None else f"{self.message} ({self.progress:.0%})"


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the scheduler. Outside this module it is only something to cancel."""

    request: InfillRequest
    started: float
    #: Takes the events; None: a prime, which nobody listens to.
    emit: Callable[[Event], None] | None
    steps: Iterator[Event | None] | None = None
    passed_over: int = 0
    #: Seconds its own steps have taken.
    worked: float = 0.0
    #: Set from outside: end at the next step boundary with this.
    verdict: Final | None = None

    @property
    def document(self) -> tuple[str, str]:
        return self.request.client, self.request.document

    @property
    def deadline(self) -> float:
        return self.started + self.request.deadline_ms / 1000

    def end(self, verdict: Final) -> None:
        """Asks for the end; the first verdict stands."""
        self.verdict = self.verdict or verdict

    def timed(self, final: Final) -> Final:
        """`final` with the time since receipt that went to others' steps."""
        queue_ms = max(0.0, time.monotonic() - self.started - self.worked) * 1000
        return replace(final, timing=replace(final.timing, queue_ms=queue_ms))


class _Closing(BaseException):
    """Raised out of a report to stop loading; not an `Exception`, lest a loader take it for its own fault."""


class Scheduler:
    """Loads the engine in its own thread and runs jobs on it until closed. Every method is thread-safe."""

    def __init__(
        self,
        load: Callable[[Report], Engine],
        max_live: int = 64,
        failed: Callable[[str], None] = lambda line: None,
        observer: Observer | None = None,
    ) -> None:
        """`failed` gets the line that says why `load` raised, in the scheduler's thread."""
        self._load = load
        self._failed = failed
        self._observer = observer
        self._max_live = max_live
        self._wake = threading.Condition()
        self._jobs: list[Job] = []
        self._closing = False
        self._active = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="infill-engine", daemon=True)
        #: None until the model is ready.
        self.engine: Engine | None = None
        self.phase = Phase("starting", "the engine is starting")
        #: Infill requests received so far, refused ones too.
        self.requests = 0

    @property
    def live(self) -> int:
        """Infill requests that are being answered."""
        return sum(job.emit is not None and job.verdict is None for job in list(self._jobs))

    @property
    def background(self) -> int:
        """Documents whose contexts are still to be encoded ahead of need."""
        return sum(job.emit is None and job.verdict is None for job in list(self._jobs))

    def idle_s(self) -> float:
        """Seconds since there was work; 0 while there is. A refused request is none, so a failed engine soon ends."""
        with self._wake:
            if self._jobs or self.phase.state in ("starting", "fetching"):
                return 0.0
            return time.monotonic() - self._active

    def start(self) -> None:
        """Starts the thread, which begins by loading the model."""
        self._thread.start()

    def submit(self, request: InfillRequest, emit: Callable[[Event], None], started: float) -> Job:
        """Queues a request; `emit` gets its events and then exactly one `Final`, which may come at once.

        A live request of the same client and document is superseded. `emit` must neither block nor raise.
        """
        job = Job(request, started, emit)
        with self._wake:
            self.requests += 1
            for other in self._jobs:
                if other.document == job.document:
                    other.end(Final("superseded"))
            if refusal := self._refusal():
                self._emit_final(job, refusal)
            else:
                self._jobs.append(job)
            self._wake.notify()
        return job

    def prime(self, request: InfillRequest) -> None:
        """Encodes the contexts of a request ahead of need, once nothing else is to be done. Nobody is told.

        Takes the place of an older one of the same document; where a request of that is live, nothing is queued. Of
        many only the newest are kept.
        """
        prime = Job(request, time.monotonic(), emit=None)
        with self._wake:
            of_document = [job for job in self._jobs if job.document == prime.document and job.verdict is None]
            if self._refusal() or any(job.emit for job in of_document):
                return
            for older in of_document:
                older.end(Final("superseded"))
            self._jobs.append(prime)
            primes = [job for job in self._jobs if job.emit is None and job.verdict is None]
            if len(primes) > MAX_PRIMES:
                primes[0].end(Final("superseded"))
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Ends a job at its next step boundary; nothing happens if it has ended."""
        with self._wake:
            job.end(Final("cancelled"))
            self._wake.notify()

    def close(self) -> None:
        """Asks the thread to end; whatever is live then is cancelled. Does not wait: see `join`."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def join(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the thread; returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _refusal(self) -> Final | None:
        """Why a new request cannot be taken now."""
        if self._closing:
            return Final("starting", "the engine is stopping: ask again in a moment")
        if self.phase.state == "error":
            return Final("error", self.phase.message)
        if self.phase.state != "ready":
            return Final("starting", self.phase.line)
        if self.live >= self._max_live:
            return Final("busy", f"the engine has {self._max_live} requests already")
        return None

    def _run(self) -> None:
        try:
            self.engine = engine = self._load(self._report)
        except _Closing:
            return
        except Exception as error:
            log.exception("the model cannot be loaded")
            self._enter(Phase("error", _one_line(error)))
            self._failed(self.phase.message)
            return
        self._enter(Phase("ready"))
        while job := self._next_job():
            self._step(engine, job)
        for job in list(self._jobs):
            self._finish(job, job.verdict or Final("cancelled"))

    def _report(self, message: str, progress: float | None) -> None:
        if self._closing:
            raise _Closing
        self._enter(Phase("starting" if progress is None else "fetching", message, progress))

    def _enter(self, phase: Phase) -> None:
        with self._wake:
            self.phase = phase
            self._active = time.monotonic()

    def _next_job(self) -> Job | None:
        """Waits for work and picks the most urgent; None once the scheduler is closed."""
        with self._wake:
            while not self._closing:
                if job := self._pick():
                    return job
                self._wake.wait()
        return None

    def _pick(self) -> Job | None:
        """Jobs to be ended, then infills by deadline (none passed over for ever), then the newest prime."""
        for job in self._jobs:
            if job.verdict:
                return job
        infills = [job for job in self._jobs if job.emit]
        if not infills:
            return self._jobs[-1] if self._jobs else None
        job = max(infills, key=lambda job: job.passed_over)
        if job.passed_over < PATIENCE:
            job = min(infills, key=lambda job: job.deadline)
        for other in infills:
            other.passed_over += 1
        job.passed_over = 0
        return job

    def _step(self, engine: Engine, job: Job) -> None:
        """One step of one job; a failing request ends alone, the engine lives on."""
        if job.verdict:
            self._finish(job, job.verdict)
            return
        try:
            if job.steps is None:
                job.steps = engine.infill(job.request, job.started) if job.emit else engine.prime(job.request)
            began = time.monotonic()
            event = next(job.steps)
            job.worked += time.monotonic() - began
        except StopIteration:
            if job.emit:
                log.error("a request ended without an answer")
                self._finish(job, _failure("no answer"))
            else:
                self._finish(job, Final("end"))
        except Exception as error:
            _log_failure(error)
            self._finish(job, _failure(type(error).__name__))
        else:
            if isinstance(event, Final):
                self._finish(job, job.timed(event))
                self.prime(job.request)
            elif event is not None and job.emit:
                job.emit(event)

    def _finish(self, job: Job, final: Final) -> None:
        if isinstance(job.steps, Generator):
            try:
                job.steps.close()
            except Exception as error:
                _log_failure(error)
        with self._wake:
            self._jobs.remove(job)
            self._active = time.monotonic()
        self._emit_final(job, final)

    def _emit_final(self, job: Job, final: Final) -> None:
        if job.emit:
            job.emit(final)
            if self._observer:
                self._observer.finished(job.request, final)


def _one_line(error: Exception) -> str:
    """What went wrong while loading. Errors raised on purpose (`RuntimeError`, `OSError`) say it all."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, RuntimeError | OSError) else f"{type(error).__name__}: {text}"


def _failure(what: str) -> Final:
    return Final("error", f"the engine failed ({what}): its log in {protocol.cache_dir()} says where")


def _log_failure(error: Exception) -> None:
    """Logs where it failed but not the error's text, which may quote the user's."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("a request failed with %s\n%s", type(error).__name__, where.rstrip())
