"""A checkpoint on disk, read tensor by tensor: sharded safetensors or one GGUF file, in whatever form it was quantised.

Files are mapped. A tensor goes to the device, is checked for NaN, and what was read of the file is let go before the
next one, so the host holds one tensor at a time beside what is served from it. Nothing that is kept in few bits is
widened as a whole (`infill_kernels.stored`). Knows names and formats of files, and no forward pass.

Forms of quantised safetensors that are read: FP8 with a scale a tensor, an output or a block (`weight_scale`,
`weight_scale_inv`), NVFP4 (ModelOpt's and compressed-tensors' names), int8 with a scale an output, and integers packed
into 32 bits (compressed-tensors' "int-quantized" and "pack-quantized"). Of AWQ and GPTQ nothing is read.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

import torch
from infill_kernels.fp8 import quantise_rows
from infill_kernels.stored import (
    E2M1,
    Dense,
    Grouped,
    Linear,
    Scaled,
    Stored,
    concatenated,
    relative_error,
    stacked,
    together,
)
from torch import Tensor

from infill_engine.core import ModelError
from infill_engine.gguf_file import GgufFile, release

#: How the matrices of a model are served: as the file has them ("stored", in which floating ones are rounded to the
#: type of the rest), or rounded as they are loaded.
Form = Literal["stored", "fp8", "int8", "int4"]
FORMS: tuple[Form, ...] = get_args(Form)

#: Inputs that share a scale where matrices are rounded as they are loaded.
INT8_GROUP, INT4_GROUP = 64, 32
#: Rows that are rounded at a time.
ROUNDED_ROWS = 64
#: Rows of each matrix in which the error of rounding is measured.
MEASURED_ROWS = 64

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOATING_NAMES = ("F64", "F32", "F16", "BF16")

#: Who quantised what is read, as a config.json names them; None: nobody.
_METHODS = (None, "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4")

#: Begins the names of what a text model does not need.
_NOT_TEXT = ("vision", "audio", "embed_vision", "embed_audio", "multi_modal")


class Weights(Protocol):
    """The weights of a checkpoint on the serving device, by the names of its published form."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """As it is published. Raises `ModelError` where there is none."""

    def dense(self, name: str) -> Tensor:
        """A tensor in the floating type that is served. Raises `ModelError` where there is none, or NaN in it."""

    def looked_up(self, name: str) -> Tensor:
        """A matrix of which a few rows are read at a time: on the host floating numbers stay in the file, in its type.
        Raises as `dense` does."""

    def linear(self, *names: str) -> Linear:
        """The product with one or several matrices, named with `.weight`, and their biases where they have some; their
        outputs side by side. Raises `ModelError`."""

    def stored(self, name: str) -> Stored:
        """One or several matrices as they are served. Raises `ModelError`."""

    def rounded(self, form: str, error: float) -> None:
        """Notes how far another has rounded a matrix, in its first rows."""


class Checkpoint(Protocol):
    """Tensors on disk, by the names of the model's published form."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """What its config.json says; of a GGUF file the same, made of its metadata."""

    @property
    def names(self) -> Sequence[str]:
        """Of all tensors, without those that only say how others are kept."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Stored:
        """A tensor as it lies on disk, in the host's memory. Raises `ModelError`."""

    def release(self, name: str) -> None:
        """Lets the system forget what it holds of it in memory; where that is needed after all, it is read again."""

    def served_bytes(self, name: str, floating: int) -> int:
        """What it takes as it is; floating: bytes of a floating number."""

    def rounding(self, name: str) -> tuple[str, float]:
        """What its form is called, and the relative error that reading it so makes, in its first rows."""


class SafetensorsFile:
    """One file, mapped."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for one that is none, or is cut short."""
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            (size,) = struct.unpack_from("<Q", self._map)
            header = json.loads(self._map[8 : 8 + min(size, len(self._map))])
            self._base = 8 + size
            self.tensors = {
                name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ModelError(f"{path} is no whole safetensors file ({error}): download it again") from None
        end = self._base + max((entry[3] for entry in self.tensors.values()), default=0)
        if end > len(self._map):
            raise ModelError(f"{path} is cut short: it has {len(self._map)} of {end} bytes: download it again")

    def tensor(self, name: str) -> Tensor:
        """A view of the file."""
        kind, shape, first, end = self.tensors[name]
        dtype = _TYPES.get(kind)
        if dtype is None or end - first != math.prod(shape) * dtype.itemsize:
            raise ModelError(f"{self.path}: {name} is of type {kind} {list(shape)}, which is not read")
        if end == first:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=end - first, offset=self._base + first)
        # A view of bytes has to begin at a multiple of the type's size, which the format does not promise.
        aligned = flat if (self._base + first) % dtype.itemsize == 0 else flat.clone()
        return aligned.view(dtype).view(shape)

    def release(self, name: str) -> None:
        _, _, first, end = self.tensors[name]
        release(self._map, self._base + first, end - first)


#: Endings of tensors that say how the one before them is kept.
_SIDES = ("_scale_inv", "_scale_2", "_scale", "_global_scale", "_zero_point", "_shape", "_g_idx")
_SIDE = re.compile(rf"({'|'.join(_SIDES)})$")
#: What says how activations were kept.
_NO_WEIGHT = re.compile(r"\.(input_scale|input_global_scale|[kv]_scale|activation_scale)$")


class SafetensorsFolder:
    """A Hugging Face folder: config.json and one or several shards."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`, also where a shard is missing or cut short."""
        self.path = path
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        quantised = self.config.get("quantization_config") or {}
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        if method not in _METHODS:
            raise ModelError(
                f"{path} is quantised by {method}, which is not read: use bf16, FP8, NVFP4, int4 of "
                "compressed-tensors, or a GGUF file"
            )
        index = path / "model.safetensors.index.json"
        if index.exists():
            where = read_json(index).get("weight_map")
            if not isinstance(where, dict):
                raise ModelError(f"{index} does not say where the tensors are: download it again")
            files = {name: SafetensorsFile(path / name) for name in sorted(set(where.values()))}
        else:
            files = {file.name: SafetensorsFile(file) for file in sorted(path.glob("*.safetensors"))}
            if not files:
                raise ModelError(f"{path} has no *.safetensors: use a folder of safetensors, or a GGUF file")
            where = {name: file.path.name for file in files.values() for name in file.tensors}
        missing = [name for name, file in where.items() if name not in files[file].tensors]
        if missing:
            raise ModelError(f"{path / where[missing[0]]} lacks {missing[0]}: download it again")
        self._files = {name: files[file] for name, file in where.items()}
        packed = (name.removesuffix("_packed") for name in self._files if name.endswith(".weight_packed"))
        plain = (name for name in self._files if not self._is_side(name) and not name.endswith(".weight_packed"))
        # By file, then by place, so that loading in this order reads forward.
        self.names = sorted([*plain, *packed], key=lambda name: self._place(self._main(name)))

    def _is_side(self, name: str) -> bool:
        """Whether a tensor only says how another is kept."""
        side = _SIDE.search(name)
        base = name[: side.start()] if side else ""
        return bool(_NO_WEIGHT.search(name)) or base in self._files or f"{base}_packed" in self._files

    def _place(self, name: str) -> tuple[str, int]:
        file = self._files[name]
        return file.path.name, file.tensors[name][2]

    def _main(self, name: str) -> str:
        """The tensor that holds most of one."""
        main = name if name in self._files else f"{name}_packed"
        if main not in self._files:
            raise ModelError(f"{self.path} has no tensor {name}: it is not the model that its config.json says")
        return main

    def shape(self, name: str) -> tuple[int, ...]:
        main = self._main(name)
        kind, shape = self._files[main].tensors[main][:2]
        if main != name and self._side(name, "_global_scale") is None:
            return tuple(self._tensor(f"{name}_shape").tolist())
        return (*shape[:-1], 2 * shape[-1]) if kind == "U8" and len(shape) > 1 else tuple(shape)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self.path} has no tensor {name}")
        return self._files[name].tensor(name)

    def _side(self, name: str, ending: str) -> Tensor | None:
        """What stands beside a tensor under its name with another ending."""
        return self._tensor(f"{name}{ending}") if f"{name}{ending}" in self._files else None

    def release(self, name: str) -> None:
        main = self._main(name)
        self._files[main].release(main)

    def served_bytes(self, name: str, floating: int) -> int:
        main = self._main(name)
        kind, shape, first, end = self._files[main].tensors[main]
        size: int = end - first
        if _TYPES.get(kind) in _FLOATING:
            return int(math.prod(shape)) * floating
        sides = (self._side(name, ending) for ending in ("_scale", "_scale_inv"))
        scale = next((side for side in sides if side is not None), torch.empty(0))
        if kind == "U8":
            return size + 2 * scale.numel()
        if kind == "F8_E4M3":
            return size + 4 * scale.numel()
        four_bits = kind == "I32" and size < math.prod(self.shape(name))
        return size + scale.nbytes * (2 if four_bits else 1)  # of the offset, too

    def rounding(self, name: str) -> tuple[str, float]:
        main = self._main(name)
        kind, shape, *_ = self._files[main].tensors[main]
        if kind != "U8" or len(shape) != 2:
            return kind, 0.0
        exact = self._nvfp4(name)
        first = replace(exact, values=exact.values[:MEASURED_ROWS], scale=exact.scale[:MEASURED_ROWS])
        return "NVFP4", relative_error(_narrow(first), first.rows(0, len(first.values), torch.float32))

    def _nvfp4(self, name: str) -> Grouped:
        """Raises `ModelError` where there is no scale for the scales."""
        scale, second, whole = (self._side(name, side) for side in ("_scale", "_scale_2", "_global_scale"))
        factor = second.float() if second is not None else 1 / whole.float() if whole is not None else None
        if scale is None or factor is None:
            raise self._wrong(name)
        while factor.dim() < scale.dim():
            factor = factor.unsqueeze(-1)
        return Grouped(self._tensor(self._main(name)), scale.float() * factor, table=torch.tensor(E2M1))

    def read(self, name: str) -> Stored:
        values = self._tensor(self._main(name))
        scale = self._side(name, "_scale")
        if values.dtype in _FLOATING:
            return Dense(values)
        if values.dtype == torch.float8_e4m3fn:
            inverse = self._side(name, "_scale_inv")
            return _scaled(values, inverse if inverse is not None else scale, self._block(), self._wrong(name))
        if values.dtype == torch.int8 and scale is not None and scale.numel() == len(values):
            return Grouped(values, scale.reshape(-1, 1))
        if values.dtype == torch.uint8:
            return _narrow(self._nvfp4(name))
        if values.dtype == torch.int32 and scale is not None:
            return self._packed(name, values, scale)
        raise self._wrong(name)

    def _block(self) -> tuple[int, int]:
        """Outputs and inputs of a block of FP8."""
        outs, ins = (self.config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
        return outs, ins

    def _packed(self, name: str, packed: Tensor, scale: Tensor) -> Grouped:
        """Integers that lie in 32 bits one behind the other, the first lowest, half of their range added."""
        shape = self.shape(name)
        bits = next((bits for bits in (4, 8) if -(-shape[-1] * bits // 32) == packed.shape[-1]), None)
        if bits is None or shape[-1] % 2:
            raise self._wrong(name)
        if self._side(name, "_zero_point") is not None or scale.dim() != 2:
            raise ModelError(f"{self.path}: {name} has zero points, which are not read: use a symmetric quantisation")
        order = self._side(name, "_g_idx")
        if order is not None and not torch.equal(order.long(), torch.arange(shape[-1]) * scale.shape[-1] // shape[-1]):
            raise ModelError(f"{self.path}: {name} has groups out of order (actorder), which are not read: use others")
        codes = packed.contiguous().view(torch.uint8)[:, : shape[-1] * bits // 8]  # of two codes the first is the lower
        if bits == 8:
            return Grouped((codes ^ 128).view(torch.int8), scale)
        return Grouped(codes, scale, -8 * scale)

    def _wrong(self, name: str) -> ModelError:
        return ModelError(
            f"{self.path}: {name} is kept in a form that is not read: use bf16, FP8, NVFP4, or a GGUF file"
        )


def _narrow(stored: Grouped) -> Grouped:
    """With scales in fp16, if they are in its range: they come to a third of what numbers of 4 bits take."""
    half = stored.scale.half()
    return replace(stored, scale=half) if _finite(half) else stored


def _scaled(values: Tensor, scale: Tensor | None, block: tuple[int, int], wrong: ModelError) -> Scaled:
    """FP8 with a scale a tensor, an output or a block."""
    if scale is None:
        raise wrong
    *several, outs, ins = values.shape
    scale = scale.float()
    if scale.numel() == math.prod(several):
        return Scaled(values, scale.reshape(*several, 1, 1), (outs, ins))
    if scale.numel() == math.prod(several) * outs:
        return Scaled(values, scale.reshape(*several, outs, 1), (1, ins))
    if tuple(scale.shape) == (*several, -(-outs // block[0]), -(-ins // block[1])):
        return Scaled(values, scale, block)
    raise wrong


#: Names of GGUF files' tensors, without `.weight`, beside those of the published form. {} is the layer.
_COMMON = {
    "token_embd": "{root}embed_tokens.weight",
    "output_norm": "{root}norm.weight",
    "output": "lm_head.weight",
    "blk.{}.attn_norm": "{root}layers.{}.input_layernorm.weight",
    "blk.{}.attn_output": "{root}layers.{}.self_attn.o_proj.weight",
    **{f"blk.{{}}.attn_{part}": f"{{root}}layers.{{}}.self_attn.{part}_proj.weight" for part in "qkv"},
    **{f"blk.{{}}.attn_{part}.bias": f"{{root}}layers.{{}}.self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"blk.{{}}.ffn_{part}": f"{{root}}layers.{{}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "blk.{}.ffn_norm": "{root}layers.{}.post_attention_layernorm.weight",
}
_GEMMA = _COMMON | {
    "self_cond_pre_norm": "{root}self_conditioning.pre_norm.weight",
    **{f"self_cond_{part}": f"{{root}}self_conditioning.{part}_proj.weight" for part in ("gate", "up", "down")},
    "blk.{}.attn_q_norm": "{root}layers.{}.self_attn.q_norm.weight",
    "blk.{}.attn_k_norm": "{root}layers.{}.self_attn.k_norm.weight",
    "blk.{}.post_attention_norm": "{root}layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_norm": "{root}layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.pre_ffw_norm_2": "{root}layers.{}.pre_feedforward_layernorm_2.weight",
    "blk.{}.post_ffw_norm": "{root}layers.{}.post_feedforward_layernorm.weight",
    "blk.{}.post_ffw_norm_1": "{root}layers.{}.post_feedforward_layernorm_1.weight",
    "blk.{}.post_ffw_norm_2": "{root}layers.{}.post_feedforward_layernorm_2.weight",
    "blk.{}.ffn_gate_inp": "{root}layers.{}.router.proj.weight",
    "blk.{}.ffn_gate_inp.scale": "{root}layers.{}.router.scale",
    "blk.{}.ffn_down_exps.scale": "{root}layers.{}.router.per_expert_scale",
    "blk.{}.ffn_gate_up_exps": "{root}layers.{}.experts.gate_up_proj",
    "blk.{}.ffn_down_exps": "{root}layers.{}.experts.down_proj",
    "blk.{}.layer_output_scale": "{root}layers.{}.layer_scalar",
    "blk.{}.enc_layer_output_scale": "model.encoder.language_model.layers.{}.layer_scalar",
}
_LLADA_ROOT = "model.transformer."
_LLADA = {
    "token_embd": "{root}wte.weight",
    "output_norm": "{root}ln_f.weight",
    "output": "{root}ff_out.weight",
    "blk.{}.attn_norm": "{root}blocks.{}.attn_norm.weight",
    "blk.{}.attn_output": "{root}blocks.{}.attn_out.weight",
    **{f"blk.{{}}.attn_{part}": f"{{root}}blocks.{{}}.{part}_proj.weight" for part in "qkv"},
    "blk.{}.ffn_norm": "{root}blocks.{}.ff_norm.weight",
    "blk.{}.ffn_gate": "{root}blocks.{}.ff_proj.weight",
    "blk.{}.ffn_up": "{root}blocks.{}.up_proj.weight",
    "blk.{}.ffn_down": "{root}blocks.{}.ff_out.weight",
}
#: By `general.architecture`: the names, their root, and the class that the published config names.
_ARCHITECTURES = {
    "diffusion-gemma": (_GEMMA, "model.decoder.", "DiffusionGemmaForBlockDiffusion"),
    "dream": (_COMMON, "model.", "DreamModel"),
    "qwen2": (_COMMON, "model.", "Qwen2ForCausalLM"),
    "llada": (_LLADA, _LLADA_ROOT, "LLaDAModelLM"),
}


#: Types of tokens in a GGUF file that no text has: control, user defined, unused.
_ADDED = (3, 4, 5)


class GgufCheckpoint:
    """One GGUF file as a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`."""
        self.path, self.file = path, GgufFile(path)
        arch = self.file.facts.get("general.architecture")
        if arch not in _ARCHITECTURES:
            raise ModelError(
                f"{path} is of architecture {arch!r}, which is not served: {', '.join(_ARCHITECTURES)} are"
            )
        table, root, _ = _ARCHITECTURES[arch]
        self._own: dict[str, str] = {}
        for own in self.file.tensors:
            layer = re.search(r"^blk\.(\d+)\.", own)
            number = layer[1] if layer else ""
            plain = re.sub(r"^blk\.\d+\.", "blk.{}.", own).removesuffix(".weight")
            if plain in table:
                self._own[table[plain].replace("{root}", root).replace("{}", number)] = own
        self.names = sorted(self._own, key=lambda name: self.file.tensors[self._own[name]].start)
        # llama.cpp puts the two halves of a head's rows in turns where its rotary layout is that of pairs.
        self._paired = arch == "llada"
        self.config: Mapping[str, Any] = self._config(arch)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._name(name)].shape

    def release(self, name: str) -> None:
        self.file.release(self._name(name))

    def served_bytes(self, name: str, floating: int) -> int:
        own = self._name(name)
        if self.file.kind(own) in _FLOATING_NAMES:
            return math.prod(self.shape(name)) * floating
        return self.file.served_bytes(own)

    def rounding(self, name: str) -> tuple[str, float]:
        own = self._name(name)
        return self.file.kind(own), self.file.rounding(own, MEASURED_ROWS)

    def read(self, name: str) -> Stored:
        stored = self.file.tensor(self._name(name))
        if self._paired and re.search(r"\.(q|k)_proj\.", name):
            heads = self.config["n_heads" if ".q_proj." in name else "n_kv_heads"]
            return _halved(stored, heads)
        return stored

    @property
    def tokenizer(self) -> tuple[list[str], list[Sequence[str]], set[int]] | None:
        """The vocabulary, the merges, and the ids of added tokens, of a byte-level BPE that cuts text as Qwen2's does;
        None for any other."""
        facts = {name: self.file.facts.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "tokens", "merges")}
        if facts["model"] != "gpt2" or facts["pre"] != "qwen2" or not facts["tokens"] or not facts["merges"]:
            return None
        kinds = self.file.facts.get("tokenizer.ggml.token_type") or []
        added = {i for i, kind in enumerate(kinds) if kind in _ADDED}
        return facts["tokens"], [merge.split(" ") for merge in facts["merges"]], added

    def _name(self, name: str) -> str:
        if name not in self._own:
            raise ModelError(f"{self.path} has no tensor for {name}: it is not the model that it says")
        return self._own[name]

    def _config(self, arch: str) -> dict[str, Any]:
        """The published form's config.json, of the metadata."""
        facts = self.file.facts

        def fact(name: str, default: Any = None) -> Any:
            value = facts.get(f"{arch}.{name}", default)
            if value is None:
                raise ModelError(f"{self.path} does not say {arch}.{name}: use another file of this model")
            return value

        tokenizer = "tokenizer.ggml."
        layers, heads = fact("block_count"), fact("attention.head_count")
        vocab = vocabulary(self)
        shared = {
            "architectures": [_ARCHITECTURES[arch][2]],
            "vocab_size": vocab,
            "mask_token_id": facts.get(f"{tokenizer}mask_token_id"),
            "eos_token_id": facts.get(f"{tokenizer}eos_token_id"),
            "bos_token_id": facts.get(f"{tokenizer}bos_token_id"),
            "pad_token_id": facts.get(f"{tokenizer}padding_token_id"),
        }
        if arch == "diffusion-gemma":
            return shared | self._gemma(fact, layers, heads, vocab)
        if arch == "llada":
            return shared | {
                "n_layers": layers,
                "n_heads": heads,
                "n_kv_heads": fact("attention.head_count_kv", heads),
                "d_model": fact("embedding_length"),
                "mlp_hidden_size": fact("feed_forward_length"),
                "embedding_size": vocab,
                "rope_theta": fact("rope.freq_base", 500_000.0),
                "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
                "max_sequence_length": fact("context_length"),
                "weight_tying": f"{_LLADA_ROOT}ff_out.weight" not in self._own,
            }
        return shared | {
            "model_type": "Dream" if arch == "dream" else "qwen2",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": fact("attention.head_count_kv", heads),
            "hidden_size": fact("embedding_length"),
            "intermediate_size": fact("feed_forward_length"),
            "rope_theta": fact("rope.freq_base", 1_000_000.0),
            "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": fact("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._own,
        }

    def _gemma(self, fact: Any, layers: int, heads: int, vocab: int) -> dict[str, Any]:
        kv_heads = fact("attention.head_count_kv")
        kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * layers
        # A full layer makes its values of the keys' product, so it has no matrix for them.
        full = [f"model.decoder.layers.{i}.self_attn.v_proj.weight" not in self._own for i in range(layers)]
        wide = {str(i): i for i in range(layers) if full[i]}
        return {
            "model_type": "diffusion_gemma",
            "canvas_length": self.file.facts.get("diffusion.canvas_length", 256),
            "text_config": {
                "vocab_size": vocab,
                "hidden_size": fact("embedding_length"),
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": next((n for n, is_full in zip(kv_heads, full, strict=True) if not is_full), 1),
                "head_dim": fact("attention.key_length_swa"),
                "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
                "per_layer_config": {
                    name: {"head_dim": fact("attention.key_length"), "num_key_value_heads": kv_heads[i]}
                    for name, i in wide.items()
                },
                "sliding_window": fact("attention.sliding_window"),
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": fact("rope.freq_base_swa", 10_000.0)},
                    "full_attention": {"rope_theta": fact("rope.freq_base"), "partial_rotary_factor": 0.25},
                },
                "top_k_experts": fact("expert_used_count"),
                "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
                "final_logit_softcapping": fact("final_logit_softcapping", 30.0),
                "max_position_embeddings": fact("context_length"),
            },
        }


def _halved(stored: Stored, heads: int) -> Stored:
    """With the rows of each head in halves again, of a matrix [O, K] that has them in pairs."""

    def rows(x: Tensor) -> Tensor:
        pairs = x.view(heads, len(x) // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(len(x), -1)

    if isinstance(stored, Dense):
        return Dense(rows(stored.values))
    stored = cast(Grouped, stored)
    offset = None if stored.offset is None else rows(stored.offset)
    return replace(stored, values=rows(stored.values), scale=rows(stored.scale), offset=offset)


def opened(path: Path) -> Checkpoint:
    """The checkpoint in a folder, or the GGUF file. Raises `ModelError`."""
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return GgufCheckpoint(ggufs[0])
        if not (path / "config.json").exists() and ggufs:
            names = ", ".join(file.name for file in ggufs)
            raise ModelError(f"{path} has several GGUF files: name one of {names}")
        return SafetensorsFolder(path)
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder with config.json nor a .gguf file")
    return GgufCheckpoint(path)


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises `ModelError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: download the whole model") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no JSON object: download it again")
    return found


@dataclass(slots=True)
class Several:
    """Matrices of one shape, each in a place of its own."""

    parts: list[Stored]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: int) -> Stored:
        return self.parts[index]

    def rows(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        return torch.stack([part.rows(first, end, dtype) for part in self.parts])

    def to(self, device: torch.device | str) -> Several:
        return Several([part.to(device) for part in self.parts])


class Loaded:
    """`Weights` of a checkpoint, loaded as they are asked for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        dtype: torch.dtype,
        form: Form,
        reading: Callable[[], object] = lambda: None,
    ) -> None:
        """dtype: of what is floating; reading: called whenever a tensor was read, and may raise."""
        self._reading = reading
        self._checkpoint, self._device, self._dtype, self._form = checkpoint, torch.device(device), dtype, form
        self._names = set(checkpoint.names)
        #: The relative errors of all matrices that are not floating, by their form.
        self.errors: dict[str, list[float]] = {}

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def dense(self, name: str) -> Tensor:
        stored = self._checkpoint.read(name)
        shape = stored.shape
        if isinstance(stored, Dense):
            wide = stored.values.to(self._device, self._dtype)
        else:
            wide = stored.to(self._device).rows(0, shape[0], self._dtype)
        self._check(name, Dense(wide))
        self._checkpoint.release(name)
        return wide

    def looked_up(self, name: str) -> Tensor:
        stored = self._checkpoint.read(name)
        if self._device.type != "cpu":
            return self.dense(name)
        if not isinstance(stored, Dense):
            # Its steps are of 4 to 8 bits: half precision holds them in half of the memory, gigabytes of a model of 7B.
            stored = Dense(stored.rows(0, stored.shape[0], torch.float16))
        self._check(name, stored)
        self._checkpoint.release(name)
        return stored.values

    def linear(self, *names: str) -> Linear:
        biases = list(map(bias_of, names))
        matrices = [self.stored(name) for name in names]
        if not any(map(self.has, biases)):
            return stacked(matrices)
        parts = [
            self.dense(bias) if self.has(bias) else torch.zeros(self._checkpoint.shape(name)[0])
            for name, bias in zip(names, biases, strict=True)
        ]
        return stacked(matrices, torch.cat([part.to(self._device, self._dtype) for part in parts]))

    def stored(self, name: str) -> Stored:
        if not self.has(name) and ".experts." in name:
            return self._experts(name)
        there = self._formed(self._checkpoint.read(name).to(self._device))
        self._check(name, there)
        if not isinstance(there, Dense | Several):
            form, error = self._checkpoint.rounding(name)
            if form not in _FLOATING_NAMES:  # else it was rounded as it was loaded
                self.errors.setdefault(form, []).append(error)
        self._checkpoint.release(name)
        return there

    def rounded(self, form: str, error: float) -> None:
        self.errors.setdefault(form, []).append(error)

    @property
    def told(self) -> str:
        """What was quantised, in a line for the log; "" where nothing was."""
        return "; ".join(
            f"{len(errors)} matrices of {form}, off by at most {max(errors):.1e}"
            for form, errors in self.errors.items()
        )

    def _experts(self, name: str) -> Stored:
        """All experts' matrices, where each has its own; the gate's and the other one as one."""
        root, _, kind = name.rpartition(".")
        members = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        parts: list[Stored] = []
        while self.has(f"{root}.{len(parts)}.{members[0]}.weight"):
            pieces = [self.stored(f"{root}.{len(parts)}.{member}.weight") for member in members]
            whole = concatenated(pieces)
            if whole is None:
                raise ModelError(f"{self._checkpoint.path}: the matrices of {root} are kept in different forms")
            parts.append(whole)
        if not parts:
            raise ModelError(f"{self._checkpoint.path} has no tensor {name}: it is not the model that it says")
        return together(parts) or Several(parts)

    def _formed(self, stored: Stored) -> Stored:
        """In the form that is served."""
        if not isinstance(stored, Dense):
            return stored
        exact = stored.values
        if self._form == "stored":
            return Dense(exact.to(self._dtype))
        if exact.dim() == 2:
            rounded = self._rounded(exact)
            self.errors.setdefault(self._form, []).append(relative_error(rounded, exact[:MEASURED_ROWS]))
            return rounded
        parts = [self._formed(Dense(matrix)) for matrix in exact]
        return together(parts) or Several(parts)

    def _rounded(self, exact: Tensor) -> Stored:
        """A matrix [O, K] in fewer bits, some rows at a time: rounding takes several times as much as it rounds."""
        ins = exact.shape[-1]
        bits, most = (8, INT8_GROUP) if self._form == "int8" else (4, INT4_GROUP)

        def part(rows: Tensor) -> Stored:
            if self._form == "fp8":
                values, scale = quantise_rows(rows)
                return Scaled(values, scale, (1, ins))
            return Grouped.of(rows, bits, math.gcd(ins, most))

        whole = concatenated([part(rows) for rows in torch.split(exact, ROUNDED_ROWS)])
        assert whole is not None
        return whole

    def _check(self, name: str, stored: Stored) -> None:
        """Raises `ModelError` where there is a NaN: the model would write nothing but padding."""
        self._reading()
        if isinstance(stored, Several):
            for part in stored.parts:
                self._check(name, part)
            return
        if isinstance(stored, Scaled):
            codes, scale = stored.values.view(torch.uint8), stored.scale
            wrong = bool((codes & 127 == 127).any()) or not _finite(scale)
        elif isinstance(stored, Grouped):
            wrong = not _finite(stored.scale) or (stored.offset is not None and not _finite(stored.offset))
        else:
            wrong = not _finite(cast(Dense, stored).values)
        if wrong:
            raise ModelError(f"{self._checkpoint.path}: {name} holds NaN or infinity: download it again")


def bias_of(name: str) -> str:
    """What the bias of a matrix is called."""
    return name.removesuffix(".weight") + ".bias"


def check_sizes(weights: Weights, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ModelError` where a tensor is there in another size than its config tells, or the bias of a matrix is:
    before anything is read, and before a product fails or reads beside it."""
    biases = {bias_of(name): size[:1] for name, size in sizes.items() if len(size) == 2}
    for name, size in {**sizes, **biases}.items():
        if weights.has(name) and (found := weights.shape(name)) != size:
            raise ModelError(f"its {name} is {list(found)}, not {list(size)}: the config is another's")


def _finite(x: Tensor) -> bool:
    """Whether there is neither NaN nor infinity, in one pass without a copy."""
    if not x.numel():
        return True
    low, high = torch.aminmax(x)
    return bool(torch.isfinite(low) & torch.isfinite(high))


#: How the tables are called from which tokens are looked up, and onto which hidden states are projected.
_EMBEDDINGS, _HEADS = ("embed_tokens.weight", "wte.weight"), ("lm_head.weight", "transformer.ff_out.weight")


def needed_bytes(checkpoint: Checkpoint, form: Form, floating: int, compiled: bool = False) -> int:
    """Memory that the weights of a text model will take; floating: bytes of a floating number; compiled: the kernels of
    a CPU serve it, which have every matrix in int8 whatever the file has. Reads headers only."""
    names = list(text_names(checkpoint))
    if not compiled:
        return sum(_needed(checkpoint, name, form, floating) for name in names)
    # What is looked up is as the file has it, in two bytes; what projects to the vocabulary is there in int8 as well.
    head = next((name for name in names if name.endswith(_HEADS)), None)
    total = 0
    for name in names:
        shape = checkpoint.shape(name)
        product = len(shape) > 1 and (not name.endswith(_EMBEDDINGS) or head is None)
        looked_up = name.endswith(_HEADS + _EMBEDDINGS)
        per_number = 1 * product + 2 * looked_up if len(shape) > 1 else 4
        total += math.prod(shape) * per_number + 4 * shape[0] * product
    return total


def parameters(checkpoint: Checkpoint) -> int:
    """Of a text model."""
    return sum(math.prod(checkpoint.shape(name)) for name in text_names(checkpoint))


def vocabulary(checkpoint: Checkpoint) -> int:
    """How many ids a text model has. Raises `ModelError`."""
    for name in text_names(checkpoint):
        if name.endswith(_EMBEDDINGS):
            return checkpoint.shape(name)[0]
    raise ModelError(f"{checkpoint.path} has no embedding: it is not the model that it says")


def text_names(checkpoint: Checkpoint) -> Iterator[str]:
    """The tensors that a text model needs."""
    return (name for name in checkpoint.names if not any(part.startswith(_NOT_TEXT) for part in name.split(".")))


def _needed(checkpoint: Checkpoint, name: str, form: Form, floating: int) -> int:
    shape = checkpoint.shape(name)
    numbers = math.prod(shape)
    if len(shape) < 2 or name.endswith(_HEADS + _EMBEDDINGS) or ".router." in name:
        return numbers * floating
    kept = checkpoint.served_bytes(name, floating)
    if form == "stored" or kept != numbers * floating:
        return kept
    if form == "fp8":
        return numbers + 4 * numbers // shape[-1]
    bits, group = (8, INT8_GROUP) if form == "int8" else (4, INT4_GROUP)
    return numbers * bits // 8 + (4 if form == "int8" else 8) * numbers // math.gcd(shape[-1], group)
