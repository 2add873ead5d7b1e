"""Where gaps end, as the engine scores it: `python -m bench.ends [--gaps N] [--model M]`.

Held-out gaps that may have several lines are filled with what their authors wrote and then with what the model would
write behind it, END forbidden. At each line end on the way the engine scores the end: by the probability of END and by
the likelihood of the suffix there. The scores of the true end and of those before and beyond it are compared, and
the rule that stops is fitted on some packages and tried on the others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from infill_engine import gap as gap_rules
from infill_engine.config import EngineConfig
from infill_engine.core import Canvas, Rows
from infill_engine.engine import Engine
from infill_engine.protocol import Candidate, cache_dir
from rich.progress import track

from bench.filling import Case, Model, _tokens, held_out, with_suffix

#: Lines that are written beyond the true end.
BEYOND = 2


@dataclass(frozen=True)
class Place:
    """A line end."""

    #: Lines of the gap before it.
    lines: int
    #: The logarithm of the odds of END against all else.
    end: float
    #: Mean log-probability of the suffix's first tokens there, nats.
    suffix: float


@dataclass(frozen=True)
class Ends:
    """The line ends of a gap, in order; the true one is `places[true]`."""

    package: str
    language: str
    made: str
    places: tuple[Place, ...]
    true: int


class Truth:
    """A `CommitPolicy` that writes the truth and then what the model says."""

    tokens: Sequence[int] = ()

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        at = canvas.frontier
        return canvas.commit([self.tokens[at] if at < len(self.tokens) else rows.token[0]])


def scored(case: Case, model: Model, truth: Truth) -> Ends | None:
    """The scored line ends of a case; None where it has too few to choose from."""
    request = with_suffix(case, model)
    lines = case.truth.count("\n") + 1
    if request.max_lines == 1 or request.tail.strip() or not request.suffix.strip():
        return None
    request = msgspec.structs.replace(request, max_lines=lines + BEYOND, max_tokens=256, min_indent=None)
    truth.tokens = _tokens(case.truth, request, model.tokenizer)
    engine = _endless(model, truth)
    candidate = Candidate("")
    for event in engine.events(request, time.monotonic()):
        if isinstance(event, Candidate):
            candidate = event
    found = [end for end in candidate.ends if end.suffix_logprob is not None]
    offsets = [end.offset for end in found]
    if len(case.truth) not in offsets or not candidate.text.startswith(case.truth):
        return None
    places = tuple(
        Place(candidate.text[: end.offset].count("\n") + 1, float(np.log(max(end.end_prob, 1e-12))), end.suffix_logprob)
        for end in found
        if end.suffix_logprob is not None
    )
    return Ends(case.package, case.snapshot.language, case.made, places, offsets.index(len(case.truth)))


def _endless(model: Model, truth: Truth) -> Engine:
    """A decoder that never says END: where nothing else restricts it, anything but END may come. So the probability
    of END that it reports is the odds of END."""
    engine = model.decoder(0, False, truth, True)
    healing, free = engine._allowed, torch.ones(len(model.codec.tokens), dtype=torch.bool)
    free[model.engine._denoiser.facts.end_id] = False
    engine._allowed = lambda run: healing(run) or {0: free}  # type: ignore[method-assign]
    return engine


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="bench.ends", description=__doc__)
    parser.add_argument("--gaps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=cache_dir() / "corpus")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    gap_rules.CLEAR_AFTER = 10**9
    model = Model.load(EngineConfig(model=options.model, threads=options.threads))
    draw, truth = held_out(options.corpus, options.seed), Truth()
    cases = [draw(i) for i in range(options.gaps)]
    kept = [one for case in track(cases) if (one := scored(case, model, truth)) is not None]
    if options.out:
        options.out.write_text("\n".join(json.dumps(asdict(one)) for one in kept), encoding="utf-8")
    print(len(kept), "gaps")


if __name__ == "__main__":
    main()
