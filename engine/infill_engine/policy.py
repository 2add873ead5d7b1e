"""Commit policies: what a denoise step makes final.

They see a canvas and what the unmask kernel read off its rows, never a model. Row i predicts slot frontier + i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infill_engine.core import Canvas, Rows, agreement


@dataclass(frozen=True, slots=True)
class VerifiedPolicy:
    """Commits what a sequential decode would have written, however many proposals that confirms.

    A proposed token is right if the row to its left, which saw only confirmed text, predicts it. The longest agreeing
    run and the token predicted after it are committed; what the masks to its right predict becomes the next proposal.
    Greedy verification as in speculative decoding (Leviathan et al. 2022, arXiv 2211.17192).
    """

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        predicted = rows.token
        agreed = agreement(canvas.proposal, predicted)
        after = canvas.commit(predicted[: min(agreed + 1, canvas.size - canvas.frontier)])
        if agreed < len(canvas.proposal):  # what stood to the right of a wrong token is worth nothing
            return after
        return replace(after, proposal=tuple(predicted[agreed + 1 :][: after.size - after.frontier]))


@dataclass(frozen=True, slots=True)
class ConfidencePolicy:
    """Commits the frontier, and after it every slot whose top probability passes the threshold, up to the first that
    does not (Fast-dLLM, arXiv 2505.22618, section 3.3, kept contiguous: known text is a prefix of the canvas)."""

    threshold: float = 0.9

    def step(self, canvas: Canvas, rows: Rows) -> Canvas:
        count = 1
        while count < len(rows) and rows.prob[count] >= self.threshold:
            count += 1
        return canvas.commit(rows.token[: min(count, canvas.size - canvas.frontier)])
