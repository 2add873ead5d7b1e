"""The choice of a serving type: the fastest that says the same, measured once a machine."""

from __future__ import annotations

import pytest
import torch
from infill_engine.fake import FakeDenoiser
from infill_engine.serving import CONTEXT, READ, choose
from infill_kernels import Head

TOKENS = [i % 250 for i in range(CONTEXT + READ + 8)]


class Typed(FakeDenoiser):
    """A fake model as one type would serve it: so slow, and with so much of its head replaced by noise."""

    def __init__(self, step_s: float, noise: float) -> None:
        super().__init__({}, step_s=step_s)
        random = torch.Generator().manual_seed(0)
        weight = self.head.weight + noise * torch.randn(self.head.weight.shape, generator=random)
        self.head = Head(weight, banned=self.head.banned)


KINDS = {"fp32": (0.02, 0.0), "bf16": (0.03, 0.0), "int8": (0.0, 0.0), "int4": (0.0, 1.0)}


@pytest.fixture
def built():
    return []


@pytest.fixture
def build(built):
    def make(dtype):
        built.append(dtype)
        return Typed(*KINDS[dtype])

    return make


def test_the_fastest_that_says_the_same_is_taken(build, tmp_path):
    dtype, measured = choose(
        ("fp32", "bf16", "int8", "int4"), build, TOKENS, "model", tmp_path / "new" / "serving.json"
    )
    assert dtype == "int8"
    assert not measured["int4"].good
    assert measured["int8"].nats == pytest.approx(0, abs=1e-6)
    assert measured["bf16"].ms > measured["int8"].ms


def test_without_a_faster_one_it_is_fp32(build, tmp_path):
    assert choose(("fp32", "int4"), build, TOKENS, "model", tmp_path / "serving.json")[0] == "fp32"


def test_what_was_measured_is_remembered_for_the_same_model_and_types(build, built, tmp_path):
    path = tmp_path / "serving.json"
    first = choose(("fp32", "int8"), build, TOKENS, "model", path)
    assert built == ["fp32", "int8"]
    assert choose(("fp32", "int8"), build, TOKENS, "model", path) == first
    assert len(built) == 2
    choose(("fp32", "int8"), build, TOKENS, "another", path)
    choose(("fp32",), build, TOKENS, "another", path)
    assert len(built) == 5


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\xff\x00", b'{"machine": 1}'])
def test_a_broken_memory_is_measured_anew(build, built, tmp_path, garbage):
    path = tmp_path / "serving.json"
    path.write_bytes(garbage)
    assert choose(("fp32", "int8"), build, TOKENS, "model", path)[0] == "int8"
    choose(("fp32", "int8"), build, TOKENS, "model", path)
    assert len(built) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(build, tmp_path):
    (tmp_path / "file").write_text("")
    assert choose(("fp32", "int8"), build, TOKENS, "model", tmp_path / "file" / "serving.json")[0] == "int8"
