"""The memory in the engine: what it changes and what it must not, on a fake model over bytes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infill_engine.config import EngineConfig
from infill_engine.core import complete
from infill_engine.engine import FRESH_CHARS, Engine
from infill_engine.fake import VOCAB, FakeDenoiser
from infill_engine.memory import Memory, Weights
from infill_engine.protocol import Candidate, Document, Final, InfillRequest
from infill_engine.tokenizer import ByteCodec
from infill_engine.workspaces import Workspaces

#: Nearly all is left to the memory, where it knows something.
TRUSTED = Weights((2,), (), np.broadcast_to([0.02, 0.49, 0.49], (2, 2, 1, 3)))


def build(
    table: dict[str, str],
    weights: Weights = TRUSTED,
    codec: ByteCodec | None = None,
    workspaces: Workspaces | None = None,
    lookahead: int = 0,
    **fields,
) -> Engine:
    config = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16, **fields)
    codec = codec or ByteCodec()
    denoiser = FakeDenoiser(table, lookahead=lookahead)
    return Engine("fake", denoiser, codec, config, memory=Memory(VOCAB, weights), workspaces=workspaces)


def ask(**fields) -> InfillRequest:
    return InfillRequest(client="c", document="d", deadline_ms=60_000, **fields)


def run(engine: Engine, wanted: InfillRequest) -> tuple[str, Final, list[Candidate]]:
    *events, final = engine.events(wanted, time.monotonic())
    assert isinstance(final, Final)
    candidates = [event for event in events if isinstance(event, Candidate)]
    return (candidates[-1].text if candidates else ""), final, candidates


def test_what_followed_in_the_file_is_written_where_the_model_would_write_something_else():
    """On either side of the gap; after `size` the memory knows nothing more, and the model ends."""
    table = {"box.": "area", "box.w": "idth", "box.s": "ize"}
    assert run(build(table), ask(head="box."))[0] == "area"
    assert run(build(table), ask(prefix="box.width\n", head="box."))[0] == "width"
    assert run(build(table), ask(head="box.", suffix="\nbox.size\n"))[0] == "size"


def test_a_model_that_is_sure_of_the_end_ends():
    """However often the file goes on there: where the text ends is the model's alone to say."""
    text, final, _ = run(build({"a = ": "b"}), ask(prefix="a = b + c\n" * 5, head="a = "))
    assert (text, final.reason) == ("b", "end")


def test_a_candidate_tells_the_probabilities_of_the_mixture():
    even = Weights((2,), (), np.broadcast_to([0.5, 0.25, 0.25], (2, 2, 1, 3)))
    _, _, candidates = run(build({"box.": "x"}, even), ask(prefix="box.y\n", head="box."))
    assert candidates[-1].probs[0] == pytest.approx(2 / 3, abs=0.01)  # without a workspace, 0.5 to 0.25


def test_healing_still_writes_what_it_took_back():
    codec = ByteCodec()
    codec.last_piece = lambda text: text[len(text.rstrip("abcdefghijklmnopqrstuvwxyz")) :]
    engine = build({"x = ": "compute()"}, codec=codec)
    assert run(engine, ask(prefix="x = wrong()\n" * 3, head="x = comp"))[0] == "ute()"


words = st.sampled_from(["if a:", "\n    b = a", "\n    a = b", " + c", "\nreturn b", "x", " "])
texts = st.lists(words, min_size=1, max_size=8).map("".join)


@settings(max_examples=40, deadline=None)
@given(texts, texts, texts, st.sampled_from([0.02, 0.3, 0.6]))
def test_proposals_change_no_text_with_the_memory(before, after, written, w0):
    """The memory's, look-up's and masks', against none at all."""
    weights = Weights((2,), (), np.broadcast_to([w0, (1 - w0) / 2, (1 - w0) / 2], (2, 2, 1, 3)))
    wanted = ask(prefix=before + "\n", head="=", suffix="\n" + after, max_lines=4, max_tokens=40)
    told = []
    for proposals, lookahead in ((0, 0), (4, 0), (0, 3), (8, 3)):
        engine = build({"=": written, "\n": "    a = b", "a": " = b"}, weights, None, None, lookahead)
        engine._config = EngineConfig(prefix_tokens=400, suffix_tokens=32, chunk_tokens=16, proposal_tokens=proposals)
        text, final, _ = run(engine, wanted)
        told.append((text, final.reason))
    assert told == told[:1] * 4


def test_the_whole_file_is_known_once_there_was_time():
    """Lines far from the gap, on both sides; a request alone takes in what is near."""
    filler = "".join(f"line {i}\n" for i in range(FRESH_CHARS // 4))
    table = {"alpha(": "?", "alpha(w": "xyz", "omega(": "?"}
    near = ask(prefix="alpha(first)\n" + filler, head="alpha(", suffix="\n" + filler + "omega(last)\n")
    engine = build(table)
    assert run(engine, near)[0] == "?"
    complete(engine.prime(near))
    assert run(engine, near)[0].startswith("f")
    assert run(engine, ask(prefix=near.prefix, head="omega(", suffix=near.suffix))[0].startswith("l")


def test_requests_take_in_more_of_a_file_each():
    filler = "".join(f"line {i}\n" for i in range(FRESH_CHARS // 8 * 3))
    wanted = ask(prefix="alpha(first)\n" + filler, head="alpha(")
    engine = build({"alpha(": "?"})
    told = [run(engine, wanted)[0] for _ in range(20)]
    assert told[0] == "?"
    assert told[-1].startswith("f")


def test_two_documents_of_a_client_are_apart():
    engine = build({"box.": "area"})
    assert run(engine, ask(prefix="box.width\n", head="box."))[0].startswith("w")
    other = InfillRequest(client="c", document="other", head="box.", deadline_ms=60_000)
    assert run(engine, other)[0] == "area"
    assert run(engine, ask(head="box."))[0] == "area"  # the line was deleted


def test_other_documents_of_the_workspace_count_but_not_the_files_own_old_text(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path, ByteCodec())
    engine = build({"box.": "area"}, workspaces=workspaces)
    workspaces.put("w", [Document("a.py", "1", "box.width\n"), Document("b.py", "1", "box.size\n" * 2)])
    while workspaces.digest():
        pass
    assert run(engine, ask(head="box."))[0] == "area"
    assert run(engine, ask(head="box.", workspace="w"))[0].startswith("s")
    assert run(engine, ask(head="box.", workspace="w", path="b.py"))[0].startswith("w")
    assert run(engine, ask(head="box.", workspace="another"))[0] == "area"
    engine.close()
