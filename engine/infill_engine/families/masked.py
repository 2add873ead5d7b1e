"""Models with a mask token that see everything both ways: one decoder, of which the families differ in names and facts.

A Llama-like decoder (RMSNorm, rotary positions, grouped queries, gated FFN) without a causal mask: prefix, canvas and
suffix are one sequence, and each token sees all of it. So the hidden states of the prefix depend on the canvas, and its
keys and values are never final. What of them may be kept is said by `Caching`; where nothing is, a pass is
exact. It knows its weights, its contexts and canvases; not text, not requests.

Sources: Dream (arXiv 2508.15487), DiffuCoder (arXiv 2506.20639), LLaDA (arXiv 2502.09992); keys and values that are
kept for some passes: Fast-dLLM (arXiv 2505.22618, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from infill_kernels import OPEN, PAGE, Head, KVPool, Part, Placed, Rope, moved, plan
from torch import Tensor

from infill_engine.checkpoint import MEASURED_ROWS, Weights, bias_of, check_sizes
from infill_engine.core import ContextKV, Contexts, Facts, ModelError, OpenCanvas
from infill_engine.decoder import KV, Decoder, FloatStack, Layer

if TYPE_CHECKING:  # it brings numba
    from infill_kernels import cpu


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

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernels of this machine's CPU run it."""
        try:
            from infill_kernels import cpu
        except ImportError:  # numba is not there, or not for this Python
            return False
        return cpu.available() and self.head_size % cpu.HEAD_SIZES == 0

    def context_bytes(self, before: int, behind: int, caching: Caching, itemsize: int) -> int:
        tokens = min(before + MOST_SLOTS + behind, self.positions) + PAGE
        return caching.runs * tokens * 2 * self.layers * self.kv_heads * self.head_size * itemsize


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

    def sizes(self, shape: Shape, vocab: int, ffn: int) -> dict[str, tuple[int, ...]]:
        """Of each tensor; ffn: outputs of a gate."""
        width, heads, kv_heads = shape.width, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        of_layer: dict[str, tuple[int, ...]] = {
            self.attention_norm: (width,),
            self.q: (heads, width),
            self.k: (kv_heads, width),
            self.v: (kv_heads, width),
            self.output: (width, heads),
            self.ffn_norm: (width,),
            self.gate: (ffn, width),
            self.up: (ffn, width),
            self.down: (width, ffn),
        }
        return {
            self.embedding: (vocab, width),
            self.norm: (width,),
            self.head or self.embedding: (vocab, width),
            **{name.format(i): size for i in range(shape.layers) for name, size in of_layer.items()},
        }


@dataclass(frozen=True, slots=True)
class Caching:
    """Whose keys and values are kept from pass to pass although they would change a little: an approximation.

    The tests measure what it costs in hidden states; a checkpoint's text has to be measured with its weights.
    """

    #: All are computed anew every so many passes; 1: in each, which is exact.
    refresh: int = 1
    #: Whether the suffix's are kept too (a dual cache), or only the prefix's.
    dual: bool = False
    #: Whether the first pass of a request begins with what the last request had of the same prefix, and with what a new
    #: one has by itself, which is computed ahead of it in small steps. So are pieces of other files: they stand at the
    #: positions before the prefix then, lest each other one move it.
    across: bool = False

    @property
    def runs(self) -> int:
        """How often a request holds a whole sequence's at once: its canvas's; if any are kept, those of the best canvas
        while other lengths are tried; and the prefix's."""
        return 1 + (self.refresh > 1 or self.across) + self.across

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"keys and values can be refreshed every pass or more seldom, not every {self.refresh}")


EXACT = Caching()
#: For a CPU, where a pass over the whole sequence takes seconds: none is computed again in a request.
KEPT = Caching(refresh=1 << 30, dual=True, across=True)

#: New tokens of a prefix that are worth a pass of their own, ahead of the first one over the canvas, and layers of it
#: that one step runs: between two, more urgent work may go first.
LEAST_ALONE, GROUP = 8, 8
#: Slots that a canvas has at most.
MOST_SLOTS = 64
#: Memory for keys and values, by default.
CACHE_BYTES = 512 << 20


class _Prefix:
    """`ContextKV`: the tokens, and if `Caching.across` the keys and values that the first of them had last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.kv: KV | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens) + (self.kv.nbytes if self.kv is not None else 0)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        if self.kv is not None:
            self.kv.truncate(length)


@dataclass(frozen=True, slots=True)
class _State:
    """What a canvas keeps of a pass: keys and values of its whole sequence, of which those of the tokens before `first`
    and of those behind the slots are read again."""

    kv: KV
    first: int
    #: Passes since they were computed, that one included.
    age: int


@dataclass(frozen=True, slots=True)
class _Share:
    """One canvas's share of a pass. Places count in its sequence, prefix, canvas and all."""

    #: The tokens that are computed, those from place `first` on.
    tokens: list[int]
    first: int
    #: Room for the keys and values of the sequence, which holds those of the others.
    kv: KV
    #: The places whose rows predict the open slots.
    rows: list[int]
    #: Pieces of other files that are not in the sequence.
    pieces: list[Placed]
    #: Where the canvas begins, where the first of its tokens stands that predicts a slot, and where the sequence ends.
    prefix: int
    begin: int
    length: int
    #: Whether keys and values of the state's are read again.
    cached: bool

    def planned(self) -> Part:
        """All tokens see each other, whichever are computed."""
        count, end = len(self.tokens), self.first + len(self.tokens)
        known = [*self.pieces, Placed(self.kv.pages, 0, self.first), Placed(self.kv.pages, end, self.length)]
        return Part(range(self.first, end), [-1] * count, [OPEN] * count, count, self.kv.pages, self.first, known)


class Kind(NamedTuple):
    """What one checkpoint with a mask token is, beside its sizes."""

    names: Names
    facts: Facts
    #: Whether a token predicts the one to its right, as in a model that was causal, or itself.
    shifted: bool
    #: Ids that stand in no text and that the policy wants to be said all the same.
    controls: Sequence[int] = ()


class MaskedDenoiser:
    """`OpenDenoiser` of a model with a mask token. A family says what its checkpoints are: `sizes` and `kind`."""

    @staticmethod
    def sizes(config: Mapping[str, Any]) -> Shape:
        """Those that a family's config.json says. Raises `ModelError` for one that lacks a size."""
        raise NotImplementedError

    @staticmethod
    def kind(config: Mapping[str, Any], weights: Weights) -> Kind:
        """What else a checkpoint says of itself; arguments as `__init__` has them. Raises `ModelError`."""
        raise NotImplementedError

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Weights,
        text: Sequence[bytes],
        *,
        caching: Caching = EXACT,
        device: str = "cpu",
        cache_bytes: int = CACHE_BYTES,
        team: cpu.Team | None = None,
    ) -> None:
        """config: what config.json says, with the ids that the tokenizer's files say (`JsonCodec.roles`) in the place
        of its own; weights: by their published names; text: the bytes of each id, empty for those that never stand in
        text, at most as many as the vocabulary has; cache_bytes: memory for keys and values of all passes and contexts;
        team: the threads of the compiled kernels of the CPU, which run matrices rounded to int8 (see `Shape.compiled`);
        None: torch runs the matrices as `weights` have them.

        Raises `ModelError` for a config or weights that are not of this family or of other sizes, and where the mask is
        no id of the vocabulary.
        """
        shape = self.sizes(config)
        names, facts, shifted, controls = self.kind(config, weights)
        self.facts = facts
        self._shape, self._shifted, self._caching = shape, shifted, caching
        self._device = torch.device(device)
        vocab = _checked(weights, names, shape)
        read = weights.dense if team is None else weights.looked_up
        embedding = read(names.embedding)
        head = embedding if names.head is None else read(names.head)
        assert facts.open is not None
        others = *facts.opening, *facts.open.closing, *controls
        for role, id_ in ("mask", facts.mask_id), ("end", facts.end_id), *(("token", other) for other in others):
            if id_ is None or not 0 <= id_ < vocab:
                raise ModelError(f"its {role} is id {id_}, of {vocab} ids: use the model's own config.json")
        if len(text) > vocab:
            raise ModelError(f"its tokenizer has {len(text)} ids, its weights {vocab}: use the model's own tokenizer")
        banned = torch.ones(vocab, dtype=torch.bool)
        banned[[i for i, piece in enumerate(text) if piece]] = False
        banned[[id_ for id_ in facts.open.ends if 0 <= id_ < vocab]] = False
        banned[list(controls)] = False
        banned[facts.mask_id] = True
        dtype = embedding.dtype if team is None else torch.float32
        kept = embedding.dtype if team is None else torch.float16
        sizes = shape.layers, shape.kv_heads, shape.head_size
        pages = max(4, cache_bytes // (2 * math.prod(sizes) * PAGE * kept.itemsize))
        self._pool = KVPool(*sizes, pages, kept, self._device, transposed=team is not None)
        stack: FloatStack | cpu.Int8Stack
        if team is None:
            scale = shape.head_size**-0.5
            stack = FloatStack([*_layers(weights, names, shape)], shape.head_size, shape.eps, scale)
            self.head = Head(head, banned=banned)
        else:
            stack, project = _compiled(weights, names, shape, head, team)
            self.head = Head(head, banned=banned, project=project)
        norm = weights.dense(names.norm).to(dtype)
        rope = Rope(shape.head_size, shape.rope_base, self._device)
        self._decoder = Decoder(stack, shape.layers, embedding, norm, shape.eps, dtype, self._pool, rope)

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        own = cast(_Prefix, kv) if kv is not None else _Prefix()
        if tokens:
            if self._caching.across:
                yield from self._encode(own, tokens)
            own.tokens += tokens
            yield
        return own

    def _encode(self, prefix: _Prefix, tokens: Sequence[int]) -> Generator[None, None, None]:
        """Keys and values of a prefix that goes on with `tokens`, where there are so many new ones that the first pass
        would be long: they see what stands before them and each other, no canvas and no suffix yet."""
        kv = prefix.kv or KV(self._pool)
        done = kv.length
        new = [*prefix.tokens, *tokens][done:]
        if done and len(new) < LEAST_ALONE:
            return
        end = done + len(new)
        kv.reserve(end)
        alike = [-1] * len(new), [OPEN] * len(new)
        of_pass = plan(
            [Part(range(done, end), *alike, len(new), kv.pages, done, [Placed(kv.pages, 0, done)])], 0.0, self._device
        )
        x = self._decoder.embed(moved(torch.tensor(new), self._device))
        for first in range(0, self._decoder.depth, GROUP):
            if first:
                yield
            x = self._decoder.layers(x, of_pass, first, min(first + GROUP, self._decoder.depth))
        kv.length = end
        prefix.kv = kv

    def denoise(
        self, canvases: Sequence[OpenCanvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        shares = [self._share(*one) for one in zip(canvases, contexts, states, strict=True)]
        hidden = self._run(shares)
        after = [
            self._kept(share, cast(_Prefix, context.prefix), state)
            for share, context, state in zip(shares, contexts, states, strict=True)
        ]
        own = torch.split(hidden, [len(share.tokens) for share in shares])
        return [x[[place - share.first for place in share.rows]] for x, share in zip(own, shares, strict=True)], after

    def _run(self, shares: Sequence[_Share]) -> Tensor:
        """The rows [N, width] of the final norm, of the tokens of all shares."""
        tokens = torch.tensor([token for share in shares for token in share.tokens])
        of_pass = plan([share.planned() for share in shares], 0.0, self._device)
        return self._decoder(moved(tokens, self._device), of_pass)

    def _share(self, canvas: OpenCanvas, contexts: Contexts, state: _State | None) -> _Share:
        """What of one canvas's sequence has to be computed in this pass."""
        prefix, blocks = cast(_Prefix, contexts.prefix), cast(Sequence[_Prefix], contexts.blocks)
        opening, apart = len(self.facts.opening), self._caching.across
        before = prefix.tokens[: canvas.origin]
        if not apart:
            before[opening:opening] = [token for block in blocks for token in block.tokens[opening:]]
        kept = [block.kv for block in blocks if block.kv is not None] if apart else []
        pieces = [Placed(kv.pages, opening, kv.length, -kv.length) for kv in kept]
        sequence = [*before, *canvas.tokens]
        if len(sequence) > self._shape.positions:
            raise ModelError(f"{len(sequence)} tokens are more than the model's {self._shape.positions}")
        slot = len(before) + len(canvas.left)
        behind, length = slot + canvas.size, len(sequence)
        begin = max(slot - self._shifted, 0)  # without a token before it, slot 0 is predicted by its own
        cached = state is not None and state.age < self._caching.refresh
        first, end = 0, length
        kv = state.kv if state is not None else KV(self._pool)
        if state is not None and cached:
            first = state.first
            if self._caching.dual:
                end = behind
                if grown := length - kv.length:  # what stands behind it is the same, further on
                    kv.move(behind - grown, grown, self._decoder.rope)
        elif state is None and prefix.kv is not None:
            first = min(prefix.kv.length, begin)
            kv = prefix.kv.copy(first)
        kv.reserve(length)
        kv.length = length
        rows = [max(slot + i - self._shifted, 0) for i in canvas.open]
        return _Share(sequence[first:end], first, kv, rows, pieces, len(before), begin, length, cached)

    def _kept(self, share: _Share, prefix: _Prefix, state: _State | None) -> _State | None:
        """What the next passes may use of this one's keys and values."""
        if state is not None and share.cached:
            return replace(state, age=state.age + 1)
        if self._caching.across:
            prefix.kv = prefix.kv or KV(self._pool)
            prefix.kv.take(share.kv, share.first, share.prefix)
        elif self._caching.refresh == 1:
            return None
        return _State(share.kv, share.begin, age=1)


def _checked(weights: Weights, names: Names, shape: Shape) -> int:
    """How many ids there are. Raises `ModelError` where the weights are not those that the config tells of."""
    vocab, ffn = weights.shape(names.head or names.embedding)[0], weights.shape(names.gate.format(0))[0]
    check_sizes(weights, names.sizes(shape, vocab, ffn))
    if weights.has(names.attention_norm.format(shape.layers)):
        raise ModelError(f"its config.json says {shape.layers} layers, and there are more: the config is another's")
    biases = [bias_of(name.format(i)) for i in range(shape.layers) for name in (names.q, names.k, names.v)]
    missing = [name for name in biases if not weights.has(name)]
    if missing and len(missing) < len(biases):
        raise ModelError(f"its checkpoint has no tensor {missing[0]}, but others like it: download it again")
    return vocab


def _layers(weights: Weights, names: Names, shape: Shape) -> Iterator[Layer]:
    """The layers with products of what the weights are kept in."""
    for i in range(shape.layers):
        yield Layer(
            weights.dense(names.attention_norm.format(i)),
            weights.linear(names.q.format(i), names.k.format(i), names.v.format(i)),
            weights.linear(names.output.format(i)),
            weights.dense(names.ffn_norm.format(i)),
            weights.linear(names.gate.format(i), names.up.format(i)),
            weights.linear(names.down.format(i)),
        )


def _compiled(
    weights: Weights, names: Names, shape: Shape, head: Tensor, team: cpu.Team
) -> tuple[cpu.Int8Stack, cpu.Int8Head]:
    """The layers and the head in int8."""
    from infill_kernels import cpu

    ffn, heads = weights.shape(names.gate.format(0))[0], shape.heads * shape.head_size

    def matrix(name: str) -> Tensor:
        stored = weights.stored(name)
        wide = stored.rows(0, stored.shape[0], torch.float32)
        weights.rounded("int8", cpu.rounding(wide[:MEASURED_ROWS]))
        return wide

    def layers() -> Iterator[cpu.Layer]:
        factor = torch.ones(heads + 2 * shape.kv_heads * shape.head_size)
        factor[:heads] = shape.head_size**-0.5
        for i in range(shape.layers):
            queried = [name.format(i) for name in (names.q, names.k, names.v)]
            biased = weights.has(bias_of(queried[0]))
            yield cpu.Layer(
                attention_norm=weights.dense(names.attention_norm.format(i)),
                qkv=torch.cat([matrix(name) for name in queried]) * factor[:, None],
                output=matrix(names.output.format(i)),
                ffn_norm=weights.dense(names.ffn_norm.format(i)),
                gate=matrix(names.gate.format(i)),
                up=matrix(names.up.format(i)),
                down=matrix(names.down.format(i)),
                qkv_bias=torch.cat([weights.dense(bias_of(name)) for name in queried]) * factor if biased else None,
            )

    rounded = cpu.Weights.of(layers(), shape.layers)
    stack = cpu.Int8Stack(rounded, ffn, shape.heads, shape.kv_heads, shape.head_size, shape.eps, team)
    return stack, cpu.Int8Head(cpu.Int8Weight.of(head), len(head), team)


def number(config: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    """One above 0. Raises `ModelError` where a config says another thing, or nothing and there is no other choice."""
    value = config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        said = "does not say" if value is None else f"says {value!r:.40} for"
        raise ModelError(f"its config {said} {name}: use the one that was published with the weights")
    return value


def count(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """A whole number above 0. Raises as `number` does."""
    value = number(config, name, otherwise)
    if value != int(value):
        raise ModelError(f"its config says {value} for {name}: use the one that was published with the weights")
    return int(value)


def ends(config: Mapping[str, Any]) -> tuple[int, frozenset[int]]:
    """The id that ends a text, and all ids at which one is cut: those that the config and `generation_config` end it
    with, and padding, which some models say of all that is behind an end. Raises `ModelError` where there is none."""
    own, generation = special(config, "eos_token_id"), config.get("generation_config") or {}
    others = special(generation, "eos_token_id", needed=False), special(config, "pad_token_id", needed=False)
    return own[0], frozenset([*own, *others[0], *others[1]])


def special(config: Mapping[str, Any], name: str, needed: bool = True) -> list[int]:
    """The id, or several, that a config names. Raises `ModelError` where it is needed and not there."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise ModelError(f"its {name} is {value!r:.40}, which is no id: use the config that was published with it")
    if needed and not ids:
        raise ModelError(f"neither its config.json nor its tokenizer says {name}: is it a model that fills masks?")
    return ids
