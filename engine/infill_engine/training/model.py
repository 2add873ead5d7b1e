"""The embedded model as it is trained: the serving model's arithmetic, for batches of gaps, with gradients.

A window of a document is encoded once; each gap cut out of it is a row of canvas tokens that see the window up to their
own start, their own suffix block, perhaps a snippet, and each other. Contexts carry no gradient: their keys are cached
when the model serves, and with updates on them too one set of weights serves for both (without them the loss is no
lower). It knows tokens and masks, not text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from infill_engine.adapter import END_ROW, FUSED, MASK_ROW, factors
from infill_engine.core import ModelError
from infill_engine.smollm import BLOCK_GATE, END_ID, MASK_ID, RIGHT_GATE, SINK_ID, SMOLLM2, SPECIALS, Shape

#: Added to scores of keys that are not seen.
HIDDEN = -1e4


@dataclass(frozen=True, slots=True)
class Row:
    """One gap: known tokens from its left on, then masks hung onto them.

    Token i stands at absolute position `positions[i]`. The first `known` tokens are causal; a mask of group g sees the
    first `seen[g]` of them and its own group, whose tokens are those with `groups[i] == g` (-1 for the known).
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    groups: Sequence[int]
    seen: Sequence[int]
    known: int
    #: Tokens of the window's stream before the row's first: what it sees of it.
    origin: int
    #: The suffix as a block, its sink first; empty for none.
    block: Sequence[int]
    #: How far before position 0 the block's last token stands, beside the 1.
    distance: int
    #: Whether it sees the window's snippet.
    snippet: bool
    #: A token: what it should predict, -1 for nothing; with what weight; and how far ahead (0 for known tokens, j for
    #: the j-th mask of a group).
    targets: Sequence[int]
    weights: Sequence[float]
    ahead: Sequence[int]
    #: Tokens whose prediction is restricted to some ids, bool [V].
    allowed: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a document with the gaps cut out of it."""

    stream: Sequence[int]
    snippet: Sequence[int]
    rows: Sequence[Row]


class _KV(NamedTuple):
    """Keys (rotated) and values of one layer, [batch, kv heads, tokens, head size]."""

    keys: Tensor
    values: Tensor


class _Chunk(NamedTuple):
    """Rows of about one length, padded to the longest, as attention reads them. B rows of L tokens."""

    #: Index of each padded token among all canvas tokens, int64 [B, L]; padding repeats the row's first.
    gather: Tensor
    #: Places in [B * L] that are tokens, and which canvas tokens they are, int64 both.
    places: Tensor
    tokens: Tensor
    #: Rotations at absolute positions, in the block's and in the snippet's.
    absolute: tuple[Tensor, Tensor]
    in_block: tuple[Tensor, Tensor]
    in_snippet: tuple[Tensor, Tensor]
    #: Added to scores, [B, 1, 1 or 3 L, keys].
    prefix_bias: Tensor
    block_bias: Tensor
    snippet_bias: Tensor
    own_bias: Tensor
    #: Which of the window's rows these are.
    rows: list[int]
    prefix: int


class _Matrix(torch.autograd.Function):
    """x [N, I] times (W + b a)^T, with the sum ready in bf16 and gradients for x, a and b only.

    A product of the sum costs what the base's alone would; gradients of a and b need only thin products more. So a
    token costs twice a forward pass instead of three times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, merged: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, merged, a, b)
        return x @ merged.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor]:
        x, merged, a, b = ctx.saved_tensors
        g = grads[0]
        low = g @ b.to(g.dtype)
        grad_b = g.T @ (x @ a.to(x.dtype).T)
        return g @ merged, None, (low.T @ x).float(), grad_b.float()


class Trainee(torch.nn.Module):
    """The base, frozen, with an adapter that learns. Call `merge` after every change of its parameters."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        rank: int,
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        shape: Shape = SMOLLM2,
    ) -> None:
        """weights: the base's, by GGUF names; rank: of the updates."""
        super().__init__()
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        random = torch.Generator().manual_seed(seed)
        self._embedding = weights["token_embd.weight"].to(self.device, torch.float32, copy=True)
        self._norms = [
            tuple(weights[f"blk.{i}.{n}.weight"].to(self.device, torch.float32) for n in ("attn_norm", "ffn_norm"))
            for i in range(shape.layers)
        ]
        self._norm = weights["output_norm.weight"].to(self.device, torch.float32)
        self._base: dict[tuple[int, str], Tensor] = {}
        self._merged: dict[tuple[int, str], Tensor] = {}
        self.factors = torch.nn.ParameterDict()
        for layer in range(shape.layers):
            for name, members in FUSED.items():
                parts = [weights[f"blk.{layer}.{member}.weight"].float() for member in members]
                if name == "attn_qkv":
                    parts[0] = parts[0] / math.sqrt(shape.head_size)
                base = torch.cat(parts).to(self.device)
                self._base[layer, name] = base
                self._merged[layer, name] = torch.empty_like(base, dtype=dtype)
                a = torch.randn(rank, base.shape[1], generator=random) / math.sqrt(base.shape[1])
                for key, factor in zip(factors(layer, name), (a, torch.zeros(len(base), rank)), strict=True):
                    self.factors[_attribute(key)] = torch.nn.Parameter(factor.to(self.device))
        self.mask_row = torch.nn.Parameter(self._embedding[SPECIALS:].mean(0))
        self.end_row = torch.nn.Parameter(self._embedding[SINK_ID].clone())
        banned = torch.zeros(shape.vocab, dtype=torch.bool)
        banned[:SPECIALS] = True
        banned[END_ID] = False
        self._banned = banned.to(self.device)
        self._head = self._embedding.to(dtype)
        frequency = shape.rope_base ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size)
        self._frequency = frequency.to(self.device)
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the updates to the base."""
        for (layer, name), base in self._base.items():
            a, b = self._factors(layer, name)
            self._merged[layer, name].copy_(torch.addmm(base, b, a))

    def adapter(self) -> dict[str, Tensor]:
        """What was learned, as `infill_engine.adapter` has it."""
        tensors = {MASK_ROW: self.mask_row.detach().clone(), END_ROW: self.end_row.detach().clone()}
        for key in self._keys():
            tensors[key] = self.factors[_attribute(key)].detach() * self._scale(key)
        return tensors

    @torch.no_grad()
    def start(self, adapter: Mapping[str, Tensor]) -> None:
        """Goes on from an adapter of the same rank. Raises `ModelError` if it is not one."""
        try:
            self.mask_row.copy_(adapter[MASK_ROW])
            self.end_row.copy_(adapter[END_ROW])
            for key in self._keys():
                self.factors[_attribute(key)].copy_(adapter[key].to(self.device) / self._scale(key))
        except (KeyError, RuntimeError) as error:
            raise ModelError(f"training cannot go on from this adapter ({error}): give one of the same rank") from None
        self.merge()

    def _keys(self) -> Iterator[str]:
        """The names of all factors in an adapter."""
        for layer in range(self.shape.layers):
            for name in FUSED:
                yield from factors(layer, name)

    def _scale(self, key: str) -> Tensor:
        """By what a factor's rows [O, 1] are larger in an adapter: there queries are not scaled for the scores yet."""
        scale = torch.ones(len(self.factors[_attribute(key)]), 1, device=self.device)
        if key.endswith("attn_qkv.b"):
            scale[: self.shape.heads * self.shape.head_size] = math.sqrt(self.shape.head_size)
        return scale

    def forward(self, window: Window) -> tuple[Tensor, Tensor]:
        """Rows [T, width] of all canvas tokens that predict something, final norm applied, and their index among all
        canvas tokens, int64 [T]."""
        starts = [0]
        for row in window.rows:
            starts.append(starts[-1] + len(row.tokens))
        tokens = torch.tensor([t for row in window.rows for t in row.tokens], device=self.device)
        stream, blocks, snippet = self._contexts(window)
        # On a CPU padding costs more than calls, on a GPU it is the other way round.
        chunks = list(self._chunks(window, starts, 4 if self.device.type == "cpu" else len(window.rows)))
        back = _back(chunks)
        is_mask = (tokens == MASK_ID)[:, None]
        x = torch.where(is_mask, self.mask_row, F.embedding(tokens, self._embedding))
        for layer in range(self.shape.layers):
            of_layer = stream[layer], blocks[layer], snippet[layer] if snippet else None
            x = x + self._attention(x, layer, chunks, back, *of_layer)
            x = x + self._ffn(x, layer)
        targets = torch.tensor([t for row in window.rows for t in row.targets], device=self.device)
        predicting = torch.nonzero(targets >= 0)[:, 0]
        return self._normed(x[predicting], self._norm), predicting

    def loss(self, window: Window, predicted: tuple[Tensor, Tensor], part: int = 256) -> Loss:
        """The losses of what `forward` gave, with the gradient of their weighted sum by its rows."""
        hidden, index = predicted
        flat = [(r, i) for r, row in enumerate(window.rows) for i in range(len(row.tokens))]
        rows = [flat[i] for i in index.tolist()]
        targets = torch.tensor([window.rows[r].targets[i] for r, i in rows], device=self.device)
        weights = torch.tensor([window.rows[r].weights[i] for r, i in rows], device=self.device)
        grad, nats, right, stop = torch.empty_like(hidden), [], [], []
        end_grad = torch.zeros_like(self.end_row)
        with torch.no_grad():
            for first in range(0, len(rows), part):
                span = slice(first, first + part)
                h = hidden[span].to(self.dtype)
                z = (h @ self._head.T).float()
                z[:, END_ID] = h.float() @ self.end_row
                z.masked_fill_(self._banned, -math.inf)
                for at, (r, i) in enumerate(rows[span]):
                    if (allowed := window.rows[r].allowed.get(i)) is not None:
                        z[at].masked_fill_(~allowed.to(self.device), -math.inf)
                t = targets[span]
                right.append(z.argmax(-1) == t)
                lse = z.logsumexp(-1, keepdim=True)
                nats.append(lse[:, 0] - z.gather(1, t[:, None])[:, 0])
                p = z.sub_(lse).exp_()
                stop.append(p[:, END_ID].clone())
                p[torch.arange(len(t), device=self.device), t] -= 1
                p *= weights[span, None]
                end_grad += p[:, END_ID] @ h.float()
                of_end = p[:, END_ID].clone()
                p[:, END_ID] = 0
                grad[span] = (p.to(self.dtype) @ self._head).float() + of_end[:, None] * self.end_row
        ahead = torch.tensor([window.rows[r].ahead[i] for r, i in rows])
        first_rows = torch.tensor([i == _first(window.rows[r]) for r, i in rows])
        said = torch.cat(nats).cpu(), torch.cat(right).cpu(), torch.cat(stop).cpu()
        return Loss(*said, targets.cpu(), ahead, first_rows, grad, end_grad)

    def learn(self, window: Window, scale: float) -> Loss:
        """Adds the gradients of one window, times `scale`, to the parameters'."""
        predicted = self(window)
        loss = self.loss(window, predicted)
        predicted[0].backward(loss.grad * scale)
        if self.end_row.grad is None:
            self.end_row.grad = torch.zeros_like(self.end_row)
        self.end_row.grad += loss.end_grad * scale
        return loss

    def _factors(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        a, b = factors(layer, name)
        return self.factors[_attribute(a)], self.factors[_attribute(b)]

    def _product(self, x: Tensor, layer: int, name: str) -> Tensor:
        merged = self._merged[layer, name]
        if not torch.is_grad_enabled():
            return x @ merged.T
        return cast(Tensor, _Matrix.apply(x, merged, *self._factors(layer, name)))  # type: ignore[no-untyped-call]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.width,), weight, self.shape.eps)

    def _qkv(self, x: Tensor, layer: int) -> Tensor:
        """[N, heads + 2 kv heads, head size]."""
        h = self._normed(x, self._norms[layer][0]).to(self.dtype)
        return self._product(h, layer, "attn_qkv").view(len(x), -1, self.shape.head_size)

    def _ffn(self, x: Tensor, layer: int) -> Tensor:
        h = self._normed(x, self._norms[layer][1]).to(self.dtype)
        gate, up = self._product(h, layer, "ffn_gate_up").chunk(2, -1)
        return self._product(F.silu(gate) * up, layer, "ffn_down").float()

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors [..., 1, head size] for `_rotated` of positions [...]."""
        angles = (positions[..., None].double() * self._frequency)[..., None, :]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    @torch.no_grad()
    def _contexts(self, window: Window) -> tuple[list[_KV], list[_KV], list[_KV]]:
        """Keys and values a layer: of the stream [1, ...], of the rows' blocks [R, ...] without their sinks, padded on
        the right, and of the snippet [1, ...] likewise."""
        longest = max(2, *(len(row.block) for row in window.rows))
        blocks = [[*row.block, *[SINK_ID] * (longest - len(row.block))] for row in window.rows]
        groups = [[list(window.stream)], blocks, [list(window.snippet)] if window.snippet else []]
        tokens = torch.tensor([t for group in groups for one in group for t in one], device=self.device)
        x = F.embedding(tokens, self._embedding)
        places, first = [], 0
        for group in groups:
            if group:
                size = len(group[0])
                rotation = self._rotation(torch.arange(size, device=self.device))
                places.append((first, len(group), size, rotation, self._causal(size)))
                first += len(group) * size
        kept: list[list[_KV]] = [[], [], []]
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        for layer in range(self.shape.layers):
            qkv, attended = self._qkv(x, layer), []
            for which, (first, count, size, rotation, causal) in enumerate(places):
                own = qkv[first : first + count * size].view(count, size, -1, self.shape.head_size)
                qk = _rotated(own[:, :, : heads + kv_heads], rotation)
                keys = qk[:, :, heads:].transpose(1, 2)
                values = own[:, :, heads + kv_heads :].transpose(1, 2)
                scores = _grouped(qk[:, :, :heads], kv_heads) @ keys.transpose(-1, -2)
                weights = scores.add_(causal).softmax(-1)
                attended.append(_ungrouped(weights @ values, size).flatten(0, 1))
                sink = 1 if which else 0
                kept[which].append(_KV(keys[:, :, sink:], values[:, :, sink:]))
            if layer + 1 < self.shape.layers:
                x = x + self._product(torch.cat(attended).flatten(1), layer, "attn_output").float()
                x = x + self._ffn(x, layer)
        return kept[0], kept[1], kept[2]

    def _causal(self, size: int) -> Tensor:
        """What is added to scores [.., 3 size, size] of a causal run."""
        future = torch.full((size, size), HIDDEN, device=self.device).triu(1)
        return future.repeat(self.shape.heads // self.shape.kv_heads, 1).to(self.dtype)

    def _chunks(self, window: Window, starts: Sequence[int], size: int) -> Iterator[_Chunk]:
        """The rows by length, `size` at a time."""
        order = sorted(range(len(window.rows)), key=lambda r: len(window.rows[r].tokens))
        longest_block = max(2, *(len(row.block) for row in window.rows)) - 1
        for first in range(0, len(order), size):
            which = order[first : first + size]
            rows = [window.rows[r] for r in which]
            length, batch = max(len(row.tokens) for row in rows), len(rows)
            gather = torch.tensor([[starts[r]] * length for r in which])
            positions = torch.zeros(batch, length)
            own = torch.full((batch, length, length), HIDDEN)
            own[:, :, 0] = 0.0  # so that padding sees something
            places, tokens = [], []
            prefix = max(1, *(row.origin for row in rows))
            prefix_bias = torch.full((batch, prefix), HIDDEN)
            block_bias = torch.full((batch, longest_block), HIDDEN)
            snippet_bias = torch.full((batch, max(1, len(window.snippet) - 1)), HIDDEN)
            base = torch.zeros(batch, 1)
            for b, (r, row) in enumerate(zip(which, rows, strict=True)):
                n = len(row.tokens)
                gather[b, :n] = torch.arange(starts[r], starts[r] + n)
                places.append(torch.arange(n) + b * length)
                tokens.append(torch.arange(starts[r], starts[r] + n))
                positions[b, :n] = torch.tensor(row.positions, dtype=torch.float32)
                own[b, :n, :n] = _sight(row)
                prefix_bias[b, : row.origin] = 0.0
                # The block's last token stands at -1 - distance.
                base[b] = -len(row.block) - row.distance
                block_bias[b, : max(0, len(row.block) - 1)] = BLOCK_GATE
                if row.snippet:
                    snippet_bias[b] = BLOCK_GATE
            group = self.shape.heads // self.shape.kv_heads
            positions, base = positions.to(self.device), base.to(self.device)
            biases = [
                bias.to(self.device, self.dtype)[:, None, None] for bias in (prefix_bias, block_bias, snippet_bias)
            ]
            yield _Chunk(
                gather.to(self.device),
                torch.cat(places).to(self.device),
                torch.cat(tokens).to(self.device),
                self._rotation(positions),
                self._rotation(positions - base),
                self._rotation(positions + len(window.snippet)),
                biases[0],
                biases[1],
                biases[2],
                own.repeat(1, group, 1).to(self.device, self.dtype)[:, None],
                which,
                prefix,
            )

    def _attention(
        self,
        x: Tensor,
        layer: int,
        chunks: Sequence[_Chunk],
        back: Tensor,
        stream: _KV,
        blocks: _KV,
        snippet: _KV | None,
    ) -> Tensor:
        """The attention of canvas tokens [N, width] to their contexts and to each other, projected."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv, attended = self._qkv(x, layer), []
        for chunk in chunks:
            batch, length = chunk.gather.shape
            own = qkv.index_select(0, chunk.gather.flatten()).view(batch, length, -1, self.shape.head_size)
            qk = _rotated(own[:, :, : heads + kv_heads], chunk.absolute)
            q, keys = _grouped(qk[:, :, :heads], kv_heads), qk[:, :, heads:].transpose(1, 2)
            values = own[:, :, heads + kv_heads :].transpose(1, 2)
            seen = [_KV(stream.keys[:, :, : chunk.prefix], stream.values[:, :, : chunk.prefix])]
            scores = [q @ seen[0].keys.transpose(-1, -2) + chunk.prefix_bias]
            for kv, rotation, bias in (
                (_KV(blocks.keys[chunk.rows], blocks.values[chunk.rows]), chunk.in_block, chunk.block_bias),
                (snippet, chunk.in_snippet, chunk.snippet_bias),
            ):
                if kv is not None:
                    turned = _grouped(_rotated(own[:, :, :heads], rotation), kv_heads)
                    scores.append(turned @ kv.keys.transpose(-1, -2) + bias)
                    seen.append(kv)
            scores.append(q @ keys.transpose(-1, -2) + chunk.own_bias)
            seen.append(_KV(keys, values))
            weights = torch.cat(scores, -1).softmax(-1)
            parts = torch.split(weights, [score.shape[-1] for score in scores], -1)
            out = parts[0] @ seen[0].values
            for part, kv in zip(parts[1:], seen[1:], strict=True):
                out = out + part @ kv.values
            attended.append(_ungrouped(out, length).flatten(0, 1))
        return self._product(torch.cat(attended).index_select(0, back), layer, "attn_output").float()


class Loss(NamedTuple):
    """What each prediction of a window cost. T predictions, on the host unless said otherwise."""

    #: fp32 [T]: -log p of the target; bool [T]: whether it was the most probable; fp32 [T]: the probability of END.
    nats: Tensor
    right: Tensor
    stop: Tensor
    targets: Tensor
    #: int64 [T]: 0 for known tokens, j for the j-th mask of a group; bool [T]: whether it is the gap's first token.
    ahead: Tensor
    first: Tensor
    #: Of the weighted sum by the rows [T, width] and by END's row [width], on their device.
    grad: Tensor
    end_grad: Tensor


def _back(chunks: Sequence[_Chunk]) -> Tensor:
    """Where each canvas token stands among the padded tokens of all chunks, int64 [N]."""
    first, places = 0, []
    for chunk in chunks:
        places.append(chunk.places + first)
        first += chunk.gather.numel()
    tokens = torch.cat([chunk.tokens for chunk in chunks])
    back = torch.empty_like(tokens)
    back[tokens] = torch.cat(places)
    return back


def _attribute(key: str) -> str:
    """A parameter's name of a tensor's: PyTorch allows no dots."""
    return key.replace(".", "_")


def _first(row: Row) -> int:
    """The token that predicts the gap's first."""
    return next(i for i, target in enumerate(row.targets) if target >= 0)


def _sight(row: Row) -> Tensor:
    """What is added to scores of a row's tokens by each other, fp32 [n, n]."""
    n = len(row.tokens)
    sight = torch.full((n, n), HIDDEN)
    sight[: row.known, : row.known] = torch.full((row.known, row.known), HIDDEN).triu(1)
    groups = torch.tensor(row.groups)
    for g, seen in enumerate(row.seen):
        of_group = torch.nonzero(groups == g)[:, 0]
        first, end = int(of_group[0]), int(of_group[-1]) + 1
        sight[first:end, :seen] = 0.0
        sight[first:end, first:end] = torch.full((end - first, end - first), RIGHT_GATE).triu(1)
    return sight


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., heads, head size], turned by its position in halves: x cos + (-x2, x1) sin, the sign in the table."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[B, L, heads, D] -> [B, kv heads, heads / kv heads * L, D], so that heads that share keys are one product."""
    b, length, heads, d = q.shape
    return q.view(b, length, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)


def _ungrouped(x: Tensor, length: int) -> Tensor:
    """The way back, with heads and head size in one: [B, L, heads * D]."""
    b, kv_heads, _, d = x.shape
    return x.view(b, kv_heads, -1, length, d).permute(0, 3, 1, 2, 4).reshape(b, length, -1)
