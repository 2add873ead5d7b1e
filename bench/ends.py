"""Where gaps end, as the engine scores it: `python -m bench.ends [--gaps N] [--model M]`.

Held-out gaps that may have several lines are filled with what their authors wrote and then with what the model would
write behind it, END forbidden. At each line end on the way the engine scores the end: by the probability of END and by
the likelihood of the suffix there. The scores of the true end and of those before and beyond it are compared, and
the rule that stops is fitted on some packages and tried on the others.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from infill_engine import gap as gap_rules
from infill_engine.config import EngineConfig
from infill_engine.engine import Engine
from infill_engine.protocol import cache_dir
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.filling import Case, Forced, Model, answer, held_out, tokens_of, with_suffix
from bench.gate import logistic_regression

#: Lines that are written beyond the true end.
BEYOND = 3


@dataclass(frozen=True)
class Place:
    """A line end."""

    #: Lines of the gap before it.
    lines: int
    #: The logarithm of the odds of END against all else.
    end: float
    #: Mean log-probability of the suffix's first tokens there, nats.
    suffix: float
    #: Whether the text would leave something open there.
    open: bool = False


@dataclass(frozen=True)
class Ends:
    """The line ends of a gap, in order; the true one is `places[true]`."""

    package: str
    language: str
    made: str
    places: tuple[Place, ...]
    true: int


def scored(case: Case, model: Model, truth: Forced) -> Ends | None:
    """The scored line ends of a case; None where it has too few to choose from."""
    request = with_suffix(case, model)
    lines = case.truth.count("\n") + 1
    if request.max_lines == 1 or request.tail.strip() or not request.suffix.strip():
        return None
    request = msgspec.structs.replace(request, max_lines=lines + BEYOND, max_tokens=256, min_indent=None)
    truth.begin(tokens_of(case.truth, request, model.tokenizer))
    candidate, _ = answer(_endless(model, truth), request)
    found = [end for end in candidate.ends if end.suffix_logprob is not None]
    offsets = [end.offset for end in found]
    if len(case.truth) not in offsets or not candidate.text.startswith(case.truth):
        return None
    places = tuple(
        Place(
            candidate.text[: end.offset].count("\n") + 1,
            float(np.log(max(end.end_prob, 1e-12))),
            end.suffix_logprob,
            end.open,
        )
        for end in found
        if end.suffix_logprob is not None
    )
    return Ends(case.package, case.snapshot.language, case.made, places, offsets.index(len(case.truth)))


def _endless(model: Model, truth: Forced) -> Engine:
    """A decoder that never says END: where nothing else restricts it, anything but END may come. So the probability
    of END that it reports is the odds of END."""
    engine = model.decoder(0, False, truth, True)
    healing = engine._allowed
    engine._allowed = lambda run: healing(run) or {0: engine._unending}  # type: ignore[method-assign]
    return engine


#: What the rule knows of a line end.
FEATURES = ("one", "END", "suffix", "suffix, gained", "open", "lines")


def features(of: Ends) -> NDArray[np.float64]:
    """[ends, FEATURES]: 1, the log-odds of END, the suffix's mean log-probability, by how much that is more than at the
    best end before (0 for the first), 1 for an open end, and the logarithm of the lines."""
    suffix = np.array([place.suffix for place in of.places])
    best = np.maximum.accumulate(suffix)
    gained = np.concatenate([[0.0], suffix[1:] - best[:-1]])
    opened, lines = [place.open for place in of.places], [math.log(place.lines) for place in of.places]
    columns = [np.ones(len(suffix)), [place.end for place in of.places], suffix, gained, opened, lines]
    return np.stack([np.asarray(column, np.float64) for column in columns], 1)


def fit(gaps: Sequence[Ends], which: Sequence[str], ridge: float = 1.0) -> NDArray[np.float64]:
    """Weights [FEATURES] of a logistic regression of "the gap ends here" over the ends up to the true one, those of all
    gaps together as heavy where it ends as where it goes on; 0 for features that are not in `which`."""
    x = np.concatenate([features(gap)[: gap.true + 1] for gap in gaps])
    y = np.concatenate([np.arange(gap.true + 1) == gap.true for gap in gaps]).astype(np.float64)
    share = np.where(y > 0, 0.5 / max(1.0, y.sum()), 0.5 / max(1.0, (1 - y).sum())) * len(y)
    used = np.array([name in which or name == "one" for name in FEATURES])
    found, count = np.zeros(len(FEATURES)), used.sum()
    found[used] = logistic_regression(x[:, used], y, share, np.zeros(count), np.full(count, ridge))
    return found


@dataclass(frozen=True)
class Judged:
    """What a rule does, in shares of gaps: the true end is its best of all; it stops at the true end; it goes on at
    every end before; both. A gap that ends with its first line has no end before."""

    best: float
    stops: float
    goes_on: float
    right: float


def judge(gaps: Sequence[Ends], which: Sequence[str]) -> Judged:
    """Each gap by weights that were fitted on the packages of the other half."""
    packages = sorted({gap.package for gap in gaps})
    best, stops, goes_on, longer = [], [], [], []
    for side in (0, 1):
        own = [gap for gap in gaps if packages.index(gap.package) % 2 == side]
        weights = fit([gap for gap in gaps if packages.index(gap.package) % 2 != side], which)
        for gap in own:
            score = features(gap) @ weights
            best.append(int(score.argmax()) == gap.true)
            stops.append(score[gap.true] > 0)
            goes_on.append(bool((score[: gap.true] <= 0).all()))
            longer.append(gap.true > 0)
    both = [a and b for a, b in zip(stops, goes_on, strict=True)]
    before = [a for a, long in zip(goes_on, longer, strict=True) if long]
    return Judged(*(float(np.mean(of)) for of in (best, stops, before, both)))


RULES = {
    "END": ("END",),
    "the suffix's likelihood": ("suffix",),
    "both": ("END", "suffix"),
    "both, and what the likelihood gained": ("END", "suffix", "suffix, gained"),
    "these, and whether it is open": ("END", "suffix", "suffix, gained", "open"),
    "all": FEATURES,
}


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
    gap_rules.CLEAR_MARGIN = math.inf
    model = Model.load(EngineConfig(model=options.model, threads=options.threads))
    draw, truth = held_out(options.corpus, options.seed), Forced(model.engine._denoiser.facts.end_id)
    cases = [draw(i) for i in range(options.gaps)]
    kept = [one for case in track(cases) if (one := scored(case, model, truth)) is not None]
    if options.out:
        options.out.write_text("\n".join(json.dumps(asdict(one)) for one in kept), encoding="utf-8")
    report(kept)


def report(gaps: Sequence[Ends]) -> None:
    """Prints how often each rule is right, and the weights of the last."""
    ends = [len(gap.places) for gap in gaps]
    print(
        f"{len(gaps)} gaps, {sum(gap.true for gap in gaps)} ends before the true ones; a guess among all ends is right"
    )
    print(f"in {np.mean([1 / n for n in ends]):.0%}; decided by weights fitted on other packages")
    table = Table(box=None)
    for i, name in enumerate(("rule", "best of all", "stops", "goes on", "both")):
        table.add_column(name, justify="right" if i else "left")
    for name, which in RULES.items():
        of = judge(gaps, which)
        table.add_row(name, *(f"{share:.0%}" for share in (of.best, of.stops, of.goes_on, of.right)))
    Console().print(table)
    for name, which in RULES.items():
        print(name, {f: round(float(w), 3) for f, w in zip(FEATURES, fit(gaps, which), strict=True) if w})


if __name__ == "__main__":
    main()
