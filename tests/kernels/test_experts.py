"""The mixture of experts against its formula, in each form of weights, and the grouped products that a GPU has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from infill_kernels import experts
from infill_kernels.experts import mixture
from infill_kernels.fp8 import E4M3, quantise_rows
from infill_kernels.stored import Dense, Grouped, Scaled, Stored, together
from torch import Tensor

EXPERTS, TOP, WIDTH, INNER = 5, 2, 32, 48


def drawn(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, their experts and shares, and both weights; the last expert is nobody's."""
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=random)
    share, expert = torch.rand(rows, EXPERTS - 1, generator=random).topk(TOP)
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=random) / WIDTH**0.5
    return x, expert, share, gate_up, torch.randn(EXPERTS, WIDTH, INNER, generator=random) / INNER**0.5


def formula(x: Tensor, expert: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for row, chosen, shares in zip(x, expert, share, strict=True):
        answers = []
        for e, p in zip(chosen.tolist(), shares, strict=True):
            gate, up = (gate_up[e] @ row).chunk(2)
            answers.append(p * (down[e] @ (F.silu(gate) * up)))
        rows.append(torch.stack(answers).sum(0))
    return torch.stack(rows)


def as_fp8(weight: Tensor, whole: bool = False) -> Scaled:
    """With a scale an output, or one an expert."""
    if not whole:
        return Scaled(*quantise_rows(weight), (1, weight.shape[-1]))
    scale = weight.abs().amax((1, 2), keepdim=True) / 448
    return Scaled((weight / scale).to(E4M3), scale, tuple(weight.shape[1:]))


def as_int8(weight: Tensor) -> Grouped:
    return Grouped.of(weight, 8, 16)


def dequantised(weight: Stored) -> Tensor:
    return torch.stack([weight[e].rows(0, weight.shape[1], torch.float32) for e in range(EXPERTS)])


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("form", [Dense, as_fp8, as_int8])
def test_it_is_what_the_formula_says(rows, form):
    x, expert, share, *weights = drawn(rows)
    gate_up, down = map(form, weights)
    wanted = formula(x, expert, share, dequantised(gate_up), dequantised(down))
    torch.testing.assert_close(mixture(x, expert, share, gate_up, down, F.silu), wanted, atol=1e-5, rtol=1e-4)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that has grouped products, spelled out; of FP8's torch itself checks the arguments."""
    called = []

    def products(rows: Tensor, turned: Tensor, ends: Tensor) -> Tensor:
        assert ends.dtype == torch.int32
        assert int(ends[-1]) == len(rows)
        starts = [0, *ends.tolist()]
        return torch.cat([rows[a:b] @ turned[e] for e, (a, b) in enumerate(pairwise(starts))])

    def dense(rows: Tensor, turned: Tensor, *, offs: Tensor) -> Tensor:
        called.append("dense")
        return products(rows.float(), turned.float(), offs).to(rows.dtype)

    check = torch._scaled_grouped_mm

    def scaled(rows: Tensor, turned: Tensor, steps: Tensor, scale: Tensor, **rest: Any) -> Tensor:
        called.append("scaled")
        ends = rest.pop("offs")
        on_meta = [x.to("meta") for x in (rows, turned, steps, scale)]
        shape = check(*on_meta, offs=ends.to("meta"), **rest).shape
        y = products(rows.float() * steps[:, None], turned.float() * scale[:, None], ends)
        assert y.shape == shape
        return y.to(rest["out_dtype"])

    monkeypatch.setattr(experts, "_has_grouped", lambda device: True)
    monkeypatch.setattr(experts, "_has_scaled", lambda device: True)
    monkeypatch.setattr(F, "grouped_mm", dense)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    return called


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("whole", [False, True])
def test_fp8_goes_through_one_grouped_product_a_matrix(grouped, rows, whole):
    x, expert, share, *weights = drawn(rows)
    gate_up, down = (as_fp8(weight, whole) for weight in weights)
    found = mixture(x.bfloat16(), expert, share, gate_up, down, F.silu)
    assert grouped == ["scaled", "scaled"]
    wanted = formula(x, expert, share, dequantised(gate_up), dequantised(down))
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()  # e4m3 has three bits behind the point


def test_bf16_goes_through_one_grouped_product_a_matrix(grouped):
    x, expert, share, *weights = drawn(9)
    gate_up, down = (Dense(weight.bfloat16()) for weight in weights)
    found = mixture(x.bfloat16(), expert, share, gate_up, down, F.silu)
    assert grouped == ["dense", "dense"]
    wanted = formula(x, expert, share, *weights)
    assert (found.float() - wanted).norm() < 0.02 * wanted.norm()


def test_what_has_no_grouped_product_goes_expert_by_expert(grouped):
    x, expert, share, *weights = drawn(9)
    blocks = [Scaled(*quantise_rows(weight), (1, weight.shape[-1])) for weight in weights]
    odd = Scaled(blocks[1].values, blocks[1].scale.repeat(1, 1, 2), (1, INNER // 2))  # a scale for half a row
    found = mixture(x, expert, share, blocks[0], odd, F.silu)
    assert grouped == []
    wanted = formula(x, expert, share, dequantised(blocks[0]), dequantised(odd))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_matrices_of_one_form_go_together():
    weight = torch.randn(EXPERTS, 16, 32)
    for form in (Dense, as_fp8):
        whole = form(weight)
        joined = together([whole[e] for e in range(EXPERTS)])
        assert joined is not None
        assert joined.shape == whole.shape
        assert torch.equal(dequantised(joined), dequantised(whole))
    assert together([Dense(weight[0]), as_fp8(weight)[1]]) is None
    assert together([as_int8(weight)[0], as_int8(weight)[1]]) is None
