"""The bench of contexts: what it observes is what the engine would write by, and its tables say what was seen."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from infill_engine.config import EngineConfig
from infill_engine.engine import Engine
from infill_engine.fake import VOCAB, FakeDenoiser
from infill_engine.memory import Memory
from infill_engine.protocol import Candidate, InfillRequest
from infill_engine.tokenizer import ByteCodec

from bench.context import Seen, accuracy, exact, loss, observe, precision, with_snippet
from bench.plot import table


def build(table: dict[str, str], memory: bool) -> Engine:
    parts: dict[str, Any] = {"memory": Memory(VOCAB)} if memory else {}
    return Engine("fake", FakeDenoiser(table), ByteCodec(), EngineConfig(chunk_tokens=16), **parts)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("text", ["area", "width"])
def test_the_loss_of_a_middle_is_that_of_what_the_engine_writes(memory: bool, text: str) -> None:
    """The engine's own probabilities of its text are the figures, with the memory mixed in as there."""
    engine = build({"box.": text}, memory)
    asked = InfillRequest(
        client="c",
        document="d",
        prefix="box.area\nbox.area(x)\n",
        head="box.",
        suffix="\nbox.arena\n",
        deadline_ms=60_000,
    )
    *_, candidate, _ = (event for event in engine.events(asked, time.monotonic()))
    assert isinstance(candidate, Candidate)
    written = candidate.text
    nats, right, _, seen = observe(engine, asked, list(written.encode()))
    assert right == len(written)
    assert nats == pytest.approx(-sum(map(math.log, candidate.probs)), rel=1e-4)
    assert seen == 0
    if memory:
        assert nats != pytest.approx(observe(build({"box.": text}, False), asked, list(written.encode()))[0], rel=1e-2)


def test_a_middle_that_the_model_would_not_write_is_unlikely() -> None:
    engine = build({"box.": "area"}, memory=False)
    asked = InfillRequest(client="c", document="d", head="box.", deadline_ms=60_000)
    nats, right, *_ = observe(engine, asked, list(b"zebra"))
    assert right < 5
    assert nats > 10


def test_figures_are_over_tokens_and_over_gaps() -> None:
    seen = [
        Seen("go", tokens=10, nats=10.0, right=9, shown=True, exact=True, snippets=1, look_up_ms=0.0),
        Seen("go", tokens=30, nats=50.0, right=11, shown=False, exact=False, snippets=0, look_up_ms=0.0),
    ]
    assert loss(seen).value == pytest.approx(1.5)
    assert accuracy(seen).value == pytest.approx(0.5)
    assert exact(seen).value == pytest.approx(0.5)
    assert precision(seen).value == pytest.approx(1.0)
    assert with_snippet(seen) == 0.5


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
