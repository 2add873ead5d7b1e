"""The denoise loop and the context cache on a fake model over bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain as chained
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, ModelError, Pass, Rows
from infill_engine.engine import FIRST_SLOTS, MOST_SLOTS, Engine
from infill_engine.fake import END_ID, MASK_ID, SINK_ID, FakeDenoiser
from infill_engine.lookup import Lookup
from infill_engine.policy import VerifiedPolicy
from infill_engine.protocol import Candidate, Final, Frame, InfillRequest, Proposals
from infill_engine.tokenizer import ByteCodec

CONFIG = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16)


#: Text that never repeats itself.
LONG = " ".join(str(i) for i in range(200))


def build(table: dict[str, str], lookahead: int = 0, policy=None, step_s: float = 0.0) -> tuple[Engine, FakeDenoiser]:
    denoiser = FakeDenoiser(table, lookahead=lookahead, step_s=step_s)
    return Engine("fake", denoiser, ByteCodec(), CONFIG, policy), denoiser


def request(**fields) -> InfillRequest:
    return InfillRequest(client="c", document="d", deadline_ms=60_000, **fields)


def run(engine: Engine, wanted: InfillRequest) -> tuple[str, Final, list]:
    events = list(engine.events(wanted, time.monotonic()))
    assert [isinstance(event, Final) for event in events].count(True) == 1
    assert isinstance(events[-1], Final)
    candidates = [event for event in events if isinstance(event, Candidate)]
    return (candidates[-1].text if candidates else ""), events[-1], events


def read(tokens: list[int], probs: list[float] | None = None) -> Rows:
    """Rows that predict these tokens."""
    blank = [0.0] * len(tokens)
    return Rows(tokens, probs or blank, blank, blank, blank)


def test_it_writes_what_the_model_says_up_to_the_end():
    engine, _ = build({"return ": "a + b"})
    text, final, _ = run(engine, request(prefix="def add(a, b):\n", head="    return ", suffix="\n"))
    assert text == "a + b"
    assert final.reason == "end"
    assert final.timing.committed == len("a + b")


def test_warming_up_makes_a_pass_and_changes_no_answer():
    engine, denoiser = build({"(a": ")", "return ": "a + b"})
    engine.warm_up()
    assert denoiser.passes
    assert run(engine, request(head="    return "))[0] == "a + b"


def test_an_empty_document_gets_an_answer():
    engine, _ = build({"": "x"})
    text, final, _ = run(engine, request())
    assert (text, final.reason) == ("x", "end")


def test_several_lines_stream_as_they_are_finished():
    engine, _ = build({"def f():": "\n    a = 1\n    b = 2\n    return a"})
    text, _, events = run(engine, request(head="def f():", max_lines=8, min_indent=1))
    texts = [event.text for event in events if isinstance(event, Candidate)]
    assert text == "\n    a = 1\n    b = 2\n    return a"
    assert len(texts) > 2
    assert all(later.startswith(earlier.rstrip("\n")) for earlier, later in pairwise(texts))


@pytest.mark.parametrize("before", ["", "import os\n", "x" * 300_000 + "\n"])
def test_of_a_cursor_line_that_is_longer_than_the_window_its_end_is_read(before):
    engine, _ = build({"return ": "a + b", "return a": " + b"})
    line = "x" * 300_000 + "return "
    text, final, _ = run(engine, request(prefix=before, head=line))
    assert text == "a + b"
    assert 0 < final.timing.encoded <= CONFIG.prefix_tokens + 1
    text, final, _ = run(engine, request(prefix=before, head=line + "a"))
    assert text == " + b"
    assert final.timing.encoded <= CONFIG.chunk_tokens  # what is typed does not move where the window begins
    assert final.timing.reused > CONFIG.prefix_tokens / 2


@pytest.mark.parametrize("length", [FIRST_SLOTS - 1, FIRST_SLOTS, FIRST_SLOTS + 1, 100])
def test_the_canvas_grows_when_it_is_full(length):
    engine, _ = build({"=": LONG[:length]})
    text, final, _ = run(engine, request(head="=", max_tokens=200))
    assert text == LONG[:length]
    assert final.reason == "end"


@pytest.mark.parametrize("lookahead", [0, 3])
def test_nothing_is_written_behind_what_is_too_unsure_to_be_shown(lookahead):
    engine, denoiser = build({"=": LONG}, lookahead)  # each token with 0.9984
    text, final, _ = run(engine, request(head="=", max_tokens=200, min_prob=0.99))
    assert (text, final.reason) == (LONG[:7], "unsure")
    assert denoiser.passes <= 8
    assert run(engine, request(head="=", max_tokens=200))[0] == LONG[:200]


def test_a_gap_without_an_end_stops_at_the_largest_canvas():
    engine, _ = build({"=": LONG})
    _, final, _ = run(engine, request(head="=", max_tokens=5000))
    assert final.reason == "limit"
    assert final.timing.committed == MOST_SLOTS


@pytest.mark.parametrize("lookahead", [0, 1, 3, 8])
@pytest.mark.parametrize("text", ["a", "abc", "aab\n  c", LONG[:40]])
def test_verified_denoising_writes_what_the_sequential_decode_writes(lookahead, text):
    plain, slow = build({"=": text})
    parallel, fast = build({"=": text}, lookahead=lookahead)
    wanted = request(head="=", max_lines=4)
    assert run(parallel, wanted)[0] == run(plain, wanted)[0] == text
    if lookahead and len(text) > 4:
        assert fast.passes < slow.passes


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), max_size=7),
)
def test_the_verified_policy_keeps_the_agreeing_run_and_proposes_what_the_masks_behind_it_say(
    proposal, predicted, masks
):
    canvas = Canvas(origin=0, left=(1,), size=16, proposal=tuple(proposal), masks=tuple(masks[: len(proposal) + 1]))
    chain = (predicted * 8)[: len(proposal) + 1]
    groups = [[10 * j + i for i in range(count)] for j, count in enumerate(canvas.masks)]
    after = VerifiedPolicy().step(canvas, read([*chain, *chained(*groups)]))
    agreed = next((i for i, (a, b) in enumerate(zip(proposal, chain, strict=False)) if a != b), len(proposal))
    assert after.committed == tuple(chain[: agreed + 1])
    assert list(after.proposal) == (groups[agreed] if agreed < len(groups) else [])


def test_the_verified_policy_proposes_up_to_the_first_mask_that_is_not_sure():
    rows = read([1, 2, 3, 4], [0.1, 0.5, 0.4, 0.9])
    canvas = Canvas(origin=0, left=(1,), size=16, masks=(3,))
    for least, proposed in ((0.0, (2, 3, 4)), (0.4, (2, 3, 4)), (0.45, (2,)), (0.6, ())):
        assert VerifiedPolicy(least).step(canvas, rows).proposal == proposed


def test_look_up_saves_passes_where_text_repeats():
    line = "value = compute(first, second)"
    wanted = request(prefix=line + "\n", head="value =")
    sequential = Engine("fake", FakeDenoiser({"value =": line[7:]}), ByteCodec(), replace(CONFIG, proposal_tokens=0))
    proposing, _ = build({"value =": line[7:]})
    assert run(proposing, wanted)[1].timing.steps * 3 < run(sequential, wanted)[1].timing.steps


LINES = "\n    alpha = beta\n    gamma = delta\n    return epsilon"


@pytest.mark.parametrize("typed", [0, 1, 5, len("\n    alpha = beta"), len("\n    alpha = beta\n    ")])
def test_who_types_the_completion_gets_its_rest_in_a_few_passes(typed):
    """Also after the newline and its indentation, and when the line is whole."""
    fields = {"max_lines": 8, "min_indent": 1}
    engine, _ = build({"f():": LINES})
    text, slow, _ = run(engine, request(head="f():", **fields))
    assert text == LINES
    *above, head = ("f():" + LINES[:typed]).split("\n")
    text, fast, _ = run(engine, request(prefix="".join(line + "\n" for line in above), head=head, **fields))
    assert text == LINES[typed:]
    assert fast.timing.steps * 4 <= slow.timing.steps
    assert fast.timing.accepted.last == fast.timing.proposed.last >= len(LINES[typed:]) - fast.timing.steps
    assert (fast.timing.proposed.lookup, fast.timing.proposed.mask) == (0, 0)


def test_who_types_something_else_gets_something_else():
    engine, _ = build({"x =": " compute(first)", "x = so": "mething"})
    assert run(engine, request(head="x ="))[0] == " compute(first)"
    text, final, _ = run(engine, request(head="x = so"))
    assert text == "mething"
    assert final.timing.proposed == Proposals()


def test_a_wrong_rest_is_dropped_for_look_up():
    engine, _ = build({"=": "value + value", "= ": "valid + valid"})
    run(engine, request(prefix="valid + valid\n", head="="))
    engine._texts.keep(("c", "d"), "valid + valid\n= ", "value + value")
    text, final, _ = run(engine, request(prefix="valid + valid\n", head="= "))
    assert text == "valid + valid"
    assert 0 < final.timing.accepted.last < final.timing.proposed.last
    assert final.timing.accepted.lookup > 0


def test_what_healing_took_back_is_proposed_too():
    """The codec cuts before the word, so the gap's first tokens write its beginning again."""
    codec = ByteCodec()
    codec.last_piece = lambda text: text[len(text.rstrip("abcdefghijklmnopqrstuvwxyz")) :]
    engine = Engine("fake", FakeDenoiser({"x = ": "compute(first)"}), codec, CONFIG)
    assert run(engine, request(head="x = "))[0] == "compute(first)"
    text, final, _ = run(engine, request(head="x = comp"))
    assert text == "ute(first)"
    assert final.timing.steps <= 2


@pytest.mark.parametrize(("right", "groups", "proposed"), [(0, 1, 3), (1, 1, 0), (1, 2, 3), (2, 2, 0), (2, 9, 3)])
def test_masks_propose_behind_what_proved_right_of_a_proposal(monkeypatch, right, groups, proposed):
    """As far as there is a group; so a refused proposal leaves the next pass something to check."""
    found = iter([(*LONG[:right].encode(), END_ID, *b"abc")])
    monkeypatch.setattr(Lookup, "propose", lambda self: next(found, ()))
    engine = Engine("fake", FakeDenoiser({"=": LONG}, 3, groups), ByteCodec(), CONFIG)
    text, final, events = run(engine, request(head="=", frames=True, max_tokens=40))
    first = next(event for event in events if isinstance(event, Frame))
    states = ["committed"] * (right + 1) + ["proposed"] * proposed + ["mask"]
    assert [slot.state for slot in first.slots[: len(states)]] == states
    assert "".join(slot.text for slot in first.slots) == LONG[: right + 1 + proposed]
    assert (final.timing.accepted.mask > 0) == (final.timing.proposed.mask > 0)
    assert LONG.startswith(text)


def test_what_waits_for_a_line_end_has_masks_behind_it(monkeypatch):
    """Not within it, where it was confirmed already."""
    written = "\n  ab\n  c" + LONG
    found = iter([tuple(written[:6].encode())])
    monkeypatch.setattr(Lookup, "propose", lambda self: next(found, ()))
    engine = Engine("fake", FakeDenoiser({":": written}, 3, 2), ByteCodec(), CONFIG)
    steps = engine.infill(request(head=":", suffix="\nend", max_lines=4, min_indent=1), time.monotonic())
    passes, need, outcome = [], None, None
    while len(passes) < 2:
        need, outcome = steps.send(outcome), None
        if isinstance(need, Pass):
            passes.append(need.canvas)
            (outcome,) = engine.denoise([need])
    asked, waiting = passes
    assert (asked.proposal, asked.masks) == (tuple(written[:6].encode()), (3, 3))
    assert waiting.branches
    assert waiting.committed + waiting.proposal == tuple(written[:7].encode())
    assert waiting.masks == (*[0] * len(waiting.proposal), 3)
    (outcome,) = engine.denoise([need])
    assert outcome.rows.token[waiting.group(len(waiting.proposal))] == list(written[8:11].encode())


def test_settings_say_how_many_masks_there_are():
    def proposed(lookahead: int = 0, doubt: float = 0.0, **fields) -> int:
        denoiser = FakeDenoiser({"=": LONG[:30]}, lookahead, doubt=doubt)
        engine = Engine("fake", denoiser, ByteCodec(), replace(CONFIG, **fields))
        text, final, _ = run(engine, request(head="="))
        assert text == LONG[:30]
        return final.timing.proposed.mask

    assert proposed(lookahead=3) > 15
    assert proposed(lookahead=3, masks=0) == proposed(lookahead=3, mask_groups=0) == proposed() == 0
    assert proposed(masks=3, mask_groups=4) == proposed(lookahead=3)
    # Of masks in such doubt the first has a probability of 0.92, the second of 0.17.
    assert proposed(masks=4, doubt=4.0) == proposed(masks=1) > 0
    assert proposed(masks=4, doubt=4.0, mask_prob=0.1) > proposed(masks=1)


def test_the_end_is_not_proposed():
    """What is behind it counts for nothing, and it needs no check: the token before it predicts it."""
    engine, _ = build({"=": "abc"}, lookahead=8)
    _, final, _ = run(engine, request(head="="))
    assert (final.timing.proposed.mask, final.timing.accepted.mask, final.timing.steps) == (2, 2, 2)


def test_counts_say_who_proposed_what():
    line = "value = compute(first, second)"
    engine, _ = build({"value =": line[7:]})
    final = run(engine, request(prefix=line + "\n", head="value ="))[1]
    assert final.timing.accepted.lookup > 15
    engine, _ = build({"=": LONG[:40]}, lookahead=3)
    final = run(engine, request(head="="))[1]
    assert final.timing.accepted.mask > 20
    assert final.timing.accepted.mask + final.timing.steps >= 40


def test_candidates_stream_while_a_line_is_written():
    engine, _ = build({"=": LONG[:60]})
    text, _, events = run(engine, request(head="="))
    texts = [event.text for event in events if isinstance(event, Candidate)]
    assert len(texts) >= 6
    assert texts == sorted(texts, key=len)
    assert all(text.startswith(shorter) for shorter in texts)
    assert all(shorter.endswith(" ") for shorter in texts[:-1])


def test_the_text_after_the_gap_is_tokenised_once():
    engine, _ = build({"f():": LINES})
    segments, encode = [], engine._tokenizer.encode_segment
    engine._tokenizer.encode_segment = lambda segment: segments.append(segment) or encode(segment)
    run(engine, request(head="f():", suffix="\nalpha\nbeta\ngamma", max_lines=8))
    assert [segments.count(segment) for segment in ("\nalpha", "\nbeta", "\ngamma")] == [1, 1, 1]


def test_frames_show_the_canvas_as_it_was():
    engine, _ = build({"= ": "abc"}, lookahead=2)
    _, final, events = run(engine, request(head="= ", frames=True))
    frames = [event for event in events if isinstance(event, Frame)]
    assert [frame.step for frame in frames] == list(range(1, final.timing.steps + 1))
    assert all(len(frame.slots) == FIRST_SLOTS for frame in frames)
    assert [slot.text for slot in frames[0].slots[:3]] == ["a", "b", "c"]
    assert [slot.state for slot in frames[0].slots[:4]] == ["committed", "proposed", "proposed", "mask"]
    committed = [sum(slot.state == "committed" for slot in frame.slots) for frame in frames]
    assert committed == sorted(committed)


def test_the_deadline_ends_it_with_the_best_text_so_far():
    engine, _ = build({"=": LONG}, step_s=0.005)
    wanted = replace_deadline(request(head="=", max_tokens=200), 60)
    began = time.monotonic()
    text, final, _ = run(engine, wanted)
    assert final.reason == "deadline"
    assert text != LONG
    assert LONG.startswith(text)
    assert text.endswith(" ") or " " not in text  # half a word is dropped, unless it is all there is
    assert time.monotonic() - began < 2.0


def test_a_deadline_that_comes_while_contexts_are_encoded_ends_it_there_and_keeps_them():
    engine, denoiser = build({"=": "x"})
    wanted = request(prefix="a = 1\n" * 40, head="b =")
    needs = engine.infill(replace_deadline(wanted, 60_000), time.monotonic())
    assert [next(needs) for _ in range(4)] == [None] * 4
    needs.close()
    assert denoiser.encoded == 3 * CONFIG.chunk_tokens
    late = list(engine.events(replace_deadline(wanted, 1), time.monotonic() - 1))
    assert [event.reason for event in late] == ["deadline"]
    assert denoiser.encoded == 3 * CONFIG.chunk_tokens
    _, final, _ = run(engine, wanted)
    assert final.timing.reused == 3 * CONFIG.chunk_tokens


def replace_deadline(wanted: InfillRequest, deadline_ms: int) -> InfillRequest:
    import msgspec

    return msgspec.structs.replace(wanted, deadline_ms=deadline_ms)


def test_a_key_stroke_encodes_almost_nothing():
    engine, denoiser = build({})
    text = "value = compute(first, second, third, fourth, fifth, sixth, seventh, eighth)"
    prefix = "import sys\n" * 10
    run(engine, request(prefix=prefix, head="", suffix="\nend\n"))
    before = denoiser.encoded
    for at in range(1, len(text)):
        run(engine, request(prefix=prefix, head=text[:at], suffix="\nend\n"))
    assert denoiser.encoded - before <= len(text)


def test_a_line_added_below_keeps_what_is_above():
    engine, _ = build({})
    prefix = "".join(f"line {i}\n" for i in range(20))
    run(engine, request(prefix=prefix, head="x"))
    _, final, _ = run(engine, request(prefix=prefix + "x = 1\n", head=""))
    assert final.timing.encoded < 16
    assert final.timing.reused > len(prefix) - 80


def test_an_edit_above_encodes_from_there_on():
    engine, _ = build({})
    lines = [f"line {i}\n" for i in range(20)]
    run(engine, request(prefix="".join(lines), head="x"))
    lines[10] = "changed\n"
    _, final, _ = run(engine, request(prefix="".join(lines), head="x"))
    kept = len("".join(lines[:10]))
    assert kept - 2 <= final.timing.reused <= kept + 2


def test_the_same_suffix_is_encoded_once():
    engine, denoiser = build({})
    run(engine, request(prefix="a\n", head="b", suffix="\ncommon end\n"))
    before = denoiser.encoded
    elsewhere = InfillRequest(client="e", document="f", head="c", suffix="\ncommon end\n", deadline_ms=60_000)
    run(engine, elsewhere)
    assert denoiser.encoded - before <= 3


def test_the_window_moves_in_strides_as_a_file_grows():
    """Typing at the end of a file longer than the window re-encodes it seldom, and never exceeds the budget."""
    engine, denoiser = build({})
    lines = [f"row number {i:04}\n" for i in range(200)]
    full = 0
    for end in range(20, 200):
        before = denoiser.encoded
        _, final, _ = run(engine, request(prefix="".join(lines[:end]), head="x"))
        assert final.timing.encoded + final.timing.reused <= CONFIG.prefix_tokens + 2
        full += denoiser.encoded - before > CONFIG.prefix_tokens // 2
    assert 1 <= full <= 30


@pytest.mark.parametrize("way", ["asked", "primed"])
def test_the_cursor_line_is_of_the_window_too(way):
    """A long one leaves less room for the lines above, also while it grows."""
    engine, denoiser = build({})
    prefix, most = "a row of text\n" * 200, CONFIG.prefix_tokens
    for length in range(0, most + 40, 25):
        wanted = request(prefix=prefix, head=LONG[:length])
        if way == "primed":
            for _ in engine.prime(wanted):
                pass
            held = [entry.kv.length for entry in engine._cache._entries.values() if entry.kv is not None]
            assert max(held) <= most + len(denoiser.facts.opening), length
        assert sum(piece.tokens for piece in engine.explain(wanted).pieces) <= most
        run(engine, wanted)
        held = [entry.kv.length for entry in engine._cache._entries.values() if entry.kv is not None]
        assert max(held) <= most + len(denoiser.facts.opening), length


def test_a_model_that_says_nan_fails_its_request():
    engine, denoiser = build({"= ": "1"})
    inner = denoiser.denoise

    def broken(*args):
        hidden, states = inner(*args)
        return [rows * float("nan") for rows in hidden], states

    denoiser.denoise = broken
    with pytest.raises(ModelError, match="the model says NaN: its weights are damaged, or do not suit its type"):
        list(engine.events(request(head="x = "), time.monotonic()))


def test_a_window_begins_at_a_definition():
    """Where it begins within the file: at the least indented line near there that opens a block or follows a gap."""
    file = "".join(f"    def method_{i}(self):\n        a = 1\n        b = 2\n\n" for i in range(40))
    engine, _ = build({})
    starts = []
    for end in range(0, len(file), 60):
        *above, head = file[:end].split("\n")
        run(engine, request(prefix="".join(line + "\n" for line in above), head=head))
        starts.append(bytes(t for line in engine._cache._entries["c", "d"].lines[:1] for t in line).decode())
    late = [start.strip() for start in starts[10:]]
    assert all(start.startswith("def method_") for start in late)
    assert 2 < len(set(late)) < len(late) // 2


def test_priming_takes_over_once_it_is_complete():
    engine, denoiser = build({})
    engine._cache.rate = 200.0
    prefix = "".join(f"line {i}\n" for i in range(40))
    hurried = InfillRequest(client="c", document="d", prefix=prefix, head="x", deadline_ms=400)
    _, first, _ = run(engine, hurried)
    assert first.timing.encoded < 200  # what half the deadline allows at 200 tokens a second, but at least 128
    list(engine.prime(hurried))
    before = denoiser.encoded
    _, second, _ = run(engine, hurried)
    assert denoiser.encoded == before
    assert second.timing.reused > first.timing.encoded


def test_priming_finishes_what_the_deadline_cut_short():
    engine, denoiser = build({})
    wanted = request(prefix="a = 1\n" * 40, head="b =", suffix="\nthe end\n")
    late = replace_deadline(wanted, 1)
    assert [event.reason for event in engine.events(late, time.monotonic() - 1)] == ["deadline"]
    list(engine.prime(late))
    before = denoiser.encoded
    _, final, _ = run(engine, wanted)
    assert denoiser.encoded == before
    assert final.timing.reused > 200


def test_a_suffix_that_is_not_encoded_is_cut_to_what_the_deadline_allows():
    engine, _ = build({})
    engine._cache.rate = 100.0
    suffix = "\n" + "the end of it all, at last and for ever"
    hurried = InfillRequest(client="c", document="d", head="x", suffix=suffix, deadline_ms=400)
    _, first, _ = run(engine, hurried)
    assert first.timing.encoded <= 24  # a fifth of a second at 100 tokens a second, and the sink
    list(engine.prime(hurried))
    _, second, _ = run(engine, hurried)
    assert second.timing.encoded == 0
    assert second.timing.reused == CONFIG.suffix_tokens + 2  # the block, and the sinks of block and stream


def test_a_key_stroke_after_priming_leaves_few_tokens_to_the_canvas():
    engine, denoiser = build({})
    wanted = request(prefix="import sys\n" * 9, head="some head that is long")
    run(engine, wanted)
    list(engine.prime(wanted))
    before = denoiser.encoded
    _, final, _ = run(engine, request(prefix="import sys\n" * 9, head="some head that is longe"))
    assert denoiser.encoded == before
    known = len("import sys\n" * 9 + "some head that is longe") + 1
    assert known - final.timing.reused <= denoiser.facts.left[0] + 1


def test_priming_that_is_dropped_leaves_the_warm_context():
    engine, _ = build({})
    engine._cache.rate = 200.0
    prefix = "".join(f"line {i}\n" for i in range(40))
    hurried = InfillRequest(client="c", document="d", prefix=prefix, head="x", deadline_ms=400)
    run(engine, hurried)
    priming = engine.prime(hurried)
    next(priming)
    priming.close()
    _, final, _ = run(engine, hurried)
    assert final.timing.encoded == 0


def test_the_cache_is_bounded():
    denoiser = FakeDenoiser({})
    engine = Engine("fake", denoiser, ByteCodec(), replace(CONFIG, cache_mb=1))
    engine._cache._max_bytes = 20_000
    for i in range(40):
        wanted = InfillRequest(client="c", document=f"d{i}", prefix="some text\n" * 20, head="x", deadline_ms=60_000)
        run(engine, wanted)
        assert engine.cache_bytes <= 20_000


def test_no_special_token_is_ever_written():
    engine, _ = build({"=": "x"})
    text, _, _ = run(engine, request(prefix="<mask> [MASK] <|endoftext|>\n", head="=", suffix="\n<mask>\n"))
    assert text == "x"
    assert {SINK_ID, MASK_ID} <= set(engine._denoiser.head.banned.nonzero()[:, 0].tolist())
    assert not engine._denoiser.head.banned[END_ID]


def test_line_ends_are_scored_by_the_suffix_behind_them():
    """The table's model knows that `tail` follows the second line, so the end behind it scores best."""
    table = {"f():": "\n  a\n  b\n  c", "\n  b": "\n  c", "\n  a\n  b\n": "end\n"}
    engine, _ = build(table)
    _, _, events = run(engine, request(head="f():", suffix="\nend\n", max_lines=8, min_indent=1))
    ends = [event for event in events if isinstance(event, Candidate)][-1].ends
    scored = {end.offset: end.suffix_logprob for end in ends if end.suffix_logprob is not None}
    assert len(scored) >= 2
    assert max(scored, key=scored.get) == len("\n  a\n  b")
    *line_ends, last = ends
    assert all(0.0 < end.end_prob < 1e-4 for end in line_ends)
    assert last.end_prob > 0.99


def test_an_empty_document_may_begin_with_an_empty_line_before_its_suffix():
    engine, _ = build({"": "\nfirst\nsecond"})
    text, _, events = run(engine, request(prefix="", head="", suffix="\nend\n", max_lines=8))
    assert text.startswith("\nfirst")
    assert 0 not in {end.offset for event in events if isinstance(event, Candidate) for end in event.ends}


BODY = {"f():": "\n  a\n  b", "\n  a\n  b\n": "end\n"}


@pytest.mark.parametrize("proposals", [0, 4])
def test_an_end_that_is_not_sure_is_one_place_among_others(monkeypatch, proposals):
    monkeypatch.setattr("infill_engine.engine.SURE_END", 1.1)
    monkeypatch.setattr("infill_engine.gap.CLEAR_MARGIN", 1e9)
    engine = Engine("fake", FakeDenoiser(BODY), ByteCodec(), replace(CONFIG, proposal_tokens=proposals))
    wanted = request(head="f():", suffix="\nend\n", max_lines=8, min_indent=1, max_tokens=24)
    text, final, _ = run(engine, wanted)
    assert text.startswith("\n  a\n  b")
    assert len(text) > len("\n  a\n  b")
    assert final.reason == "limit"


def test_an_end_that_is_sure_is_the_end():
    engine, _ = build(BODY)
    text, final, _ = run(engine, request(head="f():", suffix="\nend\n", max_lines=8, min_indent=1))
    assert (text, final.reason) == ("\n  a\n  b", "end")


@pytest.mark.parametrize("proposals", [0, 4])
@pytest.mark.parametrize(("text", "ends"), [("g(\n  a\n)", True), ("g(\n  a", False), ("g(", True)])
def test_a_line_that_opened_something_does_not_end_within_it(proposals, text, ends):
    engine = Engine("fake", FakeDenoiser({"f: ": text}), ByteCodec(), replace(CONFIG, proposal_tokens=proposals))
    written, final, _ = run(engine, request(head="f: ", suffix="\nend\n", open_lines=8, max_tokens=24))
    assert written.startswith(text)
    assert (final.reason, written == text) == ("end" if ends else "limit", ends)


def test_another_answer_begins_otherwise_and_leaves_the_first_to_be_typed():
    """Not with the same word behind other space."""
    engine, _ = build({"return ": "total", "eturn ": "  tokens", "turn ": "  b"})
    gap = request(head="return ", suffix="\n")
    assert run(engine, gap)[0] == "total"
    assert run(engine, request(head="return ", suffix="\n", avoid=("total",)))[0] == "  b"
    assert run(engine, request(head="return ", suffix="\n", avoid=("total", "b")))[0].isspace()
    text, final, _ = run(engine, gap)
    assert text == "total"
    assert final.timing.accepted.last == len("total")


def test_an_answer_that_shall_not_be_empty_begins_in_its_line():
    """Else a line end would take the place of the end."""
    engine, _ = build({"f():\n": "    a"})
    assert run(engine, request(head="f():", suffix="\n", max_lines=4))[0] == ""
    gap = request(head="f():", suffix="\n", max_lines=4, avoid=("",))
    text = run(engine, gap)[0]
    assert text != ""
    assert run(engine, gap)[1].timing.accepted.last > 0
    engine, _ = build({"f():\n  ": "\n\nb", "f():\n  \n\nb": ""})
    blank = {"prefix": "f():\n", "head": "  ", "suffix": "\n", "max_lines": 4, "min_indent": 2}
    assert run(engine, request(**blank))[0] == ""
    text = run(engine, request(**blank, avoid=("",)))[0]
    assert text
    assert not text.startswith("\n")


def test_another_answer_begins_otherwise_behind_what_healing_took_back():
    codec = ByteCodec()
    codec.last_piece = lambda text: text[len(text.rstrip(" ")) :]
    engine = Engine("fake", FakeDenoiser({"x =": " first", "=": " second"}), codec, CONFIG)
    assert run(engine, request(head="x = "))[0] == "first"
    assert run(engine, request(head="x = ", avoid=("first",)))[0] == "second"
