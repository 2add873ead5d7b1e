"""How long a gap is, for models that fill a canvas of a fixed length: asked of the model itself, before it is filled.

The first pass over a canvas of masks is surer of its tokens where the canvas has about the true length, on top of a
trend by length alone that has to be divided out. So lengths are tried, up and down from a guess, until they get worse
(CAL: Calibrated Adaptive Length, Liu et al. 2026, arXiv 2602.00476, algorithm 1 and appendix A).

Knows numbers only; the engine makes the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

#: Slots that are tried. The paper tries each from 1 to 64: farther apart they are found in fewer passes.
CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: (a, b, c, d, e) of B(n) = a exp(-b n) + c exp(-d n) + e: how sure LLaDA-8B was of n slots where the true ones were
#: not about as many. The authors use it for Dream-Coder and DiffuCoder too.
PUBLISHED_BIAS = (1.00, 1.77, 0.56, 0.06, 0.24)

#: Slots of the first canvas that is tried, and lengths in one direction that may be worse before it is given up. With
#: steps of one slot the paper gives up after 4; where lengths are farther apart, two say as much.
FIRST, PATIENCE = 8, 2


@dataclass(slots=True)
class LengthSearch:
    """A walk over candidate lengths. `length` is to be tried next, None once the best is known."""

    #: Ascending.
    lengths: Sequence[int]
    #: (a, b, c, d, e) of B(n) = a exp(-b n) + c exp(-d n) + e.
    bias: tuple[float, float, float, float, float]
    length: int | None = field(init=False)
    best: int | None = None
    #: By length: how sure the model was, calibrated.
    scores: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.length = max((n for n in self.lengths if n <= FIRST), default=self.lengths[0])

    def tried(self, probs: Sequence[float]) -> bool:
        """Takes in the top probabilities of the first pass over `length` slots; returns whether it is the best yet."""
        assert self.length is not None
        a, b, c, d, e = self.bias
        trend = a * exp(-b * self.length) + c * exp(-d * self.length) + e
        score = sum(probs) / len(probs) / trend
        self.scores[self.length] = score
        better = self.best is None or score > self.scores[self.best]
        if better:
            self.best = self.length
        self.length = self._next()
        return better

    def _next(self) -> int | None:
        """The next length above the best one, or, where as many as are worth trying are worse, below it."""
        assert self.best is not None
        for ahead in (list(self.lengths), list(reversed(self.lengths))):
            at = ahead.index(self.best)
            for length in ahead[at + 1 : at + 1 + PATIENCE]:
                if length not in self.scores:
                    return length
        return None
