"""The bench of the families: that its models are the published ones' shapes, and that it works, in seconds."""

from __future__ import annotations

import math

import pytest
import torch
from infill_engine import catalogue
from infill_engine.config import EngineConfig
from infill_engine.families import families as served
from infill_engine.families.masked import KEPT

from bench import engine, families
from bench.random_models import DIFFUSION_GEMMA, DREAM, LLADA, OPEN_DCODER, Model, RandomCheckpoint, tiny

DREAM_7B, GEMMA_26B = Model("Dream 7B", DREAM), Model("DiffusionGemma 26B-A4B", DIFFUSION_GEMMA)


@pytest.mark.parametrize(
    ("config", "millions"), [(OPEN_DCODER, 494), (DREAM, 7616), (LLADA, 8016), (DIFFUSION_GEMMA, 25_251)]
)
def test_the_shapes_have_as_many_numbers_as_were_published(config, millions):
    assert round(Model("one", config).parameters / 1e6) == millions


@pytest.mark.parametrize(
    ("name", "config"),
    [("open-dcoder", OPEN_DCODER), ("dream", DREAM), ("llada", LLADA), ("diffusion-gemma", DIFFUSION_GEMMA)],
)
def test_what_a_model_needs_has_room_for_the_contexts_of_a_request(name, config):
    """As the catalogue tells before anything is fetched: they lie in two bytes a number, kept as on a CPU."""
    (kind,), model, setting = config["architectures"], catalogue.named(name), EngineConfig()
    before = setting.prefix_tokens + setting.snippets * (setting.snippet_tokens + 2)
    takes = served()[kind].sizes(config).context_bytes(before, setting.suffix_tokens, KEPT, 2)
    assert 0.9 * model.contexts <= takes <= max(model.contexts, catalogue.CONTEXT_BYTES)


@pytest.mark.parametrize("config", [OPEN_DCODER, DREAM])
def test_tensors_are_those_of_transformers(config):
    transformers = pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    model = tiny(Model("one", config))
    with torch.device("meta"):
        theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**model.config)).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    assert shapes == dict(model.tensors)


def test_the_same_name_has_the_same_numbers_and_no_two_rows_are_alike():
    model = tiny(DREAM_7B)
    one, other = (RandomCheckpoint(model, "cpu", torch.float32) for _ in range(2))
    for name in one.names:
        values = one.read(name).values
        assert torch.equal(values, other.read(name).values)
        assert values.dim() == 1 or len(values.unique(dim=0)) == len(values)
    name = "model.layers.1.mlp.up_proj.weight"
    matrix = one.read(name).values
    assert matrix.norm(dim=1).mean() == pytest.approx(1, rel=0.1)
    assert not torch.equal(matrix, one.read(name.replace("1", "0")).values)


def test_a_step_reads_all_weights_once_and_of_the_experts_those_that_are_chosen():
    dream = DREAM_7B.step(17, 16, 1120)
    embeddings = 152064 * 3584
    vectors = DREAM_7B.parameters - 2 * embeddings - dream.weights
    assert 0 < vectors < 1e-3 * DREAM_7B.parameters
    assert dream.head == embeddings
    attended = 17 * (1120 + 17) * 28 * 2 * 28 * 128
    assert dream.products == 17 * dream.weights + 16 * dream.head + attended
    one, many = (GEMMA_26B.step(rows, rows, 1024) for rows in (1, 256))
    active = one.weights + one.head
    assert 3.7e9 < active < 4.1e9  # A4B, as published
    assert many.weights == pytest.approx(GEMMA_26B.parameters - many.head, rel=0.001)
    assert families.on_paper(GEMMA_26B, "bf16")[8] == "10.6"
    assert math.isclose(many.bytes(1, 2, 2), many.weights + 2 * many.head + 2 * many.kept)


def test_the_largest_that_fits_has_whole_layers():
    assert families.largest(DREAM_7B, "stored", 2, 20 << 30) == DREAM_7B
    some = families.largest(GEMMA_26B, "stored", 2, 20 << 30)
    assert some is not None
    assert some.name.endswith("12 of 30 layers")
    assert some.config["text_config"]["layer_types"].count("full_attention") == 2
    assert families.largest(GEMMA_26B, "stored", 2, 1 << 30) is None


@pytest.mark.parametrize(("model", "dtype"), families.TINY, ids=lambda value: getattr(value, "kind", value))
def test_a_gap_is_filled(model, dtype, monkeypatch):
    monkeypatch.setattr(engine, "READ_BYTES", 1 << 20)
    with torch.inference_mode():
        row = families.measured(model, dtype, 1, 1, 40)
    assert row.passes == (48 if model.kind == "gemma" else 16)
    assert min(row.context, row.first, row.each, row.floor) > 0
    assert row.cold > row.each * row.passes / 4
    assert len(row.cells) == len(families.on_paper(GEMMA_26B, "fp8")) == len(families.HEADER)
