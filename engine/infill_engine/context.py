"""The context cache: what is encoded before a canvas, kept from key stroke to key stroke.

It works on tokens and opaque `ContextKV`s, and knows neither text nor model. Encoding goes in chunks, and chunks in the
family's own steps; the generators here yield *before* each, so that a caller can give way, or stop. What was encoded
stays, also when the caller stops. Not safe to share between threads.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from infill_engine.core import ContextKV, Family, agreement, device_memory

#: Seconds that a chunk should take at most. Below so many tokens a chunk is not cut, as it would hardly take less time.
CHUNK_S, LEAST_CHUNK = 0.1, 16

Key = tuple[str, ...] | tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Entry:
    #: The lines that the window holds, and the tokens of which the first `kv.length` are encoded.
    lines: tuple[tuple[int, ...], ...] = ()
    tokens: list[int] = field(default_factory=list)
    kv: ContextKV | None = None
    #: Leases that hold it.
    pins: int = 0


@dataclass(eq=False, slots=True)
class Lease:
    """What one request uses of the cache: it stays there while the request lives. Counts its context tokens."""

    #: No request waits for what is encoded.
    ahead: bool = False
    encoded: int = 0
    reused: int = 0
    entries: list[_Entry] = field(default_factory=list)

    def pin(self, entry: _Entry) -> None:
        """Keeps an entry in the cache until the end of the lease."""
        if all(held is not entry for held in self.entries):
            self.entries.append(entry)
            entry.pins += 1


class ContextCache:
    """Streams by document, blocks by content, within `max_bytes`: what no lease holds goes, the oldest use first."""

    def __init__(self, denoiser: Family, chunk: int, max_bytes: int) -> None:
        """chunk: tokens encoded at once at most."""
        self._denoiser = denoiser
        self._chunk = chunk
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        #: Tokens a second when encoding, a running mean; a guess until measured.
        self.rate = 400.0
        #: Tokens encoded so far.
        self.encoded = 0

    @property
    def nbytes(self) -> int:
        """Memory held by encoded contexts; may be asked for from another thread."""
        return sum(entry.kv.nbytes for entry in list(self._entries.values()) if entry.kv is not None)

    @contextlib.contextmanager
    def lease(self, ahead: bool = False) -> Iterator[Lease]:
        """Something to hold entries with; ahead: no request waits for it."""
        lease = Lease(ahead)
        try:
            yield lease
        finally:
            for entry in lease.entries:
                entry.pins -= 1

    def evict(self) -> bool:
        """Forgets what was not used for longest and is in nobody's use; returns whether there was something."""
        for key, entry in self._entries.items():
            if not entry.pins:
                del self._entries[key]
                return True
        return False

    def window(
        self,
        key: tuple[str, ...],
        lines: Sequence[tuple[int, ...]],
        budget: int,
        seconds: float,
        cost: Callable[[int], float],
    ) -> tuple[tuple[int, ...], ...]:
        """The last of `lines` that a stream should hold, by token budget.

        A window that is already encoded is kept as long as it fits, so typing does not move its start. When it no
        longer fits, the new one is at most three quarters of the budget, so that the start moves in strides; of the
        first quarter of that, it begins at the line with the least `cost` (by index), the first of equals. Where
        nothing is encoded yet, no more is taken than can be encoded in `seconds`: an early completion that saw less
        beats none.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.lines:
            start = _aligned(lines, entry.lines)
            if start is not None and sum(map(len, lines[start:])) <= budget:
                return tuple(lines[start:])
        size = sum(map(len, lines))
        limit = min(float(budget if size <= budget else budget * 3 // 4), max(128.0, self.rate * seconds))
        first = _last(lines, limit)
        if first > 0:
            first = min(range(first, min(_last(lines, limit * 3 / 4), len(lines) - 1) + 1), key=cost, default=first)
        return tuple(lines[first:])

    def stream(
        self,
        key: tuple[str, ...],
        lines: tuple[tuple[int, ...], ...],
        head: Sequence[int],
        left: tuple[int, int],
        lease: Lease,
    ) -> Generator[None, None, tuple[ContextKV, list[int]]]:
        """Encodes a document's prefix up to a few tokens before the gap; returns (kv, the tokens left for the canvas).

        lines: the window's whole lines; head: the tokens of the cursor line before the gap; left: how many tokens of
        the end the canvas takes, at least and at most. Between those bounds the stream is left as it is, so most key
        strokes encode nothing. Raises `MemoryError` where it would take more room than there is beside what others use.
        """
        tokens = [*self._denoiser.facts.opening, *(token for line in lines for token in line), *head]
        entry = self._entry(key, lease)
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
        lease.reused += min(kept, end)
        entry.tokens = tokens[:end]
        return (yield from self._extend(key, entry, lease)), tokens[end:]

    def extend(self, kv: ContextKV, tokens: Sequence[int], lease: Lease) -> Generator[None, None, ContextKV]:
        """Encodes what a gap was filled with behind the stream that the lease holds. The next request of the document
        finds it there as far as it was taken. Raises `MemoryError` as `stream` does."""
        entry = next(held for held in lease.entries if held.kv is kv)
        entry.tokens = [*entry.tokens, *tokens]
        key = next((key for key, own in self._entries.items() if own is entry), ())
        return (yield from self._extend(key, entry, lease))

    def block(self, tokens: Sequence[int], lease: Lease) -> Generator[None, None, ContextKV]:
        """Encodes a piece alone, behind the family's opening; returns its kv. Raises `MemoryError` as `stream` does."""
        key = tuple(tokens)
        entry = self._entry(key, lease)
        entry.tokens = [*self._denoiser.facts.opening, *tokens]
        if entry.kv is not None:
            lease.reused += entry.kv.length
        return (yield from self._extend(key, entry, lease))

    def latest(self, document: str, client: str) -> str:
        """The client whose stream of a document was used last; `client` if that one has any, or nobody has."""
        if (client, document) in self._entries:
            return client
        streams = (key for key in reversed(self._entries) if isinstance(key[0], str) and key[1:] == (document,))
        return next((str(key[0]) for key in streams), client)

    def kept(self, key: Key, tokens: Sequence[int]) -> int:
        """How many of the first of `tokens` are encoded of a stream, by its document, or of a block, by its tokens."""
        entry, opening = self._entries.get(key), self._denoiser.facts.opening
        if entry is None or entry.kv is None:
            return 0
        return max(0, agreement(entry.tokens[: entry.kv.length], [*opening, *tokens]) - len(opening))

    def seconds(self, tokens: Sequence[int]) -> float:
        """How long it takes to encode what of a block is not encoded yet; 0 where all is."""
        return (len(tokens) - self.kept(tuple(tokens), tokens)) / self.rate

    def replace(self, key: Key, by: Key) -> None:
        """Lets the entry `by` take the place of `key`."""
        if (entry := self._entries.pop(by, None)) is not None:
            self._entries[key] = entry

    def affordable(self, tokens: Sequence[int], seconds: float) -> Sequence[int]:
        """As much of a block's tokens as can be had in `seconds`: all if they are encoded, and some in any case."""
        if not self.seconds(tokens):
            return tokens
        return tokens[: max(LEAST_CHUNK, int(self.rate * seconds))]

    def _entry(self, key: Key, lease: Lease) -> _Entry:
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        lease.pin(entry)
        return entry

    def _extend(self, key: Key, entry: _Entry, lease: Lease) -> Generator[None, None, ContextKV]:
        try:
            if entry.kv is None:
                entry.kv = yield from self._denoiser.encode((), None)
            while (done := entry.kv.length) < len(entry.tokens):
                size = min(self._chunk, max(LEAST_CHUNK, int(self.rate * CHUNK_S)))
                chunk = entry.tokens[done : done + size]
                seconds = yield from self._encode(chunk, entry.kv, lease.ahead)
                lease.encoded += len(chunk)
                self.encoded += len(chunk)
                if len(chunk) == size:
                    self.rate += 0.2 * (len(chunk) / max(seconds, 1e-6) - self.rate)
                while self.nbytes > self._max_bytes:
                    self._make_room()
        except MemoryError:
            if self._entries.get(key) is entry:  # what does not fit is not kept
                del self._entries[key]
            raise
        return entry.kv

    def _encode(self, chunk: Sequence[int], kv: ContextKV, ahead: bool) -> Generator[None, None, float]:
        """Encodes one chunk, making room for it where it has to; returns the seconds it took."""
        before, seconds = kv.length, 0.0
        steps = self._denoiser.encode(chunk, kv, ahead)
        while kv.length == before:
            yield
            began = time.perf_counter()
            try:
                with device_memory():
                    next(steps)
            except MemoryError:
                self._make_room()
                steps = self._denoiser.encode(chunk, kv, ahead)
            seconds += time.perf_counter() - began
        return seconds

    def _make_room(self) -> None:
        if not self.evict():
            raise MemoryError("all memory for contexts is in use")


def _last(lines: Sequence[tuple[int, ...]], limit: float) -> int:
    """Where the last lines begin that together have at most `limit` tokens."""
    start = len(lines)
    while start > 0 and limit >= len(lines[start - 1]):
        start -= 1
        limit -= len(lines[start])
    return start


def _aligned(lines: Sequence[tuple[int, ...]], window: Sequence[tuple[int, ...]]) -> int | None:
    """Where `window` begins in `lines`: the place from which most of its lines stand there unchanged."""
    best, most = None, 0
    for start, line in enumerate(lines):
        if line == window[0] and (same := agreement(lines[start:], window)) >= most:
            best, most = start, same
    return best
