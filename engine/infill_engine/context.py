"""The context cache: what is encoded before a canvas, kept from key stroke to key stroke.

It works on tokens and opaque `ContextKV`s, and knows neither text nor model. Encoding goes in chunks; each is one step
of the generators here, so that a caller can give way, or stop, between two of them. What was encoded stays, also when
the caller stops. Not safe to share between threads.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from infill_engine.core import ContextKV, Denoiser, agreement

#: Seconds that a chunk should take at most: so long a more urgent request may wait. Below so many tokens a chunk is not
#: cut, as it would hardly take less time.
CHUNK_S, LEAST_CHUNK = 0.1, 16

Key = tuple[str, ...] | tuple[int, ...]


@dataclass(slots=True)
class Usage:
    """Tokens of context that one request needed."""

    encoded: int = 0
    reused: int = 0


@dataclass(slots=True)
class _Entry:
    #: The lines that the window holds, and the tokens of which the first `kv.length` are encoded.
    lines: tuple[tuple[int, ...], ...] = ()
    tokens: list[int] = field(default_factory=list)
    kv: ContextKV | None = None


class ContextCache:
    """Streams by document, blocks by content, least recently used out first beyond `max_bytes`."""

    def __init__(self, denoiser: Denoiser, chunk: int, max_bytes: int) -> None:
        """chunk: tokens encoded in one step at most."""
        self._denoiser = denoiser
        self._chunk = chunk
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        #: Tokens a second when encoding, a running mean; a guess until measured.
        self.rate = 400.0

    @property
    def nbytes(self) -> int:
        """Memory held by encoded contexts; may be asked for from another thread."""
        return sum(entry.kv.nbytes for entry in list(self._entries.values()) if entry.kv is not None)

    def window(
        self, key: tuple[str, ...], lines: Sequence[tuple[int, ...]], budget: int, seconds: float
    ) -> tuple[tuple[int, ...], ...]:
        """The last of `lines` that a stream should hold, by token budget.

        A window that is already encoded is kept as long as it fits, so typing does not move its start. When it no
        longer fits, the new one is three quarters of the budget, so that the start moves in strides. Where nothing is
        encoded yet, no more is taken than can be encoded in `seconds`: an early completion that saw less beats none.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.lines:
            start = _aligned(lines, entry.lines)
            if start is not None and sum(map(len, lines[start:])) <= budget:
                return tuple(lines[start:])
        size = sum(map(len, lines))
        cold = max(128.0, self.rate * seconds)
        limit = min(float(budget if size <= budget else budget * 3 // 4), cold)
        start = len(lines)
        while start > 0 and limit >= len(lines[start - 1]):
            start -= 1
            limit -= len(lines[start])
        return tuple(lines[start:])

    def stream(
        self,
        key: tuple[str, ...],
        lines: tuple[tuple[int, ...], ...],
        head: Sequence[int],
        left: tuple[int, int],
        usage: Usage,
    ) -> Generator[None, None, tuple[ContextKV, list[int]]]:
        """Encodes a document's prefix up to a few tokens before the gap; returns (kv, the tokens left for the canvas).

        lines: the window's whole lines; head: the tokens of the cursor line before the gap; left: how many tokens of
        the end the canvas takes, at least and at most. Between those bounds the stream is left as it is, so most key
        strokes encode nothing.
        """
        tokens = [self._denoiser.facts.sink_id, *(token for line in lines for token in line), *head]
        entry = self._entry(key)
        entry.lines = lines
        least, most = left
        kept = 0
        if entry.kv is not None:
            kept = agreement(entry.tokens[: entry.kv.length], tokens)
        end = max(0, min(kept, len(tokens) - least))
        if end < len(tokens) - most:
            # Prefer the start of the cursor line, which stays while the line is typed.
            end = min(max(len(tokens) - len(head), len(tokens) - most), len(tokens) - least)
        if entry.kv is not None:
            entry.kv.truncate(min(kept, end))
        usage.reused += min(kept, end)
        entry.tokens = tokens[:end]
        return (yield from self._extend(key, entry, usage)), tokens[end:]

    def block(self, tokens: Sequence[int], usage: Usage) -> Generator[None, None, ContextKV]:
        """Encodes a piece alone, behind the family's sink; returns its kv."""
        key = tuple(tokens)
        entry = self._entry(key)
        entry.tokens = [self._denoiser.facts.sink_id, *tokens]
        if entry.kv is not None:
            usage.reused += entry.kv.length
        return (yield from self._extend(key, entry, usage))

    def replace(self, key: Key, by: Key) -> None:
        """Lets the entry `by` take the place of `key`."""
        if (entry := self._entries.pop(by, None)) is not None:  # None: it fell out while others were encoded
            self._entries[key] = entry

    def affordable(self, tokens: Sequence[int], seconds: float) -> Sequence[int]:
        """As much of a block's tokens as can be had in `seconds`: all if they are encoded, and some in any case."""
        entry = self._entries.get(tuple(tokens))
        if entry is not None and entry.kv is not None and entry.kv.length == len(entry.tokens):
            return tokens
        return tokens[: max(LEAST_CHUNK, int(self.rate * seconds))]

    def _entry(self, key: Key) -> _Entry:
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        return entry

    def _extend(self, key: Key, entry: _Entry, usage: Usage) -> Generator[None, None, ContextKV]:
        if entry.kv is None:
            entry.kv = yield from self._denoiser.encode((), None)
        while (done := entry.kv.length) < len(entry.tokens):
            size = min(self._chunk, max(LEAST_CHUNK, int(self.rate * CHUNK_S)))
            chunk = entry.tokens[done : done + size]
            began = time.perf_counter()
            entry.kv = yield from self._denoiser.encode(chunk, entry.kv)
            usage.encoded += len(chunk)
            if len(chunk) == size:
                self.rate += 0.2 * (len(chunk) / max(time.perf_counter() - began, 1e-6) - self.rate)
        self._entries[key] = entry  # it may have fallen out while others were encoded
        self._entries.move_to_end(key)
        while self.nbytes > self._max_bytes and len(self._entries) > 1:
            self._entries.popitem(last=False)
        return entry.kv


def _aligned(lines: Sequence[tuple[int, ...]], window: Sequence[tuple[int, ...]]) -> int | None:
    """Where `window` begins in `lines`: the place from which most of its lines stand there unchanged."""
    best, most = None, 0
    for start, line in enumerate(lines):
        if line == window[0] and (same := agreement(lines[start:], window)) >= most:
            best, most = start, same
    return best
