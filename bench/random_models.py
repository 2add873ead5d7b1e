"""Models of random weights in the shapes of published ones, and the least that a step of one has to read and multiply.

A pass takes as long with weights that say nothing as with others. They are made where they are to lie, tensor by
tensor, of one block of noise that is repeated: the same name has the same numbers wherever and whenever it is made.
They go through the same loading as a checkpoint's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from infill_engine.checkpoint import Form, Loaded, bias_of
from infill_engine.core import OpenDenoiser
from infill_engine.families import diffusion_gemma, llada, qwen2
from infill_engine.families.diffusion_gemma import DiffusionGemmaDenoiser, Shape
from infill_engine.families.llada import LladaDenoiser
from infill_engine.families.masked import CACHE_BYTES, EXACT, Caching
from infill_engine.families.qwen2 import Qwen2Denoiser
from infill_kernels.stored import Dense
from torch import Tensor

if TYPE_CHECKING:
    from infill_kernels import cpu

#: Numbers of noise that are repeated; a prime, lest rows of a matrix be alike.
BLOCK = 4_194_301

_QWEN2 = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_IDS = {"mask_token_id": 5, "eos_token_id": 6, "pad_token_id": 6}

#: Bytes of a number of matrices, of the head, and of keys and values, in each type that is served.
BYTES = {"int8": (1, 1, 2), "bf16": (2, 2, 2), "fp32": (4, 4, 4), "fp8": (1, 2, 2)}

#: As published (Open-dCoder's config.json is Qwen2.5-Coder-0.5B's, Dream's Qwen2.5-7B's).
OPEN_DCODER = _QWEN2 | _IDS | {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
DREAM = _QWEN2 | _IDS | {
    "architectures": ["DreamModel"], "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
LLADA = _IDS | {
    "architectures": ["LLaDAModelLM"], "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
    "mlp_hidden_size": 12288, "vocab_size": 126464, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
    "max_sequence_length": 4096, "weight_tying": False,
}  # fmt: skip
_FULL_LAYER = {"head_dim": 512, "num_key_value_heads": 2}
DIFFUSION_GEMMA: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "canvas_length": 256,
    "text_config": {
        "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "intermediate_size": 2112, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "vocab_size": 262144, "sliding_window": 1024, "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 262144,
        "layer_types": [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(30)],
        "per_layer_config": {str(i): _FULL_LAYER for i in range(5, 30, 6)},
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_type": "proportional"},
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A shape."""

    name: str
    config: Mapping[str, Any]

    @property
    def kind(self) -> Literal["qwen2", "llada", "gemma"]:
        """Its family."""
        (architecture,) = self.config["architectures"]
        return {"DiffusionGemmaForBlockDiffusion": "gemma", "LLaDAModelLM": "llada"}.get(architecture, "qwen2")  # type: ignore[return-value]

    @cached_property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by its published name."""
        if self.kind == "gemma":
            text = self.config["text_config"]
            inner = text["intermediate_size"], text["moe_intermediate_size"]
            return Shape.of(self.config).sizes(text["num_experts"], *inner)
        if self.kind == "llada":
            return llada.NAMES.sizes(llada.shape(self.config), self.vocab, self.config["mlp_hidden_size"])
        names = qwen2.NAMES.tied() if self.config["tie_word_embeddings"] else qwen2.NAMES
        sizes = names.sizes(qwen2.shape(self.config), self.vocab, self.config["intermediate_size"])
        queried = [name for name in sizes if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
        return sizes | {bias_of(name): sizes[name][:1] for name in queried}

    @property
    def parameters(self) -> int:
        """How many numbers there are."""
        return sum(map(math.prod, self.tensors.values()))

    @property
    def vocab(self) -> int:
        """Ids."""
        return int(self.config.get("text_config", self.config)["vocab_size"])

    @property
    def kept(self) -> int:
        """Numbers of keys and values a token."""
        sizes = [shape[0] for name, shape in self.tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]
        if self.kind == "gemma":  # full layers make values of the keys' product
            full = [
                own["num_key_value_heads"] * own["head_dim"]
                for own in self.config["text_config"]["per_layer_config"].values()
            ]
            sizes += full
        return sum(sizes)

    def build(
        self,
        device: str,
        dtype: torch.dtype,
        form: Form = "stored",
        *,
        caching: Caching = EXACT,
        cache_bytes: int = CACHE_BYTES,
        team: cpu.Team | None = None,
        checkpoint: RandomCheckpoint | None = None,
    ) -> OpenDenoiser:
        """dtype: of what is floating; team: as families have it, for int8 on a CPU."""
        checkpoint = checkpoint or RandomCheckpoint(self, device, dtype)
        weights = Loaded(checkpoint, device, dtype if team is None else torch.float32, form)
        families = {"qwen2": Qwen2Denoiser, "llada": LladaDenoiser, "gemma": DiffusionGemmaDenoiser}
        family: Any = families[self.kind]
        text = [b"x"] * self.vocab
        built: OpenDenoiser = family(
            self.config, weights, text, caching=caching, device=device, cache_bytes=cache_bytes, team=team
        )
        return built

    def step(self, rows: int, said: int, keys: int, canvases: int = 1) -> Step:
        """What a step of `rows` tokens in all has to do, of which `said` are read off through the head, with `keys`
        keys of each canvas behind them."""
        return (
            _gemma_step(self, rows, said, keys, canvases)
            if self.kind == "gemma"
            else _step(self, rows, said, keys, canvases)
        )

    def scaled(self, name: str, **changed: Any) -> Model:
        """The same with other sizes."""
        if self.kind == "gemma":
            text = self.config["text_config"] | changed
            layers = text["num_hidden_layers"]
            text |= {"layer_types": [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(layers)]}
            full = {"head_dim": 2 * text["head_dim"], "num_key_value_heads": max(1, text["num_key_value_heads"] // 4)}
            text |= {"per_layer_config": {str(i): full for i in range(5, layers, 6)}}
            return Model(name, {**self.config, "text_config": text})
        return Model(name, {**self.config, **changed})


@dataclass(frozen=True, slots=True)
class Step:
    """The least that a step reads once and multiplies."""

    #: Numbers of matrices; of those of the head; of cached keys and values.
    weights: float
    head: float
    kept: float
    #: Multiply-adds.
    products: float

    def bytes(self, weight: float, head: float, kept: float) -> float:
        """Bytes read, where a number of each takes so many."""
        return weight * self.weights + head * self.head + kept * self.kept


def _step(model: Model, rows: int, said: int, keys: int, canvases: int) -> Step:
    sizes = llada.shape(model.config) if model.kind == "llada" else qwen2.shape(model.config)
    head = model.vocab * sizes.width
    layers = sum(math.prod(shape) for shape in model.tensors.values() if len(shape) == 2 and shape[0] != model.vocab)
    kept = canvases * keys * model.kept
    attended = rows * (keys + rows / canvases) * sizes.layers * 2 * sizes.heads * sizes.head_size
    return Step(layers, head, kept, rows * layers + said * head + attended)


def _gemma_step(model: Model, rows: int, said: int, keys: int, canvases: int) -> Step:
    text = model.config["text_config"]
    heads, top, experts = text["num_attention_heads"], text["top_k_experts"], text["num_experts"]
    own = {name: shape for name, shape in model.tensors.items() if name.startswith(diffusion_gemma.ROOT)}
    chosen = sum(math.prod(shape) for shape in own.values() if len(shape) == 3)
    plain = sum(math.prod(shape) for shape in own.values() if len(shape) == 2 and shape[0] != text["vocab_size"])
    # Of so many experts as rows choose at random, if each is as likely.
    touched = 1 - (1 - top / experts) ** rows
    kept = attended = 0.0
    for i, kind in enumerate(text["layer_types"]):
        full = kind == "full_attention"
        layer = text["per_layer_config"][str(i)] if full else text
        seen = keys if full else min(keys, text["sliding_window"] - 1)
        kept += canvases * seen * 2 * layer["num_key_value_heads"] * layer["head_dim"]
        attended += rows * (seen + rows / canvases) * 2 * heads * layer["head_dim"]
    head = math.prod(model.tensors[f"{diffusion_gemma.ROOT}embed_tokens.weight"])
    # The expected embeddings are one more product of the rows with the embedding.
    products = rows * (plain + chosen * top / experts) + 2 * said * head + attended
    return Step(plain + chosen * touched, head, kept, products)


@dataclass(slots=True)
class RandomCheckpoint:
    """`Checkpoint` of a model of random weights, made on a device as they are asked for."""

    model: Model
    device: str
    dtype: torch.dtype
    #: Keeps each tensor, for somebody else who wants the same.
    keep: bool = False
    path: Path = Path("random")
    _block: Tensor = field(init=False)
    _kept: dict[str, Dense] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        self._block = torch.randn(BLOCK, generator=generator, device=self.device).to(self.dtype)

    @property
    def config(self) -> Mapping[str, Any]:
        """As of config.json."""
        return self.model.config

    @property
    def names(self) -> Sequence[str]:
        """Of all tensors."""
        return [*self.model.tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self.model.tensors[name]

    def read(self, name: str) -> Dense:
        """Norms and factors about 1, matrices that keep a row's length."""
        if name in self._kept:
            return self._kept[name]
        shape = self.shape(name)
        count, first = math.prod(shape), zlib.crc32(name.encode()) % BLOCK
        values = torch.empty(count, dtype=self.dtype, device=self.device)
        done = 0
        while done < count:
            piece = self._block[first : first + count - done]
            values[done : done + len(piece)] = piece
            done, first = done + len(piece), 0
        if len(shape) > 1:
            values *= shape[-1] ** -0.5
        elif name.endswith(".bias"):
            values *= 0.1
        else:
            values = 1 + 0.1 * values.clamp(-3, 3)
        dense = Dense(values.view(shape))
        if self.keep:
            self._kept[name] = dense
        return dense

    def rounding(self, name: str) -> tuple[str, float]:
        """They are what they are."""
        return str(self.dtype).removeprefix("torch."), 0.0

    def release(self, name: str) -> None:
        """There is no file."""

    def served_bytes(self, name: str, floating: int) -> int:
        """What it takes as it is."""
        return math.prod(self.shape(name)) * floating


def tiny(model: Model) -> Model:
    """A model of some hundred thousand numbers in the same shape."""
    if model.kind == "gemma":
        changed = model.scaled(
            f"{model.name}, tiny", hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
            head_dim=16, intermediate_size=96, num_experts=8, top_k_experts=2, moe_intermediate_size=32,
            vocab_size=512, sliding_window=64, max_position_embeddings=2048,
        )  # fmt: skip
        return replace(changed, config={**changed.config, "canvas_length": 64})
    if model.kind == "llada":
        return model.scaled(
            f"{model.name}, tiny", d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, mlp_hidden_size=96, vocab_size=512
        )
    return model.scaled(
        f"{model.name}, tiny", hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, vocab_size=512,
    )  # fmt: skip
