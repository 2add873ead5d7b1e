"""DiffusionGemma against transformers' own, on a tiny random model that is saved and loaded as a real folder."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from infill_engine import models
from infill_engine.checkpoint import Loaded, opened
from infill_engine.config import EngineConfig
from infill_engine.core import Contexts, ModelError, OpenCanvas, Outcome, Pass, Rows, complete
from infill_engine.engine import Engine
from infill_engine.families import prompts
from infill_engine.families.diffusion_gemma import _KV, DiffusionGemma, DiffusionGemmaDenoiser
from infill_engine.policy import AnnealedPolicy, SeededNoise
from infill_engine.protocol import Candidate, Final, Frame, InfillRequest, Snippet
from small_checkpoint import GEMMA_CANVAS, gemma, save_gemma
from small_tokenizer import CONTROLS
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.11", reason="transformers with DiffusionGemma")

generation = pytest.importorskip("transformers.models.diffusion_gemma.generation_diffusion_gemma")
EntropyBoundSamplerConfig = generation.EntropyBoundSamplerConfig

VOCAB, WINDOW, CANVAS = 128, 16, 8


def tiny(gain: float = 1.0) -> Any:
    return gemma(VOCAB, CANVAS, gain, WINDOW)


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion-gemma")
    reference.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def family(folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionGemmaDenoiser:
    """As it is loaded, but for a vocabulary of which every id is text."""
    checkpoint = opened(folder)
    text = [b"%d " % i for i in range(VOCAB)]
    return DiffusionGemmaDenoiser(checkpoint.config, Loaded(checkpoint, "cpu", dtype, "stored"), text)


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> DiffusionGemma:
    return family(folder, dtype).model


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
        return (probs.log() + noise.gumbel(*probs.shape, probs.device)).argmax(-1, keepdim=True)

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
    engine: Engine, prefix: Sequence[int], noise: SeededNoise, blocks: int, policy: AnnealedPolicy, size: int = CANVAS
) -> tuple[list[int], list[list[int]]]:
    """The same by an engine's passes and a policy; a canvas that is full is encoded behind the prefix."""
    denoiser = engine._denoiser
    kv = encoded(denoiser.model, prefix)
    text: list[int] = []
    drafts: list[list[int]] = []
    for _ in range(blocks):
        canvas, state = OpenCanvas.of(kv.length, (), noise.ids(size, len(denoiser.head.weight)), ()), None
        while not canvas.full:
            asked = Pass(canvas, Contexts(kv), state, reading=policy.reading(canvas), noise=noise)
            (outcome,) = engine.denoise([asked])
            canvas, state = policy.step(canvas, outcome.rows, noise), outcome.state
            drafts.append(outcome.rows.token)
        text += canvas.slots
        complete(denoiser.encode(canvas.slots, kv))
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
    engine = Engine("trace", family(tmp_path), Ids(), EngineConfig(memory=False))
    text, drafts = ours_generated(engine, prefix.tolist(), SeededNoise(1), 2, policy)
    assert drafts == trace.drafts
    assert text == wanted
    assert len(drafts) == passes


@torch.inference_mode()
def test_a_pinned_suffix_shares_the_canvas_and_is_expected_to_be_what_it_is(reference: Any, folder: Path) -> None:
    denoiser = family(folder)
    model = denoiser.model
    prefix, ids = drawn(3, 20)
    kv = encoded(model, prefix.tolist())
    canvas = OpenCanvas.of(kv.length, (), ids[:5].tolist(), ids[5:].tolist())
    (first,), (state,) = denoiser.denoise([canvas], [Contexts(kv)], [None])
    wanted = reference(input_ids=prefix[None], decoder_input_ids=ids[None]).logits[0]
    torch.testing.assert_close(logits(model, first), wanted[:5], rtol=1e-4, atol=1e-4)
    state = denoiser.condition(state, wanted[:5].softmax(-1) @ model.embedding)
    (second,), _ = denoiser.denoise([canvas], [Contexts(kv)], [state])
    certain = torch.full_like(wanted, -1e4).scatter(1, ids[:, None], 0.0)
    before = torch.cat([wanted[:5], certain[5:]])[None]
    again = reference(input_ids=prefix[None], decoder_input_ids=ids[None], self_conditioning_logits=before).logits[0]
    torch.testing.assert_close(logits(model, second), again[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [4, 3 * WINDOW])
@torch.inference_mode()
def test_pieces_of_other_files_stand_before_the_prefix_side_by_side(reference: Any, folder: Path, length: int) -> None:
    """As transformers has it where a mask hides pieces and prefix from each other, and from the canvas what opens a
    piece. In sliding layers of a long prefix no piece is near enough."""
    from transformers import DynamicCache

    denoiser = family(folder)
    (bos,) = denoiser.facts.opening
    prefix, canvas = drawn(length, length)
    texts = [[bos, *drawn(seed, size)[0].tolist()] for seed, size in ((1, 6), (2, 9))]
    contexts = [complete(denoiser.encode(text, None)) for text in ([bos, *prefix.tolist()], *texts)]
    (found,), _ = denoiser.denoise(
        [OpenCanvas.of(contexts[0].length, (), canvas.tolist(), ())],
        [Contexts(contexts[0], tuple(contexts[1:]))],
        [None],
    )

    runs = [*texts, [bos, *prefix.tolist()]]
    before = max(map(len, texts))
    position = [before - len(text) + i for text in texts for i in range(len(text))]
    position = torch.tensor([*position, *range(before, before + len(runs[-1]))])
    run = torch.tensor([i for i, tokens in enumerate(runs) for _ in tokens])
    opens = torch.tensor([i == 0 and j < len(texts) for j, tokens in enumerate(runs) for i in range(len(tokens))])
    back = position[:, None] - position
    encoded_by = (run[:, None] == run) & (back >= 0)
    decoded_by = torch.cat([~opens, torch.ones(len(canvas), dtype=torch.bool)]).expand(len(canvas), -1)
    first = before + len(runs[-1])
    near = torch.cat([position > first - WINDOW, torch.ones(len(canvas), dtype=torch.bool)])

    def masks(full: Tensor, sliding: Tensor) -> dict[str, Tensor]:
        both = {"full_attention": full, "sliding_attention": sliding}
        return {name: torch.where(mask, 0.0, -torch.inf)[None, None] for name, mask in both.items()}

    wanted = reference(
        input_ids=torch.tensor([[token for tokens in runs for token in tokens]]),
        position_ids=position[None],
        attention_mask=masks(encoded_by, encoded_by & (back < WINDOW)),
        cache=DynamicCache(),
        decoder_input_ids=canvas[None],
        decoder_position_ids=torch.arange(first, first + len(canvas))[None],
        decoder_attention_mask=masks(decoded_by, decoded_by & near),
    ).logits[0]
    torch.testing.assert_close(logits(denoiser.model, found), wanted, rtol=1e-4, atol=2e-4)
    (without,), _ = denoiser.denoise(
        [OpenCanvas.of(contexts[0].length, (), canvas.tolist(), ())], [Contexts(contexts[0])], [None]
    )
    assert worst(logits(denoiser.model, without), wanted) > 1e-2


def test_the_policy_never_touches_what_is_pinned_and_counts_only_what_is_open() -> None:
    policy, noise = AnnealedPolicy(VOCAB, steps=4), SeededNoise(0)
    canvas = OpenCanvas.of(0, (), (5, 6, 7), (9,)).pin({1: (6, 1.0)})
    rows = Rows([1, 2], [0.9, 0.9], [0.001, 0.001], [0.0, 0.0], [0.0, 0.0], [1, 2], [0.9, 0.9])
    once = policy.step(canvas, rows, noise)
    assert not once.full
    assert (once.slots, once.right) == ((1, 6, 2), (9,))
    assert policy.step(once, rows, noise).full  # unchanged, and sure


# Served.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_gemma(folder)
    return folder


def serve(folder: Path, **config: Any) -> Engine:
    return models.load(EngineConfig(model=str(folder), dtype="fp32", **config), lambda message, progress: None)


def ask(**fields: Any) -> InfillRequest:
    return InfillRequest(client="c", document="d", **{"deadline_ms": 60_000, "head": "x = f(", **fields})


class Watched:
    """What an engine's passes had and said."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.canvases: list[OpenCanvas] = []
        self.rows: list[Rows] = []
        inner = engine.denoise

        def denoise(passes: Sequence[Pass]) -> list[Outcome]:
            outcomes = inner(passes)
            self.canvases += [one.canvas for one in passes]
            self.rows += [outcome.rows for outcome in outcomes]
            return outcomes

        patch.setattr(engine, "denoise", denoise)


def answer(engine: Engine, request: InfillRequest) -> tuple[str, Final]:
    *events, final = engine.events(request, time.monotonic())
    assert isinstance(final, Final)
    return next((event.text for event in reversed(events) if isinstance(event, Candidate)), ""), final


def test_a_folder_is_served_and_says_text_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(checkpoint)
    watched, pieces = Watched(engine, monkeypatch), engine._tokenizer.codec.tokens
    wanted = ask(prefix="import os\n" * 9, tail=")", suffix="\nprint(x)\n", max_lines=4, max_tokens=40)
    text, final = answer(engine, wanted)
    assert final.reason in ("end", "limit")
    assert text
    assert not any(name in text for name in CONTROLS)
    again, ended = answer(engine, wanted)
    assert (again, ended.timing.steps) == (text, final.timing.steps)
    ends = engine._denoiser.facts.open.ends
    said = {token for rows in watched.rows for token in (*rows.token, *rows.sample)}
    assert all(pieces[token] or token in ends for token in said)
    assert len(said) > 40


def test_the_suffix_is_on_the_canvas_and_stays_what_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each pass, behind slots that all change; no more of it than there is room for, and no row for it. Lengths are
    tried, of which none makes a canvas of less than 32 tokens."""
    engine = serve(checkpoint, suffix_tokens=120)
    suffix = "\n" + "print(x)\n" * 60
    tokens = tuple(engine._tokenizer.encode(suffix)[:120])
    watched = Watched(engine, monkeypatch)
    answer(engine, ask(suffix=suffix, max_lines=4, max_tokens=60))
    assert all(canvas.right == tokens[: GEMMA_CANVAS - canvas.size] for canvas in watched.canvases)
    assert len({canvas.size for canvas in watched.canvases}) > 2
    assert len(watched.canvases) > 4
    assert all(len(rows) == canvas.rows for rows, canvas in zip(watched.rows, watched.canvases, strict=True))
    short = Watched(engine, monkeypatch)
    answer(engine, ask(tail=")", max_lines=1))
    assert min(canvas.size + len(canvas.right) for canvas in short.canvases) >= 32
    assert len({canvas.size for canvas in short.canvases}) > 1


def test_a_snippet_is_seen_and_encodes_no_prefix_anew(checkpoint: Path) -> None:
    engine = serve(checkpoint)
    wanted = ask(prefix="import os\n" * 9, tail=")", suffix="\nprint(x)\n", max_lines=1)
    first, _ = answer(engine, wanted)
    engine._cache.rate = 1e6  # it is encoded in no time
    seen = msgspec.structs.replace(wanted, snippets=(Snippet("def helper(name): return name\n" * 4),))
    text, final = answer(engine, seen)
    assert final.timing.snippets == 1
    (tokens,) = engine._snippets(seen)
    assert final.timing.encoded == len(tokens) + len(engine._denoiser.facts.opening)
    assert text != first


def test_a_full_canvas_is_encoded_and_followed_by_another_where_nothing_stands_behind_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, which is what the published loop does."""
    loaded = serve(checkpoint)
    denoiser, codec = loaded._denoiser, loaded._tokenizer.codec
    denoiser.head = replace(denoiser.head, banned=torch.tensor([not piece for piece in codec.tokens]))  # it goes on
    engine = Engine("blocks", denoiser, codec, EngineConfig(), noise=lambda seed: SeededNoise(7))
    watched = Watched(engine, monkeypatch)
    *events, final = engine.events(ask(head="x)", max_lines=99, max_tokens=150, frames=True), time.monotonic())
    prefix = [*denoiser.facts.opening, *codec.encode("x)")]
    assert sorted({canvas.origin for canvas in watched.canvases}) == [len(prefix) + block for block in (0, 64, 128)]
    seen = [rows.token for rows in watched.rows]
    written, drafts = ours_generated(engine, prefix, SeededNoise(7), 3, denoiser.facts.open.policy, size=64)
    assert seen == drafts
    text = [event.text for event in events if isinstance(event, Candidate)][-1]
    assert text == loaded._tokenizer.text(written[:150]).decode(errors="ignore")
    assert final.reason == "limit"
    assert [len(event.slots) for event in events if isinstance(event, Frame)] == [64] * 4 + [128] * 4 + [192] * 4


def test_what_was_written_into_the_prefix_goes_with_the_next_request(checkpoint: Path) -> None:
    """But for what of it is in the document then: that stays encoded."""
    loaded = serve(checkpoint)
    denoiser, codec = loaded._denoiser, loaded._tokenizer.codec
    denoiser.head = replace(denoiser.head, banned=torch.tensor([not piece for piece in codec.tokens]))
    engine = Engine("blocks", denoiser, codec, EngineConfig())
    text, _ = answer(engine, ask(head="x)", max_lines=99, max_tokens=100))
    (again, final), fresh = answer(engine, ask(head="x)", max_tokens=8)), Engine("f", denoiser, codec, EngineConfig())
    assert again == answer(fresh, ask(head="x)", max_tokens=8))[0]
    assert final.timing.encoded == 0
    assert len(text) > 64


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_noise_is_drawn_where_it_is_wanted(device: str) -> None:
    drawn = [SeededNoise(3).gumbel(64, 700, torch.device(device)) for _ in range(2)]
    assert drawn[0].device.type == device
    assert torch.equal(*drawn)
    assert abs(float(drawn[0].mean()) - 0.5772) < 0.02
    assert abs(float(drawn[0].var()) - 1.6449) < 0.1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"canvas_length": 128, "text_config": {}},
            "its config.json is not DiffusionGemma's: 'layer_types' is missing",
        ),
        ({"text_config": {"hidden_size": 48}}, r"embed_tokens.weight is \[700, 32\], not \[700, 48\]"),
        ({"text_config": {"vocab_size": 600}}, r"embed_tokens.weight is \[700, 32\], not \[600, 32\]"),
        ({"text_config": {"vocab_size": "700"}}, "says '700' for vocab_size"),
        ({"text_config": {"num_attention_heads": 3}}, r"q_proj.weight is \[32, 32\], not \[24, 32\]"),
        ({"text_config": {"num_key_value_heads": 4}}, r"k_proj.weight is \[16, 32\], not \[32, 32\]"),
        ({"text_config": {"top_k_experts": 5}}, "takes 5 experts of 4"),
        ({"text_config": {"sliding_window": None}}, "does not say sliding_window"),
        ({"text_config": {"layer_types": []}}, "it has no layers"),
        ({"text_config": {"layer_types": ["sliding_attention"] * 5}}, "says 5 layers, and there are more"),
        ({"text_config": {"rope_parameters": "default"}}, "its config.json is not DiffusionGemma's: "),
        ({"text_config": {"rms_norm_eps": 0}}, "says 0 for rms_norm_eps"),
        ({"canvas_length": 0, "text_config": {"eos_token_id": 1}}, "says 0 for canvas_length"),
        (
            {"text_config": {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}},
            r"layers.0.self_attn.q_proj.weight is \[32, 32\], not \[64, 32\]",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said_in_a_line(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text())
    text = config["text_config"] | change["text_config"] if change["text_config"] else {}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change, "text_config": text}))
    with pytest.raises(ModelError, match=told) as error:
        serve(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_more_ids_than_there_are_is_another_models(folder: Path) -> None:
    found = opened(folder)
    weights = Loaded(found, "cpu", torch.float32, "stored")
    with pytest.raises(ModelError, match=f"its tokenizer has {VOCAB + 1} ids, its weights {VOCAB}"):
        DiffusionGemmaDenoiser(found.config, weights, [b"x"] * (VOCAB + 1))


def test_more_tokens_than_the_model_can_read_are_refused(checkpoint: Path) -> None:
    denoiser = serve(checkpoint)._denoiser
    canvas = OpenCanvas.of(500, (), [1] * 8, [2] * 8)
    with pytest.raises(ModelError, match="516 tokens are more than the model's 512"):
        denoiser.denoise([canvas], [Contexts(_KV(denoiser.model.pools))], [None])


def test_what_stands_around_a_document_is_a_table(checkpoint: Path) -> None:
    """The bare form is what a family has; the chat form is a fact that nobody uses."""
    table = [prompts.DREAM, prompts.DREAMON, prompts.LLADA, prompts.DIFFUSION_GEMMA]
    assert all(one.source and bool(one.chat) == bool(one.chat_source) for one in table)
    assert all(one.chat.count("{}") == 1 for one in table if one.chat)
    known = serve(checkpoint)._denoiser.facts
    assert (known.opening, known.open.closing) == ((CONTROLS.index("<bos>"),), ())
    assert prompts.DREAMON.around({"bos_token_id": 7, "eos_token_id": [8, 9]}) == ((7,), (8,))
    assert prompts.DREAMON.around({}) == ((), ())
