"""A Llama-like decoder as a function of a plan, in the type that it is served in, and runs of keys and values in pages.

    x <- x + W_o attention(W_qkv n(x) + b);   x <- x + W_down (silu(W_gate n(x)) * W_up n(x))         n: RMSNorm

Knows tensors, plans and pages; no model by name, no canvas. What sees what, and where it stands, is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from infill_kernels import PAGE, KVPool, Plan, Rope, canvas_attention, rotate, rotate_and_store
from torch import Tensor

#: A product with one matrix: x [N, K] -> [N, O].
Product = Callable[[Tensor], Tensor]


class Stack(Protocol):
    """The layers as one function, in one serving type."""

    def __call__(self, x: Tensor, plan: Plan, pool: KVPool, rope: Rope, first: int, end: int) -> Tensor:
        """The residual stream [N, width] after layers `first` to `end` - 1; keys and values go into the pool."""


class Layer(NamedTuple):
    """One layer of a `FloatStack`: norms [width], and products."""

    attention_norm: Tensor
    #: Of queries, keys and values, one behind the other.
    qkv: Product
    output: Product
    ffn_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class FloatStack:
    """The layers by torch and the kernels that suit the device, with any products."""

    layers: Sequence[Layer]
    head_size: int
    eps: float
    #: Of the attention's scores.
    scale: float

    def __call__(self, x: Tensor, plan: Plan, pool: KVPool, rope: Rope, first: int, end: int) -> Tensor:
        for i in range(first, end):
            layer, keys, values = self.layers[i], pool.keys[i], pool.values[i]
            qkv = layer.qkv(normed(x, layer.attention_norm, self.eps)).view(len(x), -1, self.head_size)
            q = rotate_and_store(qkv, keys, values, plan, rope)
            attended = canvas_attention(q, keys, values, plan, rope, scale=self.scale)
            x = x + layer.output(attended.view(len(x), -1))
            gate, up = layer.gate_up(normed(x, layer.ffn_norm, self.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return x


@dataclass(frozen=True, slots=True)
class Decoder:
    """The model from ids to hidden rows, on one device."""

    stack: Stack
    #: How many layers it has.
    depth: int
    embedding: Tensor
    norm: Tensor
    eps: float
    #: Of the residual stream.
    dtype: torch.dtype
    pool: KVPool
    rope: Rope

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream [N, width] before the first layer, of ids [N]."""
        return F.embedding(tokens, self.embedding).to(self.dtype)

    def layers(self, x: Tensor, of_pass: Plan, first: int, end: int) -> Tensor:
        """The residual stream after layers `first` to `end` - 1."""
        return self.stack(x, of_pass, self.pool, self.rope, first, end)

    def __call__(self, tokens: Tensor, of_pass: Plan) -> Tensor:
        """All of it: ids [N] to the rows [N, width] of the final norm."""
        return normed(self.layers(self.embed(tokens), of_pass, 0, self.depth), self.norm, self.eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows [N, width]."""
    return F.rms_norm(x, weight.shape, weight, eps)


class KV:
    """Keys and values of one run of tokens, in pages of a pool, to which they return: token i lies in slot i. Keys are
    rotated at 0, 1, 2, ... or at the positions of a canvas, as whoever plans the passes wants it."""

    def __init__(self, pool: KVPool) -> None:
        self.length = 0
        self.pages: list[int] = []
        #: Follows what writes into the pages on another stream than that of requests.
        self.written: torch.cuda.Event | None = None
        self._pool = pool

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return len(self.pages) * self._pool.page_bytes

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        self.length = min(self.length, length)
        self._give(-(-self.length // PAGE))

    def reserve(self, length: int) -> None:
        """Room for `length` tokens. Raises `MemoryError` where the pool has no more."""
        while len(self.pages) * PAGE < length:
            self.pages.append(self._pool.take())

    def copy(self, length: int) -> KV:
        """The first tokens, in pages of their own. Raises `MemoryError`."""
        own = KV(self._pool)
        own.take(self, 0, length)
        return own

    def take(self, other: KV, first: int, length: int) -> None:
        """Has the tokens of `other` up to `length`, which are its own before `first`. Raises `MemoryError`."""
        self.reserve(length)
        pages = slice(first // PAGE, -(-length // PAGE))
        for of_pool in (self._pool.keys, self._pool.values):
            of_pool[:, self.pages[pages]] = of_pool[:, other.pages[pages]]
        self.length = length

    def move(self, first: int, by: int, rope: Rope) -> None:
        """Lets the tokens from `first` on stand so many places further right, their keys turned on as far; what then is
        left of them is room. Raises `MemoryError`."""
        end, half = self.length, self._pool.keys.shape[-1] // 2
        self.reserve(end + by)
        (page, offset), (to, at) = self._slots(first, end), self._slots(first + by, end + by)
        keys, values = self._pool.keys[:, page, :, offset], self._pool.values[:, page, :, offset]  # [n, layers, H, hd]
        back = half if by < 0 else 0  # with its halves exchanged a head turns the other way round
        flat, angle = keys.flatten(0, 1), torch.full((keys.shape[0] * keys.shape[1],), abs(by))
        turned = rotate(flat.roll(back, -1), rope, angle).roll(back, -1)
        self._pool.keys[:, to, :, at] = turned.view(keys.shape).to(keys.dtype)
        self._pool.values[:, to, :, at] = values
        self.length = end + by

    def _slots(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Where tokens lie: pages, and places in them."""
        at = torch.arange(first, end)
        return torch.tensor(self.pages)[at // PAGE], at % PAGE

    def settle(self) -> None:
        """Lets the current stream wait for what is being written."""
        if self.written is not None:
            self.written.wait()
            self.written = None

    def _give(self, kept: int) -> None:
        """Gives the pages back but the first `kept`. Whoever takes them next may write at once."""
        if self.written is not None and len(self.pages) > kept:
            self.written.synchronize()
            self.written = None
        self._pool.give(self.pages[kept:])
        del self.pages[kept:]

    def __del__(self) -> None:
        self._give(0)
