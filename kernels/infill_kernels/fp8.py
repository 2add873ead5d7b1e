"""Matrix products in FP8 (e4m3): weights with a scale an output, activations with a scale a row, rounded as they come.

Knows tensors, nothing of models.

    y_ro = s_r t_o sum_k X_rk W_ok         X, W in e4m3;  s_r = max_k |x_rk| / 448,  t_o = max_k |w_ok| / 448

No row's rounding depends on the others. Sources: e4m3 (Micikevicius et al. 2022, arXiv 2209.05433, table 1; 448 is its
largest number); dynamic quantisation a row as in LLM.int8 (arXiv 2208.07339, section 2.1).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from infill_kernels import dispatch

E4M3 = torch.float8_e4m3fn
#: The largest number of e4m3.
LARGEST = 448.0
#: A row's scale at least, so that one of zeros has one.
SMALLEST_SCALE = 1e-12
#: Both sizes of a weight are padded to a multiple of this, which the products ask for.
MULTIPLE = 16


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K], finite, of any floating dtype, as e4m3 [N, K] and the fp32 scale [N, 1] of each row. A row of zeros
    stays one; elements below 2^-19 of their row's largest become zero."""
    exact = x.float()
    scale = (exact.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (exact / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


class Fp8Linear:
    """y = x W^T with W kept in e4m3. Where the device has no FP8 products, W is widened for each product instead, and
    the rows of x are not rounded: then it saves memory, not time."""

    def __init__(self, weight: Tensor, device: torch.device | str = "cpu") -> None:
        """weight: [O, K], any floating dtype and device."""
        self._outs, self._ins = weight.shape
        padded = F.pad(weight.to(device).float(), (0, -self._ins % MULTIPLE, 0, -self._outs % MULTIPLE))
        self._values, scale = quantise_rows(padded)
        self._scale = scale.T.contiguous()  # [1, O]

    @classmethod
    def kept(cls, values: Tensor, scale: Tensor) -> Fp8Linear:
        """Of what is in e4m3 already: [O, K], both multiples of `MULTIPLE`, and fp32 [O, 1], on one device."""
        own = cls.__new__(cls)
        own._outs, own._ins = values.shape
        own._values, own._scale = values, scale.T.contiguous()
        return own

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self._values.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, K] -> [N, O] in x's dtype."""
        x = F.pad(x, (0, self._values.shape[1] - self._ins)) if self._ins % MULTIPLE else x
        if has_products(x.device):
            rows, scale = dispatch.quantise_rows(x)
            # Sums in fp32 are rounded to bf16, the only result that all devices give with a scale a row.
            y = torch._scaled_mm(rows, self._values.T, scale, self._scale, out_dtype=torch.bfloat16).to(x.dtype)
        else:
            y = (F.linear(x, self._values.to(x.dtype)).float() * self._scale).to(x.dtype)
        return y[:, : self._outs].contiguous()


@cache
def has_products(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 with a scale a row: tried once, since it depends on the device, on torch and
    on what torch was built with."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return False
    a, scale = torch.zeros(MULTIPLE, MULTIPLE, dtype=E4M3, device=device), torch.ones(MULTIPLE, 1, device=device)
    try:
        torch._scaled_mm(a, a.T, scale, scale.T, out_dtype=torch.bfloat16)
    except RuntimeError:  # also NotImplementedError
        return False
    return True
