"""What a filled gap is worth against what its author wrote, and how sure a figure over many gaps is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from infill_engine.protocol import Candidate, Reason
from numpy.typing import ArrayLike, NDArray

from infill_lsp.core import Kind

#: Resamplings of a bootstrap; the seed is fixed, so a table is the same each time it is made.
RESAMPLINGS, SEED = 2_000, 7


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """A gap, and what one decoder filled it with; a line of the files that tables are made of."""

    index: int
    package: str
    language: str
    #: How the gap was made, and what the product took it for.
    made: str
    kind: Kind
    #: What stood in the gap, and on its last line after it.
    truth: str
    tail: str
    candidate: Candidate
    #: The candidate up to the end that is chosen for it.
    chosen: str
    #: What the edit puts before `rest`, which is what stays of the tail. A closer of the tail that the edit replaces by
    #: itself is counted with what stays. "" without an edit.
    shown: str
    rest: str
    similarity: float
    #: From the request to its last event, the prefix encoded already, and in how many passes how many tokens.
    ms: float
    steps: int
    tokens: int
    reason: Reason
    #: Where the truth was written for the model: of how many tokens how many it would have written itself.
    agreed: int | None = None
    forced: int | None = None
    #: Whether the document passes its tests, where it has some.
    passed: bool | None = None

    @property
    def wanted(self) -> str:
        """What `shown` should be."""
        return self.truth + self.tail[: len(self.tail) - len(self.rest)]

    @property
    def exact(self) -> bool:
        """Whether the edit makes the document that was."""
        return same(self.shown, self.rest, self.truth, self.tail)

    @property
    def exact_model(self) -> bool:
        """Whether the model's own text does."""
        return same(self.chosen, self.tail, self.truth, self.tail)

    @property
    def first_line(self) -> bool:
        return first_line(self.shown) == first_line(self.wanted)

    @property
    def ended(self) -> bool | None:
        """Whether the text stops where the truth does; None where it went another way before either was over."""
        text, truth = self.chosen.rstrip(), self.truth.rstrip()
        return text == truth if text.startswith(truth) or truth.startswith(text) else None


def same(text: str, rest: str, truth: str, tail: str) -> bool:
    """Whether `text` before `rest` fills the line as `truth` before `tail` does, trailing space aside."""
    return (text.rstrip() + rest).rstrip() == (truth.rstrip() + tail).rstrip()


def similarity(text: str, truth: str) -> float:
    """1 less the Levenshtein distance over the longer length (code points), trailing space aside; 1 for two empty."""
    a, b = text.rstrip(), truth.rstrip()
    return 1 - distance(a, b) / max(len(a), len(b), 1)


def distance(a: str, b: str) -> int:
    """Levenshtein distance in code points (Wagner and Fischer 1974), a row of the table at a time.

    A row's insertions, row[j] = min over i <= j of (without[i] + j - i), are a running minimum of without[i] - i.
    """
    other = np.array([ord(c) for c in b], np.int64)
    steps = np.arange(len(b) + 1)
    row = steps
    for i, c in enumerate(a, 1):
        without = np.empty_like(steps)
        without[0] = i
        without[1:] = np.minimum(row[1:] + 1, row[:-1] + (other != ord(c)))
        row = np.minimum.accumulate(without - steps) + steps
    return int(row[-1])


def first_line(text: str) -> str:
    """The first line that is not blank, without space at its end."""
    return next((line.rstrip() for line in text.split("\n") if line.strip()), "")


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that so large a share of them is not above; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class Figure(NamedTuple):
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        return f"{self.value:.1%} ({100 * self.low:.1f}–{100 * self.high:.1f})"

    def number(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


NONE = Figure(float("nan"), float("nan"), float("nan"))


def ratio(over: ArrayLike, under: ArrayLike | None = None) -> Figure:
    """The sum of `over` to the sum of `under`, one number a gap in each and the same gap at each place; the mean of
    `over` without `under`. The interval is from a bootstrap of the gaps (Efron and Tibshirani 1993, section 13.3), so a
    ratio of two decoders is paired. Not a number where there is nothing to divide by; an end that some resampling has
    nothing to divide by for is infinite."""
    a = np.asarray(over, np.float64)
    b = np.ones_like(a) if under is None else np.asarray(under, np.float64)
    assert a.shape == b.shape
    if not b.sum():
        return NONE
    weights = _resampled(len(a))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (weights @ a) / (weights @ b)
    low, high = np.quantile(np.where(np.isnan(drawn), np.inf, drawn), [0.025, 0.975], method="nearest")
    return Figure(float(a.sum() / b.sum()), float(low), float(high))


def _resampled(size: int) -> NDArray[np.float64]:
    """How often each of `size` things is in each resampling: [RESAMPLINGS, size]."""
    random = np.random.default_rng(SEED)
    return random.multinomial(size, np.full(size, 1 / size), RESAMPLINGS).astype(np.float64)
