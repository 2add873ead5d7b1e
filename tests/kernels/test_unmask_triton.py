"""The Triton `unmask` against the reference, on the GPU where there is one and interpreted where there is none."""

from __future__ import annotations

import math

import pytest
import torch
from infill_kernels import Head, Unmasked, backend
from infill_kernels.unmask import unmask as reference

pytest.importorskip("triton")
from infill_kernels import unmask_triton as fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gumbel(seed: int, *shape: int) -> torch.Tensor:
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).clamp(1e-9, 1 - 1e-7)
    return -torch.log(-torch.log(uniform)).to(DEVICE)


def some(seed: int, share: float, vocab: int) -> torch.Tensor:
    return torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) < share


def close(got: Unmasked, expected: Unmasked, tolerance: float = 1e-5, soft: float = 1e-4) -> None:
    assert torch.equal(got.token, expected.token)
    assert torch.equal(got.sample, expected.sample)
    torch.testing.assert_close(got.prob, expected.prob, rtol=10 * tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse, expected.lse, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.entropy, expected.entropy, rtol=10 * tolerance, atol=10 * tolerance)
    if expected.soft is not None:
        assert got.soft is not None
        torch.testing.assert_close(got.soft.float(), expected.soft.float(), rtol=soft, atol=soft)


@pytest.mark.parametrize(
    ("rows", "vocab", "width", "options"),
    [
        (1, 300, 64, "plain"),
        (1, 2, 1, "all"),
        (3, 700, 37, "all"),
        (17, 131, 99, "plain"),
        (33, 400, 64, "all"),
        (130, 257, 16, "all"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_agrees_with_the_reference_in_fp32(rows, vocab, width, dtype, options, monkeypatch):
    hidden, weight = normal(0, rows, width).to(dtype), normal(1, vocab, width).to(dtype)
    plain = options == "plain"
    banned = None if plain else some(2, 0.3, vocab) & (torch.arange(vocab) != 1)
    sets = {} if plain else {i: some(i, 0.1, vocab) | (torch.arange(vocab) == 1) for i in range(0, rows, 2)}
    noise = None if plain else gumbel(3, rows, vocab)
    monkeypatch.setattr(fused, "CHUNK", rows * 256)  # so that these small vocabularies take several chunks

    def run(unmask, weight: torch.Tensor) -> Unmasked:
        head = Head(weight, None if plain else 30.0, banned)
        allowed = head.allow(rows, sets) if sets else None
        temperature = 1.0 if plain else 0.7
        return unmask(hidden, head, temperature=temperature, allowed=allowed, noise=noise, soft=True)

    # fp32 dots of 128 products differ by their order; the fp16 kernel sums in fp32 too, only its result is rounded.
    close(run(fused.unmask, weight), run(reference, weight.float()), 2e-5, 1e-4 if dtype == torch.float32 else 2e-3)


def test_ties_go_to_the_lowest_id_of_all_tiles():
    weight = torch.zeros(700, 16, device=DEVICE)
    weight[[650, 140, 135, 400]] = 1.0
    out = fused.unmask(torch.ones(1, 16, device=DEVICE), Head(weight), noise=torch.zeros(1, 700, device=DEVICE))
    assert out.token.tolist() == out.sample.tolist() == [135]


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_extreme_logits(scale):
    hidden = torch.tensor([[scale], [0.0], [-scale]], device=DEVICE)
    head = Head(normal(4, 500, 1))
    close(fused.unmask(hidden, head, soft=True), reference(hidden, head, soft=True))


def test_a_single_admitted_id_behind_tiles_of_banned_ones():
    banned = torch.arange(600) != 430
    out = fused.unmask(normal(5, 2, 8), Head(normal(6, 600, 8), banned=banned), noise=gumbel(7, 2, 600), soft=True)
    assert out.token.tolist() == out.sample.tolist() == [430, 430]
    assert out.prob.tolist() == [1.0, 1.0]
    assert out.entropy.tolist() == [0.0, 0.0]
    torch.testing.assert_close(out.soft, normal(6, 600, 8)[[430, 430]])


def test_a_replay_gives_the_same_bits():
    hidden, head, noise = normal(8, 5, 32), Head(normal(9, 400, 32)), gumbel(10, 5, 400)
    first, again = (fused.unmask(hidden, head, noise=noise, soft=True) for _ in range(2))
    for name in ("token", "sample", "prob", "lse", "entropy", "soft"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert not torch.equal(first.sample, first.token)


def test_no_rows_are_no_trouble():
    out = fused.unmask(normal(0, 0, 16), Head(normal(1, 40, 16)), soft=True)
    assert out.token.shape == out.prob.shape == (0,)
    assert out.soft is not None
    assert out.soft.shape == (0, 16)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        fused.unmask(normal(0, 1, 3), Head(normal(1, 5, 3)), temperature=temperature)


def test_a_transposed_weight_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        fused.unmask(normal(0, 1, 3), Head(normal(1, 3, 5).T))


def test_tensors_on_the_cpu_are_served_by_torch_and_on_a_gpu_by_triton():
    assert backend("cpu") == "torch"
    assert backend("cuda:1") == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 64, 256])
@pytest.mark.parametrize("width", [576, 2816])
def test_bf16_is_no_worse_than_torchs_own(rows, width):
    hidden, weight = (x.bfloat16() for x in (normal(0, rows, width), normal(1, 5000, width) / width**0.5))
    exact = reference(hidden.float(), Head(weight.float(), 30.0), soft=True)
    own = reference(hidden, Head(weight, 30.0), soft=True)
    got = fused.unmask(hidden, Head(weight, 30.0), soft=True)
    for name in ("prob", "lse", "entropy", "soft"):
        errors = [(getattr(x, name).float() - getattr(exact, name).float()).abs().max().item() for x in (got, own)]
        assert errors[0] <= errors[1] + 1e-5, name
    assert (got.token == exact.token).float().mean() >= (own.token == exact.token).float().mean()


@pytest.mark.gpu
def test_weights_of_more_than_2_to_the_31_numbers():
    weight = torch.zeros(262144, 8320, dtype=torch.float16, device=DEVICE)
    weight[-1] = 0.01
    out = fused.unmask(torch.ones(2, 8320, device=DEVICE), Head(weight), soft=True)
    assert out.token.tolist() == [262143, 262143]
    torch.testing.assert_close(out.soft, weight[[-1, -1]], rtol=1e-2, atol=1e-4)
