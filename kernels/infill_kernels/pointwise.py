"""What stands between a layer's matrix products, row by row: RMSNorm behind a residual, and gated activations.

Knows nothing of models. This is the specification of the Triton kernels beside it. No model calls either yet, they use
torch's own functions: whether a fused kernel pays is for `python -m bench.kernels` to say, on a GPU.

    add_rmsnorm:  s = x + r          y = s / sqrt(mean(s^2) + eps) * w
    gated:        y = f(a) * b       f = silu or gelu (tanh form), (a, b) the two halves of a row

Sources: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4); SwiGLU and GeGLU (Shazeer 2020,
arXiv 2002.05202, equation 6); GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2).
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s, y) of x and residual [N, D] and weight [D], of one floating dtype; computed in fp32 from the rounded s."""
    total = x + residual
    return total, F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(x.dtype)


def gated(x: Tensor, activation: Activation) -> Tensor:
    """[N, F] of x [N, 2 F], a in the first half of a row; computed in fp32."""
    a, b = x.float().chunk(2, -1)
    return ((F.silu(a) if activation == "silu" else F.gelu(a, approximate="tanh")) * b).to(x.dtype)
