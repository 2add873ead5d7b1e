"""DiffusionGemma against transformers' own, on a tiny random model that is saved and loaded as a real folder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from infill_engine.checkpoint import Loaded, opened
from infill_engine.core import complete
from infill_engine.families.diffusion_gemma import _KV, DiffusionGemma, Shape
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.11", reason="transformers with DiffusionGemma")

VOCAB, WINDOW, CANVAS = 128, 16, 8


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' model, every weight random, those that begin as ones too: a norm left out would not show."""
    torch.manual_seed(0)
    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        max_position_embeddings=512,
        use_bidirectional_attention="vision",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
    )
    config = transformers.DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=CANVAS,
        boi_token_id=120,
        eoi_token_id=121,
        image_token_id=122,
    )
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        unlike = {tensor.data_ptr(): (name, tensor) for name, tensor in model.state_dict().items()}
        for name, tensor in unlike.values():
            if name.endswith(("norm.weight", "scale", "layer_scalar", "norm_1.weight", "norm_2.weight")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1:
                tensor.mul_(10)
    return model


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion-gemma")
    reference.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionGemma:
    checkpoint = opened(folder)
    return DiffusionGemma(Shape.of(checkpoint.config), Loaded(checkpoint, "cpu", dtype, "stored"), "cpu")


def encoded(model: DiffusionGemma, tokens: Sequence[int], chunk: int = 1000) -> _KV:
    kv = _KV(model.pools)
    for first in range(0, len(tokens), chunk):
        complete(model.encode(tokens[first : first + chunk], kv))
    return kv


def decoded(
    model: DiffusionGemma, prefixes: Sequence[_KV], canvases: Sequence[Tensor], soft: Tensor | None = None
) -> Tensor:
    own = [_KV(model.pools) for _ in canvases]
    for kv, canvas in zip(own, canvases, strict=True):
        kv.reserve(len(canvas))
    plans = model.planned([(p.length, len(c)) for p, c in zip(prefixes, canvases, strict=True)], prefixes, own)
    tokens = torch.cat(list(canvases))
    return model.decode(
        tokens, torch.zeros(len(tokens), 32, dtype=model.embedding.dtype) if soft is None else soft, plans
    )


def logits(model: DiffusionGemma, hidden: Tensor) -> Tensor:
    z = (hidden @ model.embedding.T).float()
    return 30 * torch.tanh(z / 30)


def drawn(seed: int, prefix: int, canvas: int = CANVAS) -> tuple[Tensor, Tensor]:
    """Random ids of a prefix and of a canvas."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(3, 119, (prefix,), generator=generator),
        torch.randint(0, VOCAB, (canvas,), generator=generator),
    )


def worst(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).abs().max())


@pytest.fixture(scope="module")
def exact(reference: Any) -> Any:
    """The reference in fp64, from which errors are measured."""
    return copy.deepcopy(reference).double()


@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@torch.inference_mode()
def test_logits_in_fp32_are_as_near_to_the_truth_as_those_of_transformers(
    reference: Any, exact: Any, folder: Path, length: int
) -> None:
    """At and around a window's edge, the prefix encoded in chunks."""
    prefix, canvas = drawn(length, length)
    given = {"input_ids": prefix[None], "decoder_input_ids": canvas[None]}
    true = exact(**given).logits[0]
    model = ours(folder)
    found = logits(model, decoded(model, [encoded(model, prefix.tolist(), chunk=7)], [canvas]))
    assert worst(found, true) < 4 * max(worst(reference(**given).logits[0], true), 1e-5)
    assert (found.argmax(-1) == true.argmax(-1)).all()


@torch.inference_mode()
def test_a_window_that_is_one_token_off_would_show(exact: Any, folder: Path) -> None:
    prefix, canvas = drawn(5, 2 * WINDOW)
    true = exact(input_ids=prefix[None], decoder_input_ids=canvas[None]).logits[0]
    for off in (-1, 1):
        model = ours(folder)
        sliding, full = model.shape.kinds
        assert sliding.window == WINDOW
        model.shape = replace(model.shape, kinds=(replace(sliding, window=WINDOW + off), full))
        kv = encoded(model, prefix.tolist())
        assert worst(logits(model, decoded(model, [kv], [canvas])), true) > 1e-2


@torch.inference_mode()
def test_logits_in_bf16_err_no_more_than_those_of_transformers_in_bf16(
    reference: Any, exact: Any, folder: Path
) -> None:
    rounded = copy.deepcopy(reference).bfloat16()
    model = ours(folder, torch.bfloat16)
    errors = []
    for seed in range(4):
        prefix, canvas = drawn(seed, 20)
        given = {"input_ids": prefix[None], "decoder_input_ids": canvas[None]}
        true = exact(**given).logits[0]
        found = logits(model, decoded(model, [encoded(model, prefix.tolist())], [canvas]))
        wrong = [(x.double() - true).square().mean().sqrt() for x in (found, rounded(**given).logits[0])]
        errors.append(torch.stack(wrong))
    own, theirs = torch.stack(errors).mean(0).tolist()
    assert own < 1.25 * theirs


@torch.inference_mode()
def test_canvases_of_different_sizes_and_prefixes_go_through_one_pass(folder: Path) -> None:
    model = ours(folder)
    pairs = [drawn(1, 3, 5), drawn(2, 40, CANVAS), drawn(3, WINDOW, 1)]
    prefixes = [encoded(model, prefix.tolist()) for prefix, _ in pairs]
    together = decoded(model, prefixes, [canvas for _, canvas in pairs]).split([len(canvas) for _, canvas in pairs])
    for prefix, (_, canvas), rows in zip(prefixes, pairs, together, strict=True):
        torch.testing.assert_close(rows, decoded(model, [prefix], [canvas]), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_prefix_that_is_cut_and_encoded_again_is_as_if_it_had_been_written_so(folder: Path) -> None:
    model = ours(folder)
    prefix, canvas = drawn(7, 40)
    kv = encoded(model, [*prefix[:30].tolist(), *drawn(8, 12)[0].tolist()])
    kv.truncate(30)
    complete(model.encode(prefix[30:].tolist(), kv))
    fresh = decoded(model, [encoded(model, prefix.tolist())], [canvas])
    torch.testing.assert_close(decoded(model, [kv], [canvas]), fresh, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_self_conditioning_is_that_of_transformers(reference: Any, folder: Path) -> None:
    prefix, canvas = drawn(9, 20)
    before = 3 * torch.randn(1, CANVAS, VOCAB, generator=torch.Generator().manual_seed(9))
    wanted = reference(input_ids=prefix[None], decoder_input_ids=canvas[None], self_conditioning_logits=before).logits[
        0
    ]
    model = ours(folder)
    kv = encoded(model, prefix.tolist())
    found = logits(model, decoded(model, [kv], [canvas], before[0].softmax(-1) @ model.embedding))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert worst(logits(model, decoded(model, [kv], [canvas])), wanted) > 1e-2
