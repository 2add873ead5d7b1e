"""Commit policies: what a denoise step makes final.

They see a canvas and what the unmask kernel read off its rows, never a model. Of a `Canvas`, row i predicts slot
frontier + i, up to the one behind the proposal; the masks' rows follow (`Canvas.group`). Of an `OpenCanvas`, row i
predicts the i-th open slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Literal, cast

import torch
from torch import Tensor

from infill_engine.config import STEPS
from infill_engine.core import Canvas, Facts, Noise, OpenCanvas, OpenPolicy, Reading, Rows, agreement


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
class ThresholdPolicy:
    """Pins every open slot whose token is as probable as the threshold, and the most probable one in any case
    (Fast-dLLM, arXiv 2505.22618, section 3.3)."""

    threshold: float = 0.9
    #: Whether neighbours that say the same wait for each other (`apart`); as published they do not.
    apart: bool = True

    def reading(self, canvas: OpenCanvas) -> Reading:
        return Reading()

    def step(self, canvas: OpenCanvas, rows: Rows, noise: Noise) -> OpenCanvas:
        order = _descending(rows.prob)
        accepted = list(takewhile(lambda row: rows.prob[row] >= self.threshold, order)) or order[:1]
        return _pin(canvas, rows, apart(canvas, rows.token, accepted) if self.apart else accepted)


@dataclass(frozen=True, slots=True)
class EntropyPolicy:
    """Pins open slots in ascending order of entropy as long as those before have together no more than `bound` nats,
    which bounds what is lost by taking them as independent (EB-sampler, arXiv 2505.24857, section 3)."""

    bound: float = 0.1

    def reading(self, canvas: OpenCanvas) -> Reading:
        return Reading()

    def step(self, canvas: OpenCanvas, rows: Rows, noise: Noise) -> OpenCanvas:
        return _pin(canvas, rows, apart(canvas, rows.token, _bounded(rows.entropy, self.bound)))


@dataclass(frozen=True, slots=True)
class StepsPolicy:
    """Pins the surest open slots, so many a pass as make a canvas full in `steps` passes.

    `order`: the surest are those with the most probable tokens (LLaDA's low-confidence remasking, arXiv 2502.09992,
    section 2.4; MaskGIT, arXiv 2202.04200) or those with the least entropy (Dream, arXiv 2508.15487).
    """

    order: Literal["prob", "entropy"]
    #: Passes that a canvas is to take; None: as many as it has slots, one a pass.
    steps: int | None = None
    #: How slots are spread over the steps. "even": the same number in each, those that are left over in the first
    #: (LLaDA). "time": floor(open (1 - s / t)) from time t to s, times falling evenly from 1 to 0.001 (Dream); steps in
    #: which that is none are left out.
    spread: Literal["even", "time"] = "even"
    #: At more than 0 tokens are drawn at it, else the most probable is taken.
    temperature: float = 0.0
    #: Whether the probability that counts is that at the temperature (Dream), or that at 1 (LLaDA).
    tempered: bool = True
    #: As in `Reading`.
    top_p: float = 1.0

    def reading(self, canvas: OpenCanvas) -> Reading:
        if not self.temperature:
            return Reading(top_p=self.top_p)
        temperature, noise = (self.temperature, 1.0) if self.tempered else (1.0, self.temperature)
        return Reading(temperature, noise, top_p=self.top_p)

    def step(self, canvas: OpenCanvas, rows: Rows, noise: Noise) -> OpenCanvas:
        counts = _counts(canvas.size, self.steps or canvas.size, self.spread)
        count = counts[canvas.step] if canvas.step < len(counts) else 1
        sureness = rows.sample_prob if self.order == "prob" else [-entropy for entropy in rows.entropy]
        return _pin(canvas, rows, _descending(sureness)[:count])


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """Lets a canvas grow and shrink within, by two tokens that a model was trained to say of its length: a slot that
    `expand_id` would fill becomes two open ones, and one that `delete_id` would fill is removed, with all open slots to
    its right if `rest` (DreamOn, arXiv 2602.01326, section 3)."""

    policy: OpenPolicy
    mask_id: int
    expand_id: int
    delete_id: int
    #: Slots beyond which it does not grow; nor are more added, where some are removed again, lest it go on for ever.
    most: int = 64
    rest: bool = True

    def reading(self, canvas: OpenCanvas) -> Reading:
        reading = self.policy.reading(canvas)
        if canvas.size < self.most and canvas.grown < self.most:
            return reading
        return reading._replace(refused=(*reading.refused, self.expand_id))

    def step(self, canvas: OpenCanvas, rows: Rows, noise: Noise) -> OpenCanvas:
        after = self.policy.step(canvas, rows, noise)
        deleted = [slot for slot in canvas.open if after.pinned[slot] and after.slots[slot] == self.delete_id]
        if self.rest and deleted:
            deleted = [slot for slot in canvas.open if slot >= deleted[0]]
        for slot in reversed(canvas.open):  # from the right: those that are still to be seen stay where they are
            if slot in deleted:
                after = after.splice(slot, ())
            elif after.pinned[slot] and after.slots[slot] == self.expand_id:
                after = after.splice(slot, (self.mask_id,) * (2 if after.size < self.most else 1))
        return after


@dataclass(frozen=True, slots=True)
class AnnealedPolicy:
    """Uniform-state denoising, where an open slot holds a token and no mask: each pass accepts samples as
    `EntropyPolicy` does, puts fresh noise into the other slots, and remembers nothing of what was accepted. When the
    most probable tokens are those of the pass before and surely so, or the passes are spent, they are pinned, all at
    once. The temperature falls evenly. Sources: EB-sampler (arXiv 2505.24857); DiffusionGemma's published sampler,
    whose numbers these are.
    """

    #: Ids that noise is drawn from.
    vocab: int
    #: Passes at most.
    steps: int = 48
    bound: float = 0.1
    #: In the first pass and, nearly, in the last.
    hottest: float = 0.8
    coldest: float = 0.4
    #: Nats a slot on average below which the most probable tokens are sure.
    settled: float = 0.005

    def reading(self, canvas: OpenCanvas) -> Reading:
        left = (self.steps - min(canvas.step, self.steps - 1)) / self.steps
        return Reading(self.coldest + (self.hottest - self.coldest) * left, 1.0)

    def step(self, canvas: OpenCanvas, rows: Rows, noise: Noise) -> OpenCanvas:
        slots, after = canvas.open, canvas.seen(rows)
        fresh = noise.ids(len(slots), self.vocab)
        unchanged = rows.token == [canvas.predicted[slot] for slot in slots]
        sure = unchanged and sum(rows.entropy) < self.settled * len(slots)
        if sure or after.step >= self.steps:
            return after.pin(dict(zip(slots, zip(rows.token, rows.prob, strict=True), strict=True)))
        accepted = {slots[row]: rows.sample[row] for row in _bounded(rows.entropy, self.bound)}
        return after.refill(dict(zip(slots, fresh, strict=True)) | accepted)


class SeededNoise:
    """Torch's own generators, one a device: the same seed draws the same there."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def gumbel(self, rows: int, vocab: int, device: torch.device) -> Tensor:
        drawn = torch.rand(rows, vocab, generator=self._generator(device), device=device)
        return drawn.clamp_(min=1e-20).log_().neg_().log_().neg_()  # in one buffer

    def ids(self, count: int, vocab: int) -> list[int]:
        drawn: list[int] = torch.randint(vocab, (count,), generator=self._generator(torch.device("cpu"))).tolist()
        return drawn

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def apart(canvas: OpenCanvas, tokens: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Of the rows that are accepted in one pass, the surest first, those that do not put the same token beside another.

    Slots that are filled together do not see each other, so two neighbours may both hold what belongs into one of them:
    that is where the stutter of parallel decoding begins. The less sure one waits for the next pass.
    """
    slots, taken = canvas.open, dict[int, int]()
    for row in accepted:
        slot, token = slots[row], tokens[row]
        if token not in (taken.get(slot - 1), taken.get(slot + 1)):
            taken[slot] = token
    return [row for row, slot in enumerate(slots) if slot in taken]


def _pin(canvas: OpenCanvas, rows: Rows, which: Sequence[int]) -> OpenCanvas:
    """One step further, with the samples of some rows final."""
    slots = canvas.open
    return canvas.seen(rows).pin({slots[row]: (rows.sample[row], rows.sample_prob[row]) for row in which})


def _bounded(entropy: Sequence[float], bound: float) -> list[int]:
    """Rows in ascending order of entropy, as long as those before have together no more than `bound` nats."""
    spent, rows = 0.0, list[int]()
    for row in _descending([-nats for nats in entropy]):
        if spent > bound:
            break
        rows.append(row)
        spent += entropy[row]
    return rows


def _descending(values: Sequence[float]) -> list[int]:
    """The indices of values from the greatest on, the first of equals first."""
    return sorted(range(len(values)), key=lambda i: -values[i])


@lru_cache(1024)
def _counts(slots: int, steps: int, spread: Literal["even", "time"]) -> list[int]:
    """How many slots each pass of `StepsPolicy` pins."""
    if spread == "even":
        counts = [slots // steps + (step < slots % steps) for step in range(steps)]
    else:
        counts, left = [], slots
        times = torch.linspace(1, 1e-3, steps + 1)  # in fp32 as published: rounding decides what floor makes of it
        for time, following in pairwise(times):
            counts.append(int(left * (1 - following / time)) if len(counts) < steps - 1 else left)
            left -= counts[-1]
    return [count for count in counts if count]


def decoding(name: str, facts: Facts) -> OpenPolicy:
    """The policy of a family that sees both sides, by the name that settings have for it: "threshold", "entropy", or
    the one that was published, which is also the only one where open slots hold noise; "sampled": that one with the
    published temperature and `top_p`; "steps:N": that one in N passes a canvas."""
    assert facts.open is not None
    published = facts.open.policy
    if name == "published" or facts.mask_id is None:
        return published
    inner = published.policy if isinstance(published, ElasticPolicy) else published
    if name == "sampled":
        temperature, top_p = facts.open.sampling
        other: OpenPolicy = replace(cast(StepsPolicy, inner), temperature=temperature, top_p=top_p)
    elif steps := STEPS.fullmatch(name):
        other = replace(cast(StepsPolicy, inner), steps=int(steps[1]))
    else:
        other = ThresholdPolicy() if name == "threshold" else EntropyPolicy()
    return replace(published, policy=other) if isinstance(published, ElasticPolicy) else other
