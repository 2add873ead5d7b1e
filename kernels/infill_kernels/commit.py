"""`commit`: what a denoise step makes final, for a batch of canvases on the device.

Knows nothing of models or text. This is the torch reference, the readable specification that a fused kernel is tested
against. Nothing is read back, so that several steps can run before the host looks.

The state holds the slots of each gap; what is pinned around a gap (its head, its suffix) has no slot. Slot j of
canvas c is predicted by row first[c] + j - committed[c] of the outputs. A step makes slots committed .. stop final:

    cut    the first end id among them, at slot e: committed = e, status ENDED
    stop   no end and committed = capacity: status FULL
    grow   no end and committed = size: size = min(2 size, capacity)

Canvases whose status is not LIVE stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infill_kernels.unmask import Unmasked

#: What became of a canvas: still being filled, cut at an end id, or filled up without one.
LIVE, ENDED, FULL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class CanvasState:
    """C canvases on one device, `committed | proposed | open` up to `size` of at most S slots. Changed in place."""

    #: int64 [C, S]. Committed slots are final; proposed ones are fed as known tokens and checked; the open ones hold
    #: noise under `EntropyBound` and are undefined otherwise, and so are all from `size` on.
    tokens: Tensor
    #: float32 [C, S], the probability of each committed token; undefined elsewhere. Where a canvas was cut, slot
    #: `committed` holds the end id and its probability.
    prob: Tensor
    #: int64 [C, S], under `EntropyBound` the last step's most probable tokens, -1 before the first.
    predicted: Tensor
    #: int32 [C], contiguous from slot 0.
    committed: Tensor
    #: int32 [C], how many slots after them hold a proposal.
    proposed: Tensor
    #: int32 [C], slots in use.
    size: Tensor
    #: int32 [C], LIVE, ENDED or FULL.
    status: Tensor

    @classmethod
    def new(cls, canvases: int, size: int, capacity: int, device: torch.device | str = "cpu") -> CanvasState:
        """Empty canvases of `size` slots that can grow to `capacity`."""
        if not 0 < size <= capacity:
            raise ValueError(f"a canvas of {size} slots does not fit a capacity of {capacity}")
        count = torch.zeros(4, canvases, dtype=torch.int32, device=device)
        count[2] = size
        tokens = torch.zeros(canvases, capacity, dtype=torch.int64, device=device)
        return cls(tokens, torch.zeros_like(tokens, dtype=torch.float32), torch.full_like(tokens, -1), *count)


@dataclass(frozen=True, slots=True)
class Verified:
    """Commits the longest run of the proposal that the rows predict, and the token after it. If all of it holds, what
    the rows further right predict is the next proposal. Greedy verification (Leviathan et al. 2022, arXiv 2211.17192).
    """


@dataclass(frozen=True, slots=True)
class Threshold:
    """Commits the first open slot, and those after it up to the first whose probability is below `prob` (Fast-dLLM,
    arXiv 2505.22618, section 3.3, kept contiguous)."""

    prob: float = 0.9


@dataclass(frozen=True, slots=True)
class EntropyBound:
    """Uniform-state denoising: slots are accepted in ascending order of entropy, the first of equal ones first, while
    the sum of the entropies accepted before does not exceed `bound`. An accepted slot takes the sample, another fresh
    noise, and no acceptance is remembered. When the most probable tokens are those of the step before and the mean
    entropy is below `settled`, they are committed, all at once. Sources: the EB-sampler (Ben-Hamu et al. 2025, arXiv
    2505.24857); the sampler of DiffusionGemma."""

    bound: float = 0.1
    settled: float = 0.005


Rule = Verified | Threshold | EntropyBound


def commit(
    state: CanvasState,
    outputs: Unmasked,
    first: Tensor,
    rows: Tensor,
    ends: Tensor,
    rule: Rule,
    noise: Tensor | None = None,
) -> None:
    """Takes one step's outputs into the state, in place.

    first, rows: int32 [C], where each canvas's rows begin in `outputs` and how many there are: at least one for each
    proposed slot and one more (one for each slot to `size` under `EntropyBound`); ends: int64 [E], the ids that end a
    gap; noise: int64 [C, S] random ids for `EntropyBound`, an input so that a trace can be replayed.

    Raises `ValueError` for `EntropyBound` without noise.
    """
    check_noise(rule, noise)
    if not len(outputs.token):
        return
    tokens, committed, size = state.tokens, state.committed[:, None], state.size[:, None]
    capacity = tokens.shape[1]
    slot = torch.arange(capacity, device=tokens.device)
    at = slot - committed
    fed = (at >= 0) & (at < rows[:, None]) & (slot < size)
    row = (first[:, None] + at).clamp(0, len(outputs.token) - 1)
    predicted, prob = outputs.token[row], outputs.prob[row]
    known, reach = committed + state.proposed[:, None], torch.minimum(committed + rows[:, None], size)

    def leftmost(where: Tensor) -> Tensor:
        """[C, 1], the first slot that holds, the capacity if none does."""
        return slot.expand_as(where).masked_fill(~where, capacity).amin(1, keepdim=True)

    written, kept = predicted, fed
    if isinstance(rule, Verified):
        agreed = torch.minimum(leftmost(fed & (predicted != tokens)), known)
        stop = torch.minimum(agreed + 1, reach)
        reach = torch.where(agreed == known, reach, stop)
    elif isinstance(rule, Threshold):
        stop = reach = torch.minimum(leftmost(fed & (at > 0) & ~(prob >= rule.prob)), reach)
    else:
        assert noise is not None
        entropy = torch.where(fed, outputs.entropy[row], torch.inf)
        ascending, order = entropy.sort(dim=1, stable=True)
        before = torch.cat([torch.zeros_like(ascending[:, :1]), ascending.cumsum(1)[:, :-1]], 1)
        accepted = torch.zeros_like(fed).scatter(1, order, before <= rule.bound)
        mean = entropy.masked_fill(~fed, 0.0).sum(1, keepdim=True) / fed.sum(1, keepdim=True)
        settled = (~fed | (predicted == state.predicted)).all(1, keepdim=True) & (mean < rule.settled)
        taken = torch.where(settled, predicted, outputs.sample[row])
        written = torch.where(fed & (settled | accepted), taken, noise)
        kept, stop = slot >= committed, torch.where(settled, size, committed)
        reach = stop

    end = leftmost(fed & torch.isin(written, ends))
    ended = end < stop
    stop = torch.minimum(stop, end)
    full = ~ended & (stop == capacity)
    grown = torch.where(~ended & (stop == size), (2 * size).clamp(max=capacity), size)
    live = state.status[:, None] == LIVE

    torch.where(live & kept, written, tokens, out=tokens)
    torch.where(live & fed, prob, state.prob, out=state.prob)
    torch.where(live & fed, predicted, state.predicted, out=state.predicted)
    for old, new in (
        (state.proposed, torch.where(ended, 0, reach - stop)),
        (state.status, torch.where(ended, ENDED, torch.where(full, FULL, LIVE))),
        (state.size, grown),
        (state.committed, stop),
    ):
        old.copy_(torch.where(live[:, 0], new[:, 0], old))


def check_noise(rule: Rule, noise: Tensor | None) -> None:
    """Raises `ValueError` where a rule needs noise and has none."""
    if isinstance(rule, EntropyBound) and noise is None:
        raise ValueError("EntropyBound needs `noise`, random ids for the slots that are not accepted")
