"""How gaps are filled by models that see both sides: on a scripted model over bytes, and a tiny random checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine import models
from infill_engine.config import EngineConfig
from infill_engine.core import Contexts, OpenCanvas, OpenPolicy, Pass, Reading, Rows, complete
from infill_engine.engine import Engine
from infill_engine.lengths import CANDIDATES, PUBLISHED_BIAS, LengthSearch
from infill_engine.policy import (
    AnnealedPolicy,
    ElasticPolicy,
    EntropyPolicy,
    SeededNoise,
    StepsPolicy,
    ThresholdPolicy,
    decoding,
)
from infill_engine.protocol import Candidate, Final, Frame, InfillRequest, Snippet
from infill_engine.scheduler import Scheduler
from infill_engine.tokenizer import ByteCodec
from scripted import wait_for
from scripted_open import END_ID, EXPAND_ID, MASK_ID, VOCAB, Gap, OpenFake
from small_checkpoint import EXACT, save
from test_batching import together

CONFIG = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16)


def ask(document: str = "d", **fields) -> InfillRequest:
    return InfillRequest(client="c", document=document, **{"deadline_ms": 60_000, **fields})


def engine(*gaps: Gap, codec: ByteCodec | None = None, policy: OpenPolicy | None = None, **facts) -> Engine:
    model = OpenFake(*gaps, **facts)
    return Engine("scripted", model, codec or ByteCodec(specials=4), CONFIG, policy)


def run(of: Engine, wanted: InfillRequest) -> tuple[str, Final, list]:
    events = list(of.events(wanted, time.monotonic()))
    assert isinstance(events[-1], Final)
    candidates = [event for event in events if isinstance(event, Candidate)]
    return (candidates[-1].text if candidates else ""), events[-1], events


def test_both_sides_say_what_is_missing():
    model = engine(Gap("f(", "a, b", ")"), Gap("f(", "x", "]"), Gap("f(", "c"))
    assert run(model, ask(head="f(", tail=")", suffix="\n"))[0] == "a, b"
    assert run(model, ask(head="f(", tail="]", suffix="\n"))[0] == "x"
    text, final, _ = run(model, ask(prefix="import os\n", head="y = f("))
    assert (text, final.reason) == ("c", "end")


def seen(of: Engine) -> list[OpenCanvas]:
    """The canvases of the passes to come."""
    canvases: list[OpenCanvas] = []
    inner = of._denoiser._rows
    of._denoiser._rows = lambda canvas, contexts: (canvases.append(canvas), inner(canvas, contexts))[1]
    return canvases


WAYS = {
    "end": {"length": "end"},
    "calibrated": {"length": "calibrated", "lengths": tuple(range(1, 40)), "bias": PUBLISHED_BIAS, "doubt": 2.5},
    "elastic": {
        "length": "elastic",
        "elastic": True,
        "policy": ElasticPolicy(StepsPolicy("prob"), MASK_ID, EXPAND_ID, END_ID, 64),
    },
    "shared": {  # noise in place of masks, on a canvas that the suffix shares
        "mask_id": None,
        "policy": AnnealedPolicy(VOCAB),
        "length": "calibrated",
        "lengths": tuple(range(1, 40)),
        "bias": PUBLISHED_BIAS,
        "doubt": 2.5,
        "canvas": 64,
        "goes_on": True,
    },
}


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 17, 30])
@pytest.mark.parametrize("way", WAYS)
def test_the_gap_gets_its_length(way, length):
    """By an END in a canvas with room to spare, by asking the model, by a canvas that grows and shrinks."""
    text = "abcdefghijklmnopqrstuvwxyzABCDEF"[:length]
    model = engine(Gap("x = ", text, ")"), **WAYS[way])
    found, final, _ = run(model, ask(head="x = ", tail=")"))
    assert (found, final.reason) == (text, "end")
    assert final.timing.committed == length


def test_a_suffix_that_shares_the_canvas_has_its_length_asked_for_and_nothing_behind_it_none():
    """With slots and suffix together no fewer than the family needs: where there is no more text, it has ended."""
    facts = {**WAYS["shared"], "lengths": CANDIDATES, "least": 32, "doubt": 0.3}
    for suffix, length in itertools.product((")", ")" + "x" * 14, ")" + "x" * 99), (2, 14, 48)):
        model = engine(Gap("x = ", "a" * length, ")"), **facts)
        canvases = seen(model)
        assert run(model, ask(head="x = ", suffix=suffix))[0] == "a" * length
        assert len({canvas.size for canvas in canvases}) > 1
        for canvas in canvases:
            known = suffix.encode()[: 64 - canvas.size][:32]
            assert canvas.right == (*known, *[END_ID] * (32 - canvas.size - len(known)))
    alone = engine(Gap("x = ", "ab"), **facts)
    assert run(alone, ask(head="x = "))[0] == "ab"
    assert {size for (size,) in alone._denoiser.passes} == {32}


def test_growing_a_canvas_keeps_what_it_holds_in_order():
    model = engine(Gap("x = ", "abcdefghij", ")"), **WAYS["elastic"])
    _, _, events = run(model, ask(head="x = ", tail=")", frames=True))
    frames = [event for event in events if isinstance(event, Frame)]
    assert len(frames[0].slots) < 10 == len(frames[-1].slots)
    final = [frame for frame in frames if all(slot.state == "committed" for slot in frame.slots)]
    assert ["".join(slot.text for slot in frame.slots) for frame in final] == ["abcdefghij"]


def test_what_is_final_on_the_left_is_streamed_and_stays():
    body = "\n    a = 1\n    b = 2\n    return a"
    model = engine(Gap("def f():", body, "\n\nclass"), policy=StepsPolicy("prob"))
    text, _, events = run(model, ask(head="def f():", suffix="\n\nclass A: ...\n", max_lines=8, min_indent=1))
    texts = [event.text for event in events if isinstance(event, Candidate)]
    assert text == body
    assert len(texts) > 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


@pytest.mark.parametrize(
    ("limits", "kept", "reason"),
    [
        ({"max_lines": 1}, "one", "end"),
        ({"max_lines": 2}, "one\n  two", "limit"),
        ({"max_lines": 9, "min_indent": 2}, "one\n  two", "end"),
        ({"max_lines": 9, "max_tokens": 5}, "one\n ", "limit"),
    ],
)
def test_text_stops_where_text_from_the_left_would(limits, kept, reason):
    model = engine(Gap("x: ", "one\n  two\nthree\n  four", "\nend"))
    text, final, _ = run(model, ask(head="x: ", suffix="\nend", **limits))
    assert (text.rstrip(), final.reason) == (kept.rstrip(), reason)


def test_nothing_is_written_behind_what_is_too_unsure_to_be_shown():
    model = engine(Gap("x = ", "abcdefgh", "\nend"), policy=StepsPolicy("prob"))
    whole, final, _ = run(model, ask(head="x = ", suffix="\nend"))
    assert (whole, final.reason) == ("abcdefgh", "end")
    text, final, _ = run(model, ask("e", head="x = ", suffix="\nend", min_prob=1.0))
    assert (text, final.reason) == ("a", "unsure")


def test_a_line_that_the_suffix_says_again_ends_the_gap():
    model = engine(Gap("x:\n", "  one()\n  again()\n", "\n  again()"))
    assert run(model, ask(prefix="x:\n", suffix="\n  again()\n", max_lines=9))[0] == "  one()"


def test_a_text_that_is_stuck_is_cut():
    """As it comes about where passes pin too much at once."""
    model = engine(Gap("x = ", "value\n" + "return result\n" * 6, "\nend"))
    text, final, _ = run(model, ask(head="x = ", suffix="\nend", max_lines=20, max_tokens=200))
    assert (text, final.reason) == ("value", "limit")


class MiddleFirst(StepsPolicy):
    """Pins the open slot in the middle."""

    def step(self, canvas: OpenCanvas, rows: Rows, noise: SeededNoise) -> OpenCanvas:
        row = len(rows) // 2
        return canvas.seen(rows).pin({canvas.open[row]: (rows.token[row], rows.prob[row])})


def test_no_pass_is_made_for_what_stands_behind_an_end():
    """Of 16 slots the 9th and the 5th are said to be END: what is left is the text."""
    model = engine(Gap("x = ", "abcd", ")"), lengths=(16,), policy=MiddleFirst("prob"))
    text, final, _ = run(model, ask(head="x = ", tail=")"))
    assert (text, final.timing.steps) == ("abcd", 2 + 4)


@pytest.mark.parametrize("blocks", [True, False])
def test_snippets_stand_in_front_of_the_prefix_where_a_family_reads_them(blocks):
    model = engine(Gap("x = ", "ab", ")"), blocks=blocks)
    seen = []
    inner = model._denoiser._rows
    model._denoiser._rows = lambda canvas, contexts: (seen.append(contexts.blocks), inner(canvas, contexts))[1]
    model._cache.rate = 1e6  # what keeps tokens only encodes them in no time
    best = Snippet("def helper(): ...")
    _, final, _ = run(model, ask(head="x = ", tail=")", snippets=(best,)))
    assert [bytes(block.tokens[1:]) for block in seen[0]] == ([b"def helper(): ...\n\n"] if blocks else [])
    assert final.timing.snippets == blocks
    pieces = model.explain(ask(head="x = ", tail=")", snippets=(best,))).pieces
    assert [(piece.kind, piece.used) for piece in pieces] == [("prefix", True), ("suffix", True), ("snippet", blocks)]


def test_what_a_family_wants_behind_a_suffix_stands_behind_all_of_it_only():
    model = engine(Gap("x = ", "ab", ")"), closing=(END_ID,))
    canvases = seen(model)
    run(model, ask(head="x = ", tail=")", suffix="\n"))
    run(model, ask(head="x = ", tail=")", suffix="\n" + "long\n" * 20))
    assert canvases[0].right == (*b")\n", END_ID)
    assert canvases[-1].right == tuple(b")\n" + b"long\n" * 6)


def test_another_text_begins_otherwise():
    model = engine(Gap("x = ", "abc", ")"), Gap("x = ", "abc", ")"))
    first, *_ = run(model, ask(head="x = ", tail=")"))
    other, *_ = run(model, ask(head="x = ", tail=")", avoid=(first,)))
    assert first == "abc"
    assert other[:1] != "a"


def test_settings_may_choose_another_policy_than_the_published_one():
    def passes(decoding: str, **facts) -> int:
        model = OpenFake(Gap("x = ", "abcdef", ")"), policy=StepsPolicy("prob"), **facts)
        served = Engine("scripted", model, ByteCodec(specials=4), replace(CONFIG, decoding=decoding))
        text, final, _ = run(served, ask(head="x = ", tail=")"))
        assert text == "abcdef"
        return final.timing.steps

    assert 1 == passes("threshold") <= passes("entropy") < passes("published")
    elastic = {**WAYS["elastic"], "lengths": (2,)}
    policy = decoding("steps:7", OpenFake(**elastic).facts)
    assert policy == replace(elastic["policy"], policy=StepsPolicy("prob", steps=7))
    policy = decoding("threshold", OpenFake(**elastic).facts)
    assert policy == replace(elastic["policy"], policy=ThresholdPolicy())
    with pytest.raises(ValueError, match="must be one of published, sampled, threshold, entropy, steps:N, not fast"):
        replace(CONFIG, decoding="fast")


def test_settings_may_have_tokens_drawn_as_the_authors_do():
    facts = OpenFake(policy=StepsPolicy("entropy"), sampling=(0.2, 0.9)).facts
    sampled = StepsPolicy("entropy", temperature=0.2, top_p=0.9)
    assert decoding("sampled", facts) == sampled
    assert sampled.reading(masked(2)) == Reading(0.2, 1.0, top_p=0.9)
    elastic = replace(WAYS["elastic"]["policy"], policy=StepsPolicy("prob"))
    grown = OpenFake(policy=elastic, sampling=(0.1, 0.5)).facts
    assert decoding("sampled", grown) == replace(elastic, policy=StepsPolicy("prob", temperature=0.1, top_p=0.5))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_of_a_row_only_the_ids_count_that_are_probable_enough(top_p, temperature):
    """Against the definition, id by id; a restricted row has the most probable ones of its set."""
    model = engine(Gap("x = ", "abc", ")"))
    torch.manual_seed(0)
    hidden = 2 * torch.randn(4, len(model._denoiser.head.weight))
    admitted = torch.zeros(hidden.shape[1], dtype=torch.bool)
    admitted[40:60] = True
    reading = Reading(temperature, top_p=top_p)
    asked = Pass(
        masked(4), Contexts(complete(model._denoiser.encode((), None))), reading=reading, allowed={2: admitted}
    )
    ((rows,), _) = model._open.read([asked], [hidden], [None])
    for i in range(4):
        free = model._denoiser.head.free & (admitted if i == 2 else torch.ones_like(admitted))
        p = (hidden[i] / temperature).masked_fill(~free, -torch.inf).softmax(-1)
        kept, total = [], 0.0
        for token in p.argsort(descending=True).tolist():
            if total > top_p:
                break
            kept.append(p[token])
            total += float(p[token])
        q = torch.tensor(kept) / sum(kept)
        assert rows.token[i] == int(p.argmax())
        assert rows.prob[i] == pytest.approx(float(q[0]), rel=1e-4)
        assert rows.entropy[i] == pytest.approx(float(-torch.where(q > 0, q * q.log(), 0).sum()), abs=1e-3)


class HealingCodec(ByteCodec):
    """Letters at the end may belong to a longer word, so the gap writes them again."""

    def last_piece(self, text: str) -> str:
        return text[len(text.rstrip("abcdefghijklmnopqrstuvwxyz")) :]


@pytest.mark.parametrize("heals", [True, False])
def test_healing_is_a_fact_of_the_family(heals):
    model = engine(Gap("x = retu", "rned", ")"), codec=HealingCodec(specials=4), heals=heals)
    text, final, events = run(model, ask(head="x = retu", tail=")", frames=True))
    assert text == "rned"
    assert final.timing.committed == (8 if heals else 4)
    states = [slot.state for slot in [event for event in events if isinstance(event, Frame)][-1].slots]
    assert states[:4] == (["head"] if heals else ["committed"]) * 4


def test_what_was_taken_back_is_written_again_whatever_the_model_would_say():
    """The first slots are restricted one after the other, and nothing else is pinned before they are."""
    model = engine(Gap("x = ", "other", ")"), codec=HealingCodec(specials=4))
    canvases = []
    inner = model._denoiser.denoise

    def denoise(batch, contexts, states):
        canvases.extend(batch)
        return inner(batch, contexts, states)

    model._denoiser.denoise = denoise
    _, final, _ = run(model, ask(head="x = abc", tail=")"))
    assert bytes(canvases[3].slots[:3]) == b"abc"
    assert [canvas.pinned.count(True) for canvas in canvases[:4]] == [0, 1, 2, 3]
    assert final.reason == "end"


def test_a_canvas_filled_with_nothing_gets_the_next_length_once():
    model = engine(Gap("x = ", "", ")"), lengths=(4, 8, 16))
    text, final, _ = run(model, ask(head="x = ", tail=")", max_tokens=3, max_lines=4))
    assert (text, final.reason) == ("", "end")
    assert model._denoiser.passes == [[4], [8]]


def test_no_canvas_is_smaller_than_the_family_can_fill():
    model = engine(Gap("x = ", "ab", ")"), lengths=(32, 64))
    assert run(model, ask(head="x = ", tail=")", max_tokens=2, max_lines=4))[0] == "ab"
    assert model._denoiser.passes[0] == [32]


@pytest.mark.parametrize(("sure", "kept"), [(12.0, "abcdef"), (1.0, "ab")])
def test_at_the_deadline_predictions_are_taken_as_far_as_they_are_sure(sure, kept):
    model = engine(Gap("x = ", "abcdef", ")"), policy=StepsPolicy("prob"), sure=sure)
    steps = model.infill(ask(head="x = ", tail=")"), time.monotonic())
    need, passes, events = next(steps), 0, []
    while True:
        if isinstance(need, Pass):
            passes += 1
            outcome = model.denoise([need])[0] if passes <= 2 else None
            need = steps.send(outcome)
        else:
            events.append(need)
            try:
                need = next(steps)
            except StopIteration:
                break
    *_, candidate, final = events
    assert (candidate.text, final.reason) == (kept, "deadline")
    assert len(candidate.probs) == len(kept)


def test_a_deadline_before_the_first_pass_leaves_nothing():
    model = engine(Gap("x = ", "abcdef", ")"))
    encode = model._denoiser.encode

    def slow(tokens, kv, ahead=False):
        time.sleep(0.02)
        return encode(tokens, kv, ahead)

    model._denoiser.encode = slow
    text, final, _ = run(model, ask(prefix="text\n" * 20, head="x = ", tail=")", deadline_ms=10))
    assert (text, final.reason, final.timing.steps) == ("", "deadline", 0)


@pytest.mark.parametrize(("doubt", "kept"), [(0.0, "abcdef"), (4.0, "")])
def test_a_deadline_while_lengths_are_tried_takes_the_best_so_far(doubt, kept):
    """Of canvases of 8 and 12 slots that of 8 is nearer; where it is two slots off, the model may not be sure of it."""
    model = engine(Gap("x = ", "abcdef", ")"), length="calibrated", lengths=(4, 8, 12, 16), doubt=doubt)
    steps = model.infill(ask(head="x = ", tail=")"), time.monotonic())
    outcome, events, passes = None, [], 0
    with contextlib.suppress(StopIteration):
        while True:
            need = steps.send(outcome)
            outcome = model.denoise([need])[0] if isinstance(need, Pass) and passes < 2 else None
            passes += isinstance(need, Pass)
            events.append(need)
    *_, candidate, final = events
    assert (candidate.text, final.reason) == (kept, "deadline")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text("ab(\n", min_size=1, max_size=16), min_size=1, max_size=4), st.sampled_from([*WAYS]), st.randoms()
)
def test_company_changes_no_text(texts, way, random):
    gaps = [Gap(f"{i}=", text, ")") for i, text in enumerate(texts)]
    requests = [ask(str(i), head=f"{i}=", tail=")", max_lines=6) for i in range(len(texts))]
    alone = [run(engine(*gaps, **WAYS[way]), wanted) for wanted in requests]
    shared = together(
        engine(*gaps, **WAYS[way]), requests, lambda live: random.sample(live, random.randint(1, len(live)))
    )
    for (text, final, _), (*_, candidate, shared_final) in zip(alone, shared, strict=True):
        assert (candidate.text, shared_final.reason) == (text, final.reason)
        assert shared_final.timing.steps == final.timing.steps


def test_the_prefix_is_kept_from_key_to_key():
    model = engine(Gap("x = ", "ab", ")"), Gap("x = a", "b", ")"))
    run(model, ask(prefix="text\n" * 20, head="x = ", tail=")"))
    _, final, _ = run(model, ask(prefix="text\n" * 20, head="x = a", tail=")"))
    assert final.timing.reused > 90
    assert final.timing.encoded <= 2


def test_priming_encodes_the_prefix_alone():
    model = engine(Gap("x = ", "ab", ")"))
    wanted = ask(prefix="text\n" * 20, head="x = ", tail=")")
    for _ in model.prime(wanted):
        pass
    assert model.encoded_tokens == 1 + len(wanted.prefix + wanted.head)
    assert run(model, wanted)[1].timing.encoded == 0


@pytest.mark.parametrize("where", ["encode", "denoise", "_say"])
def test_where_a_device_has_no_room_what_nobody_uses_makes_some(where):
    """Whatever it is that asked for too much: encoding, a pass, or the reading of its rows."""
    model = engine(Gap("x = ", "ab", ")"))
    others = [ask(str(i), prefix="text\n" * 20, head=f"{i} = ", tail=")") for i in range(2)]
    for other in others:
        run(model, other)
    held, of = model._cache.nbytes, model._open if where == "_say" else model._denoiser
    inner, full = getattr(of, where), [True]

    def ask_for_room():
        if full:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")

    def crowded(*given):
        ask_for_room()
        return inner(*given)

    def encode(tokens, kv, ahead=False):
        if tokens:
            ask_for_room()
        return (yield from inner(tokens, kv, ahead))

    setattr(of, where, encode if where == "encode" else crowded)
    assert run(model, ask("mine", head="x = ", tail=")"))[0] == "ab"
    assert model._cache.nbytes < held

    full += [True] * 99
    final = through_a_scheduler(model, [ask("mine", prefix="other\n" * 9, head="x = ", tail=")")])[0][1]
    assert final.reason == "busy"
    assert "memory" in final.message


def test_what_is_blank_and_goes_on_is_not_begun_again_behind_itself():
    """A retry would write behind what is encoded already, and of which the text knows nothing."""
    blank = " " * 32
    model = engine(Gap("x = ", blank), Gap(f"x = {blank}", ""), length="end", goes_on=True, lengths=(32, 48))
    canvases = seen(model)
    text, final, _ = run(model, ask(head="x = "))
    assert (text, final.reason) == (blank, "end")
    assert {(canvas.origin, canvas.size) for canvas in canvases} == {(5, 32), (37, 32)}


def test_a_model_that_says_nan_fails_its_request_and_no_other():
    model = engine(Gap("x = ", "ab", ")"), Gap("bad", "cd", ")"))
    inner = model._denoiser._rows
    model._denoiser._rows = lambda canvas, contexts: (
        inner(canvas, contexts)
        * (float("nan") if bytes(t for t in contexts.prefix.tokens if t < 256).endswith(b"bad") else 1.0)
    )
    finals = through_a_scheduler(model, [ask("1", head="x = ", tail=")"), ask("2", head="bad", tail=")")])
    assert [final.reason for _, final in finals] == ["end", "error"]
    assert finals[0][0].text == "ab"
    assert finals[1][1].message == "the model says NaN: its weights are damaged, or do not suit its type"


def through_a_scheduler(model: Engine, requests: Sequence[InfillRequest]) -> list[tuple[Candidate, Final]]:
    scheduler = Scheduler(lambda report: model)
    scheduler.start()
    wait_for(lambda: scheduler.phase.state == "ready")
    try:
        answers = []
        queues: list[queue.Queue] = [queue.Queue() for _ in requests]
        for wanted, events in zip(requests, queues, strict=True):
            scheduler.submit(wanted, events.put, time.monotonic())
        for events in queues:
            candidate = Candidate("")
            while not isinstance(event := events.get(timeout=30), Final):
                candidate = event if isinstance(event, Candidate) else candidate
            answers.append((candidate, event))
        return answers
    finally:
        scheduler.close()
        assert scheduler.join(10)


# Policies.


def read(tokens: Sequence[int], probs: Sequence[float], entropy: Sequence[float] | None = None) -> Rows:
    tokens, probs = list(tokens), list(probs)
    blank = [0.0] * len(tokens)
    return Rows(tokens, probs, list(entropy or blank), blank, blank, tokens, probs)


def masked(size: int) -> OpenCanvas:
    return OpenCanvas.of(3, (), [MASK_ID] * size, (1, 2))


NOISE = SeededNoise(0)


def pinned(canvas: OpenCanvas) -> dict[int, int]:
    return {i: token for i, token in enumerate(canvas.slots) if canvas.pinned[i]}


def test_the_threshold_pins_what_is_sure_wherever_it_stands_and_the_surest_in_any_case():
    rows = read([5, 6, 7, 8], [0.95, 0.5, 0.89, 0.9])
    assert pinned(ThresholdPolicy(0.9).step(masked(4), rows, NOISE)) == {0: 5, 3: 8}
    assert pinned(ThresholdPolicy(0.99).step(masked(4), rows, NOISE)) == {0: 5}
    after = ThresholdPolicy(0.9).step(masked(4), rows, NOISE)
    assert (after.predicted, after.prob, after.step) == ((5, 6, 7, 8), (0.95, 0.5, 0.89, 0.9), 1)
    assert pinned(ThresholdPolicy(0.9).step(after, read([9, 9], [0.1, 0.2]), NOISE)) == {0: 5, 3: 8, 2: 9}


def test_the_entropy_bound_pins_as_long_as_what_is_lost_is_bounded():
    rows = read([5, 6, 7, 8], [0.9] * 4, [0.3, 0.06, 0.2, 0.05])
    assert pinned(EntropyPolicy(0.1).step(masked(4), rows, NOISE)) == {3: 8, 1: 6}
    assert pinned(EntropyPolicy(0.12).step(masked(4), rows, NOISE)) == {3: 8, 1: 6, 2: 7}
    assert pinned(EntropyPolicy(0.01).step(masked(4), rows, NOISE)) == {3: 8}


#: The first pass of LLaDA's decoder with the random weights of `test_families`: each slot says the same, as parallel
#: decoding's stutter begins. With a threshold of 0.04 the published sampler fills the canvas with it.
STUTTER = [0.0494, 0.0501, 0.057, 0.0605, 0.0626, 0.0616, 0.0551, 0.0543, 0.0601, 0.064, 0.0674, 0.0679]


def test_neighbours_that_say_the_same_in_one_pass_are_not_both_pinned():
    canvas, rows = masked(12), read([70] * 12, STUTTER, [5.2] * 12)
    assert len(pinned(ThresholdPolicy(0.04, apart=False).step(canvas, rows, NOISE))) == 12
    assert sorted(pinned(ThresholdPolicy(0.04).step(canvas, rows, NOISE))) == [0, 2, 4, 6, 9, 11]
    assert sorted(pinned(ThresholdPolicy(0.06).step(canvas, rows, NOISE))) == [4, 9, 11]
    by_entropy = pinned(EntropyPolicy(99.0).step(canvas, rows, NOISE))
    assert not any(slot + 1 in by_entropy for slot in by_entropy)


def test_what_waited_for_its_neighbour_is_asked_again():
    after = ThresholdPolicy(0.9).step(masked(3), read([7, 7, 8], [0.93, 0.97, 0.95]), NOISE)
    assert pinned(after) == {1: 7, 2: 8}
    assert pinned(ThresholdPolicy(0.9).step(after, read([7], [0.99]), NOISE)) == {0: 7, 1: 7, 2: 8}


@pytest.mark.parametrize(("steps", "spread"), [(None, "even"), (3, "even"), (20, "even"), (4, "time"), (32, "time")])
def test_fixed_steps_fill_a_canvas_in_so_many_passes(steps, spread):
    canvas, passes = masked(8), 0
    policy = StepsPolicy("prob", steps, spread)
    while not canvas.full:
        canvas = policy.step(canvas, read([7] * canvas.rows, [0.5] * canvas.rows), NOISE)
        passes += 1
    assert passes == canvas.step <= min(steps or 8, 8)
    assert passes == min(steps or 8, 8) or spread == "time"


SAID = st.lists(st.tuples(st.sampled_from([65, 66, END_ID, EXPAND_ID]), st.integers(1, 99)), min_size=16, max_size=16)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.lists(SAID, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_an_elastic_canvas_comes_to_an_end_and_loses_nothing_that_is_final(size, script, rest, several):
    inner = ThresholdPolicy(0.5) if several else StepsPolicy("prob")
    policy = ElasticPolicy(inner, MASK_ID, EXPAND_ID, END_ID, most=16, rest=rest)
    canvas = masked(size)
    for step in range(100):
        if canvas.full:
            break
        said = script[step % len(script)][: canvas.rows]
        refused = policy.reading(canvas).refused
        rows = read([65 if token in refused else token for token, _ in said], [prob / 100 for _, prob in said])
        after = policy.step(canvas, rows, NOISE)
        final = [token for token, is_final in zip(canvas.slots, canvas.pinned, strict=True) if is_final]
        kept = [token for token, is_final in zip(after.slots, after.pinned, strict=True) if is_final]
        assert after.size <= 16
        assert after.right == canvas.right
        assert not {END_ID, EXPAND_ID} & set(after.slots)
        left = iter(kept)
        assert all(token in left for token in final)
        canvas = after
    assert canvas.full


def test_deleting_takes_the_open_slots_to_the_right_along():
    canvas = masked(5).pin({3: (65, 1.0)})
    rows = read([66, END_ID, 67, 68], [0.1, 0.9, 0.2, 0.3])
    rest = ElasticPolicy(StepsPolicy("prob"), MASK_ID, EXPAND_ID, END_ID, 8).step(canvas, rows, NOISE)
    alone = ElasticPolicy(StepsPolicy("prob"), MASK_ID, EXPAND_ID, END_ID, 8, rest=False).step(canvas, rows, NOISE)
    assert rest.slots == (MASK_ID, 65)
    assert alone.slots == (MASK_ID, MASK_ID, 65, MASK_ID)


# Lengths.


@given(st.sampled_from(CANDIDATES), st.sampled_from([PUBLISHED_BIAS, (0.0, 0.0, 0.0, 0.0, 1.0)]))
def test_the_length_at_which_the_model_is_surest_is_found(best, bias):
    """In fewer passes than there are lengths, where it is the less sure the further off it is."""
    search, tried = LengthSearch(CANDIDATES, bias), 0
    a, b, c, d, e = bias
    while (length := search.length) is not None:
        trend = a * 2.718281828 ** (-b * length) + c * 2.718281828 ** (-d * length) + e
        sure = trend * (1 - abs(CANDIDATES.index(length) - CANDIDATES.index(best)) / 20)
        search.tried([sure] * length)
        tried += 1
    assert search.best == best
    assert tried <= 2 + abs(CANDIDATES.index(best) - CANDIDATES.index(8)) + 4


def test_the_trend_by_length_is_divided_out():
    sure = {4: 0.70, 6: 0.66, 8: 0.62, 12: 0.60, 16: 0.45, 24: 0.35}
    raw, calibrated = (LengthSearch(tuple(sure), bias) for bias in ((0.0, 0.0, 0.0, 0.0, 1.0), PUBLISHED_BIAS))
    for search in (raw, calibrated):
        while search.length is not None:
            search.tried([sure[search.length]])
    assert (raw.best, calibrated.best) == (4, 12)


# A real checkpoint.


@pytest.mark.parametrize("expand", [None, 300])
def test_a_checkpoint_in_a_folder_answers_through_the_scheduler(tmp_path, expand):
    """A tiny random one with its own tokenizer; what it says is senseless, and the same for the same request only."""
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    save(tmp_path, expand_token_id=expand)
    config = replace(CONFIG, model=str(tmp_path), prefix_tokens=4096, **EXACT)
    served = models.load(config, lambda message, progress: None)
    fields = {"prefix": "import os\n" * 40, "head": "x = os.", "max_lines": 4}
    requests = [ask("a", suffix="\nprint(x)\n", **fields), ask("b", suffix="\nraise y\n", **fields)]
    answers = through_a_scheduler(served, [*requests, replace_document(requests[0], "c")])
    assert all(final.reason in ("end", "limit") for _, final in answers)
    first, other, again = (candidate for candidate, _ in answers)
    assert first.text == again.text
    assert first.probs == pytest.approx(again.probs, rel=1e-3)
    assert first.probs != pytest.approx(other.probs, rel=1e-3)
    assert first.text or other.text


def replace_document(request: InfillRequest, document: str) -> InfillRequest:
    import msgspec

    return msgspec.structs.replace(request, document=document)
