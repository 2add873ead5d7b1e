"""DiffusionGemma: block diffusion by a Gemma-like mixture of experts, run as a denoiser.

One stack of weights is run in two ways. As an encoder it is causal and writes the keys and values of the prefix. As a
decoder it reads these, and a canvas whose rows all see each other; only the scalars behind its layers are its own.
There is no mask token: an open slot holds a token drawn uniformly, and the decoder is also given what it expected in
the pass before (self-conditioning). It knows its weights, its contexts and a canvas; not text, not requests.

    v = x / rms(x),   n_w(x) = w v                                          (w itself, not 1 + w)
    x <- x + n(attention(n(x)));   x <- x + n(n(mlp(n(x))) + n(experts(n(x))));   x <- s x
    attention: queries and keys normed and rotated, scores not scaled; values normed without w; on full layers the
    values are made of the keys' product. The router reads v(x) r d^-1/2, r learned.
    sliding layers: the encoder sees |i - j| < w; every row of the decoder the last w - 1 of the prefix, and the canvas.
    decoder's input: v(E_t + ff(n(e))),  e = sqrt(d) sum_t p_t E_t of the pass before, 0 in the first

For infilling the suffix shares the canvas and is pinned. A pinned row is conditioned on its own token, as if it had
been predicted with certainty. Pieces of other files are encoded alone and stand side by side before the prefix, which
does not see them: another piece encodes nothing else anew (parallel context windows, Ratner et al. 2022, arXiv
2212.10947).

Sources: the model as in transformers >= 5.11 (`DiffusionGemmaForBlockDiffusion`), against which the tests compare;
self-conditioning (Chen et al. 2022, arXiv 2208.04202); soft-capped logits (Gemma 2, arXiv 2408.00118).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from infill_kernels import (
    LEFT,
    OPEN,
    PAGE,
    Head,
    KVPool,
    Part,
    Placed,
    Plan,
    Rope,
    canvas_attention,
    moved,
    plan,
    rotate_and_store,
)
from infill_kernels.experts import mixture
from infill_kernels.stored import Linear, Stored
from torch import Tensor

from infill_engine.checkpoint import Weights, check_sizes
from infill_engine.core import ContextKV, Contexts, Facts, ModelError, OpenCanvas, OpenFacts
from infill_engine.decoder import KV
from infill_engine.families import prompts
from infill_engine.families.masked import CACHE_BYTES, EXACT, Caching, count, number, special
from infill_engine.lengths import CANDIDATES, PUBLISHED_BIAS
from infill_engine.policy import AnnealedPolicy

if TYPE_CHECKING:  # it brings numba
    from infill_kernels import cpu

#: Where the weights that both uses share are named.
ROOT = "model.decoder."
#: And what only the encoder has.
ENCODER = "model.encoder.language_model."
#: Of a layer, over its whole width.
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
#: Ids of the published model, and of them those that end a text: the end of it, of a turn, and of a call.
VOCAB, ENDS = 262_144, (1, 106, 50)
#: Slots of a canvas, which the suffix shares: together no more than the canvas that the model was trained on, and no
#: less than 32: smaller ones were reported to take twice as many passes.
LENGTHS, LEAST = (*CANDIDATES, 96, 128), 32
#: Layers that one step of encoding runs: between two, more urgent work may go first.
GROUP = 6

_gelu = partial(F.gelu, approximate="tanh")


@dataclass(frozen=True, slots=True)
class Attention:
    """The sizes of one kind of layer."""

    kv_heads: int
    head_size: int
    rope_base: float
    #: How much of a head turns.
    rope_share: float
    #: None: sees everything.
    window: int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's sizes, as its config.json says them."""

    width: int
    heads: int
    vocab: int
    #: Of each layer, whether it is full.
    full: tuple[bool, ...]
    kinds: tuple[Attention, Attention]
    top_k: int
    eps: float
    softcap: float | None
    canvas: int
    positions: int
    #: Whether the compiled kernels of a CPU run it: their layers are others.
    compiled = False

    def context_bytes(self, before: int, behind: int, caching: Caching, itemsize: int) -> int:
        # While lengths are tried there are two canvases. The last page of each run, pieces of files too, is not full.
        tokens = min(before, self.positions) + 2 * self.canvas + 8 * PAGE
        sizes = (2 * self.full.count(full) * kind.kv_heads * kind.head_size for full, kind in enumerate(self.kinds))
        return tokens * sum(sizes) * itemsize

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Raises `ModelError` for a config that is not this family's, or lacks something."""
        text, wide, full, ropes = _parts(config)
        owns = (text, ropes[0], count(text, "sliding_window")), (wide, ropes[1], None)
        sliding, full_attention = (
            Attention(
                count(own, "num_key_value_heads"),
                count(own, "head_dim"),
                number(rope, "rope_theta"),
                number(rope, "partial_rotary_factor", 1.0),
                window,
            )
            for own, rope, window in owns
        )
        positions = count(text, "max_position_embeddings")
        softcap = text.get("final_logit_softcapping", 30.0)
        return cls(
            width=count(text, "hidden_size"),
            heads=count(text, "num_attention_heads"),
            vocab=count(text, "vocab_size"),
            full=full,
            kinds=(sliding, full_attention),
            top_k=count(text, "top_k_experts"),
            eps=number(text, "rms_norm_eps"),
            softcap=None if softcap is None else number(text, "final_logit_softcapping", softcap),
            canvas=min(count(config, "canvas_length", 256), positions),
            positions=positions,
        )

    def sizes(self, experts: int, ffn: int, expert_ffn: int) -> dict[str, tuple[int, ...]]:
        """Of each tensor, whether the experts' matrices are one tensor or each its own; ffn, expert_ffn: outputs of a
        gate of the layer, and of an expert."""
        width, soft = self.width, f"{ROOT}self_conditioning."
        sizes: dict[str, tuple[int, ...]] = {
            f"{ROOT}embed_tokens.weight": (self.vocab, width),
            f"{ROOT}norm.weight": (width,),
            f"{soft}pre_norm.weight": (width,),
            f"{soft}gate_proj.weight": (ffn, width),
            f"{soft}up_proj.weight": (ffn, width),
            f"{soft}down_proj.weight": (width, ffn),
        }
        for i, full in enumerate(self.full):
            size, kv_heads = self.kinds[full].head_size, self.kinds[full].kv_heads
            of_layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,) for name in NORMS} | {
                "self_attn.q_proj.weight": (self.heads * size, width),
                "self_attn.k_proj.weight": (kv_heads * size, width),
                **({} if full else {"self_attn.v_proj.weight": (kv_heads * size, width)}),
                "self_attn.o_proj.weight": (width, self.heads * size),
                "self_attn.q_norm.weight": (size,),
                "self_attn.k_norm.weight": (size,),
                "mlp.gate_proj.weight": (ffn, width),
                "mlp.up_proj.weight": (ffn, width),
                "mlp.down_proj.weight": (width, ffn),
                "router.scale": (width,),
                "router.proj.weight": (experts, width),
                "router.per_expert_scale": (experts,),
                "experts.gate_up_proj": (experts, 2 * expert_ffn, width),
                "experts.down_proj": (experts, width, expert_ffn),
                "layer_scalar": (1,),
            }
            sizes |= {f"{ROOT}layers.{i}.{name}": shape for name, shape in of_layer.items()}
            sizes[f"{ENCODER}layers.{i}.layer_scalar"] = (1,)
        return sizes


def _parts(
    config: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[bool, ...], Sequence[Mapping[str, Any]]]:
    """What a config.json says of all layers, and of the full ones; which are full; of positions, in the sliding and in
    the full ones. Raises `ModelError`."""
    try:
        text = config["text_config"]
        full = tuple(kind == "full_attention" for kind in text["layer_types"])
        own = text.get("per_layer_config") or {}
        wide = {"head_dim": text.get("global_head_dim", 512), "num_key_value_heads": text["num_key_value_heads"]}
        wide |= next((own[str(i)] for i, is_full in enumerate(full) if is_full and str(i) in own), {})
        if heads := text.get("num_global_key_value_heads"):
            wide["num_key_value_heads"] = heads
        ropes = [dict(text["rope_parameters"][f"{kind}_attention"]) for kind in ("sliding", "full")]
    except KeyError as error:
        raise ModelError(f"its config.json is not DiffusionGemma's: {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"its config.json is not DiffusionGemma's: {error}") from None
    if not full:
        raise ModelError("its config.json is not DiffusionGemma's: it has no layers")
    return text, wide, full, ropes


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; `scalars` are those of encoder and decoder."""

    input_norm: Tensor
    to_qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    to_output: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    to_gate_up: Linear
    to_down: Linear
    mlp_after: Tensor
    router_scale: Tensor
    router: Tensor
    expert_scale: Tensor
    experts_norm: Tensor
    expert_gate_up: Stored
    expert_down: Stored
    experts_after: Tensor
    after: Tensor
    scalars: tuple[Tensor, Tensor]


class _KV:
    """Keys and values of one run of tokens, of sliding and of full layers."""

    def __init__(self, pools: tuple[KVPool, KVPool]) -> None:
        self.kinds = KV(pools[0]), KV(pools[1])

    @property
    def length(self) -> int:
        return self.kinds[0].length

    @property
    def nbytes(self) -> int:
        return sum(kv.nbytes for kv in self.kinds)

    def truncate(self, length: int) -> None:
        for kv in self.kinds:
            kv.truncate(length)

    def reserve(self, length: int) -> None:
        """Room for `length` tokens. Raises `MemoryError` where a pool has no more."""
        for kv in self.kinds:
            kv.reserve(length)


@dataclass(frozen=True, slots=True)
class _State:
    """What is kept of a canvas from pass to pass."""

    #: Room for its keys and values, which are computed anew each time.
    kv: _KV
    #: The slots that were open in the last pass, and what each was expected to be: [R, D], in units of the embedding.
    open: tuple[int, ...] = ()
    soft: Tensor | None = None


class DiffusionGemma:
    """The model: `encode` and `decode` over one stack."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        device: torch.device | str,
        cache_bytes: int = 512 << 20,
    ) -> None:
        """cache_bytes: memory for the keys and values of all contexts and canvases."""
        self.shape, self._device = shape, torch.device(device)
        self.embedding = weights.dense(f"{ROOT}embed_tokens.weight")
        self._norm = weights.dense(f"{ROOT}norm.weight")
        self._layers = [_layer(weights, shape, i) for i in range(len(shape.full))]
        conditioning = f"{ROOT}self_conditioning."
        self._soft_norm = weights.dense(f"{conditioning}pre_norm.weight")
        self._soft_gate_up = weights.linear(f"{conditioning}gate_proj.weight", f"{conditioning}up_proj.weight")
        self._soft_down = weights.linear(f"{conditioning}down_proj.weight")
        self._ropes = tuple(
            Rope(kind.head_size, kind.rope_base, self._device, share=kind.rope_share) for kind in shape.kinds
        )
        sizes = [(shape.full.count(full), *(kind.kv_heads, kind.head_size)) for full, kind in enumerate(shape.kinds)]
        page_bytes = sum(2 * math.prod(size) * PAGE for size in sizes) * self.embedding.itemsize
        pages = max(2 * -(-shape.canvas // PAGE), cache_bytes // page_bytes)
        sliding, full = (KVPool(*size, pages, self.embedding.dtype, self._device) for size in sizes)
        self.pools = sliding, full

    @property
    def scale(self) -> Tensor:
        """What embeddings are multiplied by, rounded as they are."""
        return torch.tensor(math.sqrt(self.shape.width), dtype=self.embedding.dtype, device=self._device)

    def encode(self, tokens: Sequence[int], kv: _KV) -> Generator[None, None, None]:
        """Extends the keys and values of a prefix in place; each step but the last yields."""
        n, done = len(tokens), kv.length
        kv.reserve(done + n)
        positions, parents, classes = range(done, done + n), range(-1, n - 1), [LEFT] * n
        plans = [
            plan([Part(positions, parents, classes, n, own.pages, done, [Placed(own.pages, 0, done)])], 0.0,
                 self._device)
            for own in kv.kinds
        ]  # fmt: skip
        x = F.embedding(moved(torch.tensor(tokens), self._device), self.embedding) * self.scale
        for i in range(len(self._layers)):
            if i and i % GROUP == 0:
                yield
            kind = self.shape.kinds[self.shape.full[i]]
            x = self._run(x, i, plans[self.shape.full[i]], kind.window, 0)
        for own in kv.kinds:
            own.length = done + n

    def decode(self, tokens: Tensor, soft: Tensor, plans: Sequence[Plan]) -> Tensor:
        """The rows [N, D] of the final norm for canvases of N tokens in all.

        tokens: int64 [N]; soft: [N, D], the expected embedding of each, 0 in a canvas's first pass; plans: for sliding
        and for full layers (see `planned`).
        """
        embedded = F.embedding(tokens, self.embedding) * self.scale
        gate, up = self._soft_gate_up(self._normed(soft * self.scale, self._soft_norm)).chunk(2, -1)
        x = self._normed(embedded + self._soft_down(_gelu(gate) * up))
        for i, full in enumerate(self.shape.full):
            x = self._run(x, i, plans[full], None, 1)
        return self._normed(x, self._norm)

    def planned(
        self,
        canvases: Sequence[tuple[int, int]],
        prefixes: Sequence[_KV],
        own: Sequence[_KV],
        pieces: Sequence[Sequence[tuple[_KV, int]]] = (),
    ) -> list[Plan]:
        """Plans a decoder's pass for sliding and for full layers: every row of a canvas sees its whole canvas.

        canvases: where each begins and how many tokens it has; own: room for its keys and values; pieces: what each
        sees besides, and from which token of that on. The last token of a piece stands at the position before 0.
        """
        plans = []
        for full, kind in enumerate(self.shape.kinds):
            parts = []
            for (origin, size), prefix, kv, others in zip(
                canvases, prefixes, own, pieces or [()] * len(canvases), strict=True
            ):
                # Of what is encoded the same tokens for every row: not a window that moves with them.
                least = -math.inf if kind.window is None else origin - (kind.window - 1)
                seen = [Placed(prefix.kinds[full].pages, int(max(0, least)), origin)]
                for piece, begin in others:
                    if (first := max(begin, least + piece.length)) < piece.length:
                        seen.append(Placed(piece.kinds[full].pages, int(first), piece.length, -piece.length))
                alike = range(origin, origin + size), [-1] * size, [OPEN] * size
                parts.append(Part(*alike, size, kv.kinds[full].pages, 0, seen))
            plans.append(plan(parts, 0.0, self._device))
        return plans

    def _run(self, x: Tensor, i: int, of_pass: Plan, window: int | None, use: int) -> Tensor:
        """Layer i; use: 0 as of the encoder, 1 as of the decoder."""
        layer, shape, full = self._layers[i], self.shape, self.shape.full[i]
        kind, pool, rope = shape.kinds[full], self.pools[full], self._ropes[full]
        index = sum(other == full for other in shape.full[:i])
        keys, values = pool.keys[index], pool.values[index]

        heads = layer.to_qkv(self._normed(x, layer.input_norm)).view(len(x), -1, kind.head_size)
        q, k = heads[:, : shape.heads], heads[:, shape.heads : shape.heads + kind.kv_heads]
        v = k if full else heads[:, shape.heads + kind.kv_heads :]
        qkv = torch.cat([self._normed(q, layer.q_norm), self._normed(k, layer.k_norm), self._normed(v)], 1)
        q = rotate_and_store(qkv, keys, values, of_pass, rope)
        attended = canvas_attention(q, keys, values, of_pass, rope, scale=1.0, window=window)
        x = x + self._normed(layer.to_output(attended.flatten(1)), layer.attention_norm)

        gate, up = layer.to_gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
        common = self._normed(layer.to_down(_gelu(gate) * up), layer.mlp_after)
        routed = F.linear(self._normed(x) * layer.router_scale * shape.width**-0.5, layer.router)
        share, expert = routed.float().softmax(-1).topk(shape.top_k, -1)
        share = share / share.sum(-1, keepdim=True) * layer.expert_scale[expert].float()
        chosen = self._normed(x, layer.experts_norm)
        chosen = mixture(chosen, expert, share, layer.expert_gate_up, layer.expert_down, _gelu)
        both = common + self._normed(chosen, layer.experts_after)
        return (x + self._normed(both, layer.after)) * layer.scalars[use]

    def _normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], weight, self.shape.eps)


def _check(weights: Weights, shape: Shape) -> None:
    """Raises `ModelError` where the weights are not those that the config tells of."""
    first, layers = f"{ROOT}layers.0.", len(shape.full)
    ffn, experts = (weights.shape(f"{first}{name}.weight")[0] for name in ("mlp.gate_proj", "router.proj"))
    down = f"{first}experts.down_proj"
    expert_ffn = weights.shape(down if weights.has(down) else f"{first}experts.0.down_proj.weight")[-1]
    check_sizes(weights, shape.sizes(experts, ffn, expert_ffn))
    if weights.has(f"{ROOT}layers.{layers}.input_layernorm.weight"):
        raise ModelError(f"its config says {layers} layers, and there are more: the config is another's")
    if shape.top_k > experts:
        raise ModelError(f"its config takes {shape.top_k} experts of {experts}: the config is another's")


def _layer(weights: Weights, shape: Shape, i: int) -> _Layer:
    at = f"{ROOT}layers.{i}."

    def norm(name: str) -> Tensor:
        return weights.dense(f"{at}{name}.weight")

    attention = ("q_proj", "k_proj") if shape.full[i] else ("q_proj", "k_proj", "v_proj")
    return _Layer(
        input_norm=norm("input_layernorm"),
        to_qkv=weights.linear(*(f"{at}self_attn.{name}.weight" for name in attention)),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        to_output=weights.linear(f"{at}self_attn.o_proj.weight"),
        attention_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        to_gate_up=weights.linear(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"),
        to_down=weights.linear(f"{at}mlp.down_proj.weight"),
        mlp_after=norm("post_feedforward_layernorm_1"),
        router_scale=weights.dense(f"{at}router.scale"),
        router=weights.dense(f"{at}router.proj.weight"),
        expert_scale=weights.dense(f"{at}router.per_expert_scale"),
        experts_norm=norm("pre_feedforward_layernorm_2"),
        expert_gate_up=weights.stored(f"{at}experts.gate_up_proj"),
        expert_down=weights.stored(f"{at}experts.down_proj"),
        experts_after=norm("post_feedforward_layernorm_2"),
        after=norm("post_feedforward_layernorm"),
        scalars=(
            weights.dense(f"{ENCODER}layers.{i}.layer_scalar"),
            weights.dense(f"{at}layer_scalar"),
        ),
    )


def facts(config: Mapping[str, Any]) -> Facts:
    """What the engine must know, of config.json, the ids that the tokenizer's files say in the place of its own, and
    `generation_config`, what the file of that name says; what they leave out is as published."""
    text, generation = config["text_config"], config.get("generation_config") or {}
    ends = special(generation or config, "eos_token_id", needed=False)
    if text["vocab_size"] == VOCAB and not generation:  # a GGUF file names one of them
        ends = [*dict.fromkeys([*ends, *ENDS])]
    ends = ends or list(ENDS)
    sampler = generation.get("sampler_config")
    published = AnnealedPolicy(text["vocab_size"])
    policy = replace(
        published,
        steps=count(generation, "max_denoising_steps", published.steps),
        bound=number(sampler if isinstance(sampler, dict) else {}, "entropy_bound", published.bound),
        hottest=number(generation, "t_max", published.hottest),
        coldest=number(generation, "t_min", published.coldest),
        settled=number(generation, "confidence_threshold", published.settled),
    )
    canvas = count(config, "canvas_length", 256)
    named = {name: config.get(name, text.get(name)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    opening, closing = prompts.DIFFUSION_GEMMA.around(named)
    # What stands behind an end is said, too, and counts for when a canvas has settled: padding may be that.
    padding = special(named, "pad_token_id", needed=False)
    open_facts = OpenFacts(
        policy,
        tuple(n for n in LENGTHS if 2 * n <= canvas) or (max(1, canvas // 2),),
        # The model ends a text, not a gap: an end in front of a suffix is nothing that it was trained to say.
        "calibrated",
        frozenset([*ends, *padding]),
        # That of models with a mask: nobody has published this one's.
        bias=PUBLISHED_BIAS,
        least=LEAST,
        positions=count(text, "max_position_embeddings", 1 << 18),
        canvas=canvas,
        goes_on=True,
        closing=closing,
        blocks=True,
        soft=True,
    )
    return Facts(mask_id=None, end_id=ends[0], opening=opening, lookahead=0, left=(0, 0), open=open_facts)


class DiffusionGemmaDenoiser:
    """`OpenDenoiser`, and `SelfConditioned`, of DiffusionGemma."""

    sizes = Shape.of

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
        """config: as `facts` has it; weights: by their published names; text: the bytes of each id, empty for those
        that never stand in text. The keys and values of a prefix are final, so there is nothing to be said by
        `caching`; `team` is None, since the compiled kernels have no such layers.

        Raises `ModelError` for a config or weights that are not of this family.
        """
        shape = Shape.of(config)
        self.facts = facts(config)
        _check(weights, shape)
        if len(text) > shape.vocab:
            raise ModelError(
                f"its tokenizer has {len(text)} ids, its weights {shape.vocab}: use the model's own tokenizer"
            )
        self.model = DiffusionGemma(shape, weights, device, cache_bytes)
        assert self.facts.open is not None
        if not 0 <= self.facts.end_id < shape.vocab:
            found = self.facts.end_id
            raise ModelError(f"its end is id {found}, of {shape.vocab} ids: use its own generation_config.json")
        ends = [end for end in self.facts.open.ends if end < shape.vocab]
        banned = torch.ones(shape.vocab, dtype=torch.bool)
        banned[[i for i, piece in enumerate(text) if piece]] = False
        banned[ends] = False
        self.head = Head(self.model.embedding, softcap=shape.softcap, banned=banned)

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        own = cast(_KV, kv) if kv is not None else _KV(self.model.pools)
        if tokens:
            yield from self.model.encode(tokens, own)
            yield
        return own

    def denoise(
        self, canvases: Sequence[OpenCanvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        model = self.model
        for canvas in canvases:
            if (long := canvas.origin + len(canvas.tokens)) > model.shape.positions:
                raise ModelError(f"{long} tokens are more than the model's {model.shape.positions}")
        before = [cast(_State, state or _State(_KV(model.pools))) for state in states]
        for canvas, state in zip(canvases, before, strict=True):
            state.kv.reserve(len(canvas.tokens))
        everything = torch.tensor([token for canvas in canvases for token in canvas.tokens])
        tokens = moved(everything, self.head.weight.device)
        sizes = [len(canvas.tokens) for canvas in canvases]
        plans = model.planned(
            [(canvas.origin, size) for canvas, size in zip(canvases, sizes, strict=True)],
            [cast(_KV, context.prefix) for context in contexts],
            [state.kv for state in before],
            [[(cast(_KV, kv), len(self.facts.opening)) for kv in context.blocks] for context in contexts],
        )
        soft = torch.cat([self._soft(*pair) for pair in zip(canvases, before, strict=True)])
        rows = torch.split(model.decode(tokens, soft, plans), sizes)
        hidden, after = [], []
        for canvas, row, state in zip(canvases, rows, before, strict=True):
            slots = canvas.open
            hidden.append(row[moved(torch.tensor(slots), row.device) + len(canvas.left)])
            after.append(_State(state.kv, tuple(slots)))
        return hidden, after

    def condition(self, state: Any, soft: Tensor) -> Any:
        return replace(cast(_State, state), soft=soft)

    def _soft(self, canvas: OpenCanvas, state: _State) -> Tensor:
        """[T, D], the expected embedding of each token of a canvas."""
        embedding = self.model.embedding
        if state.soft is None:
            return embedding.new_zeros(len(canvas.tokens), embedding.shape[1])
        # What is pinned is expected to be what it is.
        soft = F.embedding(moved(torch.tensor(canvas.tokens), embedding.device), embedding)
        open_now = set(canvas.open)
        kept = [i for i, slot in enumerate(state.open) if slot in open_now]
        at = moved(torch.tensor([len(canvas.left) + state.open[i] for i in kept]), embedding.device)
        soft[at] = state.soft[moved(torch.tensor(kept), embedding.device)].to(soft.dtype)
        return soft
