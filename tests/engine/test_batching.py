"""Several requests at once: that sharing passes and memory, and any proposals whatsoever, change no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine import engine as engine_module
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, Pass, Rows
from infill_engine.engine import Engine
from infill_engine.fake import FakeDenoiser
from infill_engine.lookup import Lookup
from infill_engine.policy import VerifiedPolicy
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_engine.tokenizer import ByteCodec

CONFIG = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16)
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
gap = st.tuples(st.text("ab(\n", min_size=1, max_size=16), st.text("ab(\n", max_size=16), st.text("ab(\n", max_size=16))


@settings(max_examples=40, deadline=None)
@given(st.lists(gap, min_size=1, max_size=4), st.lists(tokens, min_size=1), st.integers(0, 3), st.randoms())
def test_no_proposal_and_no_company_changes_the_text(gaps, proposals, lookahead, random):
    """Whatever look-up, masks and an earlier text propose, and whoever shares a pass: what is committed is what each
    request gets alone, one token a pass."""
    table = {f"{i}=": text for i, (text, _, _) in enumerate(gaps)}
    requests = [
        ask(str(i), prefix=context + "\n", head=f"{i}=", suffix="\n" + context, max_lines=6)
        for i, (_, context, _) in enumerate(gaps)
    ]
    alone = [answer(Engine("fake", FakeDenoiser(table), ByteCodec(), SEQUENTIAL), wanted) for wanted in requests]

    class AnyLookup(Lookup):
        def propose(self) -> tuple[int, ...]:
            return tuple(random.choice(proposals)) or super().propose()

    class AnyPolicy(VerifiedPolicy):
        def step(self, canvas: Canvas, rows: Rows) -> Canvas:
            after = super().step(canvas, rows)
            return replace(after, proposal=tuple(random.choice(proposals))[: after.size - after.frontier])

    policy = AnyPolicy() if random.random() < 0.5 else VerifiedPolicy()
    shared = Engine("fake", FakeDenoiser(table, lookahead, groups=2), ByteCodec(), CONFIG, policy)
    for wanted, (_, _, earlier) in zip(requests, gaps, strict=True):
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
