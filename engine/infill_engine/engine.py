"""The engine: a request in, events out, one bounded piece of work at a time.

`Engine.infill` is the main path: contexts, canvas, then `forward -> unmask -> commit -> (grow | cut | stop)` until the
gap is closed or the deadline comes. It knows no model by name, no socket and no editor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

import torch
from infill_kernels import Allowed, Unmasked, logits, unmask
from torch import Tensor

from infill_engine.config import EngineConfig
from infill_engine.context import ContextCache, Usage
from infill_engine.core import Canvas, CommitPolicy, Contexts, Denoiser
from infill_engine.gap import GapText
from infill_engine.lookup import Lookup
from infill_engine.policy import VerifiedPolicy
from infill_engine.protocol import Event, Final, Frame, InfillRequest, Reason, Slot, Timing
from infill_engine.tokenizer import Codec, Healed, LineTokenizer

T = TypeVar("T")

#: The canvas begins with this many slots and doubles when they are full, up to the request's limit.
FIRST_SLOTS, MOST_SLOTS = 16, 256

#: Tokens of the suffix whose likelihood scores a line end: with 8 the true end of a gap of several lines ranks first
#: 77% of the time, with 3 it is 71%.
SCORED_SUFFIX = 8

#: The share of a request's time that encoding contexts may take when nothing of them is cached.
ENCODE_SHARE = 0.5


@dataclass(slots=True)
class _Run:
    """One request on its way."""

    request: InfillRequest
    started: float
    text: GapText
    lookup: Lookup
    usage: Usage = field(default_factory=Usage)
    encode_ms: float = 0.0
    denoise_ms: float = 0.0
    steps: int = 0
    #: Line ends whose branches are on the canvas: byte offset in the gap, probability of END there.
    scoring: list[tuple[int, float]] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.started + self.request.deadline_ms / 1000 - time.monotonic()

    @property
    def late(self) -> bool:
        return self.left_s <= 0

    def final(self, reason: Reason) -> Final:
        timing = Timing(
            encode_ms=self.encode_ms,
            denoise_ms=self.denoise_ms,
            steps=self.steps,
            committed=self.text.tokens,
            encoded=self.usage.encoded,
            reused=self.usage.reused,
        )
        return Final(reason, timing=timing)


class Engine:
    """A loaded model and its caches. Not safe to share between threads: one worker owns it."""

    def __init__(
        self,
        name: str,
        denoiser: Denoiser,
        codec: Codec,
        config: EngineConfig,
        policy: CommitPolicy | None = None,
        device: str = "cpu",
        dtype: str = "fp32",
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self._denoiser = denoiser
        self._policy = policy or VerifiedPolicy()
        self._tokenizer = LineTokenizer(codec)
        self._config = config
        self._cache = ContextCache(denoiser, config.chunk_tokens, config.cache_mb << 20)

    @property
    def cache_bytes(self) -> int:
        """Memory held by encoded contexts."""
        return self._cache.nbytes

    @torch.inference_mode()
    def infill(self, request: InfillRequest, started: float) -> Generator[Event | None, None, None]:
        """Fills one gap. Each step is one encoding chunk or one denoise step, and yields an event or None; the last
        event is a `Final`. `started` is `time.monotonic()` at the request's receipt, from which the deadline counts."""
        lines, healed = self._split(request)
        known = [token for line in lines for token in line] + healed.tokens
        run = _Run(request, started, GapText(request, healed.rest), Lookup(known, self._after(request)))
        context = yield from self._contexts(run, lines, healed.tokens)
        if context is None:
            yield run.final("deadline")
            return
        contexts, left, origin = context
        canvas, state, reason = Canvas(origin, tuple(left), FIRST_SLOTS), None, None
        while reason is None:
            canvas, state, reason, events = self._step(run, canvas, contexts, state)
            yield from events or (None,)
        if reason != "end":
            run.text.close()
        yield run.text.candidate()
        yield run.final(reason)

    @torch.inference_mode()
    def prime(self, request: InfillRequest) -> Generator[None, None, None]:
        """Encodes ahead of need, for the next request of a place: first what this one's deadline cut short, up to the
        last few tokens, then the whole window. That is kept apart until it is complete: a request that comes meanwhile
        goes on with what was there."""
        cache, budget = self._cache, self._config.prefix_tokens
        left = (self._denoiser.facts.left[0],) * 2
        lines, healed = self._split(request)
        key = (request.client, request.document)
        following = (*key, "next")
        window = cache.window(key, lines, budget, math.inf)
        yield from cache.stream(key, window, healed.tokens, left, Usage())
        if after := self._after(request)[: self._config.suffix_tokens]:
            yield from cache.block(after, Usage())
        full = cache.window(following, lines, budget, math.inf)
        if len(full) > len(window):
            yield from cache.stream(following, full, healed.tokens, left, Usage())
            cache.replace(key, following)

    def _split(self, request: InfillRequest) -> tuple[list[tuple[int, ...]], Healed]:
        """The tokens of the whole lines before the gap, a tuple a segment, and the healed cursor line."""
        *above, cursor = self._tokenizer.segments(request.prefix + request.head) or [""]
        return [self._tokenizer.encode_segment(segment) for segment in above], self._tokenizer.heal(cursor)

    def _contexts(
        self, run: _Run, lines: list[tuple[int, ...]], head: list[int]
    ) -> Generator[None, None, tuple[Contexts, list[int], int] | None]:
        """The encoded contexts, the known tokens that go onto the canvas, and how many stand before those; None if the
        deadline came first (what was encoded by then is kept)."""
        request, cache, config = run.request, self._cache, self._config
        key = (request.client, request.document)
        after = self._after(request)[: config.suffix_tokens]
        seconds = request.deadline_ms / 1000 * ENCODE_SHARE - len(after) / cache.rate
        window = cache.window(key, lines, config.prefix_tokens, seconds)
        stream = yield from _in_time(run, cache.stream(key, window, head, self._denoiser.facts.left, run.usage))
        if stream is None:
            return None
        prefix, left = stream
        origin = prefix.length
        if not after:
            return Contexts(prefix), left, origin
        seconds = run.left_s - request.deadline_ms / 1000 * (1 - ENCODE_SHARE)
        block = yield from _in_time(run, cache.block(cache.affordable(after, seconds), run.usage))
        return None if block is None else (Contexts(prefix, (block,)), left, origin)

    def _step(
        self, run: _Run, canvas: Canvas, contexts: Contexts, state: Any
    ) -> tuple[Canvas, Any, Reason | None, list[Event]]:
        """One denoise step: forward, unmask, commit, then grow, cut or stop."""
        began = time.perf_counter()
        hidden, states = self._denoiser.denoise([canvas], [contexts], [state])
        outputs = unmask(hidden[0], self._denoiser.head, allowed=self._allowed(run.text.pending, len(hidden[0])))
        reason, finished_line = self._score(run, canvas, hidden[0], outputs), False
        open_rows = len(hidden[0]) - sum(len(tokens) for _, tokens in canvas.branches)
        after = self._policy.step(canvas, outputs.first(open_rows))
        if reason is None:
            after, reason, finished_line = self._take(run, canvas, after, hidden[0], outputs)
        if reason is None and after.frontier == MOST_SLOTS:
            reason = "limit"
        elif after.full:
            after = after.grow(min(2 * after.size, MOST_SLOTS))
        if reason is None and run.late:
            reason = "deadline"
        if self._config.lookup and reason is None and not after.proposal and not run.text.pending:
            after = replace(after, proposal=run.lookup.propose()[: after.size - after.frontier - 1])
        run.steps += 1
        run.denoise_ms += (time.perf_counter() - began) * 1000
        events: list[Event] = [self._frame(run, after)] if run.request.frames else []
        if finished_line and reason is None:
            events.append(run.text.candidate())
        return after, states[0], reason, events

    def _take(
        self, run: _Run, before: Canvas, after: Canvas, hidden: Tensor, outputs: Unmasked
    ) -> tuple[Canvas, Reason | None, bool]:
        """Adds what was committed to the text, up to where it has to stop; hangs a branch onto the canvas where a line
        ended. Returns the canvas, why to stop, and whether a line was finished."""
        tokens, text, finished_line = after.committed[before.frontier :], run.text, False
        probs = outputs.prob[: len(tokens)].tolist()
        end_probs = self._end_probs(hidden[: len(tokens)], outputs.lse[: len(tokens)])
        for i, token in enumerate(tokens):
            if token == self._denoiser.facts.end_id:
                text.score(text.length, None, probs[i])
                return after, "end", finished_line
            written, piece = text.length, self._tokenizer.codec.tokens[token]
            reason = text.append(piece, probs[i])
            run.lookup.append(token)
            if written >= 0 and piece.startswith(b"\n"):
                finished_line = True
                after = self._branch(run, after, before.frontier + i, written, end_probs[i])
            if reason is not None:
                return after, reason, finished_line
            if after.branches:
                # What follows may be moot once the end is scored: it waits for that, as a proposal.
                taken = before.frontier + i + 1
                waiting = (*after.committed[taken:], *after.proposal)
                return replace(after, committed=after.committed[:taken], proposal=waiting), None, finished_line
        return after, None, finished_line

    def _branch(self, run: _Run, canvas: Canvas, slot: int, at: int, end_prob: float) -> Canvas:
        """Notes the line end before `slot` as a place to stop; where a suffix can score it, hangs a branch there."""
        following = self._after(run.request)[:SCORED_SUFFIX]
        if not following or run.request.tail.strip() or run.request.max_lines == 1:
            run.text.score(at, None, end_prob)
            return canvas
        run.scoring.append((at, end_prob))
        # The last token before the end is read again in the branch, where it does not see the suffix it predicts.
        last = [*canvas.left, *canvas.committed[:slot]][-1]
        return replace(canvas, branches=(*canvas.branches, (slot - 1, (last, *following[:-1]))))

    def _score(self, run: _Run, canvas: Canvas, hidden: Tensor, outputs: Unmasked) -> Reason | None:
        """Scores this pass's branches: the mean log-probability of the suffix's first tokens at each line end."""
        reason: Reason | None = None
        row = len(hidden) - sum(len(tokens) for _, tokens in canvas.branches)
        following = torch.tensor(self._after(run.request)[:SCORED_SUFFIX], device=hidden.device)[:, None]
        for (_, tokens), (at, end_prob) in zip(canvas.branches, run.scoring, strict=True):
            rows = slice(row, row + len(tokens))
            row += len(tokens)
            scores = logits(hidden[rows], self._denoiser.head, following)[:, 0] - outputs.lse[rows]
            reason = run.text.score(at, scores.mean().item(), end_prob) or reason
        run.scoring.clear()
        return reason

    def _end_probs(self, hidden: Tensor, lse: Tensor) -> list[float]:
        """The probability of END in each row."""
        ids = torch.full((len(hidden), 1), self._denoiser.facts.end_id, device=hidden.device)
        probs: list[float] = (logits(hidden, self._denoiser.head, ids)[:, 0] - lse).exp().tolist()
        return probs

    def _after(self, request: InfillRequest) -> list[int]:
        """The tokens after the gap; none where only blank lines follow."""
        text = request.tail + request.suffix
        return self._tokenizer.encode(text) if text.strip() else []

    def _allowed(self, rest: bytes, rows: int) -> Allowed | None:
        """The frontier has to write `rest` again; the other rows are free."""
        return self._denoiser.head.allow(rows, {0: self._tokenizer.allowed(rest)}) if rest else None

    def _frame(self, run: _Run, canvas: Canvas) -> Frame:
        """The canvas as it stands after a step."""
        slots, offset = [], 0
        for token, prob in zip(canvas.committed, run.text.probs, strict=False):
            piece = self._tokenizer.codec.tokens[token]
            offset += len(piece)
            state: Literal["head", "committed"] = "head" if offset <= len(run.text.rest) else "committed"
            slots.append(Slot(piece.decode(errors="replace"), prob, state))
        for token in canvas.proposal:
            slots.append(Slot(self._tokenizer.codec.tokens[token].decode(errors="replace"), 0.0, "proposed"))
        slots += [Slot("", 0.0, "mask")] * (canvas.size - len(slots))
        return Frame(run.steps, (time.monotonic() - run.started) * 1000, tuple(slots))


def _in_time(run: _Run, work: Generator[None, None, T]) -> Generator[None, None, T | None]:
    """Passes the steps of `work` on and returns its value, or None as soon as the deadline has come."""
    while True:
        began = time.perf_counter()
        try:
            next(work)
        except StopIteration as done:
            return cast(T, done.value)
        finally:
            run.encode_ms += (time.perf_counter() - began) * 1000
        if run.late:
            return None
        yield None
