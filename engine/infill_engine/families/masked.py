"""Models with a mask token that see everything both ways: one decoder, of which the families differ in names and facts.

A Llama-like decoder (RMSNorm, rotary positions, grouped queries, gated FFN) without a causal mask: prefix, canvas and
suffix are one sequence, and each token sees all of it. So the hidden states of the prefix depend on the canvas, and its
keys and values are never final. What of them may be kept is said by `Caching`; by default nothing is, and a pass is
exact. It knows its weights, its contexts and canvases; not text, not requests.

Sources: Dream (arXiv 2508.15487), DiffuCoder (arXiv 2506.20639), LLaDA (arXiv 2502.09992); keys and values that are
kept for some passes: Fast-dLLM (arXiv 2505.22618, section 3.2).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from infill_kernels import Head, Rope, moved, rotate
from infill_kernels.stored import Linear
from torch import Tensor

from infill_engine.checkpoint import Weights
from infill_engine.core import ContextKV, Contexts, Facts, ModelError, OpenCanvas


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's sizes."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    rope_base: float
    eps: float
    #: Tokens that a sequence may have.
    positions: int


@dataclass(frozen=True, slots=True)
class Names:
    """What a family calls its tensors; {} is the layer."""

    embedding: str
    norm: str
    #: None: the embedding serves.
    head: str | None
    attention_norm: str
    q: str
    k: str
    v: str
    output: str
    ffn_norm: str
    gate: str
    up: str
    down: str

    def tied(self) -> Names:
        """The same without a head of its own."""
        return replace(self, head=None)


@dataclass(frozen=True, slots=True)
class Caching:
    """Whose keys and values are kept from pass to pass although they would change a little: an approximation.

    The tests measure what it costs in hidden states; a checkpoint's text has to be measured with its weights.
    """

    #: All are computed anew every so many passes; 1: in each, which is exact.
    refresh: int = 1
    #: Whether the suffix's are kept too (a dual cache), or only the prefix's.
    dual: bool = False
    #: Whether the first pass of a request begins with what the last request had of the same prefix.
    across: bool = False

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"keys and values can be refreshed every pass or more seldom, not every {self.refresh}")


EXACT = Caching()


class _KV(NamedTuple):
    """Keys, rotated where they stand, and values of some tokens: [layers, Hkv, T, hd]."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @classmethod
    def of(cls, *parts: _KV) -> _KV:
        """Those of several runs of tokens, one behind the other."""
        return cls(torch.cat([one.keys for one in parts], 2), torch.cat([one.values for one in parts], 2))

    def part(self, first: int, end: int) -> _KV:
        """Those of some tokens, in memory of their own."""
        return _KV(self.keys[:, :, first:end].clone(), self.values[:, :, first:end].clone())


class _Prefix:
    """`ContextKV`: the tokens, and the keys and values that the first of them had in the last pass over all, with those
    of the pieces of other files that stood there."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.kv: _KV | None = None
        self.pieces: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens) + (self.kv.nbytes if self.kv is not None else 0)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        held = length + len(self.pieces)
        if self.kv is not None and self.kv.length > held:
            self.kv = self.kv.part(0, held) if length else None


@dataclass(frozen=True, slots=True)
class _State:
    """What a canvas keeps of a pass: keys and values of the tokens before `first` and from `end` on."""

    kv: tuple[_KV, ...]
    first: int
    end: int
    #: Tokens that the sequence had: where it grows or shrinks, what stands behind the canvas moves.
    length: int
    #: Passes since all were computed.
    age: int


@dataclass(frozen=True, slots=True)
class _Share:
    """One canvas's share of a pass. Places count in its sequence, prefix, canvas and all."""

    #: The tokens that are computed, those from place `first` on.
    tokens: list[int]
    first: int
    #: Keys and values of the others.
    known: tuple[_KV, ...]
    #: The places whose rows predict the open slots.
    rows: list[int]
    #: The tokens of other files in front of the prefix.
    pieces: list[int]
    #: Where the canvas begins, where the first of its tokens stands that predicts a slot, where the last slot ends, and
    #: where the sequence ends.
    prefix: int
    begin: int
    behind: int
    length: int
    #: Whether `known` is the state's.
    cached: bool


class _Layer(NamedTuple):
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class MaskedDenoiser:
    """`OpenDenoiser` of a model with a mask token."""

    def __init__(
        self,
        shape: Shape,
        names: Names,
        weights: Weights,
        facts: Facts,
        text: Sequence[bytes],
        *,
        shifted: bool,
        controls: Sequence[int] = (),
        caching: Caching = EXACT,
        device: str = "cpu",
    ) -> None:
        """text: the bytes of each id, empty for those that never stand in text, at most as many as the vocabulary has;
        shifted: whether a token predicts the one to its right, as in a model that was causal, or itself; controls: ids
        that stand in no text and that the policy wants to be said all the same.

        Raises `ModelError` for weights of other sizes, and where the mask is no id of the vocabulary.
        """
        self.facts = facts
        self._shape, self._shifted, self._caching = shape, shifted, caching
        self._device = torch.device(device)
        self._embedding = weights.dense(names.embedding)
        head = self._embedding if names.head is None else weights.dense(names.head)
        vocab = len(head)
        if self._embedding.shape != head.shape or head.shape[1] != shape.width:
            raise ModelError(
                f"its embedding is {list(head.shape)}, not of width {shape.width}: the config is another's"
            )
        if facts.mask_id is None or not 0 <= facts.mask_id < vocab:
            raise ModelError(f"its mask is id {facts.mask_id}, of {vocab} ids: use the model's own config.json")
        assert facts.open is not None
        if len(text) > vocab:
            raise ModelError(f"its tokenizer has {len(text)} ids, its weights {vocab}: use the model's own tokenizer")
        banned = torch.ones(vocab, dtype=torch.bool)
        banned[[i for i, piece in enumerate(text) if piece]] = False
        banned[[id_ for id_ in facts.open.ends if id_ < vocab]] = False
        banned[list(controls)] = False
        banned[facts.mask_id] = True
        self.head = Head(head, banned=banned)
        self._norm = weights.dense(names.norm)
        self._layers = [
            _Layer(
                weights.dense(names.attention_norm.format(i)),
                weights.linear(names.q.format(i), names.k.format(i), names.v.format(i)),
                weights.linear(names.output.format(i)),
                weights.dense(names.ffn_norm.format(i)),
                weights.linear(names.gate.format(i), names.up.format(i)),
                weights.linear(names.down.format(i)),
            )
            for i in range(shape.layers)
        ]
        self._rope = Rope(shape.head_size, shape.rope_base, self._device)

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        own = cast(_Prefix, kv) if kv is not None else _Prefix()
        if tokens:
            own.tokens += tokens
            yield
        return own

    def denoise(
        self, canvases: Sequence[OpenCanvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        shares = [self._share(*one) for one in zip(canvases, contexts, states, strict=True)]
        try:
            x, fresh = self._run(shares)
        except torch.OutOfMemoryError:
            raise MemoryError("the device has no room for a pass of so many tokens") from None
        after = [
            self._kept(share, kv, cast(_Prefix, context.prefix), state)
            for share, kv, context, state in zip(shares, fresh, contexts, states, strict=True)
        ]
        own = torch.split(x, [len(share.tokens) for share in shares])
        rows = [x[[place - share.first for place in share.rows]] for x, share in zip(own, shares, strict=True)]
        return [self._normed(of_canvas, self._norm) for of_canvas in rows], after

    def _share(self, canvas: OpenCanvas, contexts: Contexts, state: _State | None) -> _Share:
        """What of one canvas's sequence has to be computed in this pass."""
        prefix, opening = cast(_Prefix, contexts.prefix), self.facts.opening
        pieces = [token for block in contexts.blocks for token in cast(_Prefix, block).tokens[len(opening) :]]
        before = prefix.tokens[: canvas.origin]
        before[len(opening) : len(opening)] = pieces
        sequence = [*before, *canvas.tokens]
        if len(sequence) > self._shape.positions:
            raise ValueError(f"{len(sequence)} tokens are more than the model's {self._shape.positions}")
        slot = len(before) + len(canvas.left)
        behind, length = slot + canvas.size, len(sequence)
        begin = max(slot - self._shifted, 0)  # without a token before it, slot 0 is predicted by its own
        first, end = 0, length
        known: tuple[_KV, ...] = ()
        cached = state is not None and state.age < self._caching.refresh
        if state is not None and self._caching.dual:
            cached = cached and state.length == length
        if state is not None and cached:
            first, end, known = state.first, state.end if self._caching.dual else length, state.kv
        elif state is None and prefix.kv is not None and prefix.pieces == pieces:
            first = min(prefix.kv.length, begin)
            known = (prefix.kv.part(0, first),)
        rows = [max(slot + i - self._shifted, 0) for i in canvas.open]
        return _Share(sequence[first:end], first, known, rows, pieces, len(before), begin, behind, length, cached)

    def _kept(self, share: _Share, fresh: _KV | None, prefix: _Prefix, state: _State | None) -> _State | None:
        """What the next passes may use of this one's keys and values."""
        if state is not None and share.cached:
            return replace(state, age=state.age + 1)
        if fresh is None:
            return None
        whole = _KV.of(*share.known, fresh)
        if self._caching.across:
            prefix.kv, prefix.pieces = whole.part(0, share.prefix), share.pieces
        if not self._caching.dual:
            return _State((whole.part(0, share.begin),), share.begin, share.length, share.length, age=1)
        both = whole.part(0, share.begin), whole.part(share.behind, share.length)
        return _State(both, share.begin, share.behind, share.length, age=1)

    def _run(self, shares: Sequence[_Share]) -> tuple[Tensor, list[_KV | None]]:
        """All layers over the tokens of all shares: the residual stream [N, width], and each share's own keys and
        values where some are to be kept."""
        shape, sizes = self._shape, [len(share.tokens) for share in shares]
        ids = [token for share in shares for token in share.tokens]
        places = [share.first + i for share in shares for i in range(len(share.tokens))]
        self._rope.reserve(max(places) + 1)
        position = moved(torch.tensor(places), self._device)
        x = F.embedding(moved(torch.tensor(ids), self._device), self._embedding)
        keep = (self._caching.refresh > 1 or self._caching.across) and not all(share.cached for share in shares)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(len(x), -1, shape.head_size)
            qk = rotate(qkv[:, : -shape.kv_heads], self._rope, position).to(x.dtype)
            q, k, v = qk[:, : shape.heads], qk[:, shape.heads :], qkv[:, -shape.kv_heads :]
            qs, ks, vs = (torch.split(y, sizes) for y in (q, k, v))
            known = [[(kv.keys[i], kv.values[i]) for kv in share.known] for share in shares]
            attended = [self._attend(*of_canvas) for of_canvas in zip(qs, ks, vs, known, strict=True)]
            x = x + layer.output(torch.cat(attended).view(len(x), -1))
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if keep:
                keys.append(k)
                values.append(v)
        if not keep:
            return x, [None] * len(shares)
        stacked = (torch.split(torch.stack(both).transpose(1, 2), sizes, 2) for both in (keys, values))
        return x, [_KV(*own) for own in zip(*stacked, strict=True)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, known: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of one canvas's queries [n, H, hd] to everything: its own keys and values [n, Hkv, hd], and known
        ones [Hkv, T, hd]. There is no mask, and no order: keys carry their positions. Returns [n, H, hd]."""
        keys = torch.cat([*(of for of, _ in known), k.transpose(0, 1)], 1)
        values = torch.cat([*(of for _, of in known), v.transpose(0, 1)], 1)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], enable_gqa=True)
        return out[0].transpose(0, 1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._shape.eps)


def number(config: Mapping[str, Any], name: str) -> float:
    """Raises `ModelError` where a config does not say it."""
    value = config.get(name)
    if not isinstance(value, int | float):
        raise ModelError(f"its config.json does not say {name}: use the one that was published with the weights")
    return value


def special(config: Mapping[str, Any], name: str, needed: bool = True) -> list[int]:
    """The id, or several, that a config names. Raises `ModelError` where it is needed and not there."""
    value = config.get(name)
    ids = [value] if isinstance(value, int) else list(value or ())
    if needed and not ids:
        raise ModelError(f"neither its config.json nor its tokenizer says {name}: is it a model that fills masks?")
    return ids
