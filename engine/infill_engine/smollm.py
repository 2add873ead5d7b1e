"""The embedded model: SmolLM2-135M run as a denoiser.

A Llama-like decoder (30 layers, width 576, 9 query and 3 key heads of 64, gated FFN of 1536, RoPE base 100,000, RMSNorm
1e-5, tied embedding). It knows its weights, its contexts and a canvas; not text, not requests.

Where a context stands: the prefix stream at positions 0, 1, 2, ...; blocks at the positions before it, so that the last
token of a block stands at -1. Measured on 300 held-out gaps with these weights, mean nats a token of the true middle:
prefix alone 2.15; the suffix as a block after the canvas, where it stands in the file, 2.60 to 2.77; before the prefix
2.01, and 1.98 with the key of the block's own sink left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    moved,
    plan,
)
from infill_kernels.fp8 import Fp8Linear
from torch import Tensor

from infill_engine import cuda
from infill_engine.core import Canvas, ContextKV, Contexts, Facts, ModelError, agreement
from infill_engine.decoder import KV, Decoder, FloatStack, Layer, Product, Stack


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

#: Known tokens before the gap on the canvas: at least, and at most.
LEFT_TOKENS = (4, 20)

#: Masks in a group that serving feeds where the weights were trained for them.
MASKS = 2

#: Layers that one step of encoding runs: between two, more urgent work may go first.
GROUP = 10

#: Tokens that a GPU writes before the host looks, where nothing else is asked of it.
GPU_STEPS = 8
#: Rotary positions that there are on a GPU from the start, 8 MiB: growing the tables costs the recorded graphs.
GPU_POSITIONS = 1 << 15

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def _layers(
    weights: Mapping[str, Tensor],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    product: Callable[[Tensor], Product],
) -> Iterator[Layer]:
    """The layers in a floating type; product: makes one of a matrix [O, K]."""
    for i in range(shape.layers):
        q, k, v, output, gate, up, down = (weights[f"blk.{i}.{name}.weight"] for name in _MATRICES)
        attention_norm, ffn_norm = (
            weights[f"blk.{i}.{name}.weight"].to(device, dtype) for name in ("attn_norm", "ffn_norm")
        )
        matrices = torch.cat([_scaled(q, shape), k, v]), output, torch.cat([gate, up]), down
        to_qkv, to_output, to_gate_up, to_down = map(product, matrices)
        yield Layer(attention_norm, to_qkv, to_output, ffn_norm, to_gate_up, to_down)


def _products(dtype: str, floating: torch.dtype, device: torch.device) -> Callable[[Tensor], Product]:
    """What makes the products of a floating stack."""
    if dtype == "fp8":
        return partial(Fp8Linear, device=device)
    return lambda weight: partial(F.linear, weight=weight.to(device, floating))


def _scaled(q: Tensor, shape: Shape) -> Tensor:
    """The query weights with the scale of the scores in them; 1/8 is exact in any floating type."""
    return q / math.sqrt(shape.head_size)


def quantised(weights: Mapping[str, Tensor], shape: Shape = SMOLLM2) -> dict[str, Tensor]:
    """What an int8 model is made of: the layers and the head, by the names of `infill_kernels.cpu.Weights`."""
    from infill_kernels import cpu

    def layers() -> Iterator[cpu.Layer]:
        for i in range(shape.layers):
            q, k, v, *others = (weights[f"blk.{i}.{name}.weight"].float() for name in _MATRICES)
            attention_norm, ffn_norm = (weights[f"blk.{i}.{name}.weight"] for name in ("attn_norm", "ffn_norm"))
            output, gate, up, down = others
            yield cpu.Layer(attention_norm, torch.cat([_scaled(q, shape), k, v]), output, ffn_norm, gate, up, down)

    parts = {name: torch.from_numpy(part) for name, part in cpu.Weights.of(layers(), shape.layers)._asdict().items()}
    embedding = weights["token_embd.weight"].float()
    head = cpu.Int8Weight.of(embedding)
    parts["head"], parts["head_scale"] = torch.from_numpy(head.values), torch.from_numpy(head.scale)
    parts["rows"] = embedding.half()
    return {f"{INT8}{name}": tensor for name, tensor in parts.items()}


#: Begins the names of the tensors that `quantised` makes.
INT8 = "int8."


@dataclass(slots=True)
class _State:
    """The canvas's known tokens and their keys and values (rotated at absolute positions), kept from pass to pass."""

    kv: KV
    tokens: list[int]


class SmolDenoiser:
    """`Denoiser` of the embedded model: known tokens predict their right neighbour, masks what stands behind theirs."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        dtype: str,
        device: str,
        shape: Shape = SMOLLM2,
        cache_bytes: int = 512 << 20,
        threads: int = 1,
        masks: int = 0,
    ) -> None:
        """weights: by their GGUF names, any floating type, q and k rows in half-split order, for int8 with what
        `quantised` makes of them; dtype: fp32, bf16, int8 or fp8; cache_bytes: memory for the keys and values of all
        contexts and canvases; threads: of one pass in int8 (the others use torch's); masks: to feed in a group, 0 for
        weights that were not trained for them."""
        self._device = torch.device(device)
        floating = torch.bfloat16 if dtype in ("bf16", "fp8") else torch.float32
        on_gpu = self._device.type == "cuda"
        steps = GPU_STEPS if on_gpu else 1
        self.facts = Facts(MASK_ID, END_ID, (SINK_ID,), lookahead=masks, left=LEFT_TOKENS, steps=steps)
        rope = Rope(shape.head_size, shape.rope_base, self._device, GPU_POSITIONS if on_gpu else 2048)
        banned = torch.zeros(shape.vocab, dtype=torch.bool)
        banned[:SPECIALS] = True
        banned[END_ID] = False
        stack: Stack
        if dtype == "int8":
            from infill_kernels import cpu

            team = cpu.Team(threads)
            parts = {name: weights[f"{INT8}{name}"].numpy() for name in (*cpu.Weights._fields, "head", "head_scale")}
            head = cpu.Int8Weight(parts.pop("head"), parts.pop("head_scale"))
            stacked = cpu.Weights(**parts)
            stack = cpu.Int8Stack(stacked, shape.ffn, shape.heads, shape.kv_heads, shape.head_size, shape.eps, team)
            # The rows themselves are only looked up, and stay where they are mapped.
            rows = weights[f"{INT8}rows"]
            self.head = Head(rows, banned=banned, project=cpu.Int8Head(head, shape.vocab, team))
        else:
            layers = _layers(weights, shape, floating, self._device, _products(dtype, floating, self._device))
            stack = FloatStack([*layers], shape.head_size, shape.eps, scale=1.0)
            self.head = Head(weights["token_embd.weight"].to(self._device, floating), banned=banned)
        kept = torch.float16 if dtype == "int8" else floating
        sizes = (shape.layers, shape.kv_heads, shape.head_size)
        page_bytes = 2 * math.prod(sizes) * PAGE * kept.itemsize
        pages = max(4, cache_bytes // page_bytes)
        self._pool = KVPool(*sizes, pages, kept, self._device, transposed=dtype == "int8")
        norm = weights["output_norm.weight"].to(self._device, floating)
        self._forward = Decoder(stack, shape.layers, self.head.weight, norm, shape.eps, floating, self._pool, rope)
        self._graphed = cuda.Graphed(self._forward, rope, self._device) if on_gpu else None
        self._behind = cuda.Behind(self._device) if on_gpu else None

    def prepare(self) -> None:
        """Compiles and records what usual passes run on a GPU, so that no request has to wait for it."""
        if self._graphed is not None:
            self._graphed.prepare(RIGHT_GATE)

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        own = cast(KV, kv) if kv is not None else KV(self._pool)
        n, done = len(tokens), own.length
        if n == 0:
            return own
        own.reserve(done + n)
        chain = list(range(-1, n - 1))
        before = [Placed(own.pages, 0, done)]
        part = Part(range(done, done + n), chain, [LEFT] * n, n, own.pages, done, before)
        with self._writing(own, ahead):
            of_pass, x = plan([part], 0.0, self._device), self._forward.embed(moved(torch.tensor(tokens), self._device))
        layers = self._forward.depth
        for first in range(0, layers, GROUP):
            with self._writing(own, ahead):
                x = self._forward.layers(x, of_pass, first, min(first + GROUP, layers))
            if first + GROUP < layers:
                yield
        own.length = done + n
        yield
        return own

    @contextlib.contextmanager
    def _writing(self, kv: KV, ahead: bool) -> Iterator[None]:
        """What is launched within writes into `kv`: behind the requests' work if it is ahead of need."""
        if ahead and self._behind is not None:
            with self._behind.work() as kv.written:
                yield
        else:
            kv.settle()
            yield

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
        # A copy, since the next pass may compute where this one's rows are.
        hidden = self._load(torch.tensor(tokens), plan(parts, RIGHT_GATE)).run().clone()
        for state in after:
            state.kv.length = len(state.tokens)
        rows = torch.split(hidden, [part.queries for part in parts])
        return [x[frontier:] for x, frontier in zip(rows, keep, strict=True)], after

    def write(
        self,
        canvases: Sequence[Canvas],
        contexts: Sequence[Contexts],
        states: Sequence[Any],
        steps: int,
        read: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, list[Any]]:
        hidden, after = self.denoise(canvases, contexts, states)
        parts = []
        for canvas, context, state in zip(canvases, contexts, after, strict=True):
            # What is known already is one more context of the next token: then the plan of the token after that has
            # the same lists, with one added here and there.
            kv, known = state.kv, len(state.tokens)
            kv.reserve(known + steps)
            placed = [*self._placed(canvas, context), Placed(kv.pages, 0, known)]
            parts.append(Part([canvas.origin + known], [-1], [LEFT], 1, kv.pages, known, placed))
        of_pass = plan(parts, RIGHT_GATE)
        last = replace(of_pass, most_keys=of_pass.most_keys + steps, positions=of_pass.positions + steps)
        loaded = self._load(torch.zeros(len(parts), dtype=torch.int64), last)
        said = cuda.write(loaded, read(torch.cat(hidden)), steps - 1, read).cpu()
        for state, ids in zip(after, said[:-1, 0].long().T.tolist(), strict=True):
            state.tokens += ids
            state.kv.length = len(state.tokens)
        return said, after

    def _place(self, canvas: Canvas, contexts: Contexts, state: _State | None) -> tuple[list[int], Part, int, _State]:
        """One canvas's share of a pass: its tokens that are computed, where they stand, the row among them that
        predicts the frontier, and the state after the pass."""
        tree = canvas.tree(MASK_ID)
        chain = [*canvas.left, *canvas.committed, *canvas.proposal]
        kv = state.kv if state is not None else KV(self._pool)
        done = 0
        if state is not None:  # what is known stays; a proposal that proved wrong is written over
            done = min(agreement(state.tokens, chain), tree.frontier)
        kv.reserve(len(tree.tokens))
        queries = len(tree.tokens) - done
        placed = self._placed(canvas, contexts)
        part = Part(tree.positions, tree.parents, tree.classes, queries, kv.pages, 0, placed)
        return tree.tokens[done:], part, tree.frontier - done, _State(kv, chain)

    def _placed(self, canvas: Canvas, contexts: Contexts) -> list[Placed]:
        """The contexts where they stand for a canvas, ready to be read."""
        prefix, blocks = cast(KV, contexts.prefix), cast(Sequence[KV], contexts.blocks)
        for kv in (prefix, *blocks):
            kv.settle()
        placed = [Placed(prefix.pages, 0, canvas.origin)]
        return placed + [Placed(b.pages, 1, b.length, -b.length, BLOCK_GATE, block=True) for b in blocks]

    def _load(self, tokens: Tensor, of_pass: Plan) -> cuda.Loaded:
        """A whole pass over ids [N]; both on the host."""
        if self._graphed is not None:
            return self._graphed.load(tokens, of_pass)
        return cuda.Loaded(tokens, of_pass, partial(self._forward, tokens, of_pass))


def serving_dtype(wanted: str, device: str) -> str:
    """The type to serve in. "auto" is bf16 on a GPU, and stays "auto" on a CPU, where it takes a measurement.

    Raises `ModelError` for a type that this model or machine does not have.
    """
    if wanted == "auto" and device != "cpu":
        return "bf16"
    served = ("auto", *(cpu_dtypes() if device == "cpu" else ("fp32", "bf16", "fp8")))
    if wanted not in served:
        raise ModelError(
            f"the embedded model cannot be served in {wanted!r} on {device}: use one of {', '.join(served)}"
        )
    if wanted == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ModelError(f"{torch.cuda.get_device_name(device)} has no fp8: use auto, fp32 or bf16")
    return wanted


def cpu_dtypes() -> tuple[str, ...]:
    """The types that this machine's CPU serves in: bf16 where it has products in it, int8 where it has the kernels."""
    mkldnn = torch.ops.mkldnn
    fast_bf16 = hasattr(mkldnn, "_is_mkldnn_bf16_supported") and mkldnn._is_mkldnn_bf16_supported()
    return ("fp32", *(("bf16",) if fast_bf16 else ()), *(("int8",) if int8_available() else ()))


def int8_available() -> bool:
    """Whether this machine can serve in int8."""
    try:
        from infill_kernels import cpu
    except ImportError:  # numba is not there, or not for this Python
        return False
    return cpu.available()
