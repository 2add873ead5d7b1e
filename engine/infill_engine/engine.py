"""The engine: a request in, events out, and in between what it needs of the model, one bounded piece at a time.

`Engine.infill` is the main path of a request: contexts, canvas, then passes, each of which is committed, scored and
followed by the next, until the gap is closed or the deadline comes. A request does not run its passes itself:
`Engine.denoise` runs those of several at once. It knows no model by name, no socket and no editor.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, cast

import msgspec
import numpy as np
import torch
from infill_kernels import Allowed, backend, logits, moved, unmask
from torch import Tensor

from infill_engine.bidirectional import OpenFilling
from infill_engine.config import EngineConfig
from infill_engine.context import ContextCache, Lease
from infill_engine.core import (
    Canvas,
    CommitPolicy,
    Contexts,
    Denoiser,
    Noise,
    OpenDenoiser,
    OpenPolicy,
    Outcome,
    Pass,
    Rows,
    Writer,
    agreement,
    device_memory,
)
from infill_engine.gap import GapText, columns
from infill_engine.lookup import AFTER, BEFORE, LastTexts, Lookup
from infill_engine.policy import SeededNoise, VerifiedPolicy, decoding
from infill_engine.protocol import (
    Candidate,
    Event,
    Explanation,
    Final,
    Frame,
    InfillRequest,
    Piece,
    Reason,
    Recalled,
    Slot,
    content_id,
)
from infill_engine.run import Filling, Run, Source, in_time, see
from infill_engine.tokenizer import Codec, Healed, LineTokenizer, Side, TrailingTokenizer

if TYPE_CHECKING:  # they bring numba, which takes half a second to import
    from infill_engine.memory import Candidates, Memory, View
    from infill_engine.workspaces import Workspaces

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", str, list[int])

#: The canvas begins with this many slots and doubles when they are full, up to the request's limit.
FIRST_SLOTS, MOST_SLOTS = 16, 256

#: Tokens of the suffix whose likelihood scores a line end: with 8 the true end of a gap of several lines ranks first
#: 77% of the time, with 3 it is 71%.
SCORED_SUFFIX = 8

#: Where a suffix scores line ends, END ends the gap only if it is as probable as this. Taken wherever it is the most
#: probable, it ended 43% of held-out gaps of several lines where their authors did; with the best of the scored ends,
#: up to one clearly past, it was 68%, a point less where 95% are enough.
SURE_END = 0.98

#: The share of a request's time that encoding contexts may take when nothing of them is cached.
ENCODE_SHARE = 0.5

#: The share of it that snippets which are not encoded yet may take: a device on which they cost nothing encodes them at
#: once, elsewhere a request goes without them.
SNIPPET_SHARE = 0.05

#: Tokens of an earlier text proposed at once.
LAST_TOKENS = 16

#: Milliseconds that compiling may take: it was 14 s on two cores.
WARM_UP_MS = 600_000

#: Documents whose text is kept, to be compared with what comes, and characters of each on either side of its gap.
KEPT_FILES, OPEN_CHARS = 16, 1 << 19

#: Characters on each side of a gap that a request tokenises for the memory, beyond those known from requests before; so
#: many more in a step of `Engine.prime`, until all are known.
FRESH_CHARS = 4096

#: The same where somebody wants to know what is used: some milliseconds.
EXPLAINED_CHARS = 1 << 16

#: Characters before the gap that are tokenised, for each token of the window; real code has 3 to 4.
WINDOW_CHARS = 16

#: Of what followed the longest match, so many are told of to people.
TOLD = 3


@dataclass(slots=True, kw_only=True)
class _Run(Run):
    """A request whose text grows from the left."""

    #: What the gap's tokens will be if it is filled as it was before.
    last: list[int]
    #: What is remembered at this gap; None where the engine has no memory, and look-up proposes in its place.
    view: View | None
    lookup: Lookup | None
    canvas: Canvas = field(init=False)
    #: Who proposed what is on the canvas.
    source: Source = "mask"
    #: Line ends whose branches are on the canvas: byte offset in the gap, probability of END there.
    scoring: list[tuple[int, float]] = field(default_factory=list)
    #: The slot at which END was the most probable and not taken, and how probable it was.
    refused: tuple[int, float] | None = None

    @property
    def following(self) -> list[int]:
        """The suffix's first tokens, by which line ends are scored; none where nothing is to be scored."""
        one_line = self.request.max_lines == 1 or self.request.tail.strip()
        return [] if one_line else self.after[:SCORED_SUFFIX]


class Engine:
    """A loaded model and its caches. Not safe to share between threads: one worker owns it."""

    def __init__(
        self,
        name: str,
        denoiser: Denoiser | OpenDenoiser,
        codec: Codec,
        config: EngineConfig,
        policy: CommitPolicy | OpenPolicy | None = None,
        device: str = "cpu",
        dtype: str = "fp32",
        memory: Memory | None = None,
        workspaces: Workspaces | None = None,
        noise: Callable[[int], Noise] = SeededNoise,
    ) -> None:
        """policy: for the kind of canvas that the family fills. memory: of what is mixed into what the model says;
        workspaces: whose documents count beside the open file. A family that sees both sides has neither; noise: its
        chance, made of a request's seed."""
        self.name, self.device, self.dtype = name, device, dtype
        self._denoiser = denoiser
        self._policy = cast(CommitPolicy | None, policy) or VerifiedPolicy(config.mask_prob)
        facts = denoiser.facts.open
        kind = TrailingTokenizer if codec.joins_newlines else LineTokenizer
        self._tokenizer = kind(codec, heals=facts is None or facts.heals)
        if facts is not None and facts.positions is not None:
            # What the family adds, and a blank line behind each snippet, take a few more.
            others = max(facts.most, *facts.lengths) + config.suffix_tokens + facts.blocks * config.snippets * 2
            room = facts.positions - others - facts.blocks * config.snippets * config.snippet_tokens - 8
            config = replace(config, prefix_tokens=max(1, min(config.prefix_tokens, room)))
        self._config = config
        self._cache = ContextCache(denoiser, config.chunk_tokens, config.cache_mb << 20)
        self._texts = LastTexts()
        self.workspaces = workspaces
        self._memory = memory
        #: The open files' text, by document.
        self._sides: OrderedDict[tuple[str, str], tuple[Side, Side]] = OrderedDict()
        self._free = denoiser.head.free.numpy()
        self._unending = torch.ones(len(codec.tokens), dtype=torch.bool)
        self._unending[denoiser.facts.end_id] = False
        #: Masks a group, groups a pass.
        self._masks = denoiser.facts.lookahead if config.masks is None else config.masks
        self._groups = denoiser.facts.groups if config.mask_groups is None else config.mask_groups
        #: Of a family that sees both sides.
        self._open = self._opened(cast(OpenPolicy | None, policy), noise) if facts is not None else None
        verified = Filling(self._begin, self._prepare, self._next_pass, self._step, self._finish)
        self._filling = verified if self._open is None else self._open.stages

    @property
    def kernels(self) -> str:
        """Which kernels serve."""
        return backend(self.device, self._denoiser.head)

    @property
    def cache_bytes(self) -> int:
        """Memory held by encoded contexts."""
        return self._cache.nbytes

    @property
    def encoded_tokens(self) -> int:
        """Context tokens encoded so far."""
        return self._cache.encoded

    @torch.inference_mode()
    def infill(self, request: InfillRequest, started: float) -> Generator[Event | Pass | None, Outcome | None, None]:
        """Fills one gap. `started` is `time.monotonic()` at the request's receipt, from which the deadline counts.

        Yields events, of which the last is a `Final`, and what it needs: None for a step of encoding, which the next
        `next` does, and a `Pass` of which it wants to be sent the `Outcome`. Sent None instead, it ends as at its
        deadline. Closing it frees what it holds. Raises `MemoryError` where its contexts do not fit beside what other
        requests use.
        """
        filling = self._filling
        with self._cache.lease() as lease:
            run = filling.begin(request, started, lease)
            try:
                reason = yield from filling.prepare(run)
                if reason is None:
                    self._note(run)
                while reason is None:
                    outcome = yield filling.next_pass(run)
                    reason, events = ("deadline", []) if outcome is None else filling.step(run, outcome)
                    yield from events
                    reason = reason or (yield from filling.go_on(run))
            finally:
                if not any(request.avoid):  # who types on goes on with the first text
                    self._texts.keep(run.document, run.before, run.text.candidate().text)
        filling.close(run, reason)
        if run.steps:
            yield run.text.candidate()
        yield run.final(reason)

    @torch.inference_mode()
    def denoise(self, passes: Sequence[Pass]) -> list[Outcome]:
        """Runs passes of several requests as one: a forward pass, a reading of its rows, a copy to the host; where
        the model can go on without the host, several of each but the copy.

        Raises `MemoryError` where there is no room and no context to forget; fewer passes may fit.
        """
        began, steps = time.perf_counter(), self._steps(passes)
        if self._open is not None:
            hidden, states = self._forward(passes, self._denoiser.denoise)
            rows, states = self._with_room(self._open.read, passes, hidden, states)
            seconds = time.perf_counter() - began
            return [Outcome(of_pass, state, seconds) for of_pass, state in zip(rows, states, strict=True)]
        if steps > 1:
            write = partial(cast(Writer, self._denoiser).write, steps=steps, read=self._say)
            written, states = self._forward(passes, write)
            said = [of_canvas.T for of_canvas in written.unbind(2)]
        else:
            hidden, states = self._forward(passes, self._denoiser.denoise)
            read = self._with_room(self._read, passes, torch.cat(hidden))
            said = list(torch.split(read, [one.rows for one in passes], 1))
        seconds = time.perf_counter() - began
        return [Outcome(Rows.of(of_pass), state, seconds, steps) for of_pass, state in zip(said, states, strict=True)]

    def events(self, request: InfillRequest, started: float) -> Iterator[Event]:
        """The events of one request that has the engine to itself."""
        steps, outcome = self.infill(request, started), None
        while True:
            try:
                need = steps.send(outcome)
            except StopIteration:
                return
            outcome = self.denoise([need])[0] if isinstance(need, Pass) else None
            if isinstance(need, Candidate | Frame | Final):
                yield need

    def close(self) -> None:
        """Writes what is remembered to disk."""
        if self.workspaces is not None:
            self.workspaces.close()

    def warm_up(self) -> None:
        """Fills a small gap, so that what is compiled or set up at its first use is there before the first request."""
        if self.workspaces is not None:
            self.workspaces.warm_up()
        gap = InfillRequest(
            client="",
            document="",
            prefix="a = 1\nb = 2\n",
            head="print(a",
            suffix="\nprint(b)\n",
            max_lines=2,
            max_tokens=2,
            deadline_ms=WARM_UP_MS,
        )
        for _ in self.events(gap, time.monotonic()):
            pass

    @torch.inference_mode()
    def prime(self, request: InfillRequest) -> Generator[None, None, None]:
        """Encodes ahead of need, for the next request of a place: first what this one's deadline cut short, up to the
        last few tokens, then the whole window. That is kept apart until it is complete: a request that comes meanwhile
        goes on with what was there. Then the snippets. In the end takes the rest of the file into the memory. Each
        yield asks for a step, which the next `next` does."""
        cache, left = self._cache, (self._denoiser.facts.left[0],) * 2
        key = (request.client, request.document)
        following = (*key, "next")
        segments, lines, head = self._split(request)

        with cache.lease(ahead=True) as lease:
            current = self._lines(key, segments, lines, head, math.inf)
            yield from cache.stream(key, current, head.tokens, left, lease)
            after = self._after(request)[: self._config.suffix_tokens]
            if after and self._open is None:  # else it stands on the canvas
                yield from cache.block(after, lease)
            full = self._lines(following, segments, lines, head, math.inf)
            if len(full) > len(current):
                yield from cache.stream(following, full, head.tokens, left, lease)
                cache.replace(key, following)
            for tokens in filter(None, self._snippets(request)[: 2 * self._config.snippets]):
                yield from cache.block(tokens, lease)  # the next best may be the best for the next key
        if self._memory is not None:
            for side in self._around(request):
                while not side.encode(FRESH_CHARS):
                    yield
            if (view := self._view(request, head)) is not None:
                view.refresh()

    @torch.inference_mode()
    def explain(self, request: InfillRequest) -> Explanation:
        """What the request would be answered from if it came now. Encodes nothing. Where its client never asked for the
        document, what is encoded is that of the client that did last."""
        client = self._cache.latest(request.document, request.client)
        request = msgspec.structs.replace(request, client=client)
        segments, lines, head = self._split(request)
        after, seconds = self._after(request)[: self._config.suffix_tokens], request.deadline_ms / 1000 * ENCODE_SHARE
        window = self._lines((request.client, request.document), segments, lines, head, seconds)
        pieces = self._pieces(request, window, head, after, self._offered(request))
        return Explanation(content_id(request.document), tuple(pieces), tuple(self._recalled(request, lines, head)))

    def _note(self, run: Run) -> None:
        """Counts the snippets that are missed, and names in the log what a request is filled from."""
        request = run.request
        run.late_snippets = min(sum(bool(tokens) for tokens, _ in run.offered), self._config.snippets) - run.snippets
        if not log.isEnabledFor(logging.INFO):
            return
        pieces = self._pieces(request, run.window, run.head, run.suffix, run.offered)
        used = ", ".join(f"{piece.kind} {piece.id}" for piece in pieces if piece.used)
        log.info("version %d of %s is filled from %s", request.version, content_id(request.document), used)

    def _recalled(self, request: InfillRequest, lines: Sequence[tuple[int, ...]], head: Healed) -> Iterator[Recalled]:
        """What the memory knows of the slot that the gap begins with."""
        if (view := self._view(request, head, EXPLAINED_CHARS)) is None:
            return
        known = [token for line in lines for token in line] + head.tokens
        file, workspace = view.matches(())
        source: Literal["file", "workspace"]
        for source, match in ("file", file), ("workspace", workspace):
            if length := int(match.length[0]):
                likely = zip(match.ids[0].tolist(), match.share[0].tolist(), strict=True)
                followers = [(self._said([token]), share) for token, share in likely if share > 0]
                here = self._said(known[-length:])
                yield Recalled(source, length, int(match.times[0]), here, tuple(followers[:TOLD]))

    def _pieces(
        self,
        request: InfillRequest,
        window: Sequence[tuple[int, ...]],
        head: Healed,
        after: Sequence[int],
        offered: Sequence[tuple[list[int], bool]],
    ) -> Iterator[Piece]:
        """What there is to see for a canvas, as `explain` tells it."""
        before, cache = [*(token for line in window for token in line), *head.tokens], self._cache
        kept = cache.kept((request.client, request.document), before)
        yield Piece("prefix", content_id(self._tokenizer.text(before)), len(before), kept, used=True)
        if after:
            kept = cache.kept(tuple(after), after)
            yield Piece("suffix", content_id(self._tokenizer.text(after)), len(after), kept, used=True)
        for snippet, (tokens, used) in zip(request.snippets, offered, strict=True):
            kept = cache.kept(tuple(tokens), tokens)
            yield Piece("snippet", snippet.id, len(tokens), kept, used, snippet.path)

    def _said(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.text(tokens).decode(errors="replace")

    def _opened(self, policy: OpenPolicy | None, noise: Callable[[int], Noise]) -> OpenFilling:
        """What fills canvases that are open on both sides."""
        return OpenFilling(
            cast(OpenDenoiser, self._denoiser),
            self._cache,
            self._tokenizer,
            self._config,
            policy or decoding(self._config.decoding, self._denoiser.facts),
            window=self._window,
            split=self._split,
            after=self._after,
            offered=self._offered,
            noise=noise,
        )

    def _window(self, run: Run, after: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
        """The lines that the prefix stream should hold; after: tokens to be encoded besides."""
        seconds = run.request.deadline_ms / 1000 * ENCODE_SHARE - len(after) / self._cache.rate
        return self._lines(run.document, run.segments, run.lines, run.head, seconds)

    def _lines(
        self,
        key: tuple[str, ...],
        segments: Sequence[str],
        lines: Sequence[tuple[int, ...]],
        head: Healed,
        seconds: float,
    ) -> tuple[tuple[int, ...], ...]:
        """Those of `lines` that a stream should hold beside the cursor line."""
        budget = self._config.prefix_tokens - len(head.tokens)
        return self._cache.window(key, lines, budget, seconds, _start_cost(segments))

    def _begin(self, request: InfillRequest, started: float, lease: Lease) -> _Run:
        """Tokenises, once a request."""
        segments, lines, head = self._split(request)
        after = self._after(request)
        known = [token for line in lines for token in line] + head.tokens
        last = self._texts.rest((request.client, request.document), request.prefix + request.head)
        view = self._view(request, head)
        return _Run(
            request=request,
            started=started,
            lease=lease,
            segments=segments,
            lines=lines,
            head=head,
            after=after,
            last=(self._tokenizer.continuation(segments[-1], head, last) or []) if last else [],
            text=GapText(request, head.rest),
            view=view,
            lookup=None if view else Lookup(known, after, self._config.proposal_tokens),
        )

    def _prepare(self, run: _Run) -> Generator[None, None, Reason | None]:
        """Encodes the contexts and lays out the canvas; "deadline" if that came first (what is encoded is kept)."""
        request, cache, config = run.request, self._cache, self._config
        after = run.after[: config.suffix_tokens]
        total_s = request.deadline_ms / 1000
        run.window = self._window(run, after)
        stream = cache.stream(run.document, run.window, run.head.tokens, self._denoiser.facts.left, run.lease)
        encoded = yield from in_time(run, stream)
        if encoded is None:
            return "deadline"
        prefix, left = encoded
        run.canvas, run.contexts = Canvas(prefix.length, tuple(left), FIRST_SLOTS), Contexts(prefix)
        if after:
            after = list(cache.affordable(after, run.left_s - total_s * (1 - ENCODE_SHARE)))
            if not (yield from see(run, [cache.block(after, run.lease)])):
                return "deadline"
        offered = self._offered(request)
        if not (yield from see(run, (cache.block(tokens, run.lease) for tokens, used in offered if used))):
            return "deadline"
        run.suffix, run.offered = after, offered
        run.canvas = self._propose(run, run.canvas)
        return None

    def _snippets(self, request: InfillRequest) -> list[list[int]]:
        """The tokens of each snippet as a block has them, none where the family reads no blocks."""
        facts, most = self._denoiser.facts.open, self._config.snippet_tokens
        behind: list[int] = []
        if facts is not None:  # the prefix follows it as if in one text
            behind, most = self._tokenizer.encode("\n\n"), most if facts.blocks else 0
        blocks = (self._tokenizer.encode(one.text[: most * WINDOW_CHARS])[:most] for one in request.snippets)
        return [tokens and [*tokens, *behind] for tokens in blocks]

    def _offered(self, request: InfillRequest) -> list[tuple[list[int], bool]]:
        """Of each snippet the tokens, and whether the canvas is to see it: of those that are encoded, or would be in no
        time, it sees as many of the best as it is set to."""
        spare_s, room = SNIPPET_SHARE * request.deadline_ms / 1000, self._config.snippets
        offered: list[tuple[list[int], bool]] = []
        for tokens in self._snippets(request):
            takes_s = self._cache.seconds(tokens)
            used = bool(tokens) and room > 0 and takes_s <= spare_s
            if used:
                room, spare_s = room - 1, spare_s - takes_s
            offered.append((tokens, used))
        return offered

    def _view(self, request: InfillRequest, head: Healed, fresh: int = FRESH_CHARS) -> View | None:
        """What is remembered at a gap: of its file as much around it as has been tokenised by now, and `fresh`
        characters more on either side."""
        if self._memory is None:
            return None
        before, after = self._around(request)
        before.encode(fresh)
        after.encode(fresh)
        lines = [*before.lines, tuple(head.tokens)]
        workspace = self.workspaces.of(request.workspace) if self.workspaces and request.workspace else None
        document = (request.client, request.document)
        return self._memory.view(document, lines, after.lines, workspace, request.path or None)

    def _around(self, request: InfillRequest) -> tuple[Side, Side]:
        """The text of a document before its cursor line and behind its gap, as it was last time and is now."""
        key = (request.client, request.document)
        sides = self._sides.get(key) or (Side(self._tokenizer, before=True), Side(self._tokenizer, before=False))
        self._sides[key] = sides
        self._sides.move_to_end(key)
        if len(self._sides) > KEPT_FILES:
            self._sides.popitem(last=False)
        before, after = sides
        before.update(request.prefix.rstrip("\n")[-OPEN_CHARS:])  # the newlines belong to the cursor line
        after.update((request.tail + request.suffix)[:OPEN_CHARS])
        return sides

    def _next_pass(self, run: _Run) -> Pass:
        targets = [token for _ in run.scoring for token in run.following]
        allowed, remembered = self._allowed(run), None
        if run.view is not None:
            sets = {row: ids.numpy() for row, ids in allowed.items()}
            remembered = run.view.candidates(run.canvas.proposal, sets, self._free)
        return Pass(
            run.canvas,
            run.contexts,
            run.state,
            allowed=allowed,
            targets=tuple(targets),
            memory=remembered,
        )

    def _steps(self, passes: Sequence[Pass]) -> int:
        """How many tokens to write at once: more than one where nothing is proposed, restricted, masked or scored."""
        looked_at = any(one.rows > 1 or one.allowed or one.memory for one in passes)
        if self._config.proposal_tokens or looked_at:
            return 1
        return min(self._denoiser.facts.steps, *(one.canvas.size - one.canvas.frontier for one in passes))

    def _forward(self, passes: Sequence[Pass], run: Callable[..., T]) -> T:
        """What `run` makes of all passes."""
        return self._with_room(run, *zip(*((p.canvas, p.contexts, p.state) for p in passes), strict=True))

    def _with_room(self, run: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """What `run` gives, with contexts forgotten to make room for it where need be."""
        while True:
            try:
                with device_memory():
                    return run(*given, **named)
            except MemoryError:
                if not self._cache.evict():
                    raise

    def _read(self, passes: Sequence[Pass], hidden: Tensor) -> Tensor:
        """What the rows [N, D] of all passes say, as `_say` has it, on the host."""
        head = self._denoiser.head
        sets: dict[int, Tensor] = {}
        remembered: list[tuple[int, Candidates]] = []
        targets = torch.full((len(hidden),), self._denoiser.facts.end_id)
        at = 0
        for p in passes:
            sets |= {at + row: ids for row, ids in p.allowed.items()}
            if p.memory is not None and p.memory.ids.size:
                remembered.append((at, p.memory))
            at += p.rows
            if p.targets:
                targets[at - len(p.targets) : at] = torch.tensor(p.targets)
        allowed = head.allow(len(hidden), sets) if sets else None
        if not remembered:
            return self._say(hidden, moved(targets, hidden.device), allowed).cpu()
        return self._mixed(hidden, targets, allowed, sets, remembered)

    def _mixed(
        self,
        hidden: Tensor,
        targets: Tensor,
        allowed: Allowed | None,
        sets: Mapping[int, Tensor],
        remembered: Sequence[tuple[int, Candidates]],
    ) -> Tensor:
        """What the rows say once what is remembered is mixed in, on the host."""
        from infill_engine.memory import Candidates, mix

        candidates = Candidates.stacked(remembered, len(hidden))
        ids = moved(torch.from_numpy(candidates.ids), hidden.device)
        said = self._say(hidden, moved(targets, hidden.device), allowed, ids).cpu().numpy()
        (token, prob, entropy, end_prob, target, lse), scores = said[:6], said[6:].T
        end_id = self._denoiser.facts.end_id
        admitted = np.full(len(hidden), self._free[end_id])
        admitted[list(sets)] = [bool(of_row[end_id]) for of_row in sets.values()]
        model = token.astype(np.int64), prob, lse, entropy, scores
        mixed = mix(candidates, *model, end_id, np.where(admitted, end_prob, 0.0))
        return torch.from_numpy(np.stack([mixed.token, mixed.prob, mixed.entropy, end_prob, target]))

    def _say(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        allowed: Allowed | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """What rows [N, D] say: the fields of `Rows` as float64 [5, N], which holds ids exactly, on their device.
        targets: int64 [N], END by default. ids: int64 [N, C], for which come the log-sum-exp and their logits, too:
        [6 + C, N]."""
        head = self._denoiser.head
        outputs = unmask(hidden, head, allowed=allowed)
        end = torch.full((len(hidden),), self._denoiser.facts.end_id, device=hidden.device)
        wanted = torch.stack([end, end if targets is None else targets], 1)
        logprobs = logits(hidden, head, wanted) - outputs.lse[:, None]
        columns = [outputs.token.double(), outputs.prob, outputs.entropy, logprobs[:, 0].exp(), logprobs[:, 1]]
        if ids is not None:
            columns += [outputs.lse.double(), *logits(hidden, head, ids).double().T]
        return torch.stack(columns)

    def _step(self, run: _Run, outcome: Outcome) -> tuple[Reason | None, list[Event]]:
        """What a pass brings: commit, then grow, cut or stop."""
        before, rows = run.canvas, outcome.rows
        if outcome.steps > 1:  # what was written before the last token is as if proposed and confirmed
            before = replace(before, proposal=tuple(rows.token[:-1]))
        run.took(outcome)
        reason, finished_line = None, False
        if run.scoring:
            opened = len(rows) - len(run.scoring) * len(run.following)
            reason, rows = self._score(run, rows[opened:]), rows[:opened]
        after = decided = self._policy.step(before, rows)
        if reason is None:
            after, reason, finished_line = self._take(run, decided, rows)
        self._count(run, after)
        if reason is None and after.frontier == MOST_SLOTS:
            reason = "limit"
        elif after.full:
            after = after.grow(min(2 * after.size, MOST_SLOTS))
        if reason is None and run.late:
            reason = "deadline"
        waiting = min(decided.frontier - after.frontier, len(after.proposal))
        run.canvas = self._propose(run, after, waiting) if reason is None else after
        events: list[Event] = [self._frame(run)] if run.request.frames else []
        return reason, events if reason is not None else [*events, *run.news(finished_line)]

    def _finish(self, run: _Run, reason: Reason) -> None:
        """Closes the text, which may end within a word."""
        if reason != "end":
            run.text.close()

    def _take(self, run: _Run, after: Canvas, rows: Rows) -> tuple[Canvas, Reason | None, bool]:
        """Adds what was committed to the text, up to where it has to stop; hangs a branch onto the canvas where a line
        ended. Returns the canvas, why to stop, and whether a line was finished."""
        frontier, text, finished_line = run.canvas.frontier, run.text, False
        for i, token in enumerate(after.committed[frontier:]):
            if token == self._denoiser.facts.end_id:
                if (run.following and rows.prob[i] < SURE_END) or text.is_begun:
                    # One place to end among others, or none: what would come instead is asked for first.
                    run.refused = frontier + i, rows.prob[i]
                    return replace(after, committed=after.committed[: frontier + i], proposal=()), None, finished_line
                text.score(text.length, None, rows.prob[i])
                return after, "end", finished_line
            written, piece = text.length, self._tokenizer.codec.tokens[token]
            reason = text.append(piece, rows.prob[i])
            if (memory := run.view or run.lookup) is not None:
                memory.append(token)
            if written >= 0 and piece.startswith(b"\n"):
                finished_line = True
                after = self._branch(run, after, frontier + i, written, rows.end_prob[i])
            if reason is not None:
                return after, reason, finished_line
            if after.branches:
                # What follows may be moot once the end is scored: it waits for that, as a proposal.
                taken = frontier + i + 1
                waiting = (*after.committed[taken:], *after.proposal)
                return replace(after, committed=after.committed[:taken], proposal=waiting), None, finished_line
        return after, None, finished_line

    def _branch(self, run: _Run, canvas: Canvas, slot: int, at: int, end_prob: float) -> Canvas:
        """Notes the line end before `slot` as a place to stop; where a suffix can score it, hangs a branch there."""
        if not run.following:
            run.text.score(at, None, end_prob)
            return canvas
        if slot - 1 <= -len(canvas.left):
            return canvas  # Nothing stands before the document's first line end that a suffix could follow.
        if run.refused is not None and run.refused[0] == slot:
            end_prob = run.refused[1]
        run.scoring.append((at, end_prob))
        # The last token before the end is read again in the branch, where it does not see the suffix it predicts.
        last = [*canvas.left, *canvas.committed[:slot]][-1]
        return replace(canvas, branches=(*canvas.branches, (slot - 1, (last, *run.following[:-1]))))

    def _score(self, run: _Run, rows: Rows) -> Reason | None:
        """Scores this pass's branches: the mean log-probability of the suffix's first tokens at each line end."""
        reason: Reason | None = None
        size = len(run.following)
        for i, (at, end_prob) in enumerate(run.scoring):
            mean = sum(rows.target_logprob[i * size : (i + 1) * size]) / size
            reason = run.text.score(at, mean, end_prob) or reason
        run.scoring.clear()
        return reason

    def _count(self, run: _Run, after: Canvas) -> None:
        """Counts what was proposed in the last pass, and what of it proved right."""
        if not (proposal := run.canvas.proposal):
            return
        right = agreement(proposal, after.committed[run.canvas.frontier :])
        run.proposed[run.source] = run.proposed.get(run.source, 0) + len(proposal)
        run.accepted[run.source] = run.accepted.get(run.source, 0) + right

    def _propose(self, run: _Run, canvas: Canvas, confirmed: int = 0) -> Canvas:
        """Seeds the slots after the frontier: with the text that was here before as long as it proves right, else with
        what followed the same tokens elsewhere, else with what masks predicted. Hangs masks onto it for the next time.

        confirmed: how many tokens of the proposal were confirmed already, and wait for a line end to be scored.
        """
        room, written = canvas.size - canvas.frontier - 1, canvas.frontier
        if tuple(run.last[:written]) != canvas.committed:
            run.last = []
        proposal = canvas.proposal
        if confirmed:
            pass
        elif last := run.last[written:][: min(room, LAST_TOKENS)]:
            proposal, run.source = tuple(last), "last"
        elif not run.text.pending and (found := self._look_up(run)[:room]):
            proposal, run.source = found, "lookup"
        else:
            end_id = self._denoiser.facts.end_id
            proposal, run.source = tuple(takewhile(lambda token: token != end_id, proposal)), "mask"
        groups = self._groups if self._masks and run.source != "last" else 0  # that one proves right, nearly always
        behind = range(confirmed, min(confirmed + groups, len(proposal) + 1))
        masks = (*[0] * confirmed, *(max(0, min(self._masks, room - j)) for j in behind))
        return replace(canvas, proposal=proposal, masks=masks)

    def _look_up(self, run: _Run) -> tuple[int, ...]:
        """What followed the same tokens elsewhere."""
        if run.view is not None:
            return run.view.propose(self._config.proposal_tokens)
        return run.lookup.propose() if run.lookup is not None else ()

    def _split(self, request: InfillRequest) -> tuple[list[str], list[tuple[int, ...]], Healed]:
        """The last segments before the gap, of those of whole lines the tokens, and the healed cursor line."""
        text, most = request.prefix + request.head, max(self._config.prefix_tokens, BEFORE)
        if len(text) > most * WINDOW_CHARS:
            first = text.find("\n", len(text) - most * WINDOW_CHARS)
            text = text[first:] if first >= 0 else _end_of(text[text.rfind("\n") + 1 :], most * WINDOW_CHARS)
        segments = self._tokenizer.segments(text) or [""]
        head = self._tokenizer.heal(segments[-1])
        if len(head.tokens) > self._config.prefix_tokens:  # the cursor line alone is more than the window
            return segments[-1:], [], Healed(_end_of(head.tokens, self._config.prefix_tokens), head.rest)
        lines: list[tuple[int, ...]] = []
        for segment in reversed(segments[:-1]):
            if most < 0:  # one more than the window holds, so that it is known not to hold all
                break
            lines.append(self._tokenizer.encode_segment(segment))
            most -= len(lines[-1])
        lines.reverse()
        return segments[len(segments) - len(lines) - 1 :], lines, head

    def _after(self, request: InfillRequest) -> list[int]:
        """The first tokens after the gap; none where only blank lines follow."""
        most = max(self._config.suffix_tokens, AFTER)
        text = (request.tail + request.suffix)[: most * WINDOW_CHARS]
        return self._tokenizer.beginning(text, most) if text and not text.isspace() else []

    def _allowed(self, run: _Run) -> dict[int, Tensor]:
        """The rows that have to write again what healing took back, and one where END was refused; the others are
        free."""
        sets = dict(enumerate(self._tokenizer.restricted(run.text.pending, run.canvas.proposal)))
        if run.refused is not None and run.refused[0] == run.canvas.frontier:
            sets.setdefault(0, self._unending)
        return sets | self._begun_otherwise(run, sets)

    def _begun_otherwise(self, run: _Run, sets: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The rows at which the gap could still begin as a text that it is to avoid, each without the ids that do."""
        found: dict[int, Tensor] = {}
        if not (avoid := [text.encode() for text in run.request.avoid]):
            return found
        written, rest = run.text.candidate().text.encode(), run.text.pending
        for row, token in enumerate((*run.canvas.proposal, None)):
            if written.strip():
                break
            other = self._tokenizer.beginning_otherwise(rest, avoid)
            if row in sets:
                other = other & sets[row]
            if b"" in avoid:
                other = other & self._unending
                if not run.request.head.strip():  # There a gap that begins with a line end is as good as empty.
                    other = self._tokenizer.beginning_in_line(rest, other)
            found[row] = other
            piece = self._tokenizer.codec.tokens[token] if token is not None else b""
            written, rest = written + piece[len(rest) :], rest[len(piece) :]
        return found

    def _frame(self, run: _Run) -> Frame:
        """The canvas as it stands after a step."""
        slots, offset = [], 0
        for token, prob in zip(run.canvas.committed, run.text.probs, strict=False):
            piece = self._tokenizer.codec.tokens[token]
            offset += len(piece)
            state: Literal["head", "committed"] = "head" if offset <= len(run.text.rest) else "committed"
            slots.append(Slot(piece.decode(errors="replace"), prob, state))
        for token in run.canvas.proposal:
            slots.append(Slot(self._tokenizer.codec.tokens[token].decode(errors="replace"), 0.0, "proposed"))
        slots += [Slot("", 0.0, "mask")] * (run.canvas.size - len(slots))
        return Frame(run.steps, (time.monotonic() - run.started) * 1000, tuple(slots))


def _end_of(line: S, most: int) -> S:
    """The last of a line's characters or tokens, at most `most`. Where they begin moves in strides, not with each
    key, so that what is encoded of them can be kept."""
    stride = max(1, most // 4)
    return line[-(-max(0, len(line) - most) // stride) * stride :]


def _start_cost(segments: Sequence[str]) -> Callable[[int], float]:
    """How badly a window begins at a segment: by its indentation, where it follows a blank line or one that is indented
    less, as a definition does; else worse than at any that does."""

    def cost(i: int) -> float:
        own = columns(segments[i].lstrip("\n").encode())
        before = segments[i - 1].lstrip("\n") if i else ""
        opens = segments[i].startswith("\n\n") or not before.strip() or columns(before.encode()) < own
        return own if opens else math.inf

    return cost
