"""Known weaknesses of models that see both sides, on recorded logits: padding, silence, and what is cut of them.

The logits are of two passes each of a tiny random DiffusionGemma of 24 ids over canvases of 32 and 64 slots; its
embedding of padding, or of the end, was made long, so that it says little else, as full-sized ones were reported to do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from infill_engine.config import EngineConfig
from infill_engine.core import ContextKV, Contexts, Facts, OpenCanvas, OpenFacts, OpenPolicy
from infill_engine.engine import Engine
from infill_engine.families.diffusion_gemma import facts
from infill_engine.policy import AnnealedPolicy, EntropyPolicy, StepsPolicy, ThresholdPolicy
from infill_engine.protocol import Candidate, Final, InfillRequest
from infill_kernels import Head
from torch import Tensor

RECORDED = json.loads((Path(__file__).parent / "recorded" / "logits.json").read_text())
PAD, END, VOCAB = 0, 1, 24
LETTERS = b"abcdefghijklmnopqrst"


class Letters:
    """Ids from 4 on are letters."""

    tokens = (b"", b"", b"", b"", *(LETTERS[i : i + 1] for i in range(VOCAB - 4)))
    joins_newlines = False

    def encode(self, text: str) -> list[int]:
        return [4 + LETTERS.index(letter) for letter in text.encode() if letter in LETTERS]

    def last_piece(self, text: str) -> str:
        return ""


class Nothing:
    """`ContextKV` of a model that reads none."""

    length = 4
    nbytes = 0

    def truncate(self, length: int) -> None: ...


class Recorded:
    """Says what was recorded for a canvas of that many slots, pass after pass, the last one again and again."""

    def __init__(self, passes: dict[str, Any], policy: OpenPolicy, ends: frozenset[int] = frozenset({END})) -> None:
        mask_id = None if isinstance(policy, AnnealedPolicy) else 3
        known = OpenFacts(policy, (32, 64, 128), "end", ends)
        self.facts = Facts(mask_id, END, (2,), lookahead=0, left=(0, 0), open=known)
        self.head = Head(
            torch.eye(VOCAB), banned=torch.tensor([i not in (*range(4, VOCAB), *ends) for i in range(VOCAB)])
        )
        self._recorded = {int(size): torch.tensor(rows) for size, rows in passes.items()}
        self.canvases: list[OpenCanvas] = []

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        yield from ()
        return kv or Nothing()

    def denoise(
        self, canvases: Sequence[OpenCanvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        self.canvases += canvases
        found = []
        for canvas, state in zip(canvases, states, strict=True):
            passes = self._recorded[canvas.size]
            found.append(passes[min(state or 0, len(passes) - 1)][canvas.open])
        return found, [(state or 0) + 1 for state in states]


POLICIES = {
    "annealed": AnnealedPolicy(VOCAB, steps=2),
    "threshold": ThresholdPolicy(),
    "entropy": EntropyPolicy(),
    "steps": StepsPolicy("prob", 4),
}


def fill(model: Recorded, **fields: Any) -> tuple[str, Final, list[int]]:
    """The text, how it ended, and the sizes of the canvases."""
    engine = Engine("recorded", model, Letters(), EngineConfig())
    limits = {"max_lines": 1, "max_tokens": 60, "deadline_ms": 60_000}
    request = InfillRequest(client="c", document="d", **{"head": "ab", "tail": "cd", **limits, **fields})
    *events, final = engine.events(request, time.monotonic())
    assert isinstance(final, Final)
    texts = [event.text for event in events if isinstance(event, Candidate)]
    sizes = [canvas.size for canvas in model.canvases]
    return texts[-1] if texts else "", final, [n for i, n in enumerate(sizes) if not i or sizes[i - 1] != n]


@pytest.mark.parametrize("name", POLICIES)
def test_what_says_padding_writes_text_all_the_same(name: str) -> None:
    """Padding is the most probable id at nearly all places. It is never said; a slot holds it as noise at most."""
    recorded = RECORDED["pad"]["32"]
    assert sum(row.index(max(row)) == PAD for row in recorded[0]) > 24
    model = Recorded(RECORDED["pad"], POLICIES[name])
    text, final, sizes = fill(model)
    assert (final.reason, sizes) == ("end", [32])
    assert len(text) > 2
    for canvas in model.canvases:
        final_ones = {token for token, pinned in zip(canvas.slots, canvas.pinned, strict=True) if pinned}
        assert PAD not in canvas.predicted
        assert not final_ones & {PAD, 2, 3}


@pytest.mark.parametrize("name", POLICIES)
def test_where_padding_ends_a_text_it_is_cut_there(name: str) -> None:
    """As in families that pad what is behind a text with an id that the tokenizer names: nothing behind it counts."""
    first = RECORDED["pad"]["32"][0]
    assert [row.index(max(row)) for row in first[:2]] == [4, PAD]
    text, final, sizes = fill(Recorded({"32": [first]}, POLICIES[name], frozenset({PAD, END})))
    assert (text, final.reason, sizes) == ("a", "end", [32])


@pytest.mark.parametrize("name", POLICIES)
def test_what_says_nothing_gets_a_longer_canvas_once(name: str) -> None:
    """On 32 slots the end stands first; on 64 there is a text. No canvas is smaller, though one line is asked for."""
    text, final, sizes = fill(Recorded(RECORDED["terse"], POLICIES[name]))
    assert sizes == [32, 64]
    assert text
    assert final.reason in ("end", "limit")


@pytest.mark.parametrize("name", POLICIES)
def test_what_says_nothing_again_is_left_alone(name: str) -> None:
    silent = RECORDED["terse"]["32"]
    twice = [[*rows, *rows] for rows in silent]
    text, final, sizes = fill(Recorded({"32": silent, "64": twice, "128": twice}, POLICIES[name]))
    assert (text, final.reason, sizes) == ("", "end", [32, 64])


def test_a_canvas_has_32_tokens_at_least_and_leaves_room_for_the_suffix() -> None:
    known = facts({"text_config": {"vocab_size": 262_144}, "canvas_length": 256}).open
    assert known is not None
    assert (known.least, known.lengths[-1], known.canvas, known.ends) == (32, 128, 256, frozenset({1, 106, 50}))
    padded = facts({"text_config": {"vocab_size": 262_144, "pad_token_id": PAD}})
    assert (padded.end_id, padded.open.ends) == (1, known.ends | {PAD})
    of_a_gguf = facts({"text_config": {"vocab_size": 262_144}, "eos_token_id": 106})
    assert (of_a_gguf.end_id, of_a_gguf.open.ends) == (106, known.ends)
    assert known.policy == AnnealedPolicy(262_144, 48, 0.1, 0.8, 0.4, 0.005)
