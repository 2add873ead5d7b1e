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
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from bench.score import quantile
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


def modules() -> list[Path]:
    """The modules of the standard library that are no packages, always in the same order."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))


def places(count: int, seed: int = 7) -> list[Place]:
    """Cuts of the standard library, four characters into a line that says something."""
    choose = random.Random(seed)
    paths = modules()
    found: list[Place] = []
    while len(found) < count:
        path = choose.choice(paths)
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
        ms = [answer.ms for answer in self.answers]
        cells = [self.name, str(len(ms)), f"{statistics.median(ms):.1f}", f"{quantile(ms, 0.95):.1f}"]
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


async def without_model(count: int) -> list[Row]:
    """What the path itself takes: the engine answers, with a model that has nothing to say."""
    row = Row("the path without the model", [])
    with tempfile.TemporaryDirectory(prefix="infill-bench-") as folder:
        empty = Path(folder) / "empty.json"
        empty.write_text("{}", encoding="utf-8")
        async with Session({"model": f"fake:{empty}", "deadline": {"automatic": 2000}}) as session:
            await session.ready()
            for cut in track(places(count), "without the model"):
                session.open(cut.uri, cut.text)
                await session.complete(cut.uri, cut.line, cut.character)
                await session.idle()
                row.answers.append(await key(session, cut, 0))
            await session.stop_engine()
    return [row]


async def embedded(count: int) -> list[Row]:
    """What a person meets: each place is opened, asked at, typed into, filled to the line's end, and left."""
    rows = {name: Row(name, []) for name in ("first request in a file", "next key stroke", "Enter", "a whole line")}
    cancels = Row("cancel until idle", [])
    async with Session({"model": "embedded"}) as session:
        status = await session.ready()
        for cut in track(places(count), f"{status.model}, {status.dtype}"):
            session.open(cut.uri, cut.text)
            rows["first request in a file"].answers.append(await session.complete(cut.uri, cut.line, cut.character))
            await session.idle()
            rows["next key stroke"].answers.append(await key(session, cut, 0))
            await session.idle()
            line = await session.complete(cut.uri, cut.line, cut.character + 1, invoked=True)
            rows["a whole line"].answers.append(line)
            idle_ms = await session.cancelled(cut.uri, cut.line, cut.character + 1, after_s=0.05)
            cancels.answers += [] if idle_ms is None else [Answer(idle_ms, [])]
            await session.idle()
            rows["Enter"].answers.append(await enter(session, cut))
            session.close(cut.uri)
        await session.stop_engine()
    return [*rows.values(), cancels]


async def key(session: Session, cut: Place, at: int) -> Answer:
    """Types one more character of what the author wrote."""
    session.insert(cut.uri, cut.line, cut.character + at, cut.typed[at])
    return await session.complete(cut.uri, cut.line, cut.character + at + 1)


async def enter(session: Session, cut: Place) -> Answer:
    """Opens a new line some lines below, as after a move of the cursor: other text precedes and follows it."""
    row = cut.line + 3
    session.insert(cut.uri, row, len(cut.text.split("\n")[row]), "\n")
    return await session.complete(cut.uri, row + 1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="places, each one request a row")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        os.environ["INFILL_RUNTIME_DIR"] = folder  # an engine of our own: one that runs already may be of older code
        measured = [asyncio.run(part(arguments.requests)) for part in (without_model, embedded)]
    rows = [row.cells() for part in measured for row in part]
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
