"""Fills several places of a document jointly: a selection, what is not kept of it, cursors, holes.

Each place is a gap of its own with a request of its own, so that the engine takes all of them in one pass. A place is
conditioned on the text of those above it: all are asked at once, on what is known by then, and asked again where what
stands above them has changed meanwhile, until nothing changes any more. That is a Jacobi iteration of filling one place
after the other: the first one stands after the first round, the n-th after the n-th at the latest, mostly much earlier,
and it ends at the same texts. The engine proposes what it wrote in a place before, so a text that stays costs little.

A place that is not written yet is seen as nothing: `...` left where code is missing would be what is written elsewhere,
too. Where nothing at all is an answer, something is asked for.

Knows neither LSP's messages nor settings, and changes nothing: whoever asks applies the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from infill_engine.protocol import ANSWERED, Candidate, Event, Final, InfillRequest
from lsprotocol import types
from msgspec import structs

from infill_lsp.confidence import cuts, fitted, shown
from infill_lsp.core import Edit, Filled, Gap, Silence, Site, Snapshot, Span
from infill_lsp.documents import Document
from infill_lsp.extraction import cut, indentation
from infill_lsp.postprocess import edit, tidied

#: Places that are filled in all, and that are asked for at once.
MAX_SITES, AT_ONCE = 64, 8
#: Lines that a selection may become for each that it had, and more, and at most; tokens, at which the canvas ends.
LINES_EACH, LINES_MORE, MOST_LINES = 2, 4, 64
MOST_TOKENS = 256
#: Deadlines of a request that are given beside one for each place: what was cut short or refused is asked again.
MORE_ROUNDS = 3
#: Seconds that an engine which starts is waited for, and between two attempts.
STARTING_S, RETRY_S = 30.0, 0.25


class FillError(Exception):
    """Why nothing is filled: one line for people."""


class Superseded(FillError):
    """A newer fill of the same document took the place of this one."""


class Engine(Protocol):
    """What is asked of `infill_lsp.client.EngineClient`."""

    def infill(self, request: InfillRequest) -> AsyncGenerator[Event, None]: ...


#: Is told how much is done, 0 to 1, with words; what it raises ends the fill.
Told = Callable[[float, str], Awaitable[None]]


def selected(snapshot: Snapshot, spans: Iterable[Span], keep: Iterable[Span] = ()) -> list[Site]:
    """What of selections is to be written, from first to last: all of each but what is kept, and cursors.

    The space and line ends at either end of a selected text stay, and so does its first line's indentation.
    """
    sites: list[Site] = []
    kept = _merged(keep)
    for span in _merged(spans):
        parts = _without(span, kept)
        trimmed = [_trimmed(snapshot, part) for part in parts]
        if parts == [span] and trimmed == [None]:
            trimmed = [_cursor(snapshot, span)]
        sites += [_site(snapshot, part) for part in trimmed if part is not None]
    return sites


async def fill(
    snapshot: Snapshot,
    sites: Sequence[Site],
    engine: Engine,
    ask: InfillRequest,
    told: Told,
    parse_check: bool = True,
) -> list[Filled]:
    """What belongs at `sites`, which are apart and in order; one for which there is nothing is left out.

    `ask` is a request without a gap, whose deadline is what a single place may take; all together may take that for
    each, and for some rounds more. Cancelling ends the engine's requests. Raises `FillError` where nothing can be
    filled, and whatever `told` raises.
    """
    return await _Filling(snapshot, sites[:MAX_SITES], engine, ask, told, parse_check).run()


def moved(spans: Iterable[Span], old: Sequence[str], new: Sequence[str]) -> list[Span] | None:
    """Where spans of a document of the lines `old` are in one of the lines `new`; None where one of them is not apart
    from the lines that changed."""
    shortest = min(len(old), len(new))
    above = next((row for row in range(shortest) if old[row] != new[row]), shortest)
    below = next((row for row in range(shortest - above) if old[-1 - row] != new[-1 - row]), shortest - above)
    by = len(new) - len(old)
    found = []
    for start, end in spans:
        if end[0] < above:
            found.append(Span(start, end))
        elif start[0] >= len(old) - below:
            found.append(Span((start[0] + by, start[1]), (end[0] + by, end[1])))
        else:
            return None
    return found


@dataclass(slots=True, eq=False)
class _Place:
    """One site on its way."""

    site: Site
    #: The gap that was answered last, and what came of it.
    gap: Gap | None = None
    filled: Filled | None = None
    #: Whether that was the engine's last word to it.
    whole: bool = False
    #: The texts above, with which there is nothing new to ask.
    above: list[str] | None = None
    #: How far the answer is, 0 to 1.
    share: float = 0.0

    @property
    def text(self) -> str:
        """What stands there as far as it is known."""
        return "" if self.filled is None else self.filled.text


class _Filling:
    """The places of one document, and what is known of their texts."""

    def __init__(
        self,
        snapshot: Snapshot,
        sites: Sequence[Site],
        engine: Engine,
        ask: InfillRequest,
        told: Told,
        parse_check: bool,
    ) -> None:
        self._snapshot = snapshot
        self._places = [_Place(site) for site in sites]
        self._engine, self._ask, self._told = engine, ask, told
        self._parse_check = parse_check
        self._pinned = _between(snapshot.lines, [site.span for site in sites])
        #: The document as one place after the other sees it: a parse starts from the one before.
        self._draft = Document(snapshot.uri, snapshot.language, snapshot.version, "\n".join(snapshot.lines))
        self._silence = ""
        self._done = 0.0

    async def run(self) -> list[Filled]:
        """Round by round, until no place sees anything new, or time is up."""
        clock = asyncio.get_running_loop().time
        each_s = self._ask.deadline_ms / 1000
        give_up = clock() + STARTING_S
        end: float | None = None  # Known once the engine answers.
        while due := await asyncio.to_thread(self._due):
            left_s = each_s * len(due) if end is None else min(each_s * len(due), end - clock())
            if left_s <= 0:
                break
            finals = await self._round(due, max(1, round(1000 * left_s)))
            if any(final.reason in ANSWERED for final in finals):
                end = clock() + each_s * (len(self._places) + MORE_ROUNDS) if end is None else end
                continue
            why = finals[0].message or "the engine is not ready: ask again in a moment"
            if end is None and clock() >= give_up:
                raise FillError(why)
            await self._tell(why)
            await asyncio.sleep(RETRY_S)
        if self._silence and all(place.gap is None for place in self._places):
            raise FillError(self._silence)
        filled = [place.filled for place in self._places if place.filled]
        return [one for one in filled if one.text != self._snapshot.text(one.span)]

    def _due(self) -> list[tuple[_Place, Snapshot, Gap]]:
        """The first places that are to be asked, as they are seen now: what they see has changed since their answer, or
        that was none."""
        due: list[tuple[_Place, Snapshot, Gap]] = []
        texts = [place.text for place in self._places]
        for number, place in enumerate(self._places):
            if len(due) == AT_ONCE:
                break
            if place.above == texts[:number]:
                continue
            snapshot = self._around(number)
            gap = cut(snapshot, "invoked")
            if isinstance(gap, Silence):
                self._silence = gap.reason
            else:
                gap = self._whole(gap, place.site)
            if isinstance(gap, Silence) or (place.whole and gap == place.gap):
                place.above = texts[:number]
            else:
                place.above = None
                due.append((place, snapshot, gap))
        return due

    def _around(self, number: int) -> Snapshot:
        """The document with the cursor at a place, all above it written."""
        before, after = [self._pinned[0]], [self._pinned[number + 1]]
        for place, pinned in zip(self._places[:number], self._pinned[1:], strict=False):
            before += place.text, pinned
        after += self._pinned[number + 2 :]
        before.append(self._places[number].site.lead)
        lines = "".join(before).split("\n")
        whole = types.TextDocumentContentChangeWholeDocument("".join(before + after))
        self._draft.change([whole], self._snapshot.version, "utf-32")
        return self._draft.snapshot(len(lines) - 1, len(lines[-1]), "utf-32", wait=True)

    def _whole(self, gap: Gap, site: Site) -> Gap:
        """The gap with room for the site's lines, within its block, and with what the cells around it say."""
        max_lines = gap.max_lines if site.lines is None else min(max(gap.max_lines, site.lines), MOST_LINES)
        # Where a line has begun, what opens a body there says more than the lines that were there.
        least = [gap.min_indent, site.min_indent] if gap.head.strip() else [site.min_indent, gap.min_indent]
        return replace(
            gap,
            kind="selection" if site.lines is not None else gap.kind,
            prefix=self._snapshot.before + gap.prefix,
            suffix=gap.suffix + self._snapshot.after,
            max_lines=max_lines,
            min_indent=next((columns for columns in least if columns is not None), None),
        )

    async def _round(self, due: Sequence[tuple[_Place, Snapshot, Gap]], deadline_ms: int) -> list[Final]:
        """Asks for places at once; how they ended."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._write(*one, deadline_ms)) for one in due]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _write(self, place: _Place, snapshot: Snapshot, gap: Gap, deadline_ms: int) -> Final:
        """Asks for one place, and notes its text."""
        place.share = 0.0
        request = structs.replace(
            self._ask,
            document=f"{self._ask.document}.fill.{self._places.index(place)}",
            language=snapshot.language,
            prefix=gap.prefix,
            head=gap.head,
            tail=gap.tail,
            suffix=gap.suffix,
            max_lines=gap.max_lines,
            open_lines=gap.open_lines,
            max_tokens=MOST_TOKENS,
            min_indent=gap.min_indent,
            avoid=("",),  # Whoever asks for it wants something there.
            deadline_ms=deadline_ms,
        )
        candidate, final = Candidate(""), Final("starting")
        async with contextlib.aclosing(self._engine.infill(request)) as events:
            async for event in events:
                match event:
                    case Candidate():
                        candidate = event
                        place.share = (1 + event.text.count("\n")) / (2 + max(gap.max_lines, event.text.count("\n")))
                        await self._tell()
                    case Final():
                        final = event
        if final.reason == "error":
            raise FillError(final.message)
        if final.reason == "superseded":
            raise Superseded("a newer fill of this document took the place of this one")
        if final.reason in ANSWERED:
            place.gap, place.whole = gap, final.reason != "deadline"
            place.filled = self._fitting(snapshot, gap, candidate, place.site)
            place.share = 1.0 if place.whole else place.share
            await self._tell()
        return final

    def _fitting(self, snapshot: Snapshot, gap: Gap, candidate: Candidate, site: Site) -> Filled | None:
        """What of the candidate belongs at the site, None where nothing does."""
        found = edit(snapshot, gap, candidate, parse_check=self._parse_check, over_tail=False)
        if not isinstance(found, Edit):
            return None
        options = cuts(shown(tidied(snapshot, gap, candidate), found.text), gap.kind)
        sure = fitted().confidence(options[-1]) if options else 0.0
        return Filled(site.span, site.lead + found.text, sure)

    async def _tell(self, words: str = "") -> None:
        """How far all is; never less than was told before."""
        places = self._places
        self._done = max(self._done, sum(place.share for place in places) / len(places))
        counted = f"{sum(place.whole for place in places)} of {len(places)}" if len(places) > 1 else ""
        await self._told(self._done, words or counted)


def _site(snapshot: Snapshot, span: Span) -> Site:
    """The place of a selection: with room for more than was there, within the block that held it."""
    (first, start), (last, end) = span
    rows = [row for row in range(first, last + 1) if snapshot.lines[row].strip()]
    begun, goes_on = snapshot.lines[first][:start].strip(), snapshot.lines[last][end:].strip()
    if span.start == span.end or (len(rows) == 1 and (begun or goes_on)):
        return Site(span)  # A cursor, or a piece of a line: as at a cursor.
    columns = [indentation(snapshot.lines[row]) for row in rows if row > first or not begun]
    return Site(span, lines=LINES_EACH * len(rows) + LINES_MORE, min_indent=min(columns, default=None))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that overlap as one."""
    merged: list[Span] = []
    for start, end in sorted((min(span), max(span)) for span in spans):
        last = merged[-1] if merged else None
        if last and (start < last.end or start == last.start or start == end == last.end):
            merged[-1] = Span(last.start, max(end, last.end))
        else:
            merged.append(Span(start, end))
    return merged


def _without(span: Span, kept: Sequence[Span]) -> list[Span]:
    """What is left of a span where parts of it are kept."""
    parts, start = [], span.start
    for keep in kept:
        if start < keep.end and keep.start < span.end and keep.start < keep.end:
            if start < keep.start:
                parts.append(Span(start, keep.start))
            start = keep.end
    return [*parts, Span(start, span.end)] if start < span.end or start == span.start else parts


def _trimmed(snapshot: Snapshot, span: Span) -> Span | None:
    """The span without space and line ends at either end; None where there is nothing else in it."""
    (first, start), (last, end) = span
    begins, ends = [], []
    for row in range(first, last + 1):
        before = start if row == first else 0
        piece = snapshot.lines[row][before : end if row == last else None]
        if piece.strip():
            begins.append((row, before + len(piece) - len(piece.lstrip())))
            ends.append((row, before + len(piece.rstrip())))
    return Span(begins[0], ends[-1]) if begins else None


def _cursor(snapshot: Snapshot, span: Span) -> Span:
    """Where to write in a span of nothing but space: at the end of its first blank line, else where it begins."""
    (first, _), (last, _) = span
    row = next((row for row in range(first, last + 1) if not snapshot.lines[row].strip()), None)
    at = span.start if row is None or span.start == span.end else (row, len(snapshot.lines[row]))
    return Span(at, at)


def _between(lines: Sequence[str], spans: Sequence[Span]) -> list[str]:
    """The text before, between and behind spans, LF only: one piece more than there are spans."""
    text = "\n".join(lines)
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    ends = [0, *(starts[row] + column for _, (row, column) in spans)]
    begins = [*(starts[row] + column for (row, column), _ in spans), len(text)]
    return [text[end:begin] for end, begin in zip(ends, begins, strict=True)]
