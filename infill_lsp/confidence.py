"""How much of a candidate is worth showing: up to where it is right, as far as its probabilities say.

A wrong suggestion costs a person more than none. So a text is not shown whole or not at all: of the places where it may
be cut, the one is taken that promises the most right characters, among those that are right often enough.

It knows candidates and kinds of gaps, neither the document nor the model. The weights and thresholds are fitted by
`bench.quality`; without the fitted file a text is as sure as the product of its tokens' probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, log1p
from pathlib import Path
from typing import get_args

import msgspec
from infill_engine.protocol import Candidate

from infill_lsp.core import SHAPES, Edit, Kind, Shape, Silence
from infill_lsp.extraction import is_word
from infill_lsp.settings import Aggressiveness

#: The fitted weights, installed with the package.
FITTED = Path(__file__).with_suffix(".json")

#: What is known of a text cut at a place, in the order of `Cut.features`. `product` is that of the probabilities of
#: the tokens up to there, as the logarithm of its odds; `product log`, `mean log`, `least log` and `first log` are
#: the logarithms of the product, of their geometric mean, of the least and of the first; `end log` is that of the
#: probability of END there, where it was scored; the sizes are logarithms, too.
FEATURES = (
    "one",
    "product",
    "product log",
    "mean log",
    "least log",
    "first log",
    "tokens",
    "characters",
    "lines",
    "line end",
    "whole",
    "scored",
    "end log",
    *(f"kind {shape}" for shape in get_args(Shape)),
)

#: What is shorter than so many code points, space aside, saves nobody a key: it takes one to accept it, and a look. On
#: 1,500 held-out gaps 57% have a text instead of 67%, and it saves 6.3% of the characters instead of 6.4%, less a key a
#: text. Who asks for everything (`eager`, and by hand) gets the shorter ones, too.
SHORTEST = 3

#: Probabilities nearer to 0 or 1 than this say no more than this.
_LEAST = 1e-6


def visible_in(text: str) -> int:
    """Code points of a text, space aside."""
    return len("".join(text.split()))


@dataclass(frozen=True, slots=True)
class Cut:
    """A place to cut a candidate: behind a token, and not inside a word."""

    #: Code points of the text that stay.
    offset: int
    #: Those of them that can be seen.
    visible: int
    #: One number for each of `FEATURES`.
    features: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """Weights by feature, and how likely a text has to be right to be shown."""

    weights: Mapping[str, float]
    thresholds: Mapping[Aggressiveness, float]
    #: Where the product of the tokens' probabilities falls below this, hardly anything is shown, whatever the
    #: threshold: no more of the text need be written.
    floor: float = 0.0

    def confidence(self, cut: Cut) -> float:
        """The probability that the text up to the cut is what belongs there, as far as it goes."""
        score = sum(self.weights[name] * value for name, value in zip(FEATURES, cut.features, strict=True))
        return 1 / (1 + exp(-max(-50.0, min(50.0, score))))

    def sure(
        self,
        edit: Edit,
        candidate: Candidate,
        kind: Kind,
        aggressiveness: Aggressiveness = "balanced",
        stands: Callable[[Edit], bool] = lambda part: True,
    ) -> Edit | Silence:
        """The part worth showing of an edit, LF only, that is made of a candidate; why there is none.

        `stands` says whether the document may be left with an edit. Text that is cut off no longer brings what it
        replaces, which then stays.
        """
        found = cuts(shown(candidate, edit.text), kind)
        if not found:
            return Silence("how sure the model is of the text is not known")
        least = 1 if aggressiveness == "eager" else SHORTEST
        options = [(cut.offset, self.confidence(cut)) for cut in found if cut.visible >= least]
        if not options:
            return Silence(f"the text is too short to save a key, {aggressiveness} shows {least} characters or more")
        threshold = self.thresholds[aggressiveness]
        for size in ranked(options, threshold):
            whole = size == len(edit.text)
            part = edit if whole else replace(edit, end=edit.start, text=edit.text[:size].rstrip())
            if stands(part):
                return part
        most = max(probability for _, probability in options)
        if most >= threshold:
            return Silence(
                f"what is right with {most:.0%} cannot stand alone, or would break the file (infill.parseCheck)"
            )
        return Silence(f"the text is right with {most:.0%}, {aggressiveness} shows from {threshold:.0%}")


def ranked(options: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Of pairs (code points, probability), the code points of those that are probable enough, the one with the most
    right ones expected first."""
    return [size for _, size in sorted(((size * p, size) for size, p in options if p >= threshold), reverse=True)]


def best(options: Sequence[tuple[int, float]], threshold: float) -> int:
    """The first of `ranked`; 0 where there is none."""
    return next(iter(ranked(options, threshold)), 0)


def shown(candidate: Candidate, text: str) -> Candidate:
    """The candidate as if its text were `text`, a part of it; an empty one if it is none."""
    shift = candidate.text.find(text) if text else -1
    if shift < 0:
        return Candidate("")
    pairs = zip(candidate.probs, candidate.offsets, strict=True)
    tokens = [(prob, offset - shift) for prob, offset in pairs if 0 < offset - shift <= len(text)]
    ends = [msgspec.structs.replace(end, offset=end.offset - shift) for end in candidate.ends]
    return Candidate(
        text,
        tuple(prob for prob, _ in tokens),
        tuple(offset for _, offset in tokens),
        tuple(end for end in ends if 0 < end.offset <= len(text)),
    )


def cuts(candidate: Candidate, kind: Kind) -> list[Cut]:
    """Where the candidate's text may be cut, in order; the last is its end, if its tokens reach there."""
    text = candidate.text
    end_probs = {end.offset: end.end_prob for end in candidate.ends}
    found: list[Cut] = []
    total, least, first = 0.0, 0.0, 0.0
    for count, (prob, offset) in enumerate(zip(candidate.probs, candidate.offsets, strict=True), 1):
        if offset > len(text):
            break
        step = log(max(prob, _LEAST))
        total, least = total + step, min(least, step)
        first = step if count == 1 else first
        if is_word(text[offset - 1 : offset]) and is_word(text[offset : offset + 1]):
            continue
        if not (visible := visible_in(text[:offset])):
            continue
        if found and found[-1].offset == offset:  # several tokens of one character
            found.pop()
        product = min(max(exp(total), _LEAST), 1 - _LEAST)
        end_prob = end_probs.get(offset)
        whole = offset == len(text)
        features = (
            1.0,
            log(product / (1 - product)),
            max(total, log(_LEAST)),
            total / count,
            least,
            first,
            log1p(count),
            log1p(offset),
            log1p(text.count("\n", 0, offset)),
            float(whole or text[offset] == "\n"),
            float(whole),
            float(end_prob is not None),
            0.0 if end_prob is None else log(max(end_prob, _LEAST)),
            *(float(SHAPES[kind] == shape) for shape in get_args(Shape)),
        )
        found.append(Cut(offset, visible, features))
    return found


#: Where nothing was fitted: a text is as sure as the product of its probabilities says. On 128 held-out gaps, filled by
#: the base model and by an adapter of it, so much was right of what these thresholds showed: 65 and 82%, 56 and 67%, 44
#: and 51%; the aims are 75, 60 and 45%. (At 0.6 it is 85 and 91%, of a third of the gaps.)
PRODUCT = Gate(
    {name: float(name == "product") for name in FEATURES}, {"quiet": 0.4, "balanced": 0.22, "eager": 0.07}, floor=0.02
)


@cache
def fitted(path: Path = FITTED) -> Gate:
    """The gate that is installed with the package; `PRODUCT` without one. Raises `OSError` and `msgspec.MsgspecError`
    for a broken package."""
    return msgspec.json.decode(path.read_bytes(), type=Gate) if path.exists() else PRODUCT
