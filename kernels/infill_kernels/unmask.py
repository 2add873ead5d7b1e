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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """A model's output layer as the kernel needs it."""

    #: [V, D], any floating dtype. A row a token id.
    weight: Tensor
    #: Logits are squashed into (-softcap, softcap) where it is given.
    softcap: float | None = None
    #: bool [V], True where an id may never be produced; None: all may.
    banned: Tensor | None = None
    #: hidden [N, D] -> fp32 logits [N, V] before the cap, where something serves faster than `weight` (an int8 copy).
    project: Callable[[Tensor], Tensor] | None = None


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
    allowed: Tensor | None = None,
    noise: Tensor | None = None,
    soft: bool = False,
) -> Unmasked:
    """Reads one token a row off hidden states.

    hidden: [N, D]; allowed: bool [N, V], a further restriction a row (None: none); noise: float32 [N, V] standard
    Gumbel draws, an input so that a trace can be replayed; soft: also return the expected embedding.

    Raises `ValueError` for a temperature that is not positive and for a row that admits no id at all.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}; take `token` for a greedy choice")
    y = logits(hidden, head) / temperature
    admitted = _admitted(y.shape, head, allowed, y.device)
    if admitted is not None:
        if not bool(admitted.any(-1).all()):
            raise ValueError("a row admits no token: `banned` and `allowed` leave nothing")
        y = y.masked_fill(~admitted, -torch.inf)
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


def logits(hidden: Tensor, head: Head, ids: Tensor | None = None) -> Tensor:
    """float32 [N, V] logits; with `ids` (int64 [N, K]) only those, [N, K]: dot products, not a matrix product."""
    if ids is None:
        z = head.project(hidden) if head.project else (hidden.to(head.weight.dtype) @ head.weight.T).float()
    else:
        z = torch.einsum("nd,nkd->nk", hidden.float(), head.weight[ids].float())
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def _admitted(shape: torch.Size, head: Head, allowed: Tensor | None, device: torch.device) -> Tensor | None:
    if head.banned is None:
        return allowed
    free = ~head.banned.to(device).expand(shape)
    return free if allowed is None else free & allowed
