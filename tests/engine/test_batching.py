"""Several requests at once: that sharing passes and memory, and any proposals whatsoever, change no text."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine import engine as engine_module
from infill_engine import scheduler as scheduler_module
from infill_engine.config import EngineConfig
from infill_engine.context import ContextCache
from infill_engine.core import Canvas, Pass, Rows, complete
from infill_engine.engine import Engine
from infill_engine.fake import FakeDenoiser
from infill_engine.lookup import Lookup
from infill_engine.policy import VerifiedPolicy
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.scheduler import Scheduler
from infill_engine.tokenizer import ByteCodec
from scripted import wait_for

CONFIG = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16)
#: Text that never repeats itself.
LONG = " ".join(str(i) for i in range(200))
SEQUENTIAL = replace(CONFIG, proposal_tokens=0)


def ask(document: str = "d", **fields) -> InfillRequest:
    return InfillRequest(client="c", document=document, deadline_ms=60_000, **fields)


def answer(engine: Engine, wanted: InfillRequest) -> tuple[Candidate, Final]:
    *events, final = engine.events(wanted, time.monotonic())
    assert isinstance(final, Final)
    return [event for event in events if isinstance(event, Candidate)][-1], final


def together(
    engine: Engine, requests: Sequence[InfillRequest], choose: Callable[[list[int]], list[int]]
) -> list[list[Candidate | Final]]:
    """The events of requests that share the engine; `choose` says who gets on in a round."""
    running = {i: engine.infill(wanted, time.monotonic()) for i, wanted in enumerate(requests)}
    needs: dict[int, object] = dict.fromkeys(running)
    events: list[list[Candidate | Final]] = [[] for _ in requests]
    while running:
        chosen = choose(sorted(running))
        waiting = [i for i in chosen if isinstance(needs[i], Pass)]
        outcomes = dict(zip(waiting, engine.denoise([needs[i] for i in waiting]) if waiting else [], strict=True))
        for i in chosen:
            need = running[i].send(outcomes.get(i))
            while isinstance(need, Candidate | Final):
                events[i].append(need)
                if isinstance(need, Final):
                    del running[i]
                    break
                need = next(running[i])
            needs[i] = need
    return events


tokens = st.lists(st.sampled_from([*b"ab(\n", 256, 257, 258]), max_size=6)
masks = st.tuples(st.integers(0, 3), st.integers(1, 4))
gap = st.tuples(st.text("ab(\n", min_size=1, max_size=16), st.text("ab(\n", max_size=16), st.text("ab(\n", max_size=16))


class HealingCodec(ByteCodec):
    """Letters at the end may belong to a longer word, so the gap writes them again."""

    def last_piece(self, text: str) -> str:
        return text[len(text.rstrip("ab")) :]


@settings(max_examples=40, deadline=None)
@given(st.lists(gap, min_size=1, max_size=4), st.lists(tokens, min_size=1), masks, st.randoms())
def test_no_proposal_and_no_company_changes_the_text(gaps, proposals, masks, random):
    """Whatever look-up, masks and an earlier text propose, and whoever shares a pass: what is committed is what each
    request gets alone, one token a pass."""
    table = {f"{i}=": text for i, (text, _, _) in enumerate(gaps)}
    requests = [
        ask(str(i), prefix=context + "\n", head=f"{i}=" + text[:2].strip(), suffix="\n" + context, max_lines=6)
        for i, (text, context, _) in enumerate(gaps)
        if "\n" not in text[:2].strip()
    ]
    alone = [answer(Engine("fake", FakeDenoiser(table), HealingCodec(), SEQUENTIAL), wanted) for wanted in requests]

    class AnyLookup(Lookup):
        def propose(self) -> tuple[int, ...]:
            return tuple(random.choice(proposals)) or super().propose()

    class AnyPolicy(VerifiedPolicy):
        def step(self, canvas: Canvas, rows: Rows) -> Canvas:
            after = super().step(canvas, rows)
            return replace(after, proposal=tuple(random.choice(proposals))[: after.size - after.frontier])

    policy = AnyPolicy() if random.random() < 0.5 else VerifiedPolicy()
    shared = Engine("fake", FakeDenoiser(table, *masks, groups=2), HealingCodec(), CONFIG, policy)
    for wanted, (_, _, earlier) in zip(requests, gaps, strict=False):
        shared._texts.keep(("c", wanted.document), wanted.prefix + wanted.head, earlier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Lookup", AnyLookup)
        events = together(shared, requests, lambda live: random.sample(live, random.randint(1, len(live))))
    for (expected, final), (*_, candidate, shared_final) in zip(alone, events, strict=True):
        assert candidate.text == expected.text
        assert candidate.ends == pytest.approx(expected.ends)
        assert shared_final.reason == final.reason
        assert shared_final.timing.steps <= final.timing.steps


def test_requests_share_their_passes():
    texts = {f"{i}=": "some text"[i:] for i in range(5)}
    requests = [ask(str(i), head=f"{i}=") for i in range(5)]
    denoiser = FakeDenoiser(texts)
    events = together(Engine("fake", denoiser, ByteCodec(), SEQUENTIAL), requests, lambda live: live)
    assert [own[-2].text for own in events] == list(texts.values())
    assert denoiser.passes == len("some text") + 1


def test_what_a_request_uses_stays_until_it_ends():
    cache = ContextCache(FakeDenoiser({}), chunk=16, max_bytes=8 * 100)
    line = tuple(range(60))
    with cache.lease() as first:
        complete(cache.stream(("first",), (line,), [], (1, 4), first))
        with cache.lease() as second, pytest.raises(MemoryError):
            complete(cache.stream(("second",), (line,), [], (1, 4), second))
        assert cache.nbytes <= 8 * 100
        with cache.lease() as again:
            complete(cache.stream(("first",), (line,), [], (1, 4), again))
        assert (again.encoded, again.reused) == (0, first.encoded)
    with cache.lease() as second:
        complete(cache.stream(("second",), (line,), [], (1, 4), second))
    assert cache.nbytes <= 8 * 100


# Through the scheduler.


class Slow(FakeDenoiser):
    """Its passes wait, once asked to, until they are let through; it fails on a text if told so."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.entered, self.through = threading.Event(), threading.Event()
        self.through.set()
        self.poison: bytes | None = None

    def denoise(self, canvases, contexts, states):
        self.entered.set()
        assert self.through.wait(5)
        if any(self.poison is not None and self.poison in bytes(canvas.left[1:]) for canvas in canvases):
            raise ValueError(self.poison)
        return super().denoise(canvases, contexts, states)

    def hold(self) -> None:
        self.entered.clear()
        self.through.clear()


class Notes:
    """An observer that writes down what it hears."""

    def __init__(self) -> None:
        self.finals: list[tuple[str, str]] = []
        self.work: list[tuple[str, int]] = []

    def finished(self, request: InfillRequest, final: Final) -> None:
        self.finals.append((request.document, final.reason))
        self.work.append((request.document, 0))

    def stepped(self, canvases: int, rows: int, seconds: float) -> None:
        self.work.append(("pass", canvases))

    def encoded(self, tokens: int, seconds: float) -> None:
        self.work.append(("encode", tokens))


class Bench:
    """A scheduler over a fake model."""

    def __init__(self, table: dict[str, str], config: EngineConfig = SEQUENTIAL, **options) -> None:
        self.denoiser = Slow(table, **options)
        self.engine = Engine("fake", self.denoiser, ByteCodec(), config)
        self.notes = Notes()
        self.scheduler = Scheduler(lambda report: self.engine, observer=self.notes)

    def __enter__(self) -> Bench:
        self.scheduler.start()
        wait_for(lambda: self.scheduler.phase.state == "ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.denoiser.through.set()
        self.scheduler.close()
        assert self.scheduler.join(5)

    def submit(self, wanted: InfillRequest) -> Asked:
        return Asked(self.scheduler, wanted)

    def rest(self) -> None:
        wait_for(lambda: not self.scheduler.live + self.scheduler.background)

    @contextlib.contextmanager
    def busy(self) -> Iterator[Asked]:
        """Holds the thread in the middle of a pass of one request; what is submitted meanwhile joins after it."""
        self.denoiser.hold()
        first = self.submit(ask("first", head="first="))
        assert self.denoiser.entered.wait(5)
        self.notes.work.clear()
        yield first
        self.denoiser.through.set()


class Asked:
    """One submitted request."""

    def __init__(self, scheduler: Scheduler, wanted: InfillRequest) -> None:
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.job = scheduler.submit(wanted, self._events.put, time.monotonic())
        self.text = ""

    def final(self) -> Final:
        while True:
            event = self._events.get(timeout=5)
            if isinstance(event, Candidate):
                self.text = event.text
            if isinstance(event, Final):
                return event


def test_what_comes_together_is_denoised_together():
    texts = {f"{i}=": "some text"[i:] for i in range(5)}
    with Bench({"first=": "x", **texts}) as bench:
        with bench.busy() as first:
            asked = [bench.submit(ask(str(i), head=f"{i}=")) for i in range(5)]
        assert [one.final().reason for one in asked] == ["end"] * 5
        assert [one.text for one in asked] == list(texts.values())
        assert first.final().reason == "end"
        assert bench.denoiser.passes <= len("some text") + 3
        assert ("pass", 6) in bench.notes.work


def test_a_pass_is_bounded_and_all_get_their_share(monkeypatch):
    monkeypatch.setattr(scheduler_module, "PASS_ROWS", 4)
    texts = {f"{i}=": "some text" for i in range(10)}
    with Bench({"first=": "x", **texts}) as bench:
        with bench.busy():
            asked = [bench.submit(ask(f"{i}", head=f"{i}=")) for i in range(10)]
        assert [one.final().reason for one in asked] == ["end"] * 10
        assert max(canvases for kind, canvases in bench.notes.work if kind == "pass") == 4
        # Who waits longest goes first now and then, so the last does not begin when the others have ended.
        started = [one.job.turn - one.job.passes for one in asked]
        assert max(started) < len("some text") * 10 // 4


def test_what_was_only_guessed_is_not_encoded_ahead():
    with Bench({"=": "x"}) as bench:
        bench.submit(ask("d", prefix="some text\n" * 30, head="=", priority="speculation")).final()
        bench.rest()
        encoded = bench.denoiser.encoded
        bench.submit(ask("d", prefix="some text\n" * 30, head="=")).final()
        bench.rest()
        assert bench.denoiser.encoded > encoded  # the last few tokens, which a canvas has until then


def test_a_cancelled_canvas_stops_within_a_pass_and_frees_its_memory():
    with Bench({"long=": LONG, "first=": "x"}) as bench:
        bench.submit(ask("d", head="short")).final()
        bench.rest()
        kept, passes = len(bench.denoiser.alive), bench.denoiser.passes
        bench.denoiser.hold()
        asked = bench.submit(ask("d", head="long="))
        assert bench.denoiser.entered.wait(5)
        bench.scheduler.cancel(asked.job)
        bench.denoiser.through.set()
        assert asked.final().reason == "cancelled"
        bench.rest()
        assert bench.denoiser.passes == passes + 1
        assert len(bench.denoiser.alive) == kept


def test_a_storm_of_cancelled_requests_leaves_no_work_behind():
    wanted = ask("next", prefix="some text\n" * 4, head="next=")
    with Bench({"next=": "done", "first=": "x"}) as alone:
        alone.submit(wanted).final()
    with Bench({"next=": "done", "first=": "x"}) as bench:
        with bench.busy() as first:
            storm = [bench.submit(ask(f"{i}", prefix=f"text {i}\n" * 40, head="=")) for i in range(60)]
            storm += [bench.submit(ask("typed", prefix=f"text {i}\n" * 40, head="=")) for i in range(140)]
            for one in storm:
                bench.scheduler.cancel(one.job)
            asked = bench.submit(wanted)
        assert asked.final().reason == "end"
        first.final()
        assert {one.final().reason for one in storm} == {"cancelled", "superseded"}
        # One step a chunk, one pass a byte and END: what it takes alone, beside the first one's two passes.
        steps = [work for work in bench.notes.work if work[0] == "encode"]
        own = [work for work in alone.notes.work if work[0] == "encode"]
        assert steps[: len(own)] == own
        assert bench.denoiser.passes <= alone.denoiser.passes + 2


def test_encoding_and_passes_take_turns():
    with Bench({"first=": LONG, "late=": "x"}, groups=3) as bench:
        with bench.busy():
            late = bench.submit(ask("late", prefix="some text\n" * 30, head="late="))
        assert late.final().reason == "end"
        kinds = "".join(kind[0] for kind, _ in bench.notes.work[: bench.notes.work.index(("late", 0))])
        encoding = kinds[kinds.index("e") : kinds.rindex("e") + 1]
        assert encoding.count("e") >= 3 * (300 // CONFIG.chunk_tokens)
        assert "ee" not in encoding
        assert "pp" not in encoding


def test_the_typed_are_encoded_before_the_explicit_before_what_is_guessed_but_nobody_starves():
    order = ("typed", "explicit", "speculation")
    with Bench({"first=": "x"}) as bench:
        with bench.busy():
            asked = [
                bench.submit(ask(name, priority=name, prefix=f"{name} text\n" * 20, head="="))
                for name in reversed(order)
            ]
        for one in asked:
            assert one.final().reason == "end"
        ended = [document for document, _ in bench.notes.finals if document != "first"]
        assert ended == list(order)
    urgent = [ask(f"{i}", prefix=f"urgent {i}\n" * 20, head="=") for i in range(12)]
    with Bench({"first=": "x"}) as bench:
        with bench.busy():
            guess = bench.submit(ask("guess", priority="speculation", prefix="guess\n" * 8, head="="))
            typed = [bench.submit(wanted) for wanted in urgent]
        for one in [*typed, guess]:
            one.final()
        ended = [document for document, _ in bench.notes.finals]
        assert ended.index("guess") < len(ended) - 1


def test_contexts_are_encoded_ahead_only_while_nobody_waits():
    with Bench({"first=": "x", "=": "y"}) as bench:
        with bench.busy():
            bench.scheduler.prime(ask("ahead", prefix="old\n" * 30))
            bench.scheduler.prime(ask("ahead", prefix="some text\n" * 30))
            asked = bench.submit(ask("now", prefix="other text\n" * 10, head="="))
        asked.final()
        work = bench.notes.work[: bench.notes.work.index(("now", 0))]
        assert 100 <= sum(tokens for kind, tokens in work if kind == "encode") <= 120
        bench.rest()
        before = bench.denoiser.encoded
        assert bench.submit(ask("ahead", prefix="some text\n" * 30)).final().timing.reused >= 290
        assert bench.denoiser.encoded == before


def test_a_deadline_that_comes_while_others_are_served_ends_it_without_work():
    with Bench({"first=": "x"}) as bench:
        with bench.busy():
            hurried = InfillRequest(client="c", document="hurried", prefix="some text\n" * 30, head="=", deadline_ms=1)
            asked = bench.submit(hurried)
            time.sleep(0.002)
        final = asked.final()
        assert final.reason == "deadline"
        assert (final.timing.encoded, final.timing.steps) == (0, 0)


def test_at_the_deadline_each_of_many_gets_what_is_written():
    with Bench({f"{i}=": LONG for i in range(10)} | {"first=": LONG}) as bench:
        with bench.busy() as first:
            asked = [bench.submit(ask(f"{i}", head=f"{i}=", max_tokens=250)) for i in range(10)]
        wait_for(lambda: ("pass", 11) in bench.notes.work)
        bench.denoiser.hold()
        assert bench.denoiser.entered.wait(5)
        passes = bench.denoiser.passes
        for one in asked:
            one.job.started -= 100  # as if so much time had gone by
        bench.denoiser.through.set()
        finals = [one.final() for one in asked]
        assert [final.reason for final in finals] == ["deadline"] * 10
        assert all(final.timing.steps <= passes + 1 for final in finals)
        assert all(one.text and LONG.startswith(one.text) for one in asked)
        assert first.final().reason == "limit"


def test_after_a_pass_that_took_longer_than_any_deadline_requests_are_answered_as_before():
    with Bench({"=": "text"}) as bench:
        bench.scheduler.pace.passed(1, 1000.0)
        one = bench.submit(ask(head="="))
        assert (one.final().reason, one.text) == ("end", "text")


def test_who_has_no_time_is_told_at_once_unless_nobody_else_is_there():
    with Bench({"first=": "x", "=": "y"}) as bench:
        bench.scheduler.pace.passed(1, 3.0)
        with bench.busy() as first:
            refused = bench.submit(InfillRequest(client="c", document="d", head="=", deadline_ms=400)).final()
            assert refused.reason == "busy"
            assert refused.message.startswith("the engine has 1 requests: another takes 12000 ms, and has ")
            patient = bench.submit(ask("patient", head="="))
        assert first.final().reason == patient.final().reason == "end"
        assert ("d", "busy") in bench.notes.finals


def test_what_the_next_key_would_overtake_is_refused_while_others_are_served():
    with Bench({"first=": "x", "=": "y"}) as bench:
        pace = bench.scheduler.pace
        for _ in range(10):
            pace.typed(0.2)
        pace.passed(1, 0.05)
        for _ in range(100):
            pace.answered(10)
        with bench.busy() as first:
            typed = InfillRequest(client="c", document="d", head="=", deadline_ms=5000)
            assert bench.submit(typed).final().message.endswith("another takes 500 ms, and has 200")
            explicit = bench.submit(InfillRequest(client="c", document="e", head="=", priority="explicit"))
        assert first.final().reason == explicit.final().reason == "end"
        assert bench.submit(typed).final().reason == "end"


def test_one_request_that_fails_in_a_shared_pass_ends_alone(caplog):
    with Bench({"first=": "x", "good=": "y", "bad=": "z"}) as bench:
        bench.denoiser.poison = b"bad="
        with bench.busy():
            good, bad = bench.submit(ask("good", head="good=")), bench.submit(ask("bad", head="bad="))
        assert good.final().reason == "end"
        assert bad.final().reason == "error"
        assert good.text == "y"
        assert "bad=" not in caplog.text


def test_where_memory_runs_out_old_contexts_go_first():
    with Bench({"=": "some text"}, room=700) as bench:
        for i in range(8):
            asked = bench.submit(ask(f"{i}", prefix=f"text {i}\n" * 30, head="="))
            assert asked.final().reason == "end"
            assert asked.text == "some text"
            bench.rest()
        assert bench.submit(ask("7", prefix="text 7\n" * 30, head="=")).final().timing.reused > 200


def test_where_all_memory_is_in_use_one_ends_and_the_others_live_on():
    table = {"first=": LONG, "=": LONG}
    with Bench(table, room=800) as bench:
        with bench.busy() as first:
            asked = [
                bench.submit(ask(f"{i}", prefix=f"text {i}\n" * 30, head="=", priority=priority, max_tokens=100))
                for i, priority in enumerate(("typed", "typed", "explicit"))
            ]
        finals = [one.final() for one in (first, *asked)]
        assert [final.reason for final in finals] == ["limit", "limit", "limit", "busy"]
        assert finals[-1].message.startswith("the engine's memory is full")
        bench.rest()
        assert bench.submit(ask("2", prefix="text 2\n" * 30, head="=", max_tokens=100)).final().reason == "limit"


def test_one_that_finds_no_memory_alone_is_not_told_of_others():
    with Bench({"=": "x"}, room=40) as bench:
        alone = bench.submit(ask("long", prefix="text\n" * 30, head="=")).final()
        assert (alone.reason, alone.message.partition(":")[0]) == ("busy", "there is no memory for even one request")
        assert bench.submit(ask("short", head="=")).final().reason == "end"


def test_one_that_finds_no_memory_behind_a_pass_takes_it_from_one_of_that_pass(monkeypatch):
    with Bench({"first=": LONG, "=": "x"}) as bench:
        filling = bench.engine._filling

        def step(run, outcome):
            if run.request.document == "first" and any(job.wants for job in bench.scheduler._jobs):
                raise MemoryError
            return filling.step(run, outcome)

        monkeypatch.setattr(bench.engine, "_filling", filling._replace(step=step))
        with bench.busy() as first:
            other = bench.submit(ask("other", head="=", priority="explicit"))
        assert other.final().reason == "busy"
        assert first.final().reason == "limit"


def test_a_fault_of_the_scheduler_leaves_nobody_waiting(caplog):
    text = "some_text"
    with Bench({"first=": "x"}) as bench:

        def stepped(canvases: int, rows: int, seconds: float) -> None:
            raise ZeroDivisionError(text)

        bench.notes.stepped = stepped
        finals = [bench.submit(ask(head="first=")).final() for _ in range(2)]
        assert [final.reason for final in finals] == ["error"] * 2
        assert all("ZeroDivisionError" in final.message for final in finals)
        assert "stepped" in caplog.text
        assert text not in caplog.text


def test_what_is_encoded_ahead_gives_back_its_memory_to_whoever_waits():
    asked: list[Asked] = []
    with Bench({"=": "x"}, room=500) as bench:

        def encoded(tokens: int, seconds: float) -> None:
            if bench.denoiser.encoded >= 200 and not asked:
                asked.append(bench.submit(ask("now", prefix="other text\n" * 30, head="=")))

        bench.notes.encoded = encoded
        bench.scheduler.prime(ask("ahead", prefix="some text\n" * 30))
        wait_for(lambda: bool(asked))
        assert asked[0].final().reason == "end"
        assert asked[0].text == "x"


def test_the_cache_never_holds_more_than_it_may_and_nothing_that_is_used_falls_out():
    bound, canvases, held = 6_000, 12 * 16 * 8, []
    with Bench({"=": "x"}) as bench:
        bench.engine._cache._max_bytes = bound
        bench.notes.encoded = lambda tokens, seconds: held.append(sum(kv.nbytes for kv in bench.denoiser.alive))
        asked = [bench.submit(ask(f"{i}", prefix=f"text {i}\n" * 30, head="=")) for i in range(12)]
        reasons = {one.final().reason for one in asked}
        assert reasons <= {"end", "busy"}
        assert "end" in reasons
        bench.rest()
        assert bench.engine.cache_bytes <= bound
        assert bound // 2 < max(held) <= bound + canvases
        assert all(entry.pins == 0 for entry in bench.engine._cache._entries.values())


TEXTS = {f"{i}=": f"{word} + {word}" for i, word in enumerate(("alpha", "beta", "gamma"))}

operation = st.tuples(
    st.sampled_from(["ask", "ask", "ask", "cancel", "prime", "poison"]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from(["typed", "explicit", "speculation"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(operation, max_size=30), st.sampled_from([math.inf, 250, 120]), st.integers(1, 3))
def test_whatever_comes_in_whatever_order_each_is_answered_once_and_rightly(operations, room, groups):
    with Bench(TEXTS, CONFIG, room=room, groups=groups) as bench:
        asked: list[tuple[int, Asked]] = []
        for kind, i, document, priority in operations:
            wanted = ask(
                f"{document}", prefix=f"text {document}\n" * 8, head=f"{i}=", priority=priority, suffix="\nend"
            )
            if kind == "ask":
                asked.append((i, bench.submit(wanted)))
            elif kind == "prime":
                bench.scheduler.prime(wanted)
            elif kind == "poison":
                bench.denoiser.poison = b"0="
            elif asked:
                bench.scheduler.cancel(asked[i % len(asked)][1].job)
        for i, one in asked:
            final = one.final()
            assert final.reason in ("end", "cancelled", "superseded", "busy", "error")
            assert final.reason != "error" or i == 0
            assert TEXTS[f"{i}="].startswith(one.text)
            if final.reason == "end":
                assert one.text == TEXTS[f"{i}="]
        bench.rest()
        assert len(bench.notes.finals) == len(asked)
        assert all(one.job.steps is None and one.job.wants is None for _, one in asked)
        contexts = list(bench.engine._cache._entries.values())
        assert all(entry.pins == 0 for entry in contexts)
        assert len(bench.denoiser.alive) == sum(entry.kv is not None for entry in contexts)
