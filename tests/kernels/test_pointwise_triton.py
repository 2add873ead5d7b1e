"""Fused norms and gated activations against torch's, and against fp64."""

from __future__ import annotations

import pytest
import torch
from infill_kernels import pointwise

pytest.importorskip("triton")
from infill_kernels import pointwise_triton as fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 37), (2, 2816)])
def test_add_rmsnorm(shape, dtype):
    x, residual, weight = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype).flip(0), draw(shape[1], dtype=dtype)
    close = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
    for got, expected in zip(
        fused.add_rmsnorm(x, residual, weight, 1e-5), pointwise.add_rmsnorm(x, residual, weight, 1e-5), strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, **close)
    total = (x + residual).double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(fused.add_rmsnorm(x, residual, weight, 1e-5)[1].double(), exact, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2 * 1536), (3, 2 * 37)])
def test_gated(shape, activation, dtype):
    x = draw(*shape, dtype=dtype)
    x[0, :2] = torch.tensor([-60.0, 60.0])
    got = fused.gated(x, activation)
    assert got.dtype == dtype
    torch.testing.assert_close(got, pointwise.gated(x, activation), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
