"""What the language server itself takes between a key and the engine: `python -m bench.path [--keys N] [--json FILE]`.

The server is the real process; in place of the engine a socket notes when a request is there and answers with nothing.
The documents are modules of the standard library, one behind the other, of 5,000 and 20,000 lines; ends of lines at
random places of them are typed again, a question behind each key. Wall time is from the question leaving this process
to the engine having it, retrieval of snippets not included (`bench.index` has it); CPU time is that of the server's
threads from the key to the answer, which other load changes less. Beside them stands how much longer than its CPU time
a loop of this process took meanwhile: 1.0 on a quiet machine, and on any other the wall times say little.

Opening: while a document of 20,000 lines is opened and parsed, small questions about another one go on; their times are
those a person meets who opens a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from infill_engine import protocol
from infill_engine.protocol import Final, Status
from lsprotocol import types

from bench.latency import modules
from bench.plot import table
from bench.score import quantile
from bench.session import Session

MODEL = "noted"
LENGTHS = 5_000, 20_000
#: Iterations of the loop that tells how busy the machine is: some 2 ms.
LOOP = 1_000_000
#: Characters of a line that stand there, and that are typed behind them.
BEGUN, TYPED = 4, 20
SMALL = "file:///bench/small.py"


class Noted:
    """What listens on the engine's socket."""

    def __init__(self) -> None:
        self.at = 0.0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                body = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0))
                if head.startswith("post /v1/infill ") and protocol.decode_request(body).priority == "typed":
                    self.at = time.perf_counter()
                answer = Status(version="1", pid=1, state="ready", model=MODEL) if "status" in head else Final("end")
                line = protocol.encode(answer) + b"\n"
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(line), line))
                await writer.drain()
        writer.close()


@dataclass(slots=True)
class Row:
    """One line of the table."""

    name: str
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        quantiles = [f"{quantile(of, share):.1f}" for of in (self.wall_ms, self.cpu_ms) for share in (0.5, 0.95)]
        return [self.name, str(len(self.wall_ms)), *quantiles, f"{quantile(self.busy, 0.5):.1f}"]


HEADER = ["request", "n", "wall ms", "p95", "CPU ms", "p95", "loop took"]


def source(lines: int) -> list[str]:
    """So many lines of Python."""
    found: list[str] = []
    for path in modules():
        found += path.read_text(encoding="utf-8").splitlines()
        if len(found) >= lines:
            break
    return found[:lines]


def busyness() -> float:
    """How many times its CPU time a loop takes here now."""
    wall, cpu = time.perf_counter(), time.thread_time()
    sum(range(LOOP))
    return (time.perf_counter() - wall) / max(1e-9, time.thread_time() - cpu)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process' threads so far, nan where the system does not say (Linux does)."""
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
    return math.nan


async def keys(session: Session, noted: Noted, lines: int, count: int) -> Row:
    """Types the rest of lines of a document of so many again."""
    row, choose, text = Row(f"a key in {lines:,} lines"), random.Random(7), source(lines)
    uri = f"file:///bench/large_{lines}.py"
    session.open(uri, "\n".join(text))
    await session.complete(uri, 0, 0)
    await asyncio.sleep(1.0)  # Its first parse is over.
    while len(row.cpu_ms) < count:
        line = choose.randrange(lines)
        indent = len(text[line]) - len(text[line].lstrip())
        rest = text[line][indent + BEGUN :]
        if len(rest) < BEGUN or not text[line].isascii():
            continue
        start = types.Position(line, indent + BEGUN)
        session.replace(uri, types.Range(start, types.Position(line, len(text[line]))), "")
        await session.complete(uri, line, 0)
        for at, key in enumerate(rest[:TYPED], start.character):
            row.busy.append(busyness())
            began, noted.at = cpu_s(session.pid), 0.0
            session.insert(uri, line, at, key)
            asked = time.perf_counter()
            await session.complete(uri, line, at + 1)
            row.cpu_ms.append(1000 * (cpu_s(session.pid) - began))
            if noted.at:  # Else nothing was to be asked there.
                row.wall_ms.append(1000 * (noted.at - asked))
        session.insert(uri, line, at + 1, rest[TYPED:])
    session.close(uri)
    return row


async def opening(session: Session, lines: int, count: int) -> list[Row]:
    """Questions about another document, before and while a large one is opened and asked about."""
    before, during = Row("another document, nothing opened"), Row(f"another document, {lines:,} lines opened")
    text = "\n".join(source(lines))
    session.open(SMALL, "x = 1\n" * 20)
    for number in range(count):
        for row in (before, during):
            row.busy.append(busyness())
            uri = f"file:///bench/opened_{number}.py"
            if row is during:
                session.open(uri, text)
                large = session.ask(uri, lines // 2, 0)
                await asyncio.sleep(0)
            asked = time.perf_counter()
            await session.complete(SMALL, 3, 5)
            row.wall_ms.append(1000 * (time.perf_counter() - asked))
            if row is during:
                await asyncio.gather(large.answer, return_exceptions=True)
                session.close(uri)
    return [before, during]


@contextlib.asynccontextmanager
async def noting() -> AsyncIterator[Noted]:
    noted, path = Noted(), protocol.socket_path(MODEL)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    server = await asyncio.start_unix_server(noted, path)
    try:
        yield noted
    finally:
        server.close()


async def measure(count: int) -> list[Row]:
    async with noting() as noted, Session({"model": MODEL, "statistics": False}) as session:
        rows = [await keys(session, noted, lines, count) for lines in LENGTHS]
        return rows + await opening(session, LENGTHS[-1], max(1, count // 10))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.path", description=__doc__)
    parser.add_argument("--keys", type=int, default=200, help="of each length (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        os.environ["INFILL_RUNTIME_DIR"] = folder
        rows = [row.cells() for row in asyncio.run(measure(arguments.keys))]
    print(table(HEADER, rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=1))


if __name__ == "__main__":
    main()
