"""A mixture of experts: each row goes through the few networks that a router chose for it.

    y_i = sum_j p_ij  W2_e f(W1_e x_i)        e = e_ij, the j-th expert of row i; f halves: act(gate) * up

Knows tensors, nothing of models. Rows are put in the order of their experts, so that each expert's weights are read
once a pass. Where they are bf16, or FP8 with a scale an output, on a GPU that has them, these are torch's grouped
products, and the host does not wait to learn who got how many rows; other forms go expert by expert.

Source: grouped products for mixtures of experts as in MegaBlocks (Gale et al. 2022, arXiv 2211.15841, section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from infill_kernels import dispatch
from infill_kernels.fp8 import E4M3, MULTIPLE
from infill_kernels.stored import Dense, Scaled, Stored, blocked

#: Rows [N, K] in the order of their groups, and int32 [E] where each group ends -> [N, O].
Grouped = Callable[[Tensor, Tensor], Tensor]


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

    to_inner, to_answers = _grouped(x, gate_up), _grouped(x, down)
    if to_inner is not None and to_answers is not None:
        ends = counts.cumsum(0).int()
        answers = to_answers(gated(to_inner(rows, ends)), ends)
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


def _grouped(x: Tensor, weight: Stored) -> Grouped | None:
    """torch's grouped product with [E, O, K] for rows like x; None where there is none that reads all at once."""
    if isinstance(weight, Dense) and x.dtype == weight.values.dtype == torch.bfloat16 and _has_grouped(x.device):
        return lambda rows, ends: F.grouped_mm(rows, weight.values.transpose(-1, -2), offs=ends)
    if isinstance(weight, Scaled) and _an_output(weight) and _has_scaled(x.device):
        scale = weight.scale[..., 0].expand(weight.shape[:2]).contiguous()

        def product(rows: Tensor, ends: Tensor) -> Tensor:
            rounded, steps = dispatch.quantise_rows(rows)
            turned = weight.values.transpose(-1, -2)
            y = torch._scaled_grouped_mm(rounded, turned, steps[:, 0], scale, offs=ends, out_dtype=torch.bfloat16)
            return y.to(rows.dtype)

        return product
    return None


def _an_output(weight: Scaled) -> bool:
    """Whether there is one scale an output, or one for all, and the sizes are those that the product takes."""
    _, outs, ins = weight.shape
    return (
        weight.scale.shape[-1] == 1 and weight.scale.shape[-2] in (1, outs) and outs % MULTIPLE == ins % MULTIPLE == 0
    )


@cache
def _has_grouped(device: torch.device) -> bool:
    return device.type == "cuda" and hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _has_scaled(device: torch.device) -> bool:
    """Whether the device has grouped products of e4m3: tried once."""
    if device.type != "cuda" or not hasattr(torch, "_scaled_grouped_mm"):
        return False
    rows, weight = (torch.zeros(*size, MULTIPLE, dtype=E4M3, device=device) for size in ((2,), (2, MULTIPLE)))
    scales = torch.ones(2, device=device), torch.ones(2, MULTIPLE, device=device)
    ends = torch.tensor([1, 2], dtype=torch.int32, device=device)
    try:
        torch._scaled_grouped_mm(rows, weight.transpose(-1, -2), *scales, offs=ends, out_dtype=torch.bfloat16)
    except RuntimeError:  # also NotImplementedError
        return False
    return True
