"""Where gaps end, as the engine scores it: `python -m bench.ends [--gaps N] [--model M]`.

Held-out gaps that may have several lines are filled with what their authors wrote and then with what the model would
write behind it, END forbidden. At each line end on the way the engine scores the end: by the probability of END and by
the likelihood of the suffix there. The scores of the true end and of those before and beyond it are compared, and
the rule that chooses among them is fitted on some packages and tried on the others.
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
from infill_engine.protocol import End, cache_dir, end_scores
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.filling import Case, Forced, Model, answer, held_out, tokens_of, with_suffix

#: Lines that are written beyond the true end.
BEYOND = 3
#: Parts of the packages, of which each is judged by what the others taught.
FOLDS = 5
#: What pulls the weights to nothing, a gap, and steps after which they no longer move.
RIDGE, NEWTON_STEPS = 0.01, 12


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
    truth.begin(tokens_of(case.truth, request, model.tokenizer), one_line=False)
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
FEATURES = ("END", "suffix", "suffix, gained", "open", "lines")


def features(of: Ends) -> NDArray[np.float64]:
    """[ends, FEATURES]: the log-odds of END, the suffix's mean log-probability, by how much that is more than at the
    best end before (0 for the first), 1 for an open end, and the logarithm of the lines."""
    suffix = np.array([place.suffix for place in of.places])
    best = np.maximum.accumulate(suffix)
    gained = np.concatenate([[0.0], suffix[1:] - best[:-1]])
    opened, lines = [place.open for place in of.places], [math.log(place.lines) for place in of.places]
    columns = [[place.end for place in of.places], suffix, gained, opened, lines]
    return np.stack([np.asarray(column, np.float64) for column in columns], 1)


def fit(gaps: Sequence[Ends], which: Sequence[str] = FEATURES) -> NDArray[np.float64]:
    """Weights [FEATURES] with which the true end is the most probable of a gap's, a softmax over their scores
    (conditional logit: McFadden 1974, by Newton's method); 0 for features that are not in `which`."""
    used = [i for i, name in enumerate(FEATURES) if name in which]
    choices = [(features(gap)[:, used], gap.true) for gap in gaps]
    weights = np.zeros(len(used))
    for _ in range(NEWTON_STEPS):
        gradient, curvature = -RIDGE * weights, RIDGE * np.eye(len(used))
        for x, true in choices:
            p = _softmax(x @ weights)
            mean = p @ x
            gradient += (x[true] - mean) / len(choices)
            curvature += ((x - mean).T * p) @ (x - mean) / len(choices)
        weights = weights + np.linalg.solve(curvature, gradient)
    found = np.zeros(len(FEATURES))
    found[used] = weights
    return found


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    odds = np.exp(scores - scores.max())
    return np.asarray(odds / odds.sum())


@dataclass(frozen=True)
class Judged:
    """Where a rule ends gaps, in shares of them: where they end, before, or beyond."""

    right: float
    early: float
    late: float

    @classmethod
    def of(cls, chosen: Sequence[int], gaps: Sequence[Ends]) -> Judged:
        off = np.array([place - gap.true for place, gap in zip(chosen, gaps, strict=True)])
        return cls(float((off == 0).mean()), float((off < 0).mean()), float((off > 0).mean()))


def judge(gaps: Sequence[Ends], which: Sequence[str]) -> Judged:
    """Each gap by weights that were fitted on the packages of the other folds."""
    fold = {package: i % FOLDS for i, package in enumerate(sorted({gap.package for gap in gaps}))}
    chosen: dict[int, int] = {}
    for own in range(FOLDS):
        weights = fit([gap for gap in gaps if fold[gap.package] != own], which)
        chosen |= {i: best(gap, weights) for i, gap in enumerate(gaps) if fold[gap.package] == own}
    return Judged.of([chosen[i] for i in range(len(gaps))], gaps)


def best(gap: Ends, weights: NDArray[np.float64]) -> int:
    """The end with the best score, the first of equals."""
    return int((features(gap) @ weights).argmax())


def engine_scores(gap: Ends) -> list[float]:
    """What the engine makes of the ends, in order."""
    ends = [End(i, place.suffix, _logistic(place.end), place.open) for i, place in enumerate(gap.places)]
    return end_scores(ends)


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clear_at(gap: Ends, scores: Sequence[float], margin: float) -> int:
    """The number of the line end at which the engine stops, since the best end leads all later ones by the margin; the
    last where it never does."""
    opened = [place.open for place in gap.places]
    clear = (at for at in range(len(scores)) if gap_rules.is_clear(scores[: at + 1], opened[: at + 1], margin))
    return next(clear, len(scores) - 1)


RULES = {
    "END": ("END",),
    "the suffix's likelihood": ("suffix",),
    "both": ("END", "suffix"),
    "both, and what the likelihood gained": ("END", "suffix", "suffix, gained"),
    "these, and whether it is open": ("END", "suffix", "suffix, gained", "open"),
    "all": FEATURES,
}
MARGINS = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, math.inf)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="bench.ends", description=__doc__)
    parser.add_argument("--gaps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=cache_dir() / "corpus")
    parser.add_argument("--out", type=Path, help="keep the scores in this file")
    parser.add_argument("--scored", type=Path, help="the scores from such a file, without filling anything")
    options = parser.parse_args(arguments)
    if options.scored:
        report(read(options.scored))
        return
    gap_rules.CLEAR_MARGIN = math.inf
    model = Model.load(EngineConfig(model=options.model, threads=options.threads))
    draw, truth = held_out(options.corpus, options.seed), Forced(model.codec, model.engine._denoiser.facts.end_id)
    cases = [draw(i) for i in range(options.gaps)]
    kept = [one for case in track(cases) if (one := scored(case, model, truth)) is not None]
    if options.out:
        options.out.write_text("\n".join(json.dumps(asdict(one)) for one in kept), encoding="utf-8")
    report(kept)


def report(gaps: Sequence[Ends]) -> None:
    """Prints how often each rule is right, the weights of each, and what stopping early costs the engine."""
    ends = [len(gap.places) for gap in gaps]
    print(
        f"{len(gaps)} gaps, {sum(gap.true for gap in gaps)} ends before the true ones and up to {BEYOND} beyond each;"
    )
    print(f"a guess is right in {np.mean([1 / n for n in ends]):.0%}; decided by weights fitted on other packages")
    scores = [engine_scores(gap) for gap in gaps]
    judged = {name: judge(gaps, which) for name, which in RULES.items()}
    judged["the engine's, as it stands"] = Judged.of([of.index(max(of)) for of in scores], gaps)
    table = Table(box=None)
    for i, name in enumerate(("the best end by", "is the true one", "comes before", "comes after")):
        table.add_column(name, justify="right" if i else "left")
    for name, of in judged.items():
        table.add_row(name, *(f"{share:.1%}" for share in (of.right, of.early, of.late)))
    Console().print(table)
    for name, which in RULES.items():
        print(name, {f: round(float(w), 2) for f, w in zip(FEATURES, fit(gaps, which), strict=True) if w})
    table = Table(box=None)
    for name in ("the engine stops where the best leads by", "ends beyond the true one", "is the true one"):
        table.add_column(name, justify="right")
    for margin in MARGINS:
        stops = [clear_at(gap, of, margin) for gap, of in zip(gaps, scores, strict=True)]
        chosen = [of[: stop + 1].index(max(of[: stop + 1])) for of, stop in zip(scores, stops, strict=True)]
        beyond = np.mean([max(stop - gap.true, 0) for stop, gap in zip(stops, gaps, strict=True)])
        table.add_row(f"{margin:g}", f"{beyond:.1f}", f"{Judged.of(chosen, gaps).right:.1%}")
    Console().print(table)


def read(path: Path) -> list[Ends]:
    """The scored gaps that `--out` has written."""
    return [msgspec.json.decode(line, type=Ends) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    main()
