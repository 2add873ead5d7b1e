"""The mask-token families against transformers' decoders under a full mask, and against samplers written out here.

The checkpoints are tiny and random, but real Hugging Face folders. The reference samplers follow the equations of the
papers on whole logits, one canvas at a time: Dream (arXiv 2508.15487), LLaDA (arXiv 2502.09992, algorithm 5), DreamOn
(arXiv 2602.01326).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from infill_engine.checkpoint import Loaded, opened
from infill_engine.config import EngineConfig
from infill_engine.core import Contexts, ModelError, Noise, OpenCanvas, OpenPolicy, Pass, complete
from infill_engine.engine import Engine
from infill_engine.families.llada import LladaDenoiser
from infill_engine.families.masked import EXACT, Caching, MaskedDenoiser
from infill_engine.families.qwen2 import Qwen2Denoiser
from infill_engine.policy import ElasticPolicy, StepsPolicy, ThresholdPolicy
from infill_engine.tokenizer import ByteCodec
from infill_kernels import logits
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")

#: Ids below TEXT are bytes of text; the vocabulary has some rows that no token has, as checkpoints do.
TEXT, END, MASK, EXPAND, BOS, VOCAB = 256, 256, 257, 258, 259, 264
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"eos_token_id": END, "pad_token_id": END, "mask_token_id": MASK, "bos_token_id": BOS}

Reference = Callable[[list[int]], tuple[Tensor, Tensor]]
PREFIX = [7, 3, 200, 41, 41, 90, 12, 8, 77, 150, 33]
RIGHT = (5, 99, 18, 64)


class Checkpoint:
    """A random checkpoint in a folder, as its family and as transformers run it."""

    def __init__(self, folder: Path, family: type[Qwen2Denoiser | LladaDenoiser], model: Any) -> None:
        self.folder, self.family, self.model = folder, family, model
        self.shifted = family is Qwen2Denoiser

    def ours(
        self, dtype: torch.dtype = torch.float32, caching: Caching = EXACT, config: dict[str, Any] | None = None
    ) -> MaskedDenoiser:
        checkpoint = opened(self.folder)
        weights = Loaded(checkpoint, "cpu", dtype, "stored")
        text = [bytes([i]) for i in range(TEXT)]
        return self.family({**checkpoint.config, **(config or {})}, weights, text, caching=caching)

    @torch.inference_mode()
    def theirs(self, sequence: list[int]) -> tuple[Tensor, Tensor]:
        """Normed hidden states [T, D] and logits [T, V], each row that which predicts its own place."""
        size = len(sequence)
        full = torch.zeros(1, 1, size, size, dtype=self.model.dtype)
        out = self.model(torch.tensor([sequence]), attention_mask=full, output_hidden_states=True)
        hidden, z = out.hidden_states[-1][0], out.logits[0].float()
        if self.shifted:
            hidden, z = (torch.cat([x[:1], x[:-1]]) for x in (hidden, z))
        return hidden, z


def randomised(model: Any) -> Any:
    """With biases and norms that are not 0 and 1, where a fault would not show."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.15)
    return model.eval()


def qwen(folder: Path, **changed: Any) -> Checkpoint:
    config = transformers.Qwen2Config(vocab_size=VOCAB, rope_theta=10_000.0, **{**SIZES, **HEADS, **IDS, **changed})
    model = randomised(transformers.Qwen2ForCausalLM(config))
    model.save_pretrained(folder)
    return Checkpoint(folder, Qwen2Denoiser, model)


def llada(folder: Path, layers: int = 3) -> Checkpoint:
    """Llama's tensors by LLaDA's names, with its config."""
    from safetensors.torch import save_file

    changed = SIZES | HEADS | {"num_hidden_layers": layers}
    config = transformers.LlamaConfig(vocab_size=VOCAB, rope_theta=500_000.0, rms_norm_eps=1e-5, **changed)
    model = randomised(transformers.LlamaForCausalLM(config))
    names = {
        "embed_tokens": "wte",
        "model.norm": "model.ln_f",
        "lm_head": "model.ff_out",
        "layers": "blocks",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
        "model.": "model.transformer.",
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    sizes = {"d_model": 32, "n_layers": layers, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 64}
    rest = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "max_sequence_length": 512, "embedding_size": VOCAB}
    written = {"model_type": "llada", "architectures": ["LLaDAModelLM"], **sizes, **rest, **IDS}
    (folder / "config.json").write_text(json.dumps(written))
    return Checkpoint(folder, LladaDenoiser, model)


@pytest.fixture(scope="module", params=["qwen2", "llada"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return qwen(folder) if request.param == "qwen2" else llada(folder)


@pytest.fixture(scope="module", params=["qwen2", "llada"])
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One of a single layer, whose keys and values hang on a token and its place alone: whatever is kept is exact."""
    folder = tmp_path_factory.mktemp(request.param)
    return qwen(folder, num_hidden_layers=1) if request.param == "qwen2" else llada(folder, 1)


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return qwen(tmp_path_factory.mktemp("dream"))


def laid_out(ours: MaskedDenoiser, slots: list[int], prefix: list[int] = PREFIX) -> tuple[OpenCanvas, Contexts]:
    """A canvas behind a prefix; slots that do not hold MASK are pinned."""
    kv = complete(ours.encode(prefix, None))
    canvas = OpenCanvas.of(kv.length, (), slots, RIGHT)
    return replace(canvas, pinned=tuple(slot != MASK for slot in slots)), Contexts(kv)


SLOTS = [MASK, 65, MASK, MASK, 66, MASK]


@torch.inference_mode()
def test_hidden_states_and_logits_are_those_of_transformers(checkpoint):
    ours = checkpoint.ours()
    canvas, contexts = laid_out(ours, SLOTS)
    (hidden,), _ = ours.denoise([canvas], [contexts], [None])
    wanted, z = checkpoint.theirs([*PREFIX, *SLOTS, *RIGHT])
    rows = [len(PREFIX) + slot for slot in canvas.open]
    torch.testing.assert_close(hidden, wanted[rows], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(hidden, ours.head), z[rows], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_in_bf16_the_error_is_bf16s_own(checkpoint):
    exact, _ = checkpoint.theirs([*PREFIX, *SLOTS, *RIGHT])
    ours = checkpoint.ours(torch.bfloat16)
    canvas, contexts = laid_out(ours, SLOTS)
    (hidden,), _ = ours.denoise([canvas], [contexts], [None])
    rows = [len(PREFIX) + slot for slot in canvas.open]
    rounded = Checkpoint(checkpoint.folder, checkpoint.family, copy.deepcopy(checkpoint.model).bfloat16())
    theirs, _ = rounded.theirs([*PREFIX, *SLOTS, *RIGHT])
    own = (hidden.float() - exact[rows]).norm() / exact[rows].norm()
    reference = (theirs[rows].float() - exact[rows]).norm() / exact[rows].norm()
    assert own <= 1.25 * reference < 0.1


@torch.inference_mode()
def test_a_ragged_batch_is_what_each_canvas_is_alone(checkpoint):
    ours = checkpoint.ours()
    all_slots = [SLOTS, [MASK], [MASK] * 20, [65, MASK]]
    both = [laid_out(ours, slots, PREFIX[i:]) for i, slots in enumerate(all_slots)]
    canvases, contexts = zip(*both, strict=True)
    together, _ = ours.denoise(canvases, contexts, [None] * len(canvases))
    for hidden, canvas, context in zip(together, canvases, contexts, strict=True):
        (alone,), _ = ours.denoise([canvas], [context], [None])
        torch.testing.assert_close(hidden, alone, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_pieces_of_other_files_stand_in_front_of_the_prefix_and_behind_what_opens_it(dream):
    ours = dream.ours(config={"expand_token_id": EXPAND})
    (bos,) = ours.facts.opening
    canvas, contexts = laid_out(ours, SLOTS, [bos, *PREFIX])
    blocks = tuple(complete(ours.encode([bos, *tokens], None)) for tokens in ([9, 8, 7], [6, 5]))
    (hidden,), _ = ours.denoise([canvas], [Contexts(contexts.prefix, blocks)], [None])
    before = [bos, 9, 8, 7, 6, 5, *PREFIX]
    wanted, _ = dream.theirs([*before, *SLOTS, *RIGHT])
    torch.testing.assert_close(hidden, wanted[[len(before) + i for i in canvas.open]], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_without_a_token_before_it_the_first_slot_is_predicted_all_the_same(checkpoint):
    ours = checkpoint.ours()
    canvas, contexts = laid_out(ours, [MASK, MASK], [])
    (hidden,), _ = ours.denoise([canvas], [contexts], [None])
    wanted, _ = checkpoint.theirs([MASK, MASK, *RIGHT])
    torch.testing.assert_close(hidden, wanted[:2], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_embedding_serves_as_head_where_the_checkpoint_has_none(tmp_path):
    tied = qwen(tmp_path, tie_word_embeddings=True)
    ours = tied.ours()
    canvas, contexts = laid_out(ours, SLOTS)
    (hidden,), _ = ours.denoise([canvas], [contexts], [None])
    _, z = tied.theirs([*PREFIX, *SLOTS, *RIGHT])
    torch.testing.assert_close(
        logits(hidden, ours.head), z[[len(PREFIX) + i for i in canvas.open]], atol=1e-4, rtol=1e-4
    )


def test_only_text_ends_and_what_changes_the_length_can_be_said(dream, tmp_path):
    free = dream.ours().head.free
    assert free[:TEXT].all()
    assert free.nonzero().flatten().tolist()[TEXT:] == [END]
    others = dream.ours(config={"generation_config": {"eos_token_id": [END, BOS]}})  # as those that were tuned to chat
    assert others.head.free.nonzero().flatten().tolist()[TEXT:] == [END, BOS]
    assert (others.facts.end_id, others.facts.open.ends) == (END, {END, BOS})
    elastic = dream.ours(config={"expand_token_id": EXPAND})
    assert elastic.head.free.nonzero().flatten().tolist()[TEXT:] == [END, EXPAND]
    assert elastic.facts.opening == (BOS,)
    assert elastic.facts.open.closing == (END,)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"mask_token_id": None}, "says mask_token_id"),
        ({"mask_token_id": VOCAB}, "its mask is id 264, of 264 ids"),
        ({"eos_token_id": None}, "says eos_token_id"),
        ({"num_hidden_layers": None}, "does not say num_hidden_layers"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3"),
        ({"num_hidden_layers": 2}, "says 2 layers, and there are more"),
        ({"num_hidden_layers": -1}, "says -1 for num_hidden_layers"),
        ({"num_attention_heads": 0}, "says 0 for num_attention_heads"),
        ({"num_attention_heads": 8}, r"k_proj.weight is \[16, 32\], not \[8, 32\]"),
        ({"num_key_value_heads": 3}, r"k_proj.weight is \[16, 32\], not \[24, 32\]"),
        ({"head_dim": "8"}, "says '8' for head_dim"),
        ({"hidden_size": 64}, r"\[264, 32\], not \[264, 64\]: the config is another's"),
        ({"rms_norm_eps": True}, "says True for rms_norm_eps"),
        ({"mask_token_id": "<mask>"}, "its mask_token_id is '<mask>', which is no id"),
        ({"eos_token_id": [VOCAB]}, "its end is id 264, of 264 ids"),
        ({"eos_token_id": 1.5}, "its eos_token_id is 1.5, which is no id"),
        ({"expand_token_id": -1}, "its token is id -1, of 264 ids"),
        ({"expand_token_id": EXPAND, "bos_token_id": VOCAB}, "its token is id 264, of 264 ids"),
        ({"generation_config": {"eos_token_id": "END"}}, "its eos_token_id is 'END', which is no id"),
        ({"rope_parameters": "yarn"}, "of type 'yarn', which is not served"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "of type 'yarn', which is not served"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said_in_a_line(dream, changed, told):
    with pytest.raises(ModelError, match=told) as error:
        dream.ours(config=changed)
    assert "\n" not in str(error.value)


def test_a_sequence_longer_than_the_model_can_read_is_refused(dream):
    ours = dream.ours(config={"max_position_embeddings": 16})
    canvas, contexts = laid_out(ours, [MASK] * 4)
    with pytest.raises(ModelError, match="19 tokens are more than the model's 16"):
        ours.denoise([canvas], [contexts], [None])


# Whole traces.


class Replayed:
    """`Noise` that is a function of the pass: a reference draws the same."""

    def __init__(self) -> None:
        self.passes = 0

    def gumbel(self, rows: int, vocab: int, device: torch.device | None = None) -> Tensor:
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        return -(-torch.rand(rows, vocab, generator=generator).log()).log()

    def ids(self, count: int, vocab: int) -> list[int]:
        raise AssertionError("masks are no noise")


def trace(
    ours: MaskedDenoiser, policy: OpenPolicy, size: int, noise: Noise, right: tuple[int, ...] = RIGHT
) -> Iterator[tuple[int, ...]]:
    """The slots after each pass, by the engine's own reading of rows."""
    engine = Engine("tiny", ours, ByteCodec(specials=VOCAB - 256), EngineConfig(), policy)
    canvas, contexts = laid_out(ours, [MASK] * size)
    canvas, state = replace(canvas, right=right), None
    while not canvas.full:
        one = Pass(canvas, contexts, state, reading=policy.reading(canvas), noise=noise)
        (outcome,) = engine.denoise([one])
        canvas, state = policy.step(canvas, outcome.rows, noise), outcome.state
        yield canvas.slots


def said(checkpoint: Checkpoint, free: Tensor, slots: list[int]) -> Tensor:
    """Reference logits [open, V] of the open slots, banned ids left out."""
    _, z = checkpoint.theirs([*PREFIX, *slots, *RIGHT])
    rows = [len(PREFIX) + i for i, token in enumerate(slots) if token == MASK]
    return z[rows].double().masked_fill(~free, -torch.inf)


def dream_reference(
    checkpoint: Checkpoint, free: Tensor, size: int, steps: int, temperature: float, by_entropy: bool
) -> Iterator[tuple[int, ...]]:
    """At step i of n, of m masks the m (1 - s / t) with the least entropy, or the most probable samples, are unmasked;
    t and s fall evenly from 1 to 0.001. Steps that unmask none are not told of."""
    slots, noise = [MASK] * size, Replayed()
    times = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        masked = [slot for slot, token in enumerate(slots) if token == MASK]
        count = int(len(masked) * (1 - times[i + 1] / times[i])) if i < steps - 1 else len(masked)
        if not count:
            continue
        z = said(checkpoint, free, slots) / (temperature or 1)
        p = z.softmax(-1)
        token = (z + noise.gumbel(len(masked), VOCAB)).argmax(-1) if temperature else z.argmax(-1)
        entropy = -torch.where(p > 0, p * p.log(), 0).sum(-1)
        sure = -entropy if by_entropy else p.gather(1, token[:, None])[:, 0]
        for row in sure.argsort(descending=True, stable=True)[:count].tolist():
            slots[masked[row]] = int(token[row])
        yield tuple(slots)


def llada_reference(
    checkpoint: Checkpoint, free: Tensor, size: int, steps: int, temperature: float
) -> Iterator[tuple[int, ...]]:
    """The masks are spread evenly over the steps; those samples stay that are most probable at temperature 1, the
    others are masked again (low-confidence remasking)."""
    slots, noise = [MASK] * size, Replayed()
    for i in range(steps):
        masked = [slot for slot, token in enumerate(slots) if token == MASK]
        z = said(checkpoint, free, slots)
        token = (z + temperature * noise.gumbel(len(masked), VOCAB)).argmax(-1) if temperature else z.argmax(-1)
        sure = z.softmax(-1).gather(1, token[:, None])[:, 0]
        for row in sure.argsort(descending=True, stable=True)[: size // steps + (i < size % steps)].tolist():
            slots[masked[row]] = int(token[row])
        yield tuple(slots)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("order", ["entropy", "prob"])
@pytest.mark.parametrize(("size", "steps"), [(12, 12), (12, 5), (7, 16)])
def test_dreams_sampler_token_for_token(dream, order, temperature, size, steps):
    ours = dream.ours()
    policy = StepsPolicy(order, steps, "time", temperature)
    expected = list(dream_reference(dream, ours.head.free, size, steps, temperature, order == "entropy"))
    assert list(trace(ours, policy, size, Replayed())) == expected
    assert MASK not in expected[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("size", "steps"), [(12, 12), (12, 5)])
def test_lladas_sampler_token_for_token(tmp_path, temperature, size, steps):
    checkpoint = llada(tmp_path)
    ours = checkpoint.ours()
    policy = StepsPolicy("prob", steps, "even", temperature, tempered=False)
    expected = list(llada_reference(checkpoint, ours.head.free, size, steps, temperature))
    assert list(trace(ours, policy, size, Replayed())) == expected


RECORDED = json.loads((Path(__file__).parent / "recorded" / "samplers.json").read_text())


@pytest.mark.parametrize("record", RECORDED, ids=lambda r: " ".join(str(r[k]) for k in list(r)[:6]))
def test_the_published_samplers_traces_token_for_token(tmp_path, record):
    """Recorded once from the published code of Dream's sampler and of LLaDA's as Fast-dLLM has it, over these weights,
    without the ids that are never produced, and with `Replayed`'s noise in the place of its own."""
    checkpoint = qwen(tmp_path) if record["family"] == "qwen2" else llada(tmp_path)
    ours, llada_like = checkpoint.ours(), record["family"] == "llada"
    policy: OpenPolicy = StepsPolicy(
        record["order"], record["steps"], "even" if llada_like else "time", record["temperature"], not llada_like
    )
    if record["threshold"] is not None:
        policy = ThresholdPolicy(record["threshold"], apart=False)
    right = () if llada_like else RIGHT  # it generates to the right only
    assert [list(slots) for slots in trace(ours, policy, record["size"], Replayed(), right)] == record["trace"]


def test_the_defaults_are_the_published_samplers(dream, tmp_path):
    assert dream.ours().facts.open.policy == StepsPolicy("entropy", None, "time", 0.0)
    assert llada(tmp_path).ours().facts.open.policy == StepsPolicy("prob", None, "even", 0.0, tempered=False)
    elastic = dream.ours(config={"expand_token_id": EXPAND}).facts.open
    assert elastic.policy == ElasticPolicy(StepsPolicy("entropy"), MASK, EXPAND, END, 64)
    assert elastic.lengths[0] == 4


def dreamon_reference(checkpoint: Checkpoint, free: Tensor, size: int, most: int) -> Iterator[tuple[int, ...]]:
    """One token a step, that of the least entropy. EXPAND becomes two masks while there is room; END is deleted, with
    all masks to its right."""
    slots, grown = [MASK] * size, 0
    while MASK in slots:
        masked = [slot for slot, token in enumerate(slots) if token == MASK]
        z = said(checkpoint, free, slots)
        if len(slots) >= most or grown >= most:
            z[:, EXPAND] = -torch.inf
        p = z.softmax(-1)
        entropy = -torch.where(p > 0, p * p.log(), 0).sum(-1)
        row = int(entropy.argmin())
        slot, token = masked[row], int(z[row].argmax())
        if token == END:
            slots = [t for i, t in enumerate(slots) if i < slot or t != MASK]
        elif token == EXPAND:
            slots[slot : slot + 1] = [MASK, MASK]
            grown += 1
        else:
            slots[slot] = token
        yield tuple(slots)


def favour(checkpoint: Checkpoint, ids: list[int]) -> None:
    """Makes the weights like to say some ids: the first one in the middle of six masks, the next one before it."""
    hidden, _ = checkpoint.theirs([*PREFIX, *[MASK] * 6, *RIGHT])
    with torch.no_grad():
        for i, id_ in enumerate(ids):
            checkpoint.model.lm_head.weight[id_] = hidden[len(PREFIX) + 3 - 2 * i] / 4
    checkpoint.model.save_pretrained(checkpoint.folder)


@pytest.mark.parametrize("favoured", [[EXPAND], [END], []])
def test_dreamons_sampler_token_for_token(tmp_path, favoured):
    """With weights that like to expand, with some that like to delete, and with some that like neither."""
    checkpoint = qwen(tmp_path)
    favour(checkpoint, favoured)
    ours = checkpoint.ours(config={"expand_token_id": EXPAND})
    policy = replace(ours.facts.open.policy, most=12)
    expected = list(dreamon_reference(checkpoint, ours.head.free, 6, 12))
    assert list(trace(ours, policy, 6, Replayed())) == expected
    sizes = {len(slots) for slots in expected}
    assert not favoured or len(sizes) > 1


RECORDED_ELASTIC = json.loads((Path(__file__).parent / "recorded" / "dreamon.json").read_text())


@pytest.mark.parametrize("record", RECORDED_ELASTIC, ids=lambda r: " ".join(str(r[k]) for k in list(r)[:5]))
def test_dreamons_published_traces_token_for_token(tmp_path, record):
    """Recorded once from its published evaluation code over these weights, as `samplers.json` was: greedy, by its
    numbers, and hot, on weights that expand, that delete, that do both."""
    checkpoint = qwen(tmp_path)
    favour(checkpoint, record["favoured"])
    ours = checkpoint.ours(config={"expand_token_id": EXPAND})
    sampled = StepsPolicy("entropy", temperature=record["temperature"], top_p=record["top_p"])
    policy = replace(ours.facts.open.policy, policy=sampled, most=record["most"])
    found = [list(slots) for slots in trace(ours, policy, record["size"], Replayed())]
    assert found == record["trace"]


# Keys and values that are kept.


@torch.inference_mode()
def rows(ours: MaskedDenoiser, canvases: list[OpenCanvas], contexts: Contexts) -> list[Tensor]:
    """The rows of passes over a canvas as it is filled."""
    state, found = None, []
    for canvas in canvases:
        (hidden,), (state,) = ours.denoise([canvas], [contexts], [state])
        found.append(hidden)
    return found


def filled(ours: MaskedDenoiser, size: int = 8) -> tuple[list[OpenCanvas], Contexts]:
    canvas, contexts = laid_out(ours, [MASK] * size)
    canvases = [canvas]
    for slot, token in [(3, 65), (0, 66), (7, 67), (4, 68), (1, 69)]:
        canvases.append(canvases[-1].pin({slot: (token, 1.0)}))
    return canvases, contexts


@pytest.mark.parametrize("dual", [False, True])
def test_what_is_kept_of_keys_and_values_is_a_little_off_until_it_is_refreshed(checkpoint, dual):
    """The error against the run without: none in passes that compute all; the more in the others, the longer ago that
    was. A random model is a hard case: what its tokens are to each other is as strong as it is senseless."""
    exact = rows(checkpoint.ours(), *filled(checkpoint.ours()))

    def errors(refresh: int) -> list[float]:
        ours = checkpoint.ours(caching=Caching(refresh=refresh, dual=dual))
        kept = rows(ours, *filled(ours))
        return [float((a - b).norm() / b.norm()) for a, b in zip(kept, exact, strict=True)]

    often, seldom = errors(3), errors(6)
    assert [error < 1e-5 for error in often] == [True, False, False, True, False, False]
    assert [error < 1e-5 for error in seldom] == [True, False, False, False, False, False]
    assert sum(often) < sum(seldom)
    assert max(often) < 0.35
    print(f"{'dual' if dual else 'prefix'} cache, relative error of each pass:", *(f"{e:.3f}" for e in often))


RECORDED_CACHED = json.loads((Path(__file__).parent / "recorded" / "cached.json").read_text())


def recorded_cached(family: str) -> Any:
    records = [record for record in RECORDED_CACHED if record["family"] == family]
    names = [f"{'dual' if r['dual'] else 'prefix'} {r.get('steps', r.get('threshold'))}" for r in records]
    return pytest.mark.parametrize("record", records, ids=names)


@recorded_cached("llada")
def test_published_traces_with_caches_token_for_token(tmp_path, record):
    """Recorded once from Fast-dLLM's LLaDA and its two caches: the first of two blocks of masks, behind which the other
    one stands. Keys and values are those of the first pass for the prefix, or for all but the block."""
    ours = llada(tmp_path).ours(caching=Caching(refresh=99, dual=record["dual"]))
    policy = StepsPolicy("prob", record["steps"], "even", 0.0, tempered=False)
    found = trace(ours, policy, record["size"], Replayed(), (MASK,) * record["behind"])
    assert [list(slots) for slots in found] == record["trace"]
    exact = trace(llada(tmp_path).ours(), policy, record["size"], Replayed(), (MASK,) * record["behind"])
    differs = [list(slots) for slots in exact] != record["trace"]
    assert differs == record["dual"]  # what is kept of the prefix alone happens to change no token here


@recorded_cached("qwen2")
def test_dreams_published_traces_with_caches_token_for_token(tmp_path, record):
    """Recorded once from Fast-dLLM's Dream in the same way. There the first pass makes the first slot final, whatever
    it is, since the token that predicts it is kept, too; here that one is computed anew in each pass, so that the first
    slot may wait, which is told what to begin with instead."""
    ours = qwen(tmp_path).ours(caching=Caching(refresh=99, dual=record["dual"]))
    policy, noise = ThresholdPolicy(record["threshold"], apart=False), Replayed()
    engine = Engine("tiny", ours, ByteCodec(specials=VOCAB - 256), EngineConfig(), policy)
    canvas, contexts = laid_out(ours, [MASK] * record["size"])
    canvas, found = replace(canvas, right=(MASK,) * record["behind"]), []
    (outcome,) = engine.denoise([Pass(canvas, contexts, None, reading=policy.reading(canvas), noise=noise)])
    canvas = canvas.seen(outcome.rows).pin({0: (outcome.rows.token[0], outcome.rows.prob[0])})
    state = replace(outcome.state, first=len(PREFIX))
    while found.append(list(canvas.slots)) or not canvas.full:
        (outcome,) = engine.denoise([Pass(canvas, contexts, state, reading=policy.reading(canvas), noise=noise)])
        canvas, state = policy.step(canvas, outcome.rows, noise), outcome.state
    assert found == record["trace"]


def test_refreshed_in_each_pass_nothing_is_off(checkpoint):
    """But in the first one, if it begins with what is there."""
    ours = checkpoint.ours(caching=Caching(refresh=1, across=True))
    both = zip(rows(ours, *filled(ours)), rows(checkpoint.ours(), *filled(checkpoint.ours())), strict=True)
    for kept, exact in [*both][1:]:
        torch.testing.assert_close(kept, exact, atol=2e-5, rtol=1e-4)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each pass over canvases."""
    found: list[int] = []
    run = MaskedDenoiser._run

    def counted(self: MaskedDenoiser, shares: Any) -> Tensor:
        found.append(sum(len(share.tokens) for share in shares))
        return run(self, shares)

    monkeypatch.setattr(MaskedDenoiser, "_run", counted)
    return found


def grown(canvas: OpenCanvas) -> list[OpenCanvas]:
    """A canvas, then as it grew by one slot, and by four more, and lost three."""
    canvases = [canvas, canvas.splice(1, (MASK, MASK)), canvas.splice(1, (MASK,) * 6)]
    return [*canvases, canvases[-1].splice(2, ()).splice(2, ()).splice(0, ())]


def test_a_canvas_that_grows_or_shrinks_computes_no_more_than_its_own_tokens(shallow, computed):
    """What stands behind it moves along; of a single layer it is the very same there."""
    ours = shallow.ours(caching=Caching(refresh=9, dual=True, across=True))
    canvas, contexts = laid_out(ours, [MASK] * 4)
    canvases, before = grown(canvas), len(PREFIX)
    found = rows(ours, canvases, contexts)
    sizes = [one.size + shallow.shifted for one in canvases]
    assert computed == [sizes[0] + len(RIGHT), *sizes[1:]]
    for kept, one in zip(found, canvases, strict=True):
        wanted, _ = shallow.theirs([*PREFIX, *one.slots, *RIGHT])
        torch.testing.assert_close(kept, wanted[before : before + one.size], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dual", [False, True])
def test_a_canvas_that_grows_is_no_more_off_than_one_that_is_filled(checkpoint, dual):
    plain, ours = checkpoint.ours(), checkpoint.ours(caching=Caching(refresh=9, dual=dual))
    (canvas, contexts), (_, others) = laid_out(ours, [MASK] * 4), laid_out(plain, [])
    both = zip(rows(ours, grown(canvas), contexts), rows(plain, grown(canvas), others), strict=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in both]
    assert errors[0] < 1e-5 < errors[1]
    assert max(errors) < 0.35
    print("relative error as it grows:", *(f"{error:.3f}" for error in errors))


def typed_on(checkpoint: Checkpoint, caching: Caching, typed: int) -> list[Tensor]:
    """A request, and the two passes of another one that has some tokens more before its gap."""
    ours = checkpoint.ours(caching=caching)
    canvas, contexts = laid_out(ours, [MASK] * 4)
    rows(ours, [canvas], contexts)
    complete(ours.encode([65] * typed, contexts.prefix))
    return rows(ours, [replace(canvas, origin=len(PREFIX) + typed)] * 2, contexts)


@pytest.mark.parametrize("typed", [0, 2, 20])
def test_a_request_begins_with_what_is_there_of_its_prefix(shallow, computed, typed):
    """If that is switched on: what the last one had, and what is computed ahead; a few tokens are not worth that."""
    exact, begun = (typed_on(shallow, caching, typed) for caching in (EXACT, Caching(across=True)))
    whole, rest = len(PREFIX) + typed + 4 + len(RIGHT), 4 + len(RIGHT)
    last = int(shallow.shifted)  # the token before the gap is computed in any case
    new = typed if typed == 2 else last
    assert computed == [whole - typed, whole, whole, last + rest, new + rest, whole]
    for found, wanted in zip(begun, exact, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("typed", [2, 20])
def test_what_a_request_begins_with_is_off_until_all_is_computed(checkpoint, typed):
    """How much a text cares has to be measured with weights that mean something: with these it is a third to all."""
    exact, begun = (typed_on(checkpoint, caching, typed) for caching in (EXACT, Caching(across=True)))
    assert float((begun[0] - exact[0]).norm() / exact[0].norm()) > 1e-3
    torch.testing.assert_close(begun[1], exact[1], atol=2e-5, rtol=1e-4)


def test_what_is_computed_ahead_counts_when_it_is_there(checkpoint):
    ours = checkpoint.ours(caching=Caching(across=True))
    begun = ours.encode(PREFIX * 4, None)
    next(begun)
    begun.close()
    kv = complete(ours.encode(PREFIX * 2, None))
    assert kv.kv.length == kv.length == 2 * len(PREFIX)
    free = ours._pool.free
    ours._pool._free, kept = [], ours._pool._free
    with pytest.raises(MemoryError):
        complete(ours.encode(PREFIX * 4, kv))
    assert kv.kv.length == kv.length == 2 * len(PREFIX)
    ours._pool._free += kept
    complete(ours.encode(PREFIX * 4, kv))
    assert kv.kv.length == kv.length == 6 * len(PREFIX)
    assert ours._pool.free < free


def test_pieces_that_are_computed_ahead_move_no_prefix(shallow, computed):
    ours, plain = shallow.ours(caching=Caching(across=True)), shallow.ours()
    canvas, contexts = laid_out(ours, [MASK] * 4)
    kept = contexts.prefix.kv
    for piece in ([1, 2, 3, 4], [90, 80, 70], []):
        blocks = [
            tuple(complete(one.encode(tokens, None)) for tokens in ([piece] if piece else [])) for one in (ours, plain)
        ]
        (found,) = rows(ours, [canvas], Contexts(contexts.prefix, blocks[0]))
        (exact,) = rows(plain, [canvas], Contexts(laid_out(plain, [])[1].prefix, blocks[1]))
        torch.testing.assert_close(found, exact, atol=2e-5, rtol=1e-4)
    rest = 4 + len(RIGHT)
    assert computed == [n for piece in (4, 3, 0) for n in (shallow.shifted + rest, len(PREFIX) + piece + rest)]
    assert contexts.prefix.kv.length == kept.length == len(PREFIX)


def test_a_prefix_that_changed_is_not_taken_for_what_it_was(shallow):
    ours = shallow.ours(caching=Caching(across=True))
    canvas, contexts = laid_out(ours, [MASK] * 4)
    rows(ours, [canvas], contexts)
    contexts.prefix.truncate(0)
    assert contexts.prefix.nbytes == 0
    complete(ours.encode([1, 2, 3], contexts.prefix))
    (found,) = rows(ours, [replace(canvas, origin=3)], contexts)
    (exact,) = rows(shallow.ours(), [replace(canvas, origin=3)], laid_out(shallow.ours(), [], [1, 2, 3])[1])
    torch.testing.assert_close(found, exact, atol=2e-5, rtol=1e-4)
