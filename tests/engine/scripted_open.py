"""A model that sees both sides of a gap, without weights: it fills gaps as a table says, ids being bytes.

Where the text before the canvas ends with a gap's `before` (or as much of it as healing left), and the text behind the
slots begins with its `after`, slot i is predicted to be byte i of what is missing. It is the surer the further left a
slot stands, and the less sure the further the canvas is from the true length.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from infill_engine.core import ContextKV, Contexts, Facts, OpenCanvas, OpenFacts
from infill_engine.policy import ThresholdPolicy
from infill_kernels import Head
from torch import Tensor

SINK_ID, MASK_ID, END_ID, EXPAND_ID = 256, 257, 258, 259
VOCAB = 260


@dataclass(frozen=True)
class Gap:
    before: str
    text: str
    after: str = ""


class _Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class OpenFake:
    """`OpenDenoiser` over bytes."""

    def __init__(
        self,
        *gaps: Gap,
        elastic: bool = False,
        doubt: float = 0.0,
        sure: float = 12.0,
        mask_id: int | None = MASK_ID,
        **facts: Any,
    ) -> None:
        """elastic: says EXPAND in the last slot of a canvas that is too short; doubt: how much lower the logits are for
        each slot too few or too many; facts: of `OpenFacts`."""
        chosen: dict[str, Any] = {"policy": ThresholdPolicy(), "lengths": (4, 8, 16, 32, 64), "length": "end"} | facts
        known = OpenFacts(ends=frozenset({END_ID}), **chosen)
        self.facts = Facts(mask_id, END_ID, (SINK_ID,), lookahead=0, left=(0, 0), open=known)
        banned = torch.zeros(VOCAB, dtype=torch.bool)
        banned[[SINK_ID, MASK_ID]] = True
        self.head = Head(torch.eye(VOCAB), banned=banned)
        self.passes: list[list[int]] = []
        self._gaps = [(g.before.encode(), g.text.encode(), g.after.encode()) for g in gaps]
        self._elastic, self._doubt, self._sure = elastic, doubt, sure

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        own = cast(_Tokens, kv) if kv is not None else _Tokens()
        if tokens:
            own.tokens += tokens
            yield
        return own

    def denoise(
        self, canvases: Sequence[OpenCanvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        self.passes.append([canvas.size for canvas in canvases])
        rows = [self._rows(*one) for one in zip(canvases, contexts, strict=True)]
        return rows, [(state or 0) + 1 for state in states]

    def _rows(self, canvas: OpenCanvas, contexts: Contexts) -> Tensor:
        prefix = cast(_Tokens, contexts.prefix).tokens[: canvas.origin]
        missing = self._missing(bytes(t for t in [*prefix, *canvas.left] if t < 256), canvas.right)
        off = abs(canvas.size - len(missing))
        hidden = torch.zeros(canvas.rows, VOCAB)
        for row, slot in enumerate(canvas.open):
            token = missing[slot] if slot < len(missing) else END_ID
            if self._elastic and canvas.size < len(missing) and slot == canvas.open[-1]:
                token = EXPAND_ID
            hidden[row, token] = max(0.5, self._sure - 0.01 * slot - self._doubt * off)
        return hidden

    def _missing(self, before: bytes, right: Sequence[int]) -> bytes:
        after = bytes(t for t in right if t < 256)
        for known, text, following in self._gaps:
            if not after.startswith(following):
                continue
            for kept in range(len(known), 0, -1):
                if before.endswith(known[:kept]):
                    return known[kept:] + text
        return b""
