"""The scheduler: order, supersession, cancelling, faults, limits, idleness."""

from __future__ import annotations

import gc
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infill_engine import process
from infill_engine.fetch import FetchError, Report
from infill_engine.protocol import Candidate, Event, Final, InfillRequest, Timing
from infill_engine.scheduler import LEAST_PASSES, MAX_PRIMES, PATIENCE, Engine, Pace, Phase, Scheduler, Unavailable
from msgspec.structs import replace
from scripted import ScriptedEngine, Steps, ask, endless, wait_for

Start = Callable[..., Scheduler]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts schedulers on given engines, waits until they are ready, and ends them after the test."""
    started: list[Scheduler] = []

    def run(engine: Engine, **options: int) -> Scheduler:
        scheduler = Scheduler(lambda report: engine, **options)
        started.append(scheduler)
        scheduler.start()
        wait_for(lambda: scheduler.phase.state == "ready")
        return scheduler

    yield run
    for scheduler in started:
        scheduler.close()
        assert scheduler.join(5)


class Listener:
    """Takes the events of one request."""

    def __init__(self, scheduler: Scheduler, request: InfillRequest) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.job = scheduler.submit(request, self.events.put, time.monotonic())

        self.timing = Timing()

    def next(self) -> Event:
        """The next event; a final one without its timing, which is kept apart."""
        event = self.events.get(timeout=5)
        if isinstance(event, Final):
            self.timing = event.timing
            event = replace(event, timing=Timing())
        return event

    def final(self) -> Final:
        while not isinstance(event := self.next(), Final):
            pass
        return event


def two_steps(request: InfillRequest) -> Steps:
    yield None
    yield Candidate(request.document)
    yield Final("end")


class Held:
    """A script that stops in the middle of the step of document "held" until released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self, request: InfillRequest) -> Steps:
        if request.document == "held":
            self.entered.set()
            assert self.release.wait(5)
            yield Final("end")
        for _ in range(20):
            yield None
        yield Final("end")


def test_events_arrive_in_order_and_end_with_one_final(start: Start) -> None:
    listener = Listener(start(ScriptedEngine(two_steps)), ask("a"))
    assert listener.next() == Candidate("a")
    assert listener.next() == Final("end")
    assert listener.events.empty()


def test_the_earliest_deadline_goes_first_but_nobody_starves(start: Start) -> None:
    held = Held()
    engine = ScriptedEngine(held)
    scheduler = start(engine)
    Listener(scheduler, ask("held", deadline_ms=1))
    assert held.entered.wait(5)
    late = Listener(scheduler, ask("late", deadline_ms=60_000))
    soon = Listener(scheduler, ask("soon", deadline_ms=30_000))
    held.release.set()
    assert late.final() == soon.final() == Final("end")
    turns = [document for kind, document in engine.turns if kind == "infill" and document != "held"]
    assert turns[:2] == ["late", "soon"]  # what they need is asked for at once
    steps = turns[2 : 2 + 4 * (PATIENCE + 1)]
    for at in range(0, len(steps), PATIENCE + 1):
        assert steps[at : at + PATIENCE + 1].count("late") == 1


def test_waiting_for_others_is_told_apart_from_working(start: Start) -> None:
    held = Held()
    scheduler = start(ScriptedEngine(held))
    first = Listener(scheduler, ask("held"))
    assert held.entered.wait(5)
    second = Listener(scheduler, ask("second"))
    time.sleep(0.1)
    held.release.set()
    first.final()
    second.final()
    assert first.timing.queue_ms < 50
    assert second.timing.queue_ms >= 100


def test_a_newer_request_of_the_document_supersedes_the_older(start: Start) -> None:
    engine = ScriptedEngine(endless)
    scheduler = start(engine)
    old = Listener(scheduler, ask("a", version=1))
    assert old.next() == Candidate("first")
    new = Listener(scheduler, ask("a", version=2))
    assert old.next() == Final("superseded")
    assert engine.closed.is_set()
    assert new.next() == Candidate("first")
    assert old.events.empty()


def test_another_document_or_client_supersedes_nothing(start: Start) -> None:
    scheduler = start(ScriptedEngine(endless))
    listeners = [
        Listener(scheduler, ask("a")),
        Listener(scheduler, ask("b")),
        Listener(scheduler, ask("a", client="other")),
    ]
    assert [listener.next() for listener in listeners] == [Candidate("first")] * 3
    assert scheduler.live == 3


def test_cancelling_closes_the_generator_at_the_step_boundary(start: Start) -> None:
    held = Held()
    engine = ScriptedEngine(held)
    scheduler = start(engine)
    listener = Listener(scheduler, ask("held"))
    other = Listener(scheduler, ask("other"))
    assert held.entered.wait(5)
    scheduler.cancel(other.job)
    scheduler.cancel(listener.job)
    assert other.events.empty()
    assert not engine.closed.is_set()
    held.release.set()
    assert other.next() == Final("cancelled")
    assert ("infill", "other") not in engine.turns


def test_cancelling_what_has_ended_does_nothing(start: Start) -> None:
    scheduler = start(ScriptedEngine(two_steps))
    listener = Listener(scheduler, ask())
    listener.final()
    scheduler.cancel(listener.job)
    assert Listener(scheduler, ask("b")).final() == Final("end")
    assert listener.events.empty()


def test_a_storm_of_superseded_requests_is_not_busy(start: Start) -> None:
    held = Held()
    scheduler = start(ScriptedEngine(held), max_live=4)
    Listener(scheduler, ask("held"))
    assert held.entered.wait(5)
    storm = [Listener(scheduler, ask("a", version=version)) for version in range(200)]
    held.release.set()
    assert [listener.final().reason for listener in storm] == ["superseded"] * 199 + ["end"]


def test_too_many_live_requests_are_refused_at_once(start: Start) -> None:
    held = Held()
    scheduler = start(ScriptedEngine(held), max_live=2)
    Listener(scheduler, ask("held"))
    assert held.entered.wait(5)
    Listener(scheduler, ask("a"))
    refused = Listener(scheduler, ask("b"))
    assert refused.events.get_nowait() == Final("busy", "the engine has 2 requests already")
    held.release.set()


def test_contexts_are_primed_after_the_answer_and_not_before_other_infills(start: Start) -> None:
    held = Held()
    engine = ScriptedEngine(held)
    scheduler = start(engine)
    Listener(scheduler, ask("held"))
    assert held.entered.wait(5)
    other = Listener(scheduler, ask("other"))
    held.release.set()
    other.final()
    wait_for(lambda: scheduler.idle_s() > 0)
    first_prime = engine.turns.index(("prime", "other"))
    assert engine.turns[first_prime:] == [("prime", "other")] * 3 + [("prime", "held")] * 3


def test_a_prime_is_dropped_for_a_newer_request_of_its_document(start: Start) -> None:
    entered, release = threading.Event(), threading.Event()
    engine = ScriptedEngine(two_steps)

    def slow_prime(request: InfillRequest) -> Iterator[None]:
        entered.set()
        assert release.wait(5)
        yield
        engine.turns.append(("prime", "never"))
        yield

    engine.prime = slow_prime  # type: ignore[method-assign]
    scheduler = start(engine)
    Listener(scheduler, ask("a")).final()
    assert entered.wait(5)
    again = Listener(scheduler, ask("a"))
    engine.prime = lambda request: iter(())  # type: ignore[method-assign]
    release.set()
    again.final()
    wait_for(lambda: scheduler.idle_s() > 0)
    assert ("prime", "never") not in engine.turns


def test_what_is_to_be_encoded_ahead_comes_behind_speculation_and_not_to_nothing(start: Start) -> None:
    """Speculation asks for the document as it may be; what the next key needs is encoded after it."""
    gate = threading.Event()

    def script(request: InfillRequest) -> Steps:
        while not gate.is_set():
            time.sleep(0.001)
            yield None
        yield Final("end")

    engine = ScriptedEngine(script)
    scheduler = start(engine)
    guess = replace(ask(), priority="speculation")
    held = Listener(scheduler, ask("other"))  # so that nothing is encoded ahead before all is there
    scheduler.prime(ask(version=1))
    guesses = [Listener(scheduler, guess) for _ in range(2)]
    gate.set()
    assert [one.final().reason for one in (held, *guesses)] == ["end", "superseded", "end"]
    wait_for(lambda: ("d", 1) in [(one.document, one.version) for one in engine.primed])
    gate.clear()
    late = Listener(scheduler, guess)
    scheduler.prime(ask(version=2))
    gate.set()
    assert late.final().reason == "end"
    wait_for(lambda: ("d", 2) in [(one.document, one.version) for one in engine.primed])
    assert ("d", 0) not in [(one.document, one.version) for one in engine.primed]


def test_a_cancelled_request_is_not_primed(start: Start) -> None:
    engine = ScriptedEngine(endless)
    scheduler = start(engine)
    listener = Listener(scheduler, ask("a"))
    listener.next()
    scheduler.cancel(listener.job)
    listener.final()
    wait_for(lambda: scheduler.idle_s() > 0)
    assert ("prime", "a") not in engine.turns


def test_a_failing_request_ends_alone_and_its_text_stays_out_of_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: InfillRequest) -> Steps:
        if request.document == "bad":
            yield Candidate("x")
            raise KeyError(request.head)
        yield Final("end")

    scheduler = start(ScriptedEngine(script))
    with caplog.at_level(logging.INFO):
        bad = Listener(scheduler, ask("bad", head="password = hunter2")).final()
    assert bad.reason == "error"
    assert bad.message.startswith("the engine failed (KeyError): its log in ")
    assert "KeyError" in caplog.text
    assert "in script" in caplog.text
    assert "hunter2" not in caplog.text
    assert Listener(scheduler, ask("good")).final() == Final("end")


def test_a_request_without_a_final_is_an_error(start: Start) -> None:
    def script(request: InfillRequest) -> Steps:
        yield Candidate("x")

    assert Listener(start(ScriptedEngine(script)), ask()).final().reason == "error"


def test_a_generator_that_fails_while_it_is_closed_ends_all_the_same(start: Start) -> None:
    def script(request: InfillRequest) -> Steps:
        try:
            yield from endless(request)
        finally:
            raise ValueError

    scheduler = start(ScriptedEngine(script))
    listener = Listener(scheduler, ask())
    listener.next()
    scheduler.cancel(listener.job)
    assert listener.final() == Final("cancelled")
    assert scheduler.live == 0


def test_a_failing_prime_is_nobodys_fault(start: Start) -> None:
    def prime(request: InfillRequest) -> Iterator[None]:
        raise ValueError
        yield

    engine = ScriptedEngine(two_steps)
    engine.prime = prime  # type: ignore[method-assign]
    scheduler = start(engine)
    for _ in range(2):
        assert Listener(scheduler, ask()).final() == Final("end")
        wait_for(lambda: scheduler.idle_s() > 0)


def test_of_many_documents_only_the_newest_are_primed(start: Start) -> None:
    held = Held()
    engine = ScriptedEngine(held)
    scheduler = start(engine)
    Listener(scheduler, ask("held", deadline_ms=1))
    assert held.entered.wait(5)
    others = [Listener(scheduler, ask(f"{n:02}", deadline_ms=60_000)) for n in range(2 * MAX_PRIMES)]
    held.release.set()
    for other in others:
        other.final()
    wait_for(lambda: scheduler.idle_s() > 0)
    assert len({document for kind, document in engine.turns if kind == "prime"}) == MAX_PRIMES
    assert ("prime", "held") not in engine.turns


def test_before_the_model_is_ready_requests_are_answered_at_once() -> None:
    reported, finish = threading.Event(), threading.Event()

    def load(report: Report) -> Engine:
        report("fetching weights", 0.374)
        reported.set()
        assert finish.wait(5)
        return ScriptedEngine(two_steps)

    scheduler = Scheduler(load)
    early = Listener(scheduler, ask())
    assert early.next() == Final("starting", "the engine is starting")
    scheduler.start()
    assert reported.wait(5)
    assert scheduler.phase == Phase("fetching", "fetching weights", 0.374)
    assert Listener(scheduler, ask()).next() == Final("starting", "fetching weights (37%)")
    assert scheduler.idle_s() == 0
    finish.set()
    wait_for(lambda: scheduler.phase.state == "ready")
    assert Listener(scheduler, ask()).final() == Final("end")
    assert scheduler.requests == 3
    scheduler.close()
    assert scheduler.join(5)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FetchError("no such model:\n try embedded"), "no such model: try embedded"),
        (OSError("no space left"), "no space left"),
        (KeyError("blk.0"), "KeyError: 'blk.0'"),
        (RuntimeError(), "RuntimeError:"),
        (RuntimeError("0x7f " * 99), f"RuntimeError: {'0x7f ' * 50}… (the engine's log has all of it)"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why_in_one_line(error: Exception, message: str) -> None:
    def load(report: Report) -> Engine:
        raise error

    scheduler = Scheduler(load)
    scheduler.start()
    assert scheduler.join(5)
    assert scheduler.phase == Phase("error", message)
    assert Listener(scheduler, ask()).next() == Final("error", message)


def test_closing_stops_a_model_that_is_being_loaded_by_its_reports() -> None:
    def load(report: Report) -> Engine:
        while True:
            try:
                report("loading", None)
            except Exception:  # A careless loader.
                pytest.fail("closing was taken for a fault of the loader")
            time.sleep(0.001)

    scheduler = Scheduler(load)
    scheduler.start()
    scheduler.close()
    assert scheduler.join(5)


def test_closing_cancels_what_is_live_and_refuses_the_rest(start: Start) -> None:
    scheduler = start(ScriptedEngine(endless))
    listener = Listener(scheduler, ask())
    assert listener.next() == Candidate("first")
    scheduler.close()
    assert listener.next() == Final("cancelled")
    assert Listener(scheduler, ask()).next().reason == "starting"  # type: ignore[union-attr]


def test_the_thread_rests_when_there_is_nothing_to_do(start: Start) -> None:
    scheduler = start(ScriptedEngine(two_steps))
    Listener(scheduler, ask()).final()
    wait_for(lambda: scheduler.idle_s() > 0)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_refused_requests_do_not_keep_a_failed_engine_from_ending() -> None:
    def load(report: Report) -> Engine:
        raise FetchError("no such model")

    lines: list[str] = []
    scheduler = Scheduler(load, failed=lines.append)
    scheduler.start()
    assert scheduler.join(5)
    assert lines == ["no such model"]
    wait_for(lambda: scheduler.idle_s() > 0.02)
    assert Listener(scheduler, ask()).next() == Final("error", "no such model")
    assert scheduler.idle_s() > 0.02


@given(
    st.floats(1e-3, 0.1),
    st.floats(0, 1e-2),
    st.lists(st.integers(1, 256), min_size=2, max_size=30),
    st.integers(1, 512),
)
def test_the_pace_finds_what_a_pass_takes_by_its_rows(base: float, a_row: float, sizes: list[int], rows: int) -> None:
    pace = Pace()
    assert pace.pass_s(rows) == 0.0
    for size in sizes:
        pace.passed(size, base + a_row * size)
    if len(set(sizes)) > 1:
        assert pace.pass_s(rows) == pytest.approx(base + a_row * rows, rel=1e-3, abs=1e-4)
    else:
        assert pace.pass_s(rows) == pytest.approx(base + a_row * sizes[0])


def test_the_pace_forgets_one_slow_pass() -> None:
    pace = Pace()
    for _ in range(20):
        pace.passed(2, 0.02)
    pace.passed(12, 5.0)
    assert pace.pass_s(12) > 1.0
    for _ in range(600):
        pace.passed(2, 0.02)
        pace.passed(3, 0.02)
    assert pace.pass_s(12) < 0.05


def test_the_pace_gives_up_what_is_far_too_slow() -> None:
    pace = Pace()
    pace.passed(1, 13.0)
    pace.passed(1, 0.04)
    assert pace.pass_s(1) == pytest.approx(0.04)


def test_the_pace_forgets_a_key_that_was_held_down() -> None:
    pace = Pace()
    for _ in range(30):
        pace.typed(0.03)
    assert pace.stale_s == pytest.approx(0.03)
    for _ in range(12):
        pace.typed(None)
    assert pace.stale_s == math.inf


def test_the_pace_counts_the_steps_of_those_before() -> None:
    pace = Pace()
    for _ in range(50):
        pace.passed(4, 0.01)
        pace.prepared(6, 0.12)
    for _ in range(100):
        pace.answered(20)
    for others, steps in ((0, 6), (2, 18)):
        first_s, whole_s = pace.wait_s(others, 4)
        assert first_s == pytest.approx(steps * 0.02 + (steps + LEAST_PASSES) * 0.01, rel=1e-2)
        assert whole_s == pytest.approx(steps * 0.02 + (steps + 20) * 0.01, rel=1e-2)


class Loader:
    """Loads a new scripted engine each time it is asked to, or fails."""

    def __init__(self) -> None:
        self.loaded: list[weakref.ref[ScriptedEngine]] = []
        self.fault = ""

    def __call__(self, report: Report) -> Engine:
        if self.fault:
            raise FetchError(self.fault)
        report("reading the weights", None)

        def script(request: InfillRequest) -> Steps:
            yield Candidate("text")
            yield Final("end")

        engine = ScriptedEngine(script)
        self.loaded.append(weakref.ref(engine))
        return engine


def test_an_engine_may_be_kept_for_longer_than_a_thread_can_wait() -> None:
    scheduler = Scheduler(Loader(), release_s=1e300)
    scheduler.start()
    wait_for(lambda: scheduler.phase.state == "ready")
    assert Listener(scheduler, ask()).final().reason == "end"
    scheduler.close()
    assert scheduler.join(5)


def test_an_idle_engine_is_let_go_and_loaded_again_for_the_next_request() -> None:
    loader = Loader()
    scheduler = Scheduler(loader, release_s=0.05)
    scheduler.start()
    wait_for(lambda: len(loader.loaded) == 1 and loader.loaded[0]() is None)
    assert scheduler.phase.state == "ready"
    assert scheduler.engine is None
    idle_s = scheduler.idle_s()
    listener = Listener(scheduler, ask())
    assert listener.next() == Candidate("text")
    assert listener.final().reason == "end"
    assert len(loader.loaded) == 2
    wait_for(lambda: loader.loaded[1]() is None)
    assert scheduler.idle_s() < idle_s + 5
    scheduler.close()
    assert scheduler.join(5)


def test_when_the_last_client_has_left_the_engine_is_let_go_at_once() -> None:
    loader = Loader()
    scheduler = Scheduler(loader)
    scheduler.start()
    wait_for(lambda: scheduler.phase.state == "ready")
    for client in ("one", "two"):
        listener = Listener(scheduler, ask(client=client))
        assert listener.next() == Candidate("text")
        assert listener.final().reason == "end"
    scheduler.leave("one")
    assert scheduler.call(lambda engine: engine.name).result(5)
    assert len(loader.loaded) == 1
    assert loader.loaded[0]() is not None
    scheduler.leave("two")
    wait_for(lambda: loader.loaded[0]() is None)
    listener = Listener(scheduler, ask(client="two"))
    assert listener.next() == Candidate("text")
    assert len(loader.loaded) == 2
    scheduler.close()
    assert scheduler.join(5)


def test_an_engine_that_cannot_be_loaded_again_says_so_to_who_waits() -> None:
    loader, lines = Loader(), []
    scheduler = Scheduler(loader, failed=lines.append, release_s=0.05)
    scheduler.start()
    wait_for(lambda: len(loader.loaded) == 1 and loader.loaded[0]() is None)
    loader.fault = "the disk is gone: plug it in"
    listener = Listener(scheduler, ask())
    assert listener.final() == Final("error", loader.fault)
    assert lines == [loader.fault]
    assert Listener(scheduler, ask()).final() == Final("error", loader.fault)
    assert scheduler.join(5)


def named(name: str, script: Callable[[InfillRequest], Steps]) -> ScriptedEngine:
    engine = ScriptedEngine(script)
    engine.name = name
    return engine


def test_a_successor_takes_over_between_two_requests(start: Start) -> None:
    held = Held()
    former, later = named("former", held), named("later", two_steps)
    scheduler = start(former)
    running = Listener(scheduler, ask("held", deadline_ms=60_000))
    assert held.entered.wait(5)
    served = threading.Event()
    scheduler.succeed("later", lambda report: later, served.set)
    wait_for(lambda: scheduler.successor is not None and scheduler.successor.engine is later)
    waiting = Listener(scheduler, ask("b", deadline_ms=60_000))
    scheduler.prime(ask("c"))
    assert not served.is_set()
    held.release.set()
    assert running.final() == Final("end")
    assert waiting.next() == Candidate("b")
    assert waiting.final() == Final("end")
    assert served.is_set()
    assert scheduler.engine is later
    assert scheduler.successor is None
    assert {document for _, document in former.turns} <= {"held"}


def test_while_a_successor_loads_and_where_that_fails_the_former_goes_on(start: Start) -> None:
    scheduler = start(named("former", two_steps))
    go = threading.Event()

    def load(report: Report) -> Engine:
        report("fetching", 0.25)
        assert go.wait(5)
        raise FetchError("it is cut short: download it again")

    scheduler.succeed("later", load)
    wait_for(lambda: scheduler.successor is not None and scheduler.successor.phase == ("fetching", "fetching", 0.25))
    assert scheduler.phase == Phase("ready")
    assert scheduler.idle_s() == 0.0
    assert Listener(scheduler, ask("a")).next() == Candidate("a")
    go.set()
    wait_for(lambda: scheduler.successor is None)
    assert scheduler.phase == Phase("ready", "later is not used: it is cut short: download it again")
    assert Listener(scheduler, ask("a")).next() == Candidate("a")
    scheduler.succeed("another", lambda report: named("another", two_steps))
    wait_for(lambda: scheduler.engine is not None and scheduler.engine.name == "another")
    assert scheduler.phase == Phase("ready")


class Cyclic(ScriptedEngine):
    """Refers to itself, as real ones do: the count of references alone does not free it."""

    def __init__(self) -> None:
        super().__init__(two_steps)
        self.methods = (self.infill, self.prime)


@pytest.mark.parametrize("way", ["released", "succeeded"])
def test_an_engine_that_was_kept_from_the_collector_is_freed_once_it_is_let_go(way: str) -> None:
    def load(report: Report) -> Engine:
        engine = Cyclic()
        loaded.append(weakref.ref(engine))
        process.keep()
        return engine

    loaded: list[weakref.ref[Cyclic]] = []
    scheduler = Scheduler(load, release_s=0.05 if way == "released" else math.inf, freed=process.keep)
    try:
        scheduler.start()
        wait_for(lambda: scheduler.phase.state == "ready")
        if way == "succeeded":
            scheduler.succeed("later", load)
        wait_for(lambda: loaded[0]() is None)
    finally:
        scheduler.close()
        assert scheduler.join(5)
        gc.unfreeze()


def test_of_two_successors_the_newer_one_takes_over(start: Start) -> None:
    scheduler = start(named("former", two_steps))
    ended = threading.Event()

    def forever(report: Report) -> Engine:
        try:
            while True:
                report("fetching", 0.5)
                time.sleep(0.002)
        finally:
            ended.set()

    scheduler.succeed("first", forever)
    wait_for(lambda: scheduler.successor is not None and scheduler.successor.phase.state == "fetching")
    scheduler.succeed("second", lambda report: named("second", two_steps))
    wait_for(lambda: scheduler.engine is not None and scheduler.engine.name == "second")
    assert ended.wait(5)
    wait_for(lambda: scheduler.successor is None)


@pytest.mark.parametrize("instead", ["another", "the former"])
def test_what_is_loaded_in_vain_is_let_go_before_another_is_loaded(instead: str) -> None:
    """There may be no memory for both; and what nobody wants any more keeps neither memory nor documents waiting."""
    go, order, freed = threading.Event(), [], threading.Event()

    class Kept(Cyclic):
        def close(self) -> None:
            order.append("closed")

    def slow(report: Report) -> Engine:
        order.append("begun")
        assert go.wait(5)
        engine = Kept()
        loaded.append(weakref.ref(engine))
        return engine

    def other(report: Report) -> Engine:
        order.append("loaded")
        return named("second", two_steps)

    loaded: list[weakref.ref[Cyclic]] = []
    scheduler = Scheduler(lambda report: named("former", two_steps), freed=lambda: (gc.collect(), freed.set()))
    try:
        scheduler.start()
        wait_for(lambda: scheduler.phase.state == "ready")
        scheduler.succeed("first", slow)
        wait_for(lambda: order == ["begun"])
        if instead == "another":
            scheduler.succeed("second", other)
        else:
            scheduler.stay()
            assert scheduler.successor is None
            assert scheduler.idle_s() > 0.0
        time.sleep(0.05)
        assert order == ["begun"]
        go.set()
        assert freed.wait(5)
        wait_for(lambda: loaded[0]() is None)
        if instead == "another":
            wait_for(lambda: scheduler.engine is not None and scheduler.engine.name == "second")
            assert order == ["begun", "closed", "loaded"]
        else:
            assert order == ["begun", "closed"]
            assert scheduler.engine is not None
            assert scheduler.engine.name == "former"
            assert Listener(scheduler, ask("a")).next() == Candidate("a")
    finally:
        scheduler.close()
        assert scheduler.join(5)


def test_one_that_waits_to_take_over_is_let_go_where_it_is_not_wanted_any_more(start: Start) -> None:
    held, closed = Held(), threading.Event()

    class Kept(ScriptedEngine):
        def close(self) -> None:
            closed.set()

    scheduler = start(named("former", held))
    running = Listener(scheduler, ask("held", deadline_ms=60_000))
    assert held.entered.wait(5)
    scheduler.succeed("later", lambda report: Kept(two_steps))
    wait_for(lambda: scheduler.successor is not None and scheduler.successor.engine is not None)
    scheduler.stay()
    assert closed.wait(5)
    held.release.set()
    assert running.final() == Final("end")
    assert scheduler.engine is not None
    assert scheduler.engine.name == "former"


def test_a_successor_that_is_wanted_while_another_takes_over_takes_over_next(start: Start) -> None:
    scheduler = start(named("former", two_steps))

    def second() -> None:
        scheduler.succeed("second", lambda report: named("second", two_steps))

    scheduler.succeed("first", lambda report: named("first", two_steps), second)
    wait_for(lambda: scheduler.engine is not None and scheduler.engine.name == "second")
    wait_for(lambda: scheduler.successor is None)


def test_what_was_let_go_is_loaded_again_as_what_it_became() -> None:
    scheduler = Scheduler(lambda report: named("former", two_steps), release_s=0.05)
    scheduler.start()
    wait_for(lambda: scheduler.phase.state == "ready")
    names = []
    scheduler.succeed("later", lambda report: named("later", two_steps), lambda: names.append("later"))
    wait_for(lambda: bool(names) and scheduler.engine is None)
    assert Listener(scheduler, ask("a")).final() == Final("end")
    assert scheduler.engine is None or scheduler.engine.name == "later"
    scheduler.close()
    assert scheduler.join(5)
    with pytest.raises(Unavailable):
        scheduler.succeed("never", lambda report: named("never", two_steps))
