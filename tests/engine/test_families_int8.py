"""The mask-token families by the compiled int8 kernels of the CPU, against torch's products of the same weights.

Where the weights are whole steps of int8 already, what is left is the rounding of activations to 14 bits and of keys
and values to fp16; else the error of int8 itself.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from infill_engine import models
from infill_engine.checkpoint import Loaded, needed_bytes, opened
from infill_engine.config import EngineConfig
from infill_engine.core import ModelError, complete
from infill_engine.families.masked import EXACT, Caching, MaskedDenoiser
from infill_kernels import logits, unmask

cpu = pytest.importorskip("infill_kernels.cpu", reason="numba is not installed")
pytestmark = pytest.mark.skipif(not cpu.available(), reason="this processor has no int8 kernels")
pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")

from small_checkpoint import save  # noqa: E402 - it needs transformers
from test_families import MASK, PREFIX, SLOTS, TEXT, Checkpoint, filled, grown, laid_out, qwen, rows  # noqa: E402

#: Open-dCoder's heads, seven to a key head, of a size that the kernels take, and an FFN of two segments.
SIZES = {"hidden_size": 96, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 32}
WIDE = SIZES | {"intermediate_size": cpu.SEGMENT + 52, "num_hidden_layers": 2, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def team() -> cpu.Team:
    return cpu.Team(2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return qwen(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One whose matrices are int8 already."""
    found = qwen(tmp_path_factory.mktemp("whole"), **WIDE)
    with torch.no_grad():
        for weight in found.model.parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_((weight / scale).round() * scale)
    found.model.save_pretrained(found.folder)
    return found


def int8(checkpoint: Checkpoint, team: cpu.Team, caching: Caching = EXACT, config: Any = None) -> MaskedDenoiser:
    found = opened(checkpoint.folder)
    text, weights = [bytes([i]) for i in range(TEXT)], Loaded(found, "cpu", torch.float32, "stored")
    return checkpoint.family({**found.config, **(config or {})}, weights, text, caching=caching, team=team)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error."""
    return float((found.float() - wanted).norm() / wanted.norm())


@torch.inference_mode()
@pytest.mark.parametrize(("which", "most"), [("whole", 4e-3), ("checkpoint", 4e-2)])
def test_the_kernels_say_what_torch_says_but_for_the_rounding(request, team, which, most):
    checkpoint = request.getfixturevalue(which)
    both = checkpoint.ours(), int8(checkpoint, team)
    (exact,), (found,) = (rows(ours, [laid_out(ours, SLOTS)[0]], laid_out(ours, SLOTS)[1]) for ours in both)
    assert 0 < off(found, exact) < most
    z, rounded = (logits(hidden, ours.head) for hidden, ours in zip((exact, found), both, strict=True))
    assert off(rounded, z) < 1.5 * most
    said, told = (unmask(hidden, ours.head) for hidden, ours in zip((exact, found), both, strict=True))
    torch.testing.assert_close(told.lse, said.lse, atol=10 * most, rtol=0)
    torch.testing.assert_close(told.entropy, said.entropy, atol=20 * most, rtol=0)


@torch.inference_mode()
def test_a_row_is_the_same_bit_for_bit_whatever_else_is_in_its_pass(checkpoint, team):
    ours = int8(checkpoint, team)
    both = [laid_out(ours, slots, PREFIX[i:] * 4) for i, slots in enumerate([SLOTS, [MASK], [MASK] * 20, [65, MASK]])]
    canvases, contexts = zip(*both, strict=True)
    together, _ = ours.denoise(canvases, contexts, [None] * len(canvases))
    for hidden, canvas, context in zip(together, canvases, contexts, strict=True):
        (alone,), _ = ours.denoise([canvas], [context], [None])
        assert torch.equal(hidden, alone)


@pytest.mark.parametrize("caching", [Caching(3), Caching(3, dual=True), Caching(3, dual=True, across=True)])
def test_what_is_kept_of_keys_and_values_is_what_torch_keeps(whole, team, caching):
    """Passes in which all are computed and passes that read them again, and the same request once more."""

    def passes(ours: MaskedDenoiser) -> list[torch.Tensor]:
        canvases, contexts = filled(ours)
        complete(ours.encode(PREFIX * 4, contexts.prefix))
        canvases = [replace(canvas, origin=contexts.prefix.length) for canvas in canvases]
        longer = grown(canvases[0])  # as it grows and shrinks
        return rows(ours, canvases, contexts) + rows(ours, canvases[1:], contexts) + rows(ours, longer, contexts)

    for found, wanted in zip(passes(int8(whole, team, caching)), passes(whole.ours(caching=caching)), strict=True):
        assert off(found, wanted) < 6e-3


@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_of_their_memory_is_what_they_hold(tmp_path, team, tied):
    """Every matrix in int8, the tables as the file has them, and a head of its own in both."""
    found = qwen(tmp_path, **WIDE | {"tie_word_embeddings": tied})
    found.model.bfloat16().save_pretrained(found.folder)
    ours = int8(found, team)
    decoder, head = ours._decoder, ours.head
    arrays = [*decoder.stack.weights, *head.project._weight]
    tables = {tensor.data_ptr(): tensor.nbytes for tensor in (decoder.embedding, head.weight)}
    held = sum(array.nbytes for array in arrays) + sum(tables.values()) + decoder.norm.nbytes
    assert needed_bytes(opened(found.folder), "int8", 4, compiled=True) == pytest.approx(held, rel=0.02)


def test_how_far_the_kernels_round_is_measured(checkpoint, team):
    """Of each of the seven matrices of a layer, as of any other form."""
    found = opened(checkpoint.folder)
    weights = Loaded(found, "cpu", torch.float32, "stored")
    checkpoint.family(found.config, weights, [bytes([i]) for i in range(TEXT)], caching=EXACT, team=team)
    errors = weights.errors["int8"]
    assert len(errors) == 7 * WIDE["num_hidden_layers"]
    exact = found.read("model.layers.0.mlp.up_proj.weight").rows(0, 64, torch.float32)
    rounded = cpu.Int8Weight.of(exact)
    values = torch.from_numpy(rounded.values).permute(0, 2, 1, 3).reshape(-1, rounded.ins)[:64, : exact.shape[1]]
    off = (values * torch.from_numpy(rounded.scale)[:64, None] - exact).norm() / exact.norm()
    assert any(error == pytest.approx(float(off), rel=1e-3) for error in errors)
    assert weights.told.startswith(f"{len(errors)} matrices of int8, off by at most ")


def test_pages_come_back_and_their_lack_is_a_matter_of_memory(checkpoint, team):
    ours = int8(checkpoint, team, Caching(2, dual=True, across=True))
    pool, canvases = ours._pool, filled(ours)[0]
    before = pool.free
    kept = filled(ours)[1]
    rows(ours, canvases, kept)
    assert pool.free < before
    kept.prefix.truncate(0)
    assert pool.free == before
    taken = [pool.take() for _ in range(pool.free)]
    with pytest.raises(MemoryError, match="page"):
        rows(ours, canvases, kept)
    pool.give(taken)
    assert len(rows(ours, canvases, kept)) == len(canvases)


@pytest.mark.parametrize(("name", "value"), [("num_attention_heads", 7), ("num_key_value_heads", 1), ("head_dim", 64)])
def test_sizes_that_are_not_the_weights_are_refused(checkpoint, team, name, value):
    """Compiled code would read beside what it is given."""
    with pytest.raises(ModelError, match="the config is another's"):
        int8(checkpoint, team, config={name: value})


def test_a_folder_is_served_in_int8_where_the_kernels_take_it(tmp_path: Path, team):
    def loaded(**changed: Any) -> Any:
        engine = models.load(EngineConfig(model=str(tmp_path), cache_mb=16, **changed), lambda *_: None)
        return engine.dtype, engine._denoiser.head.project is not None

    save(tmp_path)
    assert loaded() == ("fp32", False)  # its heads are too small
    assert loaded(dtype="int8") == ("int8", False)
    save(tmp_path, head_dim=32)
    assert loaded() == loaded(dtype="int8") == ("int8", True)
    assert loaded(dtype="fp32") == ("fp32", False)


@torch.inference_mode()
def test_an_embedding_stays_in_the_type_of_its_file(checkpoint, team, tmp_path):
    copy.deepcopy(checkpoint.model).bfloat16().save_pretrained(tmp_path)
    ours = int8(Checkpoint(tmp_path, checkpoint.family, None), team)
    assert ours.head.weight.dtype == torch.bfloat16
    (exact,), (found,) = (
        rows(one, [laid_out(one, SLOTS)[0]], laid_out(one, SLOTS)[1]) for one in (checkpoint.ours(), ours)
    )
    assert off(found, exact) < 5e-2
