"""How a gap is filled by a model that sees both sides of it: `prefix | left, slots, right`, any slot at any time.

The prefix stream and the suffix are the same for all passes. Between them the canvas is laid out with as many open
slots as the gap may have, and after each pass the family's policy says which are final. What is final up to the first
open slot is text, streamed and stopped by the same rules as text that grows from the left. How the length of the gap is
found, and what ends it, are facts of the family (`OpenFacts`); it knows no model by name.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from infill_kernels import Allowed, Head, admitted, logits, unmask
from torch import Tensor

from infill_engine.config import EngineConfig
from infill_engine.context import ContextCache, Lease
from infill_engine.core import (
    Contexts,
    Noise,
    OpenCanvas,
    OpenDenoiser,
    OpenPolicy,
    Outcome,
    Pass,
    Reading,
    Rows,
    SelfConditioned,
)
from infill_engine.gap import GapText
from infill_engine.lengths import LengthSearch
from infill_engine.protocol import Event, Frame, InfillRequest, Reason, Slot
from infill_engine.run import Filling, Run, in_time, see
from infill_engine.tokenizer import Healed, LineTokenizer

#: Slots that are room enough for the rest of a line.
LINE_SLOTS = 32

#: At the deadline the predictions of open slots are taken up to the first that is less probable: those of one pass do
#: not see each other, and seldom go together where they are not sure.
LATE_PROB = 0.5

#: Bytes of logits that are read at once: a pass with many rows of a large vocabulary takes several of as many.
READ_BYTES = 128 << 20

#: Makes of a request: the last segments before the gap, of those of whole lines the tokens, and the cursor line.
Split = Callable[[InfillRequest], tuple[list[str], list[tuple[int, ...]], Healed]]


@dataclass(slots=True, kw_only=True)
class OpenRun(Run):
    """A request whose canvas is open."""

    noise: Noise
    canvas: OpenCanvas = field(init=False)
    #: What stands behind the slots, as far as there is room for it.
    right: Sequence[int] = ()
    #: Slots that the canvas was laid out with.
    size: int = 0
    #: Slots whose tokens are in the text.
    written: int = 0
    #: The slots of canvases before it, and how many bytes they say.
    earlier: tuple[Slot, ...] = ()
    begun: int = 0
    #: While lengths are tried: the search, and the first pass over the best canvas so far.
    search: LengthSearch | None = None
    best: tuple[OpenCanvas, Rows, Any] | None = None
    #: A canvas that was filled with nothing was given another length once.
    retried: bool = False


class OpenFilling:
    """Fills open canvases with one family."""

    def __init__(
        self,
        denoiser: OpenDenoiser,
        cache: ContextCache,
        tokenizer: LineTokenizer,
        config: EngineConfig,
        policy: OpenPolicy,
        window: Callable[[Run], tuple[tuple[int, ...], ...]],
        split: Split,
        after: Callable[[InfillRequest], list[int]],
        offered: Callable[[InfillRequest], list[tuple[list[int], bool]]],
        noise: Callable[[int], Noise],
    ) -> None:
        """window: the lines that the prefix stream should hold; split, after: what stands before and after the gap,
        tokenised; offered: of each snippet that comes with a request the tokens, and whether they are to be seen;
        noise: a request's, made of its seed."""
        facts = denoiser.facts.open
        assert facts is not None, "a family that sees both sides says how"
        self._denoiser, self._cache, self._tokenizer, self._config = denoiser, cache, tokenizer, config
        self._facts, self._mask_id = facts, denoiser.facts.mask_id
        self._policy = policy
        self._window, self._split, self._after, self._offered = window, split, after, offered
        self._noise = noise
        self._head = lru_cache(8)(self._without)
        self.stages = Filling(self.begin, self.prepare, self.next_pass, self.step, self.close, self.go_on)

    def begin(self, request: InfillRequest, started: float, lease: Lease) -> OpenRun:
        """Tokenises, once a request."""
        segments, lines, head = self._split(request)
        text = "\0".join((request.prefix, request.head, request.tail, request.suffix))
        seed = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
        return OpenRun(
            request=request,
            started=started,
            lease=lease,
            segments=segments,
            lines=lines,
            head=head,
            after=self._after(request),
            text=GapText(request, head.rest),
            noise=self._noise(int.from_bytes(seed, "big") >> 1),  # the same request gets the same answer
        )

    def prepare(self, run: OpenRun) -> Generator[None, None, Reason | None]:
        """Encodes the prefix as far as the family can without the canvas, and lays that out."""
        facts, left = self._facts, self._denoiser.facts.left
        run.window = self._window(run)
        stream = self._cache.stream(run.document, run.window, run.head.tokens, left, run.lease)
        encoded = yield from in_time(run, stream)
        if encoded is None:
            return "deadline"
        prefix, on_canvas = encoded
        run.contexts = Contexts(prefix)
        offered = self._offered(run.request)
        seen = [tokens for tokens, used in reversed(offered) if used]  # the best one next to the prefix
        if not (yield from see(run, (self._cache.block(tokens, run.lease) for tokens in seen))):
            return "deadline"
        run.offered = offered
        suffix_tokens = self._config.suffix_tokens
        run.suffix = right = run.after[: suffix_tokens and max(suffix_tokens, facts.least)]
        if len(right) == len(run.after):
            right = [*right, *facts.closing]
        run.right, run.canvas = right, OpenCanvas.of(prefix.length, on_canvas, (), ())
        self._lay_out(run, self._first_size(run))
        return None

    def _first_size(self, run: OpenRun) -> int:
        """Slots of the first canvas. Where lengths are to be tried, it begins the search."""
        facts, request = self._facts, run.request
        if facts.length == "elastic":
            return facts.lengths[0]
        if facts.length == "calibrated" and (run.right or not facts.goes_on):
            most = max(request.max_tokens, facts.lengths[0])
            run.search = LengthSearch([n for n in facts.lengths if n <= most], facts.bias)
            return cast(int, run.search.length)
        one_line = request.max_lines == 1 and request.open_lines <= 1
        room = max(LINE_SLOTS if one_line else request.max_tokens, 0 if run.right else facts.least)
        return next((n for n in facts.lengths if n >= room), facts.lengths[-1])

    def next_pass(self, run: OpenRun) -> Pass:
        """What the canvas needs."""
        return Pass(
            run.canvas,
            run.contexts,
            run.state,
            allowed=self._allowed(run),
            reading=self._policy.reading(run.canvas),
            noise=run.noise,
        )

    def step(self, run: OpenRun, outcome: Outcome) -> tuple[Reason | None, list[Event]]:
        """What a pass brings: another length, or tokens that are final; then cut, stop or go on."""
        run.took(outcome)
        canvas, rows = run.canvas, outcome.rows
        if run.search is not None:
            if run.search.tried(rows.prob) or run.best is None:
                run.best = canvas, rows, run.state
            if run.search.length is not None and not run.late:
                self._lay_out(run, run.search.length)
                return None, []
            canvas, rows, run.state = run.best
            run.search, run.best, run.size = None, None, canvas.size
        if run.text.pending:  # what was taken back is written first, a token a pass: it decides what may come next
            run.canvas = canvas.seen(rows).pin({canvas.frontier: (rows.token[0], rows.prob[0])})
        else:
            run.canvas = self._policy.step(canvas, rows, run.noise)
        reason, finished_line = self._take(run)
        if reason == "end" and self._retry(run):
            reason = None
        if reason is None and run.late:
            reason = "deadline"
        events: list[Event] = [self._frame(run)] if run.request.frames else []
        return reason, events if reason is not None else [*events, *run.news(finished_line)]

    def go_on(self, run: OpenRun) -> Generator[None, None, Reason | None]:
        """Where a full canvas does not end the text, encodes it behind the prefix and lays out the next one there."""
        if not run.canvas.full:
            return None
        work = self._cache.extend(run.contexts.prefix, run.canvas.slots, run.lease)
        prefix = yield from in_time(run, work)
        if prefix is None:
            return "deadline"
        run.earlier, run.begun = self._frame(run).slots, run.text.length + len(run.text.rest)
        run.written, run.canvas = 0, OpenCanvas.of(prefix.length, (), (), ())
        self._lay_out(run, run.size)
        return None

    def close(self, run: OpenRun, reason: Reason) -> None:
        """At the deadline takes what open slots are predicted to hold, as far as that is sure."""
        if reason != "deadline" or not run.steps:
            return
        if run.best is not None:  # lengths were still being tried
            best, rows, _ = run.best
            run.canvas = best.seen(rows)
        canvas = run.canvas
        for slot in range(run.written, canvas.size):
            token, prob = canvas.predicted[slot], canvas.prob[slot]
            unsure = not canvas.pinned[slot] and prob < LATE_PROB
            if token < 0 or unsure or run.text.pending or token in self._facts.ends:
                break
            if run.text.append(self._tokenizer.codec.tokens[token], prob) is not None:
                return
        run.text.close()

    def read(
        self, passes: Sequence[Pass], hidden: Sequence[Tensor], states: Sequence[Any]
    ) -> tuple[list[Rows], list[Any]]:
        """What the rows of each pass say, and the states with what a family wants to know of that.

        Rows are read together as far as they are read alike. Raises `ModelError` where the model says NaN.
        """
        said: list[Tensor] = []
        order: list[int] = []
        after = list(states)
        for reading, which in self._alike(passes):
            together = [passes[i] for i in which]
            rows, soft = self._say(together, torch.cat([hidden[i] for i in which]), reading)
            sizes = [one.rows for one in together]
            said += torch.split(rows, sizes, 1)
            order += which
            if soft is not None:
                family = cast(SelfConditioned, self._denoiser)
                for i, own in zip(which, torch.split(soft, sizes), strict=True):
                    after[i] = family.condition(states[i], own)
        on_host = torch.split(torch.cat(said, 1).cpu(), [part.shape[1] for part in said], 1)
        read = dict(zip(order, map(Rows.of, on_host), strict=True))
        return [read[i] for i in range(len(passes))], after

    def _alike(self, passes: Sequence[Pass]) -> Iterator[tuple[Reading, list[int]]]:
        """Which passes are read together, by their places, those with many rows each by itself; noise is another's own
        matter, and 0 in the reading that they share."""
        most = READ_BYTES // (4 * len(self._denoiser.head.weight))
        alike: dict[Reading, list[list[int]]] = {}
        for i, one in enumerate(passes):
            groups = alike.setdefault((one.reading or Reading())._replace(noise=0.0), [[]])
            if groups[-1] and sum(passes[j].rows for j in groups[-1]) + one.rows > most:
                groups.append([])
            groups[-1].append(i)
        return ((reading, which) for reading, groups in alike.items() for which in groups)

    def _say(self, passes: Sequence[Pass], hidden: Tensor, reading: Reading) -> tuple[Tensor, Tensor | None]:
        """Of rows [N, D] that are read alike: token, probability, entropy, probability of END, log-probability of END,
        sample and its probability, float64 [7, N]; and the expected embeddings, where the family wants them."""
        head, at, temperature = self._head(reading.refused), 0, reading.temperature
        vocab = len(head.weight)
        sets: dict[int, Tensor] = {}
        scales = [(one.reading or Reading()).noise for one in passes]
        noise = None
        if any(scales):
            noise = torch.zeros(len(hidden), vocab, device=hidden.device)
        for one, scale in zip(passes, scales, strict=True):
            sets |= {at + row: ids for row, ids in one.allowed.items()}
            if noise is not None and scale:
                assert one.noise is not None
                noise[at : at + one.rows] = one.noise.gumbel(one.rows, vocab, hidden.device).mul_(scale)
            at += one.rows
        allowed = head.allow(len(hidden), sets) if sets else None
        if reading.top_p < 1:
            allowed = _nucleus(hidden, head, allowed, temperature, reading.top_p)
        outputs = unmask(
            hidden,
            head,
            temperature=temperature,
            allowed=allowed,
            noise=noise,
            soft=self._facts.soft,
        )
        end = torch.full_like(outputs.token, self._denoiser.facts.end_id)
        of_both = logits(hidden, head, torch.stack([end, outputs.sample], 1)) / temperature - outputs.lse[:, None]
        # The one number where a head and its single rows round differently.
        drawn = torch.where(outputs.sample == outputs.token, outputs.prob, of_both[:, 1].exp())
        said = torch.stack(
            [
                outputs.token.double(),
                outputs.prob,
                outputs.entropy,
                of_both[:, 0].exp(),
                of_both[:, 0],
                outputs.sample,
                drawn,
            ]
        )
        return said, outputs.soft

    def _allowed(self, run: OpenRun) -> dict[int, Tensor]:
        """The frontier's row is restricted while there is something to write again, and while the gap could still begin
        as a text that it is to avoid."""
        pending, avoid = run.text.pending, [text.encode() for text in run.request.avoid]
        sets = [self._tokenizer.allowed(pending)] if pending else []
        if avoid and not run.text.candidate().text.strip():
            sets.append(self._tokenizer.beginning_otherwise(pending, avoid))
        return {0: torch.stack(sets).all(0)} if sets else {}

    def _without(self, refused: tuple[int, ...]) -> Head:
        """The family's head that does not produce some ids."""
        head = self._denoiser.head
        if not refused:
            return head
        banned = ~head.free
        banned[list(refused)] = True
        return replace(head, banned=banned)

    def _blank(self, run: OpenRun, size: int) -> list[int]:
        """What open slots hold at first."""
        if self._mask_id is not None:
            return [self._mask_id] * size
        return run.noise.ids(size, len(self._denoiser.head.weight))

    def _lay_out(self, run: OpenRun, size: int) -> None:
        """A new canvas of so many slots in the place of this one."""
        old, right, facts = run.canvas, run.right, self._facts
        if facts.canvas is not None:
            right = right[: max(0, facts.canvas - size - len(old.left))]
        if right:  # so few are all that there is: behind the last one the text ends
            right = [*right, *[self._denoiser.facts.end_id] * (facts.least - size - len(old.left) - len(right))]
        run.canvas = OpenCanvas.of(old.origin, old.left, self._blank(run, size), right)
        run.state, run.size = None, size

    def _take(self, run: OpenRun) -> tuple[Reason | None, bool]:
        """Adds what has become final, up to the first open slot, to the text. What stands behind an END is of no
        interest, so it is final, too. Returns why to stop, and whether a line was finished."""
        text, finished_line = run.text, False
        end = next((i for i, token in enumerate(run.canvas.slots) if self._ends(run.canvas, i, token)), None)
        if end is not None:
            behind = [slot for slot in run.canvas.open if slot > end]
            run.canvas = run.canvas.pin(dict.fromkeys(behind, (self._denoiser.facts.end_id, run.canvas.prob[end])))
        canvas = run.canvas
        for slot in range(run.written, canvas.frontier):
            token, prob = canvas.slots[slot], canvas.prob[slot]
            if token in self._facts.ends:
                text.score(text.length, None, prob)
                return "end", finished_line
            written, piece = text.length, self._tokenizer.codec.tokens[token]
            run.written += 1
            reason = text.append(piece, prob)
            finished_line |= written >= 0 and piece.startswith(b"\n")
            if reason is not None:
                return reason, finished_line
        if not canvas.full or (self._facts.goes_on and not canvas.right):
            return None, finished_line
        # The suffix follows: the gap is as long as the canvas, of which no pass said how probable that is.
        text.score(text.length, None, min(canvas.prob, default=1.0))
        return "end", finished_line

    def _ends(self, canvas: OpenCanvas, slot: int, token: int) -> bool:
        return canvas.pinned[slot] and token in self._facts.ends

    def _retry(self, run: OpenRun) -> bool:
        """A canvas that was filled with nothing gets the next length, once: a terse place or a canvas that is too small
        makes some models say nothing at all."""
        longer = [n for n in self._facts.lengths if n > run.size]
        if run.retried or run.late or not longer or run.earlier or run.text.candidate().text.strip():
            return False  # of what is encoded behind the prefix already nothing is taken back
        run.retried = True
        run.text, run.written, run.sent = GapText(run.request, run.head.rest), 0, 0
        self._lay_out(run, longer[0])
        return True

    def _frame(self, run: OpenRun) -> Frame:
        """The canvas as it stands after a step."""
        slots, offset, canvas, codec = list(run.earlier), run.begun, run.canvas, self._tokenizer.codec
        for slot in range(canvas.size):
            token = canvas.predicted[slot]
            piece = codec.tokens[token] if token >= 0 else b""
            offset += len(piece)
            if not canvas.pinned[slot]:
                slots.append(Slot(piece.decode(errors="replace"), canvas.prob[slot], "mask"))
            else:
                healed = slot < run.written and offset <= len(run.text.rest)
                slots.append(Slot(piece.decode(errors="replace"), canvas.prob[slot], "head" if healed else "committed"))
        return Frame(run.steps, (time.monotonic() - run.started) * 1000, tuple(slots))


def _nucleus(hidden: Tensor, head: Head, allowed: Allowed | None, temperature: float, top_p: float) -> Allowed:
    """Each of the rows [N, D] restricted to its most probable admitted ids, up to the first with which they have more
    than `top_p` together; the most probable one is among them."""
    y = admitted(hidden, head, allowed, temperature)
    sure, order = y.softmax(-1).sort(-1, descending=True)
    before = sure.cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    mask = torch.zeros_like(y, dtype=torch.bool).scatter_(-1, order, (before <= top_p) & (sure > 0))
    return Allowed(mask, torch.arange(len(y), dtype=torch.int32, device=y.device))
