"""The bench of contexts: what it observes is what the engine would write by, and its tables say what was seen."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infill_engine.config import EngineConfig
from infill_engine.engine import Engine
from infill_engine.fake import VOCAB, FakeDenoiser
from infill_engine.memory import Memory
from infill_engine.protocol import Candidate, InfillRequest
from infill_engine.tokenizer import ByteCodec

from bench.context import Seen, Variant, accuracy, exact, loss, measure, observe, page, precision, with_snippet
from bench.filling import Store
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


def look(index: int, **said: Any) -> Seen:
    return Seen(index=index, package="p", language="go", retrieval_ms=0.0, look_up_ms=0.0, **said)


@pytest.mark.parametrize("memory", [False, True])
def test_a_gap_in_which_nothing_is_missing_is_looked_at_too(memory: bool) -> None:
    asked = InfillRequest(client="c", document="d", prefix="box.area\n", head="box.area", deadline_ms=60_000)
    assert observe(build({}, memory), asked, [])[:3] == (0.0, 0, 0.0)


def test_what_was_looked_at_is_not_looked_at_again(tmp_path: Path) -> None:
    """Nor what was looked at by a run that broke off in the middle of a line."""
    looked: list[tuple[str, int]] = []

    class Bench:
        model = SimpleNamespace(threads=1)

        def __init__(self, name: str) -> None:
            self.name = name

        def store(self, folder: Path, variant: Variant, seed: int) -> Store[Seen]:
            return Store(folder / f"{self.name}-{variant.name}", Seen)

        def look(self, variant: Variant, case: Any, index: int) -> Seen:
            looked.append((f"{self.name}-{variant.name}", index))
            return look(index, tokens=1, nats=1.0, right=1, shown=True, exact=True, snippets=0)

    benches, gaps = {"base": Bench("base"), "adapter": Bench("adapter")}, {3: None, 7: None}
    first = measure(benches, gaps, tmp_path, 1)  # type: ignore[arg-type]
    assert len(looked) == 2 * 5 * 2
    assert [one.index for one in first["adapter", "all"]] == [3, 7]
    file = tmp_path / "base-none"
    file.write_bytes(file.read_bytes()[:-9])
    looked.clear()
    assert measure(benches, gaps, tmp_path, 1) == first  # type: ignore[arg-type]
    assert looked == [("base-none", 7)]
    assert "2 gaps of 1 held-out packages" in page(first)


def test_figures_are_over_tokens_and_over_gaps() -> None:
    seen = [
        look(0, tokens=10, nats=10.0, right=9, shown=True, exact=True, snippets=1),
        look(1, tokens=30, nats=50.0, right=11, shown=False, exact=False, snippets=0),
    ]
    assert loss(seen).value == pytest.approx(1.5)
    assert accuracy(seen).value == pytest.approx(0.5)
    assert exact(seen).value == pytest.approx(0.5)
    assert precision(seen).value == pytest.approx(1.0)
    assert with_snippet(seen) == 0.5


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
