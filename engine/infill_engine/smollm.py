"""The embedded model: SmolLM2-135M run as a denoiser.

A Llama-like decoder (30 layers, width 576, 9 query and 3 key heads of 64, gated FFN of 1536, RoPE base 100,000, RMSNorm
1e-5, tied embedding). It knows its weights, its contexts and a canvas; not text, not requests.

Where a context stands: the prefix stream at positions 0, 1, 2, ...; blocks at the positions before it, so that the last
token of a block stands at -1. Measured on 300 held-out gaps with these weights, mean nats a token of the true middle:
prefix alone 2.15; the suffix as a block after the canvas, where it stands in the file, 2.60 to 2.77; before the prefix
2.01, and 1.98 with the key of the block's own sink left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from infill_kernels import LEFT, CanvasPlan, Context, Head, Rope, canvas_attention, plan, rotate
from torch import Tensor

from infill_engine.core import Canvas, ContextKV, Contexts, Facts, ModelError, agreement


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's sizes; SmolLM2-135M's by default."""

    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    ffn: int = 1536
    vocab: int = 49152
    rope_base: float = 100_000.0
    eps: float = 1e-5


SMOLLM2 = Shape()
SINK_ID, MASK_ID, END_ID = 0, 15, 16
#: Ids below this are the base's control tokens. None but END is ever produced.
SPECIALS = 17

#: Gates on attention scores: for keys in blocks and for keys to the right of the query. The first lowers the loss of
#: the untrained base from 1.981 to 1.972; training moves both by less than 0.1.
BLOCK_GATE, RIGHT_GATE = 1.0, -1.0

DTYPES = ("fp32", "bf16", "int8")

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

Linear = Callable[[Tensor], Tensor]


class _Dense:
    """x W^T in the weight's own dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Int8Rows:
    """x W^T with int8 weights, a scale an output channel, and activations of two 7-bit terms with a scale a row.

    A scale a row means that no row depends on what else is in the batch. Seven bits, because AVX2's multiply-add of
    8-bit pairs saturates at 16 bits: with eight, a random product was off by 9 to 17%, with seven by 1.5 to 1.9%. Two
    terms (the rounded activation, then what rounding left, as further rows of the same product), because one costs
    quality that is not there to give: 1.801 nats a token in fp32, 1.931 with one term, 1.803 with two. A product of few
    rows is bound by reading the weights, so the second term is nearly free where it matters, between key strokes.
    """

    _LEVELS = 63

    def __init__(self, weight: Tensor) -> None:
        scale = (weight.abs().amax(1) / 127).clamp(min=1e-8)
        with warnings.catch_warnings():  # torch 2.13 announces the end of these tensors; the kernels have no other door
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scale), dtype=torch.long)
            quantised = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def __call__(self, x: Tensor) -> Tensor:
        top = x.abs().amax(-1, keepdim=True).clamp_min_(1e-12)
        # In place where it can be: at a few rows the calls cost more than the arithmetic.
        n, scale = len(x), top.mul_(1 / self._LEVELS)
        terms = x.new_empty(2 * n, x.shape[1])
        rounded, rest = terms[:n], terms[n:]
        torch.div(x, scale, out=rest)
        torch.round(rest, out=rounded)
        rest.sub_(rounded).mul_(2 * self._LEVELS)  # |rest| <= 1/2
        out = self._product(terms, 1.0, self._LEVELS + 1, self._packed)
        return cast(Tensor, out[:n].add_(out[n:], alpha=0.5 / self._LEVELS).mul_(scale))

    @staticmethod
    def available() -> bool:
        """Whether this processor has kernels for it."""
        return "x86" in torch.backends.quantized.supported_engines


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class _KV:
    """Keys (rotated at 0, 1, 2, ...) and values of one run of tokens, [layers, 2, Hkv, capacity, hd]."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, capacity: int = 64) -> None:
        self.length = 0
        sizes = (shape.layers, 2, shape.kv_heads, capacity, shape.head_size)
        self._data = torch.empty(sizes, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def reserve(self, length: int) -> None:
        """Room for `length` tokens; grows by half, so that appending costs amortised constant time."""
        capacity = self._data.shape[3]
        if length > capacity:
            layers, two, heads, _, size = self._data.shape
            data = self._data.new_empty(layers, two, heads, max(length, capacity * 3 // 2), size)
            data[:, :, :, : self.length] = self._data[:, :, :, : self.length]
            self._data = data

    def layer(self, i: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Views [Hkv, end - first, hd] of keys and values."""
        return self._data[i, 0, :, first:end], self._data[i, 1, :, first:end]


@dataclass(slots=True)
class _State:
    """The canvas's known tokens and their keys and values (rotated at absolute positions), kept from pass to pass."""

    kv: _KV
    tokens: list[int]


class _Placed(NamedTuple):
    """A context where it stands for one part of a pass."""

    kv: _KV
    #: The first token that is seen, and the end of those.
    first: int
    end: int
    bias: float

    def layer(self, i: int) -> Context:
        return Context(*self.kv.layer(i, self.first, self.end), self.bias)


class _Part(NamedTuple):
    """One canvas's (or context's) share of a pass: `tokens` are computed, their keys written into `kv` from `at` on."""

    tokens: list[int]
    kv: _KV
    at: int
    #: The canvas is kv[canvas : at + len(tokens)].
    canvas: int
    contexts: list[_Placed]
    plan: CanvasPlan


class SmolDenoiser:
    """`Denoiser` of the embedded model, untrained for masks: known tokens predict their right neighbour."""

    facts = Facts(mask_id=MASK_ID, end_id=END_ID, sink_id=SINK_ID, lookahead=0, left=(4, 20))

    def __init__(self, weights: Mapping[str, Tensor], dtype: str, device: str, shape: Shape = SMOLLM2) -> None:
        """weights: by their GGUF names, any floating type, q and k rows in half-split order; dtype: one of DTYPES."""
        self._shape = shape
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        self._rope = Rope(shape.head_size, shape.rope_base, self._device)

        def dense(weight: Tensor) -> Linear:
            return _Int8Rows(weight.float()) if dtype == "int8" else _Dense(weight.to(self._device, self._dtype))

        def norm(name: str) -> Tensor:
            return weights[name].to(self._device, self._dtype)

        def layer(i: int) -> _Layer:
            q, k, v, output, gate, up, down = (weights[f"blk.{i}.{name}.weight"] for name in _MATRICES)
            return _Layer(
                attention_norm=norm(f"blk.{i}.attn_norm.weight"),
                qkv=dense(torch.cat([q * shape.head_size**-0.5, k, v])),  # 1/8: exact in any floating type
                output=dense(output),
                ffn_norm=norm(f"blk.{i}.ffn_norm.weight"),
                gate_up=dense(torch.cat([gate, up])),
                down=dense(down),
            )

        self._layers = [layer(i) for i in range(shape.layers)]
        self._norm = norm("output_norm.weight")
        embedding = weights["token_embd.weight"].to(torch.float32, copy=True)
        # Until END is trained it is the base's own end of text, which the base puts where a file is over.
        embedding[END_ID] = embedding[SINK_ID]
        banned = torch.zeros(shape.vocab, dtype=torch.bool, device=self._device)
        banned[:SPECIALS] = True
        banned[END_ID] = False
        # Beside an int8 head the rows are only looked up, where bf16 is finer than the 4-bit weights they come from.
        rows = torch.bfloat16 if dtype == "int8" else self._dtype
        self.head = Head(
            weight=embedding.to(self._device, rows),
            banned=banned,
            project=_Int8Rows(embedding) if dtype == "int8" else None,
        )

    def encode(self, tokens: Sequence[int], kv: ContextKV | None) -> ContextKV:
        own = cast(_KV, kv) if kv is not None else _KV(self._shape, self._dtype, self._device)
        n, done = len(tokens), own.length
        if n == 0:
            return own
        chain = torch.arange(n)
        causal = plan(done + chain, chain - 1, torch.full_like(chain, LEFT), n, self._rope, [0], [False])
        self._forward([_Part(list(tokens), own, done, done, [_Placed(own, 0, done, 0.0)], causal)])
        own.length = done + n
        return own

    def denoise(
        self, canvases: Sequence[Canvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        parts, keep, after = [], [], []
        for canvas, context, state in zip(canvases, contexts, states, strict=True):
            part, frontier, known = self._place(canvas, context, state)
            parts.append(part)
            keep.append(frontier)
            after.append(known)
        hidden = torch.split(self._forward(parts), [len(part.tokens) for part in parts])
        for state in after:
            state.kv.length = len(state.tokens)
        return [rows[frontier:] for rows, frontier in zip(hidden, keep, strict=True)], after

    def _place(self, canvas: Canvas, contexts: Contexts, state: _State | None) -> tuple[_Part, int, _State]:
        """One canvas's part of a pass, the row in it that predicts the frontier, and the state after the pass."""
        tree = canvas.tree(self.facts.lookahead, MASK_ID)
        chain = [*canvas.left, *canvas.committed, *canvas.proposal]
        kv = state.kv if state is not None else _KV(self._shape, self._dtype, self._device)
        done = 0
        if state is not None:  # what is known stays; a proposal that proved wrong is written over
            done = min(agreement(state.tokens, chain), tree.frontier)
        placed = [_Placed(cast(_KV, contexts.prefix), 0, canvas.origin, 0.0)]
        placed += [_Placed(kv, 1, kv.length, BLOCK_GATE) for kv in cast(Sequence[_KV], contexts.blocks)]
        of_pass = plan(
            torch.tensor(tree.positions),
            torch.tensor(tree.parents),
            torch.tensor(tree.classes),
            len(tree.tokens) - done,
            self._rope,
            starts=[0, *(-block.length for block in contexts.blocks)],
            blocks=[False, *(True for _ in contexts.blocks)],
            bias_right=RIGHT_GATE,
        )
        part = _Part(tree.tokens[done:], kv, done, 0, placed, of_pass)
        return part, tree.frontier - done, _State(kv, chain)

    def _forward(self, parts: Sequence[_Part]) -> Tensor:
        """Hidden states [N, width] of all parts' tokens, final norm applied; keys and values go into their `kv`."""
        ids = torch.tensor([token for part in parts for token in part.tokens], device=self._device)
        sizes = [len(part.tokens) for part in parts]
        for part, size in zip(parts, sizes, strict=True):
            part.kv.reserve(part.at + size)
        shape = self._shape
        x = F.embedding(ids, self.head.weight).to(self._dtype)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(len(ids), -1, shape.head_size)
            attended = []
            for part, rows in zip(parts, torch.split(qkv, sizes), strict=True):
                qk, v = rows[:, : -shape.kv_heads], rows[:, -shape.kv_heads :]
                qk = rotate(qk, part.plan.own)
                end = part.at + len(part.tokens)
                new_k, new_v = part.kv.layer(i, part.at, end)
                new_k.copy_(qk[:, shape.heads :].transpose(0, 1))
                new_v.copy_(v.transpose(0, 1))
                seen = [context.layer(i) for context in part.contexts]
                own = part.kv.layer(i, part.canvas, end)
                attended.append(canvas_attention(qk[:, : shape.heads], *own, seen, part.plan, scale=1.0))
            x = x + layer.output(torch.cat(attended).view(len(ids), -1))
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return self._normed(x, self._norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self._shape.width,), weight, self._shape.eps)


def serving_dtype(wanted: str, device: str) -> str:
    """The type to serve in: "auto" takes bf16 on a GPU and int8 on a CPU that has the kernels, else fp32.

    Raises `ModelError` for a type that this model or machine does not have.
    """
    if wanted == "auto":
        return "bf16" if device != "cpu" else "int8" if _Int8Rows.available() else "fp32"
    if wanted not in DTYPES or (wanted == "int8" and (device != "cpu" or not _Int8Rows.available())):
        raise ModelError(f"the embedded model cannot be served in {wanted!r} on {device}: use auto, fp32 or bf16")
    return wanted
