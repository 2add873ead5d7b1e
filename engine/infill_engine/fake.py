"""A denoiser without weights, for tests and for trying an editor: it writes what a table says.

Ids are bytes. Where the bytes to the left of a slot end with a key of the table, followed by the beginning of that
key's text, the slot is predicted to be the text's next byte, and END after the last. Elsewhere END is predicted. Where
several keys fit the first counts, and the others say what comes next best. A proposal is judged as by a real model:
only what stands to the left counts. A mask guesses what stands under it and under the masks to its left, and predicts
the byte after that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast
from weakref import WeakSet

import torch
from infill_kernels import Head
from torch import Tensor

from infill_engine.core import Canvas, ContextKV, Contexts, Facts

SINK_ID, MASK_ID, END_ID = 256, 257, 258
VOCAB = 259
#: The logit of what is predicted; that of all else is 0.
_SURE = 12.0


class _Tokens:
    """A context, or what is kept of a canvas: its tokens, counted in the room of their model."""

    def __init__(self, all_of_model: WeakSet[_Tokens]) -> None:
        self.tokens: list[int] = []
        all_of_model.add(self)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class FakeDenoiser:
    """`Denoiser` over bytes."""

    def __init__(
        self,
        table: Mapping[str, str],
        lookahead: int = 0,
        open_groups: int = 4,
        doubt: float = 0.0,
        step_s: float = 0.0,
        groups: int = 1,
        room: float = math.inf,
    ) -> None:
        """table: what follows which text; lookahead: masks a group; open_groups: groups a pass; doubt: how much lower
        the logit of a mask's prediction is with each slot that it guesses; step_s: seconds a pass takes; groups: steps
        in which tokens are encoded; room: tokens that all contexts and canvases together may keep."""
        self.facts = Facts(MASK_ID, END_ID, (SINK_ID,), lookahead=lookahead, left=(1, 64), groups=open_groups)
        banned = torch.zeros(VOCAB, dtype=torch.bool)
        banned[[SINK_ID, MASK_ID]] = True
        self.head = Head(weight=torch.eye(VOCAB), banned=banned)
        self.encoded = 0
        self.passes = 0
        #: Contexts and canvases that are alive.
        self.alive: WeakSet[_Tokens] = WeakSet()
        self._doubt = doubt
        self._groups = groups
        self._room = room
        self._table = [(key.encode(), text.encode()) for key, text in table.items()]
        #: Bytes to the left that can matter.
        self._reach = max((len(key + text) for key, text in self._table), default=0)
        self._step_s = step_s

    def encode(
        self, tokens: Sequence[int], kv: ContextKV | None, ahead: bool = False
    ) -> Generator[None, None, ContextKV]:
        own = cast(_Tokens, kv) if kv is not None else _Tokens(self.alive)
        if tokens:
            self._take(len(tokens))
            for _ in range(self._groups - 1):
                yield
            own.tokens += tokens
            self.encoded += len(tokens)
            yield
        return own

    def denoise(
        self, canvases: Sequence[Canvas], contexts: Sequence[Contexts], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        after = []
        for canvas, state in zip(canvases, states, strict=True):
            kept = state or _Tokens(self.alive)
            known = [*canvas.left, *canvas.committed]
            self._take(len(known) - kept.length)
            kept.tokens = known
            after.append(kept)
        self.passes += 1
        if self._step_s:
            time.sleep(self._step_s)
        return [self._rows(*pair) for pair in zip(canvases, contexts, strict=True)], after

    def _take(self, tokens: int) -> None:
        if self._room < math.inf and sum(kept.length for kept in self.alive) + tokens > self._room:
            raise MemoryError("no room for more tokens")

    def _rows(self, canvas: Canvas, contexts: Contexts) -> Tensor:
        tree = canvas.tree(MASK_ID)
        prefix = cast(_Tokens, contexts.prefix).tokens[max(0, canvas.origin - self._reach) : canvas.origin]
        rows = []
        for i in range(tree.frontier, len(tree.tokens)):
            left, at = [], i
            while at >= 0:
                left.append(tree.tokens[at])
                at = tree.parents[at]
            guessed = 0
            if tree.tokens[i] == MASK_ID:
                guessed = tree.positions[i] - tree.positions[tree.parents[i]]
                left = left[1:]
            known = [*prefix, *reversed(left)]
            for _ in range(guessed):
                known.append(self._next(known))
            row = torch.zeros(VOCAB)
            row[END_ID] = 1.0  # rather than any other byte, where nothing else is admitted
            for rank, token in enumerate(self._choices(known)):
                row[token] = (_SURE - self._doubt * guessed) / (1 + rank)
            rows.append(row)
        return torch.stack(rows)

    def _next(self, left: Sequence[int]) -> int:
        return self._choices(left)[0]

    def _choices(self, left: Sequence[int]) -> list[int]:
        """What may come next, the most probable first."""
        text = bytes(token for token in left if token < 256)
        found: dict[int, None] = {}
        for key, answer in self._table:
            for written in range(len(answer), -1, -1):
                if text.endswith(key + answer[:written]):
                    found[answer[written] if written < len(answer) else END_ID] = None
                    break
        return list(found) or [END_ID]
