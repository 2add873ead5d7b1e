"""Snippets of other files: which a canvas sees, where they come from, and that no request waits for them."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, Contexts, complete
from infill_engine.engine import Engine
from infill_engine.fake import SINK_ID, VOCAB, FakeDenoiser
from infill_engine.memory import Memory
from infill_engine.protocol import (
    MAX_SNIPPET,
    MAX_SNIPPETS,
    Document,
    Explanation,
    Final,
    InfillRequest,
    ProtocolError,
    Snippet,
    content_id,
    decode_explanation,
    decode_request,
    encode,
)
from infill_engine.smollm import SmolDenoiser
from infill_engine.tokenizer import ByteCodec
from infill_engine.training.rows import Mix, window
from infill_engine.workspaces import Workspaces
from service import Call, Service
from test_training import RECORD, SHAPE, TOKENIZER, WEIGHTS, Bytes

CONFIG = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16, snippet_tokens=40)
ONE, TWO, THREE = (Snippet(f"def {name}():\n    return '{name}'\n", f"{name}.py") for name in ("one", "two", "three"))


class Recording(FakeDenoiser):
    """Keeps the contexts of each pass as tokens."""

    def __init__(self) -> None:
        super().__init__({"= ": "done"})
        self.seen: list[tuple[list[int], ...]] = []

    def denoise(self, canvases, contexts, states):
        self.seen += [tuple(block.tokens for block in one.blocks) for one in contexts]
        return super().denoise(canvases, contexts, states)


def build(config: EngineConfig = CONFIG, **parts) -> tuple[Engine, Recording]:
    denoiser = Recording()
    return Engine("fake", denoiser, ByteCodec(), config, **parts), denoiser


def ask(*snippets: Snippet, client: str = "c", deadline_ms: int = 400, **fields) -> InfillRequest:
    given = {"prefix": "a = 1\n", "head": "b = ", "suffix": "\nprint(b)\n", **fields}
    return InfillRequest(client=client, document="d", snippets=snippets, deadline_ms=deadline_ms, **given)


def run(engine: Engine, wanted: InfillRequest, rate: float = 1000.0) -> Final:
    """On a device that encodes so many tokens a second; with the default a snippet takes longer than it may."""
    engine._cache.rate = rate
    *_, final = engine.events(wanted, time.monotonic())
    assert isinstance(final, Final)
    return final


def block(text: str) -> list[int]:
    return [SINK_ID, *text.encode()]


def test_a_snippet_that_is_encoded_is_a_block_behind_that_of_the_suffix():
    engine, denoiser = build()
    complete(engine.prime(ask(ONE)))
    final = run(engine, ask(ONE))
    assert denoiser.seen[-1] == (block("\nprint(b)\n"), block(ONE.text))
    assert (final.timing.snippets, final.timing.late_snippets, final.timing.encoded) == (1, 0, 0)


def test_a_snippet_that_is_not_encoded_is_left_out_and_there_the_next_time():
    engine, denoiser = build()
    final = run(engine, ask(ONE))
    assert denoiser.seen[-1] == (block("\nprint(b)\n"),)
    assert (final.timing.snippets, final.timing.late_snippets) == (0, 1)
    complete(engine.prime(ask(ONE)))
    assert run(engine, ask(ONE)).timing.snippets == 1


def test_where_encoding_costs_nothing_a_snippet_is_encoded_at_once():
    engine, denoiser = build()
    assert run(engine, ask(ONE), rate=1e6).timing.snippets == 1
    assert denoiser.seen[-1][1] == block(ONE.text)


def test_in_place_of_a_late_snippet_the_next_one_is_seen():
    engine, denoiser = build()
    complete(engine.prime(ask(TWO)))
    final = run(engine, ask(ONE, TWO))
    assert denoiser.seen[-1][1:] == (block(TWO.text),)
    assert (final.timing.snippets, final.timing.late_snippets) == (1, 0)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_as_many_are_seen_as_it_is_set_to(most):
    engine, denoiser = build(replace(CONFIG, snippets=most))
    complete(engine.prime(ask(ONE, TWO, THREE)))
    assert run(engine, ask(ONE, TWO, THREE)).timing.snippets == most
    assert denoiser.seen[-1][1:] == tuple(block(one.text) for one in (ONE, TWO, THREE)[:most])
    assert most or denoiser.encoded < 60  # nothing is encoded for nobody


def test_of_a_long_snippet_the_beginning_is_seen():
    engine, denoiser = build()
    long = Snippet("x = 1234\n" * 100)
    complete(engine.prime(ask(long)))
    run(engine, ask(long))
    assert denoiser.seen[-1][1] == block(long.text)[: 1 + CONFIG.snippet_tokens]


def test_an_empty_snippet_is_none():
    engine, denoiser = build()
    complete(engine.prime(ask(Snippet(""))))
    assert run(engine, ask(Snippet(""))).timing.snippets == 0
    assert len(denoiser.seen[-1]) == 1
    complete(engine.prime(ask(ONE)))
    timing = run(engine, ask(Snippet(""), ONE)).timing
    assert (timing.snippets, timing.late_snippets) == (1, 0)


def test_what_one_editor_had_encoded_serves_another():
    engine, denoiser = build()
    complete(engine.prime(ask(ONE)))
    before = denoiser.encoded
    final = run(engine, ask(ONE, client="another"))
    assert final.timing.snippets == 1
    assert denoiser.encoded - before < 12  # the stream alone; the suffix's block is the same, too


def test_blocks_are_forgotten_within_the_memory_for_contexts():
    engine, _ = build()
    engine._cache._max_bytes = 2_000
    for i in range(30):
        complete(engine.prime(ask(Snippet(f"value_{i} = {i}\n" * 3))))
        assert engine.cache_bytes <= 2_000
    assert run(engine, ask(Snippet("value_0 = 0\n" * 3))).timing.snippets == 0


def test_a_key_stroke_encodes_its_own_tokens_alone():
    engine, denoiser = build()
    complete(engine.prime(ask(ONE, head="some head ")))
    before, encoded = denoiser.encoded, 0
    for end in range(8):
        final = run(engine, ask(ONE, head="some head that is"[: 10 + end]))
        encoded += final.timing.encoded
        assert final.timing.snippets == 1
    assert encoded == denoiser.encoded - before <= 8


def test_serving_places_a_snippet_as_training_does():
    """The engine's contexts of a gap are those that `test_what_learns_predicts_as_what_serves` compares with the
    trainee's: the suffix as a block, then the snippet, each behind the sink."""
    (row, *_), snippet = (of := window(RECORD, TOKENIZER, random.Random(0), Mix(), still=True)).rows, of.snippet
    gap = RECORD.gaps[0]
    before, after = RECORD.text[: gap.start], RECORD.text[gap.end :]
    config = EngineConfig(snippet_tokens=CONFIG.snippet_tokens)
    engine = Engine("tiny", SmolDenoiser(WEIGHTS, "fp32", "cpu", SHAPE), Bytes(), config)
    seen: list[tuple[Canvas, Contexts]] = []
    denoise = engine._denoiser.denoise
    engine._denoiser.denoise = lambda c, k, s: seen.extend(zip(c, k, strict=True)) or denoise(c, k, s)
    at = before.rfind("\n") + 1
    asked = ask(Snippet(RECORD.snippet), prefix=before[:at], head=before[at:], suffix=after, deadline_ms=600_000)
    complete(engine.prime(asked))
    run(engine, asked)
    canvas, contexts = seen[0]
    encode_alone = lambda tokens: complete(
        engine._denoiser.encode(list(tokens), complete(engine._denoiser.encode((), None)))
    )
    expected = [encode_alone(row.block), encode_alone(snippet)]
    assert [one.length for one in contexts.blocks] == [one.length for one in expected]
    hidden = [
        denoise([canvas], [Contexts(contexts.prefix, tuple(blocks))], [None])[0][0]
        for blocks in (contexts.blocks, expected)
    ]
    torch.testing.assert_close(*hidden)


def test_ids_are_of_the_content_alone():
    assert Snippet("a", "x.py").id == Snippet("a", "y.py").id == content_id("a") == content_id(b"a")
    assert Snippet("a").id != Snippet("b").id


def test_the_log_names_what_was_used_and_no_text(caplog):
    engine, _ = build()
    complete(engine.prime(ask(ONE)))
    with caplog.at_level(logging.INFO, "infill_engine.engine"):
        run(engine, ask(ONE, TWO, version=7))
    (line,) = [record.getMessage() for record in caplog.records if "filled from" in record.getMessage()]
    told = engine.explain(ask(ONE, TWO, version=7))
    assert line.startswith(f"version 7 of {told.document} is filled from prefix ")
    assert all((piece.id in line) == piece.used for piece in told.pieces)
    assert [piece.used for piece in told.pieces] == [True, True, True, False]
    assert not any(word in line for word in ("print", "one", "d.py", "return"))


def test_the_log_names_no_snippet_that_there_was_no_time_for(caplog):
    """Of two that would each be encoded in no time, the first takes the time there is."""
    engine, denoiser = build(replace(CONFIG, snippets=2))
    complete(engine.prime(ask()))
    with caplog.at_level(logging.INFO, "infill_engine.engine"):
        timing = run(engine, ask(ONE, TWO), rate=2000.0).timing
    assert denoiser.seen[-1][1:] == (block(ONE.text),)
    assert (timing.snippets, timing.late_snippets) == (1, 1)
    assert ONE.id in caplog.text
    assert TWO.id not in caplog.text


def test_the_log_names_the_part_of_a_suffix_that_was_seen(caplog):
    engine, denoiser = build()
    with caplog.at_level(logging.INFO, "infill_engine.engine"):
        run(engine, ask(suffix="\n" + "x" * 30, deadline_ms=2_000), rate=10.0)  # there is time for few of them
    (seen,) = denoiser.seen[-1]
    assert len(seen) == 17
    assert f"suffix {content_id(bytes(seen[1:]))}" in caplog.text


def test_what_would_be_used_is_told_without_encoding_anything(tmp_path: Path):
    workspaces = Workspaces(tmp_path, ByteCodec())
    engine, denoiser = build(memory=Memory(VOCAB), workspaces=workspaces)
    workspaces.put("w", [Document("other.py", "1", "a = 1\nb = size\n")])
    while workspaces.digest():
        pass
    complete(engine.prime(ask(TWO)))
    before, engine._cache.rate = denoiser.encoded, 1000.0
    told = engine.explain(ask(ONE, TWO, workspace="w"))
    assert denoiser.encoded == before
    prefix, suffix, one, two = told.pieces
    assert (prefix.tokens, prefix.used) == (len("a = 1\nb = "), True)
    assert (suffix.tokens, suffix.encoded, suffix.used) == (len("\nprint(b)\n"), len("\nprint(b)\n"), True)
    assert (one.path, one.encoded, one.used) == ("one.py", 0, False)
    assert (two.path, two.encoded, two.used) == ("two.py", two.tokens, True)
    recalled = told.memory[-1]
    assert (recalled.source, recalled.text, recalled.followers) == ("workspace", "a = 1\nb = ", (("s", 1.0),))
    engine.close()


def test_who_asks_from_elsewhere_hears_what_the_editor_has_encoded():
    engine, _ = build()
    complete(engine.prime(ask(client="editor")))
    assert engine.explain(ask(client="command")).pieces[0].encoded > 0
    assert engine.explain(replace_document(ask(client="command"), "e")).pieces[0].encoded == 0


def replace_document(request: InfillRequest, document: str) -> InfillRequest:
    return InfillRequest(client=request.client, document=document, prefix=request.prefix, head=request.head)


async def test_what_would_be_used_is_told_over_http():
    service = Service(lambda report: build()[0])
    async with service.running():
        await service.ready()
        call = Call(service.app, "POST", "/v1/context", encode(ask(ONE)))
        assert await call.status() == 200
        told = decode_explanation(await call.body())
    assert isinstance(told, Explanation)
    assert [piece.kind for piece in told.pieces] == ["prefix", "suffix", "snippet"]


@pytest.mark.parametrize("prob", [-0.1, 1.1])
def test_what_is_no_probability_is_refused(prob):
    with pytest.raises(ProtocolError, match="min_prob"):
        decode_request(encode(ask(min_prob=prob)))


@pytest.mark.parametrize("snippets", [[Snippet("x")] * (MAX_SNIPPETS + 1), [Snippet("x" * (MAX_SNIPPET + 1))]])
def test_too_many_or_too_long_snippets_are_refused(snippets):
    with pytest.raises(ProtocolError, match="snippets"):
        decode_request(encode(ask(*snippets)))
    decode_request(encode(ask(*([Snippet("x" * MAX_SNIPPET)] * MAX_SNIPPETS))))
