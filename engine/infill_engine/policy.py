"""Commit policies: what a denoise step makes final.

They see a canvas and what the unmask kernel read off its rows, never a model. Row i predicts slot frontier + i, up to
the one behind the proposal; the masks' rows follow (`Canvas.group`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from infill_engine.core import Canvas, Rows, agreement


@dataclass(frozen=True, slots=True)
class VerifiedPolicy:
    """Commits what a sequential decode would have written, however many proposals that confirms.

    A proposed token is right if the row to its left, which saw only confirmed text, predicts it. The longest agreeing
    run and the token predicted after it are committed; what the masks behind that run predict becomes the next
    proposal, up to the first that is less probable than `least`. Greedy verification as in speculative decoding
    (Leviathan et al. 2022, arXiv 2211.17192).
    """

    #: Probability of a mask's token from which on it is worth feeding.
    least: float = 0.0

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        agreed = agreement(canvas.proposal, rows.token[: len(canvas.proposal)])
        after = canvas.commit(rows.token[: min(agreed + 1, canvas.size - canvas.frontier)])
        masks = rows[canvas.group(agreed)]
        sure = takewhile(lambda guess: guess[1] >= self.least, zip(masks.token, masks.prob, strict=True))
        return replace(after, proposal=tuple(token for token, _ in sure)[: after.size - after.frontier])


@dataclass(frozen=True, slots=True)
class ConfidencePolicy:
    """Commits the frontier, and after it every slot whose top probability passes the threshold, up to the first that
    does not (Fast-dLLM, arXiv 2505.22618, section 3.3, kept contiguous: known text is a prefix of the canvas)."""

    threshold: float = 0.9

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        chain, masks = slice(1 + len(canvas.proposal)), canvas.group(len(canvas.proposal))
        tokens, probs = rows.token[chain] + rows.token[masks], rows.prob[chain] + rows.prob[masks]
        count = 1
        while count < len(probs) and probs[count] >= self.threshold:
            count += 1
        return canvas.commit(tokens[: min(count, canvas.size - canvas.frontier)])
