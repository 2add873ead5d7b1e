"""Counts of what was offered and accepted, a day at a time, on this machine alone: numbers under fixed names.

No text, path or name is ever written; a text that was accepted is remembered for half a minute, in memory, to see how
much of it stays. Knows neither LSP nor how a suggestion came about.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, timedelta
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from infill_engine.protocol import cache_dir

log = logging.getLogger(__name__)

#: Seconds after which it is looked how much of an accepted text is still there, and between two writes.
RETAINED_S, WRITE_S = 30.0, 60.0
#: Lines around an accepted text in which it is looked for, beside those that it had.
NEAR = 5
#: Offers that may still be accepted.
OPEN_OFFERS = 512
#: Days that are kept, and shown.
KEPT_DAYS, SHOWN_DAYS = 366, 14
#: Upper bounds of latencies that are told apart, in milliseconds; those beyond count as the last.
BOUNDS_MS = (5, 10, 20, 50, 100, 150, 200, 300, 400, 600, 1_000, 2_000, 5_000)

#: Whether an answer was known already, or written by the engine.
Source = Literal["known", "written"]

_PIECE = re.compile(r"\w+|[^\w\s]")
_BARS = " ▏▎▍▌▋▊▉█"


@dataclass(slots=True)
class _Offer:
    uri: str
    row: int
    text: str
    #: Whether it counts as offered, and as taken in part.
    counted: bool = False
    partly: bool = False
    taken: int = 0


class Statistics:
    """Of one editor. `lines` gives the lines of an open document, None where it is not open. All methods belong to one
    event loop."""

    def __init__(self, lines: Callable[[str], Sequence[str] | None], path: Path | None = None) -> None:
        self.enabled = True
        self._lines = lines
        self._path = path or database()
        self._counts: Counter[str] = Counter()
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        self._due: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def answered(self, source: Source, seconds: float) -> None:
        """A request was answered with something."""
        bound = next((bound for bound in BOUNDS_MS if 1000 * seconds <= bound), BOUNDS_MS[-1])
        self._count(f"{source} {bound}")

    def offer(self, id: str, uri: str, row: int, text: str) -> None:
        """A text (LF only), or what is left of it, can be drawn at a row."""
        if not self.enabled:
            return
        known = self._offers.get(id)
        self._offers[id] = _Offer(uri, row, text)
        if known is not None:
            self._offers[id].counted, self._offers[id].partly = known.counted, known.partly
        self._offers.move_to_end(id)
        if len(self._offers) > OPEN_OFFERS:
            self._offers.popitem(last=False)

    def offered(self, id: str) -> None:
        """It was drawn; however often, it counts once."""
        if (offer := self._offers.get(id)) is not None and not offer.counted:
            offer.counted = True
            self._count("offered")

    def accepted(self, id: str) -> None:
        """It was taken whole, or all of it that was left."""
        if (offer := self._offers.pop(id, None)) is None:
            return
        if not offer.counted:
            self._count("offered")
        self._count("accepted")
        self._count("characters", len(offer.text) - offer.taken)
        self._begin(self._watch(offer))

    def partially_accepted(self, id: str, length: int) -> None:
        """So many of its UTF-16 code units were taken by now."""
        if (offer := self._offers.get(id)) is None:
            return
        self.offered(id)
        units = offer.text.encode("utf-16-le", "surrogatepass")[: 2 * max(0, length)]
        taken = len(units.decode("utf-16-le", "ignore"))
        if taken > offer.taken:
            if not offer.partly:
                self._count("partly")
            offer.partly = True
            self._count("characters", taken - offer.taken)
            offer.taken = taken

    async def text(self) -> str:
        """What `infill-lsp stats` prints."""
        await self._write()
        return await asyncio.to_thread(report, self._path)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._write()

    def _count(self, name: str, by: int = 1) -> None:
        if not self.enabled:
            return
        self._counts[name] += by
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(WRITE_S, lambda: self._begin(self._write()))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, offer: _Offer) -> None:
        """Counts what of an accepted text is there after a while."""
        if (lines := self._lines(offer.uri)) is None:
            return
        before = len(lines)  # Of the lines that the document has then, which may be the same list.
        await asyncio.sleep(RETAINED_S)
        if (after := self._lines(offer.uri)) is None:
            return
        moved = len(after) - before
        first = max(0, offer.row - NEAR + min(0, moved))
        last = offer.row + offer.text.count("\n") + 1 + NEAR + max(0, moved)
        self._count("watched", len("".join(_PIECE.findall(offer.text))))
        self._count("retained", retained(offer.text, "\n".join(after[first:last])))

    async def _write(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        counts, self._counts = self._counts, Counter()
        if counts:
            try:
                await asyncio.to_thread(add, self._path, date.today(), counts)
            except (OSError, sqlite3.Error) as error:
                log.warning("the statistics cannot be written: %s", type(error).__name__)


def retained(text: str, now: str) -> int:
    """How many characters of a text's words and signs are found in another one, in their order."""
    pieces = _PIECE.findall(text)
    matcher = SequenceMatcher(None, pieces, _PIECE.findall(now), autojunk=False)
    return sum(len("".join(pieces[a : a + size])) for a, _, size in matcher.get_matching_blocks())


def database() -> Path:
    """Where the counts lie."""
    return cache_dir() / "statistics.sqlite"


def add(path: Path, day: date, counts: Mapping[str, int]) -> None:
    """Adds to the counts of a day, as several editors may at once; days of long ago are dropped. Raises `OSError` and
    `sqlite3.Error`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=5)) as connection, connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS counts (day TEXT, name TEXT, count INTEGER, PRIMARY KEY (day, name))"
        )
        connection.executemany(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count",
            [(day.isoformat(), name, count) for name, count in counts.items()],
        )
        connection.execute("DELETE FROM counts WHERE day < ?", [(day - timedelta(KEPT_DAYS)).isoformat()])


def read(path: Path) -> dict[str, Counter[str]]:
    """The counts by day, the oldest first. Raises `sqlite3.Error` for what is no such database."""
    days: dict[str, Counter[str]] = {}
    if path.exists():
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            for day, name, count in connection.execute("SELECT day, name, count FROM counts ORDER BY day"):
                days.setdefault(day, Counter())[name] = count
    return days


def report(path: Path) -> str:
    """The last days as a table with a bar for the share that was accepted."""
    try:
        days = read(path)
    except sqlite3.Error as error:
        return f"the statistics in {path} cannot be read ({error}): remove the file"
    if not days:
        return "nothing was offered yet"
    lines = ["day          shown  taken  in part  share               kept   characters   latency (p95)"]
    lines += [_line(day, counts) for day, counts in list(days.items())[-SHOWN_DAYS:]]
    total = sum(days.values(), Counter[str]())
    lines += [_line("all", total), "", f"kept: after {RETAINED_S:.0f} s; counted on this machine alone, in {path}"]
    return "\n".join(lines)


def percentile(counts: Mapping[str, int], sources: Sequence[Source], share: float) -> int | None:
    """The bound in milliseconds within which that share of the answers came; None without any."""
    found = [sum(counts.get(f"{source} {bound}", 0) for source in sources) for bound in BOUNDS_MS]
    wanted, seen = share * sum(found), 0
    for bound, count in zip(BOUNDS_MS, found, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound
    return None


def _line(day: str, counts: Mapping[str, int]) -> str:
    offered, accepted = counts.get("offered", 0), counts.get("accepted", 0)
    share = accepted / offered if offered else 0.0
    watched = counts.get("watched", 0)
    kept = f"{counts.get('retained', 0) / watched:>4.0%}" if watched else "   -"
    half, most = (percentile(counts, ("known", "written"), share) for share in (0.5, 0.95))
    latency = "-" if half is None else f"{half} ms ({most} ms)"
    return (
        f"{day:<11}{offered:>7}{accepted:>7}{counts.get('partly', 0):>9}  {share:>4.0%} {_bar(share)}  {kept}"
        f"{counts.get('characters', 0):>13}   {latency}"
    )


def _bar(share: float, width: int = 12) -> str:
    eighths = round(8 * width * min(1.0, share))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BARS[rest] if rest else "")).ljust(width)
