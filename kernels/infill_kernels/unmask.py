"""`unmask`: from hidden states to tokens, without keeping the logits.

Knows nothing of models or canvases: a row is a hidden state, a column a token id. This is the torch reference, the
readable specification that a fused kernel is tested against.

For row i with hidden state h_i, weight rows w_t, soft cap c, temperature T and the set A_i of admitted ids:

    z_it = c tanh(h_i . w_t / c)         (just h_i . w_t without a cap)
    y_it = z_it / T                      t in A_i, minus infinity elsewhere
    lse_i = log sum_t exp(y_it)
    token_i = argmax_t y_it              sample_i = argmax_t (y_it + g_it)   (Gumbel-max, g given)
    prob_i = exp(y_i,token_i - lse_i)
    entropy_i = lse_i - sum_t p_it y_it  with p_it = exp(y_it - lse_i), a term of 0 outside A_i
    (all three computed on y_it - max_t y_it, which changes nothing but the rounding)

Sources: Gumbel-max sampling (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030); soft-capped logits (Gemma 2,
arXiv 2408.00118, section 2); entropy as log-sum-exp minus the mean logit, an identity of the softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Allowed:
    """What single rows are restricted to; the others are free and cost nothing. `Head.allow` builds and checks it."""

    #: bool [K, V], the sets, without the banned ids.
    mask: Tensor
    #: int32 [N], the index of each row's set, -1 for a free row.
    row: Tensor


class Projection(Protocol):
    """Another form of a head's weight, with a product and an `unmask` of its own."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> fp32 logits [N, V] before the cap."""

    def unmask(self, hidden: Tensor, head: Head, *, temperature: float, allowed: Allowed | None) -> Unmasked:
        """`unmask` without noise and soft embedding."""


@dataclass(frozen=True, slots=True)
class Head:
    """A model's output layer as the kernel needs it."""

    #: [V, D], any floating dtype. A row a token id.
    weight: Tensor
    #: Logits are squashed into (-softcap, softcap) where it is given.
    softcap: float | None = None
    #: bool [V], True where an id may never be produced; None: all may. Kept on the weight's device.
    banned: Tensor | None = None
    #: Where something serves faster than `weight`, such as an int8 copy.
    project: Projection | None = None
    #: bool [V] on the host, the ids that are not banned: sets are checked against it without waiting for the device.
    free: Tensor = field(init=False)

    def __post_init__(self) -> None:
        vocab = len(self.weight)
        free = torch.ones(vocab, dtype=torch.bool) if self.banned is None else ~self.banned.cpu()
        if free.shape != (vocab,) or not bool(free.any()):
            raise ValueError(f"`banned` must be bool [{vocab}] and leave an id that may be produced")
        object.__setattr__(self, "free", free)
        if self.banned is not None:
            object.__setattr__(self, "banned", self.banned.to(self.weight.device))

    def allow(self, rows: int, sets: Mapping[int, Tensor]) -> Allowed:
        """Restricts some of `rows` rows, each to its own set of ids, bool [V] on the host.

        Raises `ValueError` for a row that would admit no id.
        """
        mask = torch.stack([*sets.values()]) & self.free if sets else self.free[None][:0]
        empty = [row for row, some in zip(sets, mask.any(-1).tolist(), strict=True) if not some]
        if empty:
            raise ValueError(f"row {empty[0]} admits no token: its set has only banned ids or none")
        row = torch.full((rows,), -1, dtype=torch.int32)
        row[list(sets)] = torch.arange(len(sets), dtype=torch.int32)
        device = self.weight.device
        return Allowed(mask.to(device, non_blocking=True), row.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Unmasked:
    """What is known of each row; all on the hidden states' device."""

    #: int64 [N], the most probable admitted id.
    token: Tensor
    #: int64 [N], an id drawn with the given noise; equals `token` without noise.
    sample: Tensor
    #: float32 [N] in (0, 1], the probability of `token`.
    prob: Tensor
    #: float32 [N], log-sum-exp of the admitted, tempered logits.
    lse: Tensor
    #: float32 [N], entropy in nats.
    entropy: Tensor
    #: [N, D] in the weight's dtype, sum_t p_it w_t, where asked for.
    soft: Tensor | None = None

    def first(self, rows: int) -> Unmasked:
        """The same of the first rows only."""
        return Unmasked(
            token=self.token[:rows],
            sample=self.sample[:rows],
            prob=self.prob[:rows],
            lse=self.lse[:rows],
            entropy=self.entropy[:rows],
            soft=None if self.soft is None else self.soft[:rows],
        )


def unmask(
    hidden: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    allowed: Allowed | None = None,
    noise: Tensor | None = None,
    soft: bool = False,
) -> Unmasked:
    """Reads one token a row off hidden states.

    hidden: [N, D]; allowed: a further restriction of single rows (None: none); noise: float32 [N, V] standard Gumbel
    draws, an input so that a trace can be replayed; soft: also return the expected embedding. Ties go to the lowest id.

    Raises `ValueError` for a temperature that is not positive. A row that admits no id cannot be asked for: `Head` and
    `Head.allow` refuse it.
    """
    check_temperature(temperature)
    y = admitted(hidden, head, allowed, temperature)
    top, token = y.max(-1)
    y0 = y - top[:, None]  # from the top: at logits of some hundreds, lse - mean of y itself is off in the third digit
    weights = y0.exp()
    total = weights.sum(-1)
    p = weights / total[:, None]
    mean = torch.where(p > 0, p * y0, 0.0).sum(-1)  # 0 * -inf would be NaN; a masked logit adds nothing
    return Unmasked(
        token=token,
        sample=token if noise is None else (y + noise).argmax(-1),
        prob=1 / total,
        lse=top + total.log(),
        entropy=(total.log() - mean).clamp(min=0.0),
        soft=(p.to(head.weight.dtype) @ head.weight) if soft else None,
    )


def check_temperature(temperature: float) -> None:
    """Raises `ValueError` for a temperature that no softmax has."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}; take `token` for a greedy choice")


def logits(hidden: Tensor, head: Head, ids: Tensor | None = None) -> Tensor:
    """float32 [N, V] logits; with `ids` (int64 [N, K]) only those, [N, K]: dot products, not a matrix product."""
    if ids is None:
        z = head.project(hidden) if head.project else (hidden.to(head.weight.dtype) @ head.weight.T).float()
    else:
        z = torch.einsum("nd,nkd->nk", hidden.float(), head.weight[ids].float())
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def admitted(hidden: Tensor, head: Head, allowed: Allowed | None, temperature: float) -> Tensor:
    """float32 [N, V] logits of hidden states [N, D] over a temperature, -inf for ids that the head bans, or
    that a row's restriction leaves out."""
    y = logits(hidden, head) / temperature
    if head.banned is not None:
        y = y.masked_fill(head.banned, -torch.inf)
    if allowed is not None:
        some = allowed.row >= 0
        y[some] = y[some].masked_fill(~allowed.mask[allowed.row[some]], -torch.inf)
    return y
