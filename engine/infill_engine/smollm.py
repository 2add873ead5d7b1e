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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from infill_kernels import (
    LEFT,
    PAGE,
    Head,
    KVPool,
    Part,
    Placed,
    Plan,
    Rope,
    canvas_attention,
    plan,
    rotate_and_store,
)
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

#: Layers that one step of encoding runs: between two, more urgent work may go first.
GROUP = 10

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
    """Keys (rotated at 0, 1, 2, ...) and values of one run of tokens, in pages of a pool that it gives back in the end."""

    def __init__(self, pool: KVPool) -> None:
        self.length = 0
        self.pages: list[int] = []
        self._pool = pool

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self._pool.page_bytes

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        kept = -(-self.length // PAGE)
        self._pool.give(self.pages[kept:])
        del self.pages[kept:]

    def reserve(self, length: int) -> None:
        """Room for `length` tokens. Raises `MemoryError` where the pool has no more."""
        while len(self.pages) * PAGE < length:
            self.pages.append(self._pool.take())

    def __del__(self) -> None:
        self._pool.give(self.pages)


@dataclass(slots=True)
class _State:
    """The canvas's known tokens and their keys and values (rotated at absolute positions), kept from pass to pass."""

    kv: _KV
    tokens: list[int]


class SmolDenoiser:
    """`Denoiser` of the embedded model, untrained for masks: known tokens predict their right neighbour."""

    facts = Facts(mask_id=MASK_ID, end_id=END_ID, sink_id=SINK_ID, lookahead=0, left=(4, 20))

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        dtype: str,
        device: str,
        shape: Shape = SMOLLM2,
        cache_bytes: int = 512 << 20,
    ) -> None:
        """weights: by their GGUF names, any floating type, q and k rows in half-split order; dtype: one of DTYPES;
        cache_bytes: memory for the keys and values of all contexts and canvases."""
        self._shape = shape
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        page_bytes = 2 * shape.layers * shape.kv_heads * PAGE * shape.head_size * self._dtype.itemsize
        pages = max(4, cache_bytes // page_bytes)
        self._pool = KVPool(shape.layers, shape.kv_heads, shape.head_size, pages, self._dtype, self._device)
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

    def encode(self, tokens: Sequence[int], kv: ContextKV | None) -> Generator[None, None, ContextKV]:
        own = cast(_KV, kv) if kv is not None else _KV(self._pool)
        n, done = len(tokens), own.length
        if n == 0:
            return own
        own.reserve(done + n)
        chain = list(range(-1, n - 1))
        before = [Placed(own.pages, 0, done)]
        of_pass = plan([Part(range(done, done + n), chain, [LEFT] * n, n, own.pages, done, before)], 0.0, self._device)
        x = self._embed(tokens)
        for first in range(0, self._shape.layers, GROUP):
            x = self._run(x, of_pass, first, min(first + GROUP, self._shape.layers))
            if first + GROUP < self._shape.layers:
                yield
        own.length = done + n
        yield
        return own

    def denoise(
        self, canvases: Sequence[Canvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        tokens, parts, keep, after = [], [], [], []
        for canvas, context, state in zip(canvases, contexts, states, strict=True):
            of_canvas, part, frontier, known = self._place(canvas, context, state)
            tokens += of_canvas
            parts.append(part)
            keep.append(frontier)
            after.append(known)
        of_pass = plan(parts, RIGHT_GATE, self._device)
        hidden = self._normed(self._run(self._embed(tokens), of_pass, 0, self._shape.layers), self._norm)
        for state in after:
            state.kv.length = len(state.tokens)
        rows = torch.split(hidden, [part.queries for part in parts])
        return [x[frontier:] for x, frontier in zip(rows, keep, strict=True)], after

    def _place(self, canvas: Canvas, contexts: Contexts, state: _State | None) -> tuple[list[int], Part, int, _State]:
        """One canvas's share of a pass: its tokens that are computed, where they stand, the row among them that
        predicts the frontier, and the state after the pass."""
        tree = canvas.tree(self.facts.lookahead, MASK_ID)
        chain = [*canvas.left, *canvas.committed, *canvas.proposal]
        kv = state.kv if state is not None else _KV(self._pool)
        done = 0
        if state is not None:  # what is known stays; a proposal that proved wrong is written over
            done = min(agreement(state.tokens, chain), tree.frontier)
        kv.reserve(len(tree.tokens))
        placed = [Placed(cast(_KV, contexts.prefix).pages, 0, canvas.origin)]
        for block in cast(Sequence[_KV], contexts.blocks):
            placed.append(Placed(block.pages, 1, block.length, -block.length, BLOCK_GATE, block=True))
        queries = len(tree.tokens) - done
        part = Part(tree.positions, tree.parents, tree.classes, queries, kv.pages, 0, placed)
        return tree.tokens[done:], part, tree.frontier - done, _State(kv, chain)

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(tokens, device=self._device), self.head.weight).to(self._dtype)

    def _run(self, x: Tensor, of_pass: Plan, first: int, end: int) -> Tensor:
        """The residual stream [N, width] after layers `first` to `end` - 1; keys and values go into the pool."""
        shape = self._shape
        for i in range(first, end):
            layer, keys, values = self._layers[i], self._pool.keys[i], self._pool.values[i]
            qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(len(x), -1, shape.head_size)
            q = rotate_and_store(qkv, keys, values, of_pass, self._rope)
            attended = canvas_attention(q, keys, values, of_pass, self._rope, scale=1.0)
            x = x + layer.output(attended.view(len(x), -1))
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return x

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
