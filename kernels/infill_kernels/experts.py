"""A mixture of experts: each row goes through the few networks that a router chose for it.

    y_i = sum_j p_ij  W2_e f(W1_e x_i)        e = e_ij, the j-th expert of row i; f halves: act(gate) * up

Knows tensors, nothing of models. Rows are put in the order of their experts, so that each expert's weights are read
once a pass. Where they are bf16 on a GPU that is torch's grouped product, and the host does not wait to learn who got
how many rows; other forms go expert by expert.

Source: grouped products for mixtures of experts as in MegaBlocks (Gale et al. 2022, arXiv 2211.15841, section 4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from infill_kernels.stored import Dense, Stored, blocked


def mixture(
    x: Tensor,
    expert: Tensor,
    share: Tensor,
    gate_up: Stored,
    down: Stored,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """x [N, D] -> [N, D] in x's dtype, summed in fp32.

    expert: int64 [N, k], the experts of each row; share: fp32 [N, k], what each one's answer counts; gate_up:
    [E, 2 I, D], the gate's outputs first; down: [E, D, I]; activation: of the gate.
    """
    n, k = expert.shape
    order = expert.flatten().argsort(stable=True)
    rows = x[order // k]
    counts = torch.bincount(expert.flatten(), minlength=gate_up.shape[0])

    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return activation(gate) * up

    if isinstance(gate_up, Dense) and isinstance(down, Dense) and _grouped(x, gate_up.values):
        ends = counts.cumsum(0).int()
        inner = gated(F.grouped_mm(rows, gate_up.values.transpose(-1, -2), offs=ends))
        answers = F.grouped_mm(inner, down.values.transpose(-1, -2), offs=ends)
    else:
        answers = torch.empty_like(rows)
        first = 0
        for number, count in enumerate(counts.tolist()):
            if count:
                own = slice(first, first + count)
                answers[own] = _product(gated(_product(rows[own], gate_up[number])), down[number])
                first += count
    weighted = answers.float() * share.flatten()[order, None]
    return torch.zeros(n, x.shape[1], device=x.device).index_add_(0, order // k, weighted).to(x.dtype)


def _product(x: Tensor, weight: Stored) -> Tensor:
    return F.linear(x, weight.values) if isinstance(weight, Dense) else blocked(x, weight)


def _grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a grouped product for these that does not go expert by expert itself."""
    return (
        x.device.type == "cuda"
        and x.dtype == weight.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )
