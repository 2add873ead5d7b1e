"""Latency of the whole path, as an editor sees it: `python -m bench.latency [--requests N] [--json FILE]`.

Real processes throughout: this command speaks LSP to `infill-lsp`, which asks the resident engine. The documents are
modules of the standard library, cut at fixed random places; the text after the cut is what gets typed. Times are from
the request leaving to its answer being there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.session import Answer, Session

#: A file that is opened has at least so many lines, and is cut between these two.
LEAST_LINES, FIRST_CUT, LAST_CUT = 500, 250, 450


@dataclass(slots=True)
class Place:
    """A document cut in the middle of a line: `typed` is what its author wrote next."""

    uri: str
    text: str
    line: int
    character: int
    typed: str


def places(count: int, seed: int = 7) -> list[Place]:
    """Cuts of the standard library, four characters into a line that says something."""
    choose = random.Random(seed)
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    found: list[Place] = []
    while len(found) < count:
        path = choose.choice(modules)
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) < LEAST_LINES:
            continue
        row = choose.randrange(FIRST_CUT, LAST_CUT)
        line = lines[row]
        indent = len(line) - len(line.lstrip())
        if len(line) - indent < 16 or line.lstrip()[0] in "#\"'" or not line.isascii():
            continue
        kept = [*lines[:row], line[: indent + 4], *lines[row + 1 :]]
        uri = f"file:///bench/{path.stem}_{len(found)}.py"
        found.append(Place(uri, "\n".join(kept) + "\n", row, indent + 4, line[indent + 4 :]))
    return found


@dataclass(slots=True)
class Row:
    """One line of the table."""

    name: str
    answers: list[Answer]

    def cells(self) -> list[str]:
        ms = sorted(answer.ms for answer in self.answers)
        cells = [self.name, str(len(ms)), f"{statistics.median(ms):.1f}", f"{ms[int(0.95 * (len(ms) - 1))]:.1f}"]
        timings = [answer.timing for answer in self.answers if answer.timing]
        if not timings:
            return cells + [""] * (len(HEADER) - len(cells))
        encoded, reused, steps, denoise = (
            statistics.fmean(timing[key] for timing in timings) for key in ("encoded", "reused", "steps", "denoiseMs")
        )
        shown = statistics.fmean(bool(answer.text) for answer in self.answers)
        step_ms = f"{denoise / steps:.1f}" if steps else ""
        return [*cells, f"{encoded:.0f}", f"{reused:.0f}", f"{steps:.1f}", step_ms, f"{shown:.0%}"]


HEADER = ["request", "n", "median ms", "p95 ms", "encoded", "reused", "steps", "ms/step", "with text"]


async def measure(count: int) -> AsyncIterator[Row]:
    """The rows of the table, as they come."""
    with tempfile.TemporaryDirectory(prefix="infill-bench-") as folder:
        table = Path(folder) / "empty.json"
        table.write_text("{}", encoding="utf-8")
        async with Session({"model": f"fake:{table}", "deadline": {"automatic": 2000}}) as session:
            await session.ready()
            yield Row("the path without the model", await keys(session, places(10), 2 * count // 10))
            await session.stop_engine()
    async with Session({}) as session:
        await session.ready()
        print(f"embedded model, {(await session.ready()).dtype}", file=sys.stderr)
        cuts = places(count)
        first = []
        for cut in cuts:
            await session.idle()
            session.open(cut.uri, cut.text)
            first.append(await session.complete(cut.uri, cut.line, cut.character))
        yield Row("first request in a file", first)
        yield Row("next key stroke, warm", await keys(session, cuts, 2, opened=True))
        yield Row("Enter, cursor move", await moves(session, cuts))
        whole = [await session.complete(cut.uri, cut.line, cut.character + 2, invoked=True) for cut in cuts]
        yield Row("a line to its end, warm", whole)
        idle = []
        for cut in cuts:
            ms = await session.cancelled(cut.uri, cut.line, cut.character + 2, after_s=0.05)
            idle += [] if ms is None else [Answer(ms, [])]
        yield Row("cancel until idle", idle)


async def keys(session: Session, cuts: list[Place], strokes: int, opened: bool = False) -> list[Answer]:
    """Types the next characters of each place; a request after each key, when the one before is answered."""
    answers = []
    for cut in cuts:
        if not opened:
            session.open(cut.uri, cut.text)
            await session.complete(cut.uri, cut.line, cut.character)
        for at, key in enumerate(cut.typed[:strokes]):
            await session.idle()
            session.insert(cut.uri, cut.line, cut.character + at, key)
            answers.append(await session.complete(cut.uri, cut.line, cut.character + at + 1))
    return answers


async def moves(session: Session, cuts: list[Place]) -> list[Answer]:
    """Opens a new line some lines below, in the window that is encoded: other text follows the cursor."""
    answers = []
    for cut in cuts:
        await session.idle()
        row = cut.line + 3
        end = len(cut.text.split("\n")[row])
        session.insert(cut.uri, row, end, "\n")
        answers.append(await session.complete(cut.uri, row + 1, 0))
    return answers


async def table(count: int) -> list[list[str]]:
    rows = []
    async for row in measure(count):
        rows.append(row.cells())
        print("  ".join(rows[-1]), file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="places, each asked for once or twice a row")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    rows = asyncio.run(table(arguments.requests))
    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n"
    )
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=1))


if __name__ == "__main__":
    main()
