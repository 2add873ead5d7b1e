"""Fits and judges what decides how much of a text is shown; numpy only.

The texts of half of the packages fit it, those of the others judge it, and the other way round, so every figure is of
packages that were not seen. Gaps are weighted alike, however many places their texts may be cut at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.score import Filled
from infill_lsp.confidence import FEATURES, SHORTEST, Gate, best, cuts, shown
from infill_lsp.settings import Aggressiveness

Floats = NDArray[np.float64]

#: The share of shown texts that have to be right, by how much is to be shown.
AIMS: dict[Aggressiveness, float] = {"quiet": 0.75, "balanced": 0.6, "eager": 0.45}
PRECISION = AIMS["balanced"]
#: How much more often right a threshold has to be on the texts that it is chosen on, where it looks better than it is:
#: by 0.8 points on 1,500 gaps.
MARGIN = 0.015
#: Thresholds that are tried.
GRID = np.unique(np.concatenate([np.geomspace(1e-4, 0.02, 24), np.linspace(0.02, 0.99, 98)]))
#: What pulls the weights to those of the running product alone, beside a weight of 1 a gap.
RIDGE = 2.0
NEWTON_STEPS = 50
#: Places to break a text off that are tried, and the share of the saved characters that this may cost.
FLOORS, FLOOR_COSTS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001), 0.01


@dataclass(frozen=True)
class Options:
    """One gap's text and where it may be cut to something worth showing, shortest first."""

    filled: Filled
    #: Code points [K], features [K, F], and whether what is left is how the truth begins [K].
    sizes: NDArray[np.int64]
    features: Floats
    right: NDArray[np.bool_]

    @classmethod
    def of(cls, filled: Filled) -> Options:
        found = [cut for cut in cuts(shown(filled.candidate, filled.shown), filled.kind) if cut.visible >= SHORTEST]
        sizes = np.array([cut.offset for cut in found], np.int64)
        features = np.array([cut.features for cut in found], np.float64).reshape(len(found), len(FEATURES))
        right = [filled.wanted.startswith(filled.shown[:size].rstrip()) for size in sizes]
        return cls(filled, sizes, features, np.array(right, np.bool_))

    @property
    def product(self) -> Floats:
        """The product of the probabilities up to each cut [K]."""
        return np.exp(self.features[:, FEATURES.index("product log")])

    def until(self, floor: float) -> Options:
        """The same with a text that breaks off where the product falls below the floor."""
        below = np.flatnonzero(self.product < floor)
        count = below[0] + 1 if len(below) else len(self.sizes)
        return replace(self, sizes=self.sizes[:count], features=self.features[:count], right=self.right[:count])

    def saved(self, size: int) -> int:
        """The right characters of a text cut at `size`: all or none."""
        return size if size and self.right[np.searchsorted(self.sizes, size)] else 0


#: From a gap and a threshold to how many code points are shown.
Choice = Callable[[Options, float], int]


def fit(gaps: Sequence[Options]) -> Floats:
    """Weights [F] of a logistic regression of `right`, with a ridge on the standardised features around the weights by
    which a text is as sure as the product of its probabilities."""
    gaps = [gap for gap in gaps if len(gap.sizes)]
    prior: Floats = (np.array(FEATURES) == "product").astype(np.float64)
    if not gaps:
        return prior
    x = np.concatenate([gap.features for gap in gaps])
    y = np.concatenate([gap.right for gap in gaps]).astype(np.float64)
    share = np.concatenate([np.full(len(gap.sizes), 1 / len(gap.sizes)) for gap in gaps])
    scale = x.std(0)
    scale[scale < 1e-9] = 1.0
    ridge = np.where(np.array(FEATURES) == "one", 1e-6, RIDGE)
    found: Floats = logistic_regression(x / scale, y, share, prior * scale, ridge) / scale
    return found


def logistic_regression(x: Floats, y: Floats, share: Floats, prior: Floats, ridge: Floats) -> Floats:
    """Weights [F] with which features [N, F] tell `y` [N], 0 or 1, by Newton's method (Hastie, Tibshirani and Friedman
    2009, section 4.4.1). share: what each row weighs [N]; ridge: what pulls each weight to its `prior` [F]."""
    weights = prior

    def loss(at: Floats) -> float:
        z = x @ at
        return float((share * (np.logaddexp(0, z) - y * z)).sum() + (ridge * (at - prior) ** 2).sum() / 2)

    for _ in range(NEWTON_STEPS):
        p = _logistic(x @ weights)
        gradient = x.T @ (share * (y - p)) - ridge * (weights - prior)
        curvature = (x * (share * p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        step = np.linalg.solve(curvature, gradient)
        while loss(weights + step) > loss(weights) and np.abs(step).max() > 1e-9:  # it went too far
            step /= 2
        weights = weights + step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def by_gate(weights: Floats) -> Choice:
    """The cut that promises the most right characters, of those that are probable enough."""
    known: dict[int, list[tuple[int, float]]] = {}

    def choose(gap: Options, threshold: float) -> int:
        if id(gap) not in known:
            known[id(gap)] = list(zip(gap.sizes.tolist(), confidence(weights, gap).tolist(), strict=True))
        return best(known[id(gap)], threshold)

    return choose


def by_product(gap: Options, threshold: float) -> int:
    """Up to where the running product of the probabilities falls below the threshold."""
    enough = gap.sizes[gap.product >= threshold]
    return int(enough[-1]) if len(enough) else 0


def confidence(weights: Floats, gap: Options) -> Floats:
    """The probability [K] that each cut is right."""
    return _logistic(gap.features @ weights)


class Point(NamedTuple):
    """What a threshold does over some gaps."""

    threshold: float
    #: Of gaps, those that something is shown in; of these, those where it is right; of all characters of gaps, those
    #: that were shown and right.
    shown: float
    precision: float
    saved: float


def point(gaps: Sequence[Options], sizes: Sequence[int], threshold: float = math.nan) -> Point:
    """What it comes to where so many code points are shown in each gap."""
    shown = sum(size > 0 for size in sizes)
    saved = [gap.saved(size) for gap, size in zip(gaps, sizes, strict=True)]
    characters = sum(len(gap.filled.truth) for gap in gaps)
    right = sum(size > 0 for size in saved)
    return Point(
        threshold,
        shown / max(1, len(gaps)),
        right / shown if shown else math.nan,
        sum(saved) / max(1, characters),
    )


def curve(gaps: Sequence[Options], choose: Choice) -> list[Point]:
    return [point(gaps, [choose(gap, t) for gap in gaps], t) for t in GRID.tolist()]


def threshold(gaps: Sequence[Options], choose: Choice, precision: float = PRECISION) -> float:
    """The threshold that saves the most characters while enough of the shown texts are right, elsewhere too; the
    highest where none does."""
    enough = [of for of in curve(gaps, choose) if of.precision >= precision + MARGIN]
    return max(enough, key=lambda of: of.saved).threshold if enough else float(GRID[-1])


def halves(gaps: Sequence[Options]) -> tuple[list[int], list[int]]:
    """Indexes of two sets of gaps of about the same size that share no package."""
    sides: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for package, count in sorted(Counter(gap.filled.package for gap in gaps).items(), key=lambda of: (-of[1], of[0])):
        smaller = sizes.index(min(sizes))
        sides[smaller].append(package)
        sizes[smaller] += count
    first, second = ([i for i, gap in enumerate(gaps) if gap.filled.package in side] for side in sides)
    return first, second


@dataclass(frozen=True)
class Judged:
    """Decisions over all gaps, each made by what was fitted on other packages."""

    gaps: Sequence[Options]
    #: Code points shown in each gap at the threshold that the other half chose.
    sizes: list[int]
    curve: list[Point]
    #: For the gate: the probability that each cut is right, by gap.
    confidences: list[Floats] | None = None

    @property
    def point(self) -> Point:
        return point(self.gaps, self.sizes)

    @property
    def saved(self) -> list[int]:
        return [gap.saved(size) for gap, size in zip(self.gaps, self.sizes, strict=True)]


def judge(gaps: Sequence[Options], gate: bool, precision: float = PRECISION) -> Judged:
    """Cross-fits the gate, or the threshold of the running product alone."""
    sizes = [0] * len(gaps)
    chosen: dict[int, Choice] = {}
    confidences: list[Floats] = [np.zeros(0)] * len(gaps)
    first, second = halves(gaps)
    for fitted_on, judged_on in ((first, second), (second, first)):
        own = [gaps[i] for i in fitted_on]
        weights = fit(own) if gate else np.zeros(len(FEATURES))
        choose = by_gate(weights) if gate else by_product
        at = threshold(own, choose, precision)
        for i in judged_on:
            chosen[i], sizes[i] = choose, choose(gaps[i], at)
            confidences[i] = confidence(weights, gaps[i])
    points = [point(gaps, [chosen[i](gap, t) for i, gap in enumerate(gaps)], t) for t in GRID.tolist()]
    return Judged(gaps, sizes, points, confidences if gate else None)


def final(gaps: Sequence[Options]) -> Gate:
    """What the product gets: fitted on all gaps, with the thresholds that they choose, a lower aim's never above a
    higher one's."""
    weights = fit(gaps)
    rounded = {name: round(float(weight), 5) for name, weight in zip(FEATURES, weights, strict=True)}
    choose = by_gate(weights)
    thresholds: dict[Aggressiveness, float] = {}
    most = 1.0
    for name, aim in sorted(AIMS.items(), key=lambda of: -of[1]):
        most = thresholds[name] = min(most, round(threshold(gaps, choose, aim), 5))
    return Gate(rounded, thresholds, floor(gaps, choose, list(thresholds.values())))


def floor(gaps: Sequence[Options], choose: Choice, thresholds: Sequence[float]) -> float:
    """The highest floor with which all thresholds save nearly as much as with whole texts; 0 where none does."""

    def saved(of: Sequence[Options]) -> NDArray[np.int64]:
        return np.array([sum(gap.saved(choose(gap, at)) for gap in of) for at in thresholds])

    enough = saved(gaps) * (1 - FLOOR_COSTS)
    # Lists that are kept, as `by_gate` knows gaps by what they are.
    broken = {at: [gap.until(at) for gap in gaps] for at in FLOORS}
    return next((at for at in FLOORS if (saved(broken[at]) >= enough).all()), 0.0)


def calibration(judged: Judged, bins: int = 5) -> list[tuple[float, float, float]]:
    """For cuts in `bins` ranges of their probability: the share of cuts there, the mean probability, and the share that
    is right. A gap's cuts count as one gap together."""
    assert judged.confidences is not None
    some = [(gap, p) for gap, p in zip(judged.gaps, judged.confidences, strict=True) if len(p)]
    if not some:
        return []
    p = np.concatenate([of for _, of in some])
    right = np.concatenate([gap.right for gap, _ in some])
    share = np.concatenate([np.full(len(of), 1 / len(of)) for _, of in some])
    rows = []
    for low in np.linspace(0, 1, bins + 1)[:-1]:
        here = (p >= low) & ((p < low + 1 / bins) | (low + 1 / bins >= 1))
        if weight := float(share[here].sum()):
            mean, truth = (float((share * of)[here].sum() / weight) for of in (p, right))
            rows.append((weight / float(share.sum()), mean, truth))
    return rows


def _logistic(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
