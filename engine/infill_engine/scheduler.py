"""One thread that owns the engine and runs all live requests on it together, round by round.

A request is a generator that yields what it needs of the model. Each round runs one denoise pass over all canvases that
wait for one, whoever asked for them, and one step of encoding for one request that still encodes; so neither kind of
work starves the other. Between two rounds requests come and go: cancelling costs at most one round. The scheduler does
not know what a step does, nor how events travel: it calls `emit` from its own thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from infill_engine import protocol
from infill_engine.fetch import Report
from infill_engine.protocol import ANSWERED, Candidate, Event, Explanation, Final, Frame, InfillRequest, State

if TYPE_CHECKING:  # they bring torch, which takes seconds to import
    from infill_engine.core import Outcome, Pass
    from infill_engine.workspaces import Workspaces

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Rounds that go by urgency before one that goes by who has waited longest.
PATIENCE = 3
#: Rows of one pass at most, unless a single canvas has more: beyond some hundred a pass takes as long as two.
PASS_ROWS = 256
#: Documents whose contexts wait for idle time; of more the oldest is dropped.
MAX_PRIMES = 8
#: Passes without which a text is hardly worth showing: a request that would not get so many is told at once.
LEAST_PASSES = 4

#: Characters that are told of an error nobody foresaw.
UNEXPECTED = 300

#: Seconds after which a piece of what is to be remembered is taken in even where somebody waits.
DIGEST_AFTER_S = 0.5

#: The share of typed requests that are overtaken by the next key beyond which it is worth refusing some.
OVERTAKEN = 0.3
#: The weight of a pass in the running means, for each that came after it.
FADING = 0.98
#: Times as long as it took that a pass was expected to take, beyond which the expectation is given up.
OUTDATED = 4.0

_RANK = {"typed": 0, "explicit": 1, "speculation": 2}


class Engine(Protocol):
    """What the scheduler needs of `infill_engine.engine.Engine`."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kernels(self) -> str: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def encoded_tokens(self) -> int: ...
    @property
    def workspaces(self) -> Workspaces | None: ...

    def infill(
        self, request: InfillRequest, started: float
    ) -> Generator[Candidate | Frame | Final | Pass | None, Outcome | None, None]:
        """One answer: its events, of which the last is a `Final`, and in between what it needs. A `Pass` is answered
        with its `Outcome`, or with None to end it; None asks for one step of encoding, which the next `next` does.
        `started`: `time.monotonic()` at receipt."""
        ...

    def prime(self, request: InfillRequest) -> Generator[None, None, None]:
        """Encodes the contexts of `request` for the next one of its document; each yield asks for a step, as above."""
        ...

    def explain(self, request: InfillRequest) -> Explanation:
        """What a request would be answered from."""
        ...

    def denoise(self, passes: Sequence[Pass]) -> Sequence[Outcome]:
        """Runs passes of several requests as one."""
        ...

    def close(self) -> None:
        """Keeps what is to be kept, before it is let go."""
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
class Successor:
    """An engine that is being loaded to take the place of the one that serves."""

    name: str
    load: Callable[[Report], Engine]
    #: Called in the scheduler's thread once it serves.
    serves: Callable[[], None]
    phase: Phase
    #: None until it is loaded.
    engine: Engine | None = None


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the scheduler. Outside this module it is only something to cancel."""

    request: InfillRequest
    started: float
    #: Takes the events; None: a prime, which nobody listens to.
    emit: Callable[[Event], None] | None
    #: None before its first round.
    steps: Generator[Event | Pass | None, Any, None] | None = None
    #: The pass it waits for; None while it encodes.
    wants: Pass | None = None
    #: The round in which it last got on.
    turn: int = 0
    #: Seconds of the steps and passes it took part in, and how many there were of each.
    worked: float = 0.0
    encoding_steps: int = 0
    passes: int = 0
    #: What is to be encoded ahead for its document once it has ended.
    ahead: InfillRequest | None = None
    #: Set from outside: end before the next round with this.
    verdict: Final | None = None
    #: Its final event is out.
    ended: bool = False

    @property
    def document(self) -> tuple[str, str]:
        return self.request.client, self.request.document

    @property
    def deadline(self) -> float:
        return self.started + self.request.deadline_ms / 1000

    @property
    def rank(self) -> int:
        return _RANK[self.request.priority]

    @property
    def urgency(self) -> tuple[int, float]:
        """The least goes first."""
        return self.rank, self.deadline

    def end(self, verdict: Final) -> None:
        """Asks for the end; the first verdict stands."""
        self.verdict = self.verdict or verdict

    def timed(self, final: Final) -> Final:
        """`final` with the passes that were made for it, and the time since receipt that went to others' work."""
        queue_ms = max(0.0, time.monotonic() - self.started - self.worked) * 1000
        timing = replace(final.timing, queue_ms=queue_ms, steps=final.timing.steps or self.passes)
        return replace(final, timing=timing)


class Pace:
    """What work takes, as running means. A guess of 0 until measured: nobody is refused for what is not known."""

    def __init__(self) -> None:
        # Weighted sums over passes, of 1, rows, seconds, rows^2 and rows x seconds, in which older ones fade.
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._step_s = 0.0
        self._steps = 0.0
        #: Passes that an answered request took.
        self._passes = float(LEAST_PASSES)
        #: The share of typed requests whose place a newer key stroke takes, and their age then.
        self._overtaken = 0.0
        self._overtaken_s = 0.0

    def answered(self, passes: int) -> None:
        """A request was answered in so many passes."""
        self._passes += 0.1 * (max(passes, LEAST_PASSES) - self._passes)

    def typed(self, overtaken_s: float | None) -> None:
        """A typed request was superseded at that age; None: it was answered."""
        self._overtaken += 0.1 * ((overtaken_s is not None) - self._overtaken)
        if overtaken_s is not None:
            self._overtaken_s += 0.1 * (overtaken_s - self._overtaken_s) if self._overtaken_s else overtaken_s

    @property
    def stale_s(self) -> float:
        """The age at which an answer is likely to come too late: where few are overtaken none does."""
        return self._overtaken_s if self._overtaken > OVERTAKEN else math.inf

    def passed(self, rows: int, seconds: float) -> None:
        """A pass took so long. Where that is a small part of what those before it tell, they are forgotten: such as one
        that had to wait for a compiler or for swapped memory, which is no guide to what comes."""
        passes, all_rows = self._sums[:2]
        fewer = min(1.0, rows * passes / all_rows) if all_rows else 1.0  # a pass of fewer rows may take so much less
        if seconds < self.pass_s(rows) * fewer / OUTDATED:
            self._sums = (0.0,) * 5
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(FADING * old + one for old, one in zip(self._sums, new, strict=True))

    def prepared(self, steps: int, seconds: float) -> None:
        """A request took so many steps of encoding, of so long in all, to its first pass."""
        self._steps += 0.2 * (steps - self._steps)
        if steps:
            self._step_s += 0.2 * (seconds / steps - self._step_s) if self._step_s else seconds / steps

    def pass_s(self, rows: int) -> float:
        """Seconds that a pass takes: a line through those measured, by least squares."""
        n, x, y, xx, xy = self._sums
        if not n:
            return 0.0
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 1e-6 * n * xx else 0.0
        return max(0.0, (y + slope * (n * rows - x)) / n)

    def wait_s(self, encoding: int, rows: int) -> tuple[float, float]:
        """Seconds until a new request has had `LEAST_PASSES`, and as many as answers take; where `encoding` others
        encode before it, and passes have `rows` rows with it."""
        steps = (encoding + 1) * self._steps
        encoded_s, pass_s = steps * self._step_s, self.pass_s(rows)
        return encoded_s + (steps + LEAST_PASSES) * pass_s, encoded_s + (steps + self._passes) * pass_s


NO_MEMORY = Final("busy", "the engine's memory is full of what other requests use: ask again in a moment")
NO_ROOM = Final("busy", "there is no memory for even one request: free some of the device's, or choose a smaller model")


class Unavailable(RuntimeError):
    """Why the engine cannot be asked now, in one line."""


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
        release_s: float = math.inf,
        freed: Callable[[], object] = lambda: None,
    ) -> None:
        """`failed` gets the line that says why `load` raised, in the scheduler's thread; release_s: seconds without
        work after which the engine is let go, to be loaded again for the next request; `freed` is called whenever one
        was."""
        self._load = load
        self._failed = failed
        self._observer = observer
        self._max_live = max_live
        self._release_s = release_s
        self._freed = freed
        self._wake = threading.Condition()
        self._jobs: list[Job] = []
        self._calls: deque[Callable[[Engine | None], None]] = deque()
        #: Who asked while the engine was loaded, and whether the last of them went: then it is let go at once.
        self._clients: set[str] = set()
        self._deserted = False
        #: Whether documents may wait to be taken in, and when the last piece of them was.
        self._digesting = False
        self._digested = -math.inf
        self._closing = False
        self._active = time.monotonic()
        self._rounds = 0
        #: What work takes on this machine.
        self.pace = Pace()
        self._thread = threading.Thread(target=self._run, name="infill-engine", daemon=True)
        #: None until the model is ready.
        self.engine: Engine | None = None
        self.phase = Phase("starting", "the engine is starting")
        #: What is being loaded to take its place, and the thread that loads it.
        self.successor: Successor | None = None
        self._loader: threading.Thread | None = None
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
            if self._has_work or self.successor or self.phase.state in ("starting", "fetching"):
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
            self._clients.add(request.client)
            self._deserted = False
            for other in self._jobs:
                if other.document == job.document:
                    if request.priority == "speculation" and other.verdict is None:
                        job.ahead = other.ahead if other.emit else other.request
                    if other.emit and other.verdict is None and other.request.priority == "typed":
                        self.pace.typed(time.monotonic() - other.started)
                    other.end(Final("superseded"))
            refusal = self._refusal() or self._no_time(job)
            if refusal is None:
                self._jobs.append(job)
            self._wake.notify()
        if refusal is not None:
            self._emit_final(job, refusal)
            self._prime_after(job)
        return job

    def prime(self, request: InfillRequest) -> None:
        """Encodes the contexts of a request ahead of need, once nothing else is to be done. Nobody is told.

        Takes the place of an older one of the same document; where a request of that is live, nothing is queued, but
        for speculation, behind which it comes. Of many only the newest are kept.
        """
        prime = Job(request, time.monotonic(), emit=None)
        with self._wake:
            of_document = [job for job in self._jobs if job.document == prime.document and job.verdict is None]
            for live in of_document:
                if live.emit and live.request.priority == "speculation":
                    live.ahead = request
            if self._refusal() or any(job.emit for job in of_document):
                return
            for older in of_document:
                older.end(Final("superseded"))
            self._jobs.append(prime)
            primes = [job for job in self._jobs if job.emit is None and job.verdict is None]
            if len(primes) > MAX_PRIMES:
                primes[0].end(Final("superseded"))
            self._wake.notify()

    def succeed(self, name: str, load: Callable[[Report], Engine], serves: Callable[[], None] = lambda: None) -> None:
        """Loads another engine in a thread of its own; it takes the place of the one that serves between two requests:
        those that run end first, later ones wait for it. Until then, and where loading fails, the former goes on; then
        `phase` says why. A newer successor takes the place of one that is being loaded, once that has stopped: there
        may be no memory for both.

        Raises `Unavailable` where none serves yet.
        """
        with self._wake:
            if refusal := self._not_ready():
                raise Unavailable(refusal.message)
            fallen, self.successor = self.successor, Successor(name, load, serves, Phase("starting", f"loading {name}"))
            self.phase = Phase("ready")
            self._loader = threading.Thread(
                target=self._prepare, args=(self.successor, self._loader), name="infill-loader", daemon=True
            )
            self._loader.start()
        self._drop(fallen)

    def stay(self) -> None:
        """Lets fall what is being loaded: the engine that serves goes on."""
        with self._wake:
            fallen, self.successor = self.successor, None
            if fallen is not None:
                self.phase = Phase("ready")
        self._drop(fallen)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Asks the engine something that takes milliseconds, in its thread, before the next round. Loads it where it
        was let go. Raises `Unavailable`, and so does the future where the engine ends before."""
        future: Future[T] = Future()

        def answer(engine: Engine | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise Unavailable("the engine is stopping: ask again in a moment")
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if (refusal := self._not_ready()) is not None:
                raise Unavailable(refusal.message)
            self._calls.append(answer)
            self._wake.notify()
        return future

    def leave(self, client: str) -> None:
        """A client will ask nothing more for now. The last one to leave lets the engine go, to be loaded again for the
        next request."""
        with self._wake:
            self._clients.discard(client)
            for job in self._jobs:
                if job.request.client == client:
                    job.end(Final("cancelled"))
            self._deserted = not self._clients
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

    @property
    def _has_work(self) -> bool:
        return bool(self._jobs or self._calls or self._digesting or self._is_due)

    @property
    def _is_due(self) -> bool:
        """Whether a successor waits to take over."""
        successor = self.successor  # which the thread that loads it may let fall meanwhile
        return successor is not None and successor.engine is not None

    def _not_ready(self) -> Final | None:
        """Why the engine cannot be asked anything now."""
        if self._closing:
            return Final("starting", "the engine is stopping: ask again in a moment")
        if self.phase.state == "error":
            return Final("error", self.phase.message)
        if self.phase.state != "ready":
            return Final("starting", self.phase.line)
        return None

    def _refusal(self) -> Final | None:
        """Why a new request cannot be taken now."""
        if self.live >= self._max_live:
            return self._not_ready() or Final("busy", f"the engine has {self._max_live} requests already")
        return self._not_ready()

    def _no_time(self, job: Job) -> Final | None:
        """Why a new request would not get far enough before its deadline, or be answered before its typist's next key
        makes the answer worthless. Whoever is alone is always served."""
        live = [other for other in self._jobs if other.emit and other.verdict is None]
        if not live:
            return None
        encoding = sum(other.passes == 0 and other.urgency <= job.urgency for other in live)
        rows = sum(wants.rows if (wants := other.wants) else 1 for other in live) + 1
        first_s, whole_s = self.pace.wait_s(encoding, rows)
        limits = [(first_s, job.deadline - time.monotonic())]
        if job.request.priority == "typed":
            limits.append((whole_s, self.pace.stale_s))
        for takes_s, has_s in limits:
            if takes_s > has_s:
                needs = f"another takes {takes_s * 1000:.0f} ms, and has {has_s * 1000:.0f}"
                return Final("busy", f"the engine has {len(live)} requests: {needs}")
        return None

    def _run(self) -> None:
        try:
            if self._loaded():
                while self._wait() and (engine := self._loaded()):
                    self._answer(engine)
                    self._round(engine)
                    del engine  # lest it stay when it is let go
        except Exception as error:  # a fault of the scheduler itself: nobody shall wait for a thread that is gone
            _log_failure(error)
            self._enter(Phase("error", _failure(type(error).__name__).message))
            self._failed(self.phase.message)
        failure = Final("error", self.phase.message) if self.phase.state == "error" else Final("cancelled")
        for job in list(self._jobs):
            self._finish(job, job.verdict or failure)
        self._let_go(self.engine)
        self._answer(None)

    def _answer(self, engine: Engine | None) -> None:
        """Answers what was called for; None: the engine has ended."""
        while self._calls:
            self._calls.popleft()(engine)
            with self._wake:
                self._active = time.monotonic()
                self._digesting = engine is not None

    def _let_go(self, engine: Engine | None) -> None:
        """An engine's last work."""
        try:
            if engine is not None:
                engine.close()
        except Exception as error:
            _log_failure(error)

    def _drop(self, fallen: Successor | None) -> None:
        """Lets an engine go that has never served."""
        if fallen is None:
            return
        with self._wake:
            engine, fallen.engine = fallen.engine, None
        if engine is not None:
            self._let_go(engine)
            del engine
            self._freed()

    def _prepare(self, successor: Successor, before: threading.Thread | None) -> None:
        """Loads a successor; in a thread of its own, once that which loaded `before` has ended."""

        def report(message: str, progress: float | None) -> None:
            if self._closing or self.successor is not successor:
                raise _Closing
            successor.phase = Phase("starting" if progress is None else "fetching", message, progress)

        if before is not None:
            before.join()
        try:
            report(successor.phase.message, None)  # it may not be wanted any more
            successor.engine = successor.load(report)
        except _Closing:
            return
        except Exception as error:
            log.exception("%s cannot be loaded", successor.name)
            with self._wake:
                if self.successor is successor:
                    self.successor = None
                    self.phase = Phase("ready", f"{successor.name} is not used: {_one_line(error)}")
            return
        with self._wake:
            wanted = self.successor is successor and not self._closing
            self._wake.notify()
        if not wanted:
            self._drop(successor)

    def _hand_over(self) -> None:
        """Lets a successor that is loaded take over, where no request runs."""
        with self._wake:
            successor = self.successor
            if successor is None or successor.engine is None or any(job.steps and job.emit for job in self._jobs):
                return
            engine, successor.engine = successor.engine, None  # now nobody else lets it fall
            ahead = [job for job in self._jobs if job.emit is None]
        for job in ahead:  # what they encode is of the former
            self._finish(job, Final("superseded"))
        former, self.engine, self._load = self.engine, engine, successor.load
        self.pace, self._digesting = Pace(), False
        self._let_go(former)
        del former
        self._freed()
        successor.serves()
        with self._wake:
            if self.successor is successor:  # else a newer one is on its way
                self.successor = None
        self._enter(Phase("ready"))
        log.info("%s serves now", successor.name)

    def _loaded(self) -> Engine | None:
        """The engine, loaded where it is not; None where that fails, or the scheduler is closing."""
        if self._is_due:
            self._hand_over()
        if self.engine is None:
            try:
                self.engine = self._load(self._report)
            except _Closing:
                return None
            except Exception as error:
                log.exception("the model cannot be loaded")
                self._enter(Phase("error", _one_line(error)))
                self._failed(self.phase.message)
                return None
            self._enter(Phase("ready"))
        return self.engine

    def _report(self, message: str, progress: float | None) -> None:
        if self._closing:
            raise _Closing
        self._enter(Phase("starting" if progress is None else "fetching", message, progress))

    def _enter(self, phase: Phase) -> None:
        with self._wake:
            self.phase = phase
            self._active = time.monotonic()

    def _wait(self) -> bool:
        """Waits for work, and lets the engine go where that takes long; False once the scheduler is closed."""
        while True:
            with self._wake:
                patience_s = None if self.engine is None else min(self._release_s, threading.TIMEOUT_MAX)
                self._wake.wait_for(lambda: self._has_work or self._closing or self._deserted, patience_s)
                asked = self._jobs or self._calls or self._closing or self._is_due
                if asked or (self._digesting and not self._deserted):
                    return not self._closing
                idle, self.engine, self._deserted = self.engine, None, False
                self._clients.clear()
                self._digesting = False
                self.phase = Phase("ready", "the model is not in memory: the next request loads it")
            self._let_go(idle)
            del idle
            self._freed()

    def _round(self, engine: Engine) -> None:
        """One pass for all canvases, one step for one that encodes. The most urgent go first, and every fourth round
        those who waited longest; contexts are encoded ahead, and documents remembered, only where nobody waits."""
        self._rounds += 1
        by_urgency = self._rounds % (PATIENCE + 1) != 0
        live = sorted(self._begin_round(engine), key=lambda job: job.urgency if by_urgency else (job.turn, 0.0))
        canvases = [job for job in live if job.wants]
        if canvases:
            self._denoise(engine, _together(canvases))
        encoding = [job for job in live if job.steps and not job.wants]
        if encoding and not (by_urgency and canvases and encoding[0].rank > canvases[0].rank):
            self._encode(engine, encoding[0])
        elif not live and (ahead := self._next_prime()):
            self._encode(engine, ahead)
        elif not live and self._digesting:
            self._digest(engine)
        if self._digesting and time.monotonic() > self._digested + DIGEST_AFTER_S:
            self._digest(engine)

    def _digest(self, engine: Engine) -> None:
        """Takes in a piece of the documents that wait."""
        more = engine.workspaces is not None and engine.workspaces.digest()
        with self._wake:
            self._digesting, self._digested = more or bool(self._calls), time.monotonic()
            self._active = self._digested

    def _begin_round(self, engine: Engine) -> list[Job]:
        """Ends what is to end, lets new requests say what they need, and returns the requests that are live."""
        for job in list(self._jobs):
            if job.verdict:
                self._finish(job, job.verdict)
            elif job.emit and job.steps is None and not job.ended and not self._is_due:
                job.steps, job.turn = engine.infill(job.request, job.started), self._rounds
                self._advance(job)
                self._measure(job)
        live = [job for job in list(self._jobs) if job.steps and job.emit]
        # A request ends at the boundary between rounds that is next to its deadline; but before its first pass only at
        # the deadline itself, as without passes it would never show that they have become faster.
        half_s = self.pace.pass_s(sum(job.wants.rows for job in live if job.wants)) / 2
        for job in live:
            if job.steps and time.monotonic() + (half_s if job.passes else 0.0) > job.deadline:
                self._advance(job)
        return [job for job in live if job.steps]

    def _next_prime(self) -> Job | None:
        """The newest context to be encoded ahead, unless somebody asked for something meanwhile."""
        jobs = [job for job in list(self._jobs) if not job.verdict]
        return jobs[-1] if jobs and not any(job.emit for job in jobs) else None

    def _denoise(self, engine: Engine, jobs: list[Job]) -> None:
        """One pass for all of these, after which each goes on until it needs the next."""
        failure = None
        began = time.monotonic()
        try:
            outcomes = engine.denoise([job.wants for job in jobs if job.wants])
        except MemoryError:
            failure = NO_MEMORY
        except Exception as error:
            _log_failure(error)
            failure = _failed(error)
        if failure is not None:  # out here the error no longer holds what was in the pass
            self._denoise_fewer(engine, jobs, failure)
            return
        seconds, rows = time.monotonic() - began, sum(job.wants.rows for job in jobs if job.wants)
        self.pace.passed(rows, seconds)
        if self._observer:
            self._observer.stepped(len(jobs), rows, seconds)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.ended:  # for the memory that one before it asked for
                continue
            job.worked += seconds
            job.passes += 1
            job.turn = self._rounds
            self._advance(job, outcome)

    def _denoise_fewer(self, engine: Engine, jobs: list[Job], failure: Final) -> None:
        """After a pass that failed: where memory ran out, once the least urgent job has given back its own; else each
        alone, so that only the one at fault ends."""
        if failure is NO_MEMORY:
            self._end_least_urgent()
        elif len(jobs) == 1:
            self._finish(jobs[0], failure)
        else:
            for job in jobs:
                if job.wants:
                    self._denoise(engine, [job])
            return
        if rest := [job for job in jobs if job.wants]:
            self._denoise(engine, rest)

    def _end_least_urgent(self) -> None:
        """Ends one job for the memory it holds."""
        holders = [job for job in list(self._jobs) if job.steps]
        least = max(holders, key=lambda job: (job.verdict is not None, job.emit is None, *job.urgency))
        self._finish(least, least.verdict or (NO_MEMORY if len(holders) > 1 else NO_ROOM))

    def _encode(self, engine: Engine, job: Job) -> None:
        """One step of encoding."""
        if job.steps is None:  # a prime
            job.steps = engine.prime(job.request)
        began, before = time.monotonic(), engine.encoded_tokens
        job.turn = self._rounds
        job.encoding_steps += 1
        self._advance(job)
        self._measure(job)
        if self._observer:
            self._observer.encoded(engine.encoded_tokens - before, time.monotonic() - began)

    def _measure(self, job: Job) -> None:
        """Takes what a request's contexts needed into the pace, once they are there or it has ended."""
        if job.emit and (job.wants or job.steps is None):
            self.pace.prepared(job.encoding_steps, job.worked)

    def _advance(self, job: Job, outcome: Outcome | None = None) -> None:
        """Lets a job go on until it needs the model again, or has ended; its events go out."""
        assert job.steps is not None
        began = time.monotonic()
        job.wants = final = None
        try:
            while isinstance(need := job.steps.send(outcome), Candidate | Frame):
                outcome = None
                if job.emit:
                    job.emit(need)
            if isinstance(need, Final):
                final = need
            else:
                job.wants = need
        except StopIteration:
            final = _failure("no answer") if job.emit else Final("end")
        except MemoryError:
            self._end_least_urgent()
            if job.emit and job.verdict is None and job.steps:  # it was another: this one begins again
                job.steps = None
        except Exception as error:
            _log_failure(error)
            final = _failed(error)
        job.worked += time.monotonic() - began
        if final is not None:
            self._finish(job, final)
            if job.emit and final.reason in ANSWERED:
                self.pace.answered(job.passes)
                if job.request.priority == "typed":
                    self.pace.typed(None)
                if job.request.priority != "speculation":
                    self.prime(job.request)

    def _finish(self, job: Job, final: Final) -> None:
        if job.ended:
            return
        job.ended, steps, job.steps, job.wants = True, job.steps, None, None
        if steps is not None:
            try:
                steps.close()
            except Exception as error:
                _log_failure(error)
        with self._wake:
            self._jobs.remove(job)
            self._active = time.monotonic()
        self._emit_final(job, job.timed(final))
        if final.reason != "superseded":
            self._prime_after(job)

    def _prime_after(self, job: Job) -> None:
        """Takes up again what a job of speculation took the place of."""
        if job.ahead is not None:
            self.prime(job.ahead)

    def _emit_final(self, job: Job, final: Final) -> None:
        if job.emit:
            job.emit(final)
            if self._observer:
                self._observer.finished(job.request, final)


def _together(jobs: Sequence[Job]) -> list[Job]:
    """As many as fit into one pass, in order, and at least one."""
    together: list[Job] = []
    rows = 0
    for job in jobs:
        rows += job.wants.rows if job.wants else 0
        if together and rows > PASS_ROWS:
            break
        together.append(job)
    return together


def _one_line(error: Exception) -> str:
    """What went wrong while loading. Errors raised on purpose, of this project's or the system's types, say it all;
    another's, as torch's, may be pages: its beginning is told, and the log has the rest."""
    text = " ".join(str(error).split())
    ours = type(error).__module__.partition(".")[0] in ("infill_engine", "infill_kernels")
    if text and (ours or isinstance(error, OSError)):
        return text
    return shorten(f"{type(error).__name__}: {text}", UNEXPECTED, placeholder=" … (the engine's log has all of it)")


def _failure(what: str) -> Final:
    return Final("error", f"the engine failed ({what}): its log in {protocol.cache_dir()} says where")


def _failed(error: Exception) -> Final:
    """A model's own word for what is wrong quotes nobody's text; another error's may."""
    from infill_engine.core import ModelError  # with torch, which is there once a model has failed

    return Final("error", str(error)) if isinstance(error, ModelError) else _failure(type(error).__name__)


def _log_failure(error: Exception) -> None:
    """Logs where it failed but not the error's text, which may quote the user's."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("a request failed with %s\n%s", type(error).__name__, where.rstrip())
