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
from infill_engine.config import EngineConfig
from infill_engine.core import Contexts, OpenCanvas, Pass, Rows, complete
from infill_engine.engine import Engine
from infill_engine.families.diffusion_gemma import _KV, DiffusionGemma, DiffusionGemmaDenoiser, Shape, facts
from infill_engine.policy import AnnealedPolicy, SeededNoise
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.11", reason="transformers with DiffusionGemma")

generation = pytest.importorskip("transformers.models.diffusion_gemma.generation_diffusion_gemma")
EntropyBoundSamplerConfig = generation.EntropyBoundSamplerConfig

VOCAB, WINDOW, CANVAS = 128, 16, 8


def tiny(gain: float = 1.0) -> Any:
    """transformers' model, every weight random, those that begin as ones too: a norm left out would not show. gain: of
    what the layers add; where it is small, what a slot holds is what is predicted there."""
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
                if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                    tensor.mul_(gain)
            elif tensor.dim() > 1:  # self-conditioning less, lest rounding grow tenfold with each pass of a trace
                tensor.mul_(2 if "self_conditioning" in name else 10)
    return model


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny()


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


class Ids:
    """A codec whose texts are ids, which is all that a trace needs."""

    tokens = tuple(b"%d " % i for i in range(VOCAB))
    joins_newlines = False

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def last_piece(self, text: str) -> str:
        return ""


class Trace:
    """What transformers' loop says after each pass."""

    def __init__(self) -> None:
        self.drafts: list[list[int]] = []
        self._takes_logits = False

    def put(self, value: Tensor) -> None:
        """The whole text, which is compared by itself."""

    def put_draft(self, value: Tensor) -> None:
        self.drafts.append(value[0].tolist())

    def end(self) -> None:
        """Nothing is held back."""


def generated(
    reference: Any, prefix: Tensor, noise: SeededNoise, tokens: int, **options: Any
) -> tuple[list[int], Trace]:
    """transformers' own loop, its random draws taken from `noise`."""
    randint = torch.randint

    def draw(low: int = 0, high: int = VOCAB, size: tuple[int, int] = (1, 1), **_: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", randint)
            return torch.tensor(noise.ids(size[1], VOCAB)).view(size)

    def multinomial(probs: Tensor, num_samples: int) -> Tensor:
        return (probs.log() + noise.gumbel(*probs.shape)).argmax(-1, keepdim=True)

    trace = Trace()
    sampler = EntropyBoundSamplerConfig(entropy_bound=options.pop("bound"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", draw)
        patch.setattr(torch, "multinomial", multinomial)
        out = reference.generate(
            input_ids=prefix[None],
            max_new_tokens=tokens,
            streamer=trace,
            sampler_config=sampler,
            stability_threshold=1,
            eos_token_id=None,
            pad_token_id=None,
            **options,
        )
    return out.sequences[0, len(prefix) :].tolist(), trace


def ours_generated(
    model: DiffusionGemma, prefix: Tensor, noise: SeededNoise, blocks: int, policy: AnnealedPolicy
) -> tuple[list[int], list[list[int]]]:
    """The same by the engine's passes and the family's policy; a canvas that is full is encoded behind the prefix."""
    family = DiffusionGemmaDenoiser(model, facts({"text_config": {"vocab_size": VOCAB}, "canvas_length": CANVAS}, {}))
    engine = Engine("trace", family, Ids(), EngineConfig(memory=False))
    kv = encoded(model, prefix.tolist())
    text: list[int] = []
    drafts: list[list[int]] = []
    for _ in range(blocks):
        canvas, state = OpenCanvas.of(kv.length, (), noise.ids(CANVAS, VOCAB), ()), None
        while not canvas.full:
            asked = Pass(canvas, Contexts(kv), state, reading=policy.reading(canvas), noise=noise)
            (outcome,) = engine.denoise([asked])
            canvas, state = policy.step(canvas, outcome.rows, noise), outcome.state
            drafts.append(outcome.rows.token)
        text += canvas.slots
        complete(family.encode(canvas.slots, kv))
    return text, drafts


@pytest.mark.parametrize(
    ("gain", "bound", "settled", "passes"), [(1.0, 0.1, 0.005, 24), (1.0, 6.0, 3.0, 24), (0.1, 99.0, 1.0, 4)]
)
def test_the_whole_trace_is_that_of_transformers(
    tmp_path: Path, gain: float, bound: float, settled: float, passes: int
) -> None:
    """Two canvases, the first one committed into the prefix: by the published numbers, and by others; the
    last ones settle before their passes are spent."""
    reference, (prefix, _) = tiny(gain), drawn(1, 20)
    reference.save_pretrained(tmp_path)
    hottest, coldest = (0.02, 0.01) if bound == 99 else (0.8, 0.4)
    policy = AnnealedPolicy(VOCAB, 12, bound, hottest, coldest, settled)
    wanted, trace = generated(
        reference,
        prefix,
        SeededNoise(1),
        2 * CANVAS,
        max_denoising_steps=12,
        bound=bound,
        t_min=coldest,
        t_max=hottest,
        confidence_threshold=settled,
    )
    text, drafts = ours_generated(ours(tmp_path), prefix, SeededNoise(1), 2, policy)
    assert drafts == trace.drafts
    assert text == wanted
    assert len(drafts) == passes


@torch.inference_mode()
def test_a_pinned_suffix_shares_the_canvas_and_is_expected_to_be_what_it_is(reference: Any, folder: Path) -> None:
    model = ours(folder)
    family = DiffusionGemmaDenoiser(model, facts({"text_config": {"vocab_size": VOCAB}, "canvas_length": CANVAS}, {}))
    prefix, ids = drawn(3, 20)
    kv = encoded(model, prefix.tolist())
    canvas = OpenCanvas.of(kv.length, (), ids[:5].tolist(), ids[5:].tolist())
    (first,), (state,) = family.denoise([canvas], [Contexts(kv)], [None])
    wanted = reference(input_ids=prefix[None], decoder_input_ids=ids[None]).logits[0]
    torch.testing.assert_close(logits(model, first), wanted[:5], rtol=1e-4, atol=1e-4)
    state = family.condition(state, wanted[:5].softmax(-1) @ model.embedding)
    (second,), _ = family.denoise([canvas], [Contexts(kv)], [state])
    certain = torch.full_like(wanted, -1e4).scatter(1, ids[:, None], 0.0)
    before = torch.cat([wanted[:5], certain[5:]])[None]
    again = reference(input_ids=prefix[None], decoder_input_ids=ids[None], self_conditioning_logits=before).logits[0]
    torch.testing.assert_close(logits(model, second), again[:5], rtol=1e-4, atol=1e-4)


def test_the_policy_never_touches_what_is_pinned_and_counts_only_what_is_open() -> None:
    policy, noise = AnnealedPolicy(VOCAB, steps=4), SeededNoise(0)
    canvas = OpenCanvas.of(0, (), (5, 6, 7), (9,)).pin({1: (6, 1.0)})
    rows = Rows([1, 2], [0.9, 0.9], [0.001, 0.001], [0.0, 0.0], [0.0, 0.0], [1, 2], [0.9, 0.9])
    once = policy.step(canvas, rows, noise)
    assert not once.full
    assert (once.slots, once.right) == ((1, 6, 2), (9,))
    assert policy.step(once, rows, noise).full  # unchanged, and sure
