"""How the engine bears many typists: `python -m bench.load [--clients N ...] [--seconds S] [--fake] [--json FILE]`.

A real engine process of its own, and clients that type files of the standard library again, 150 to 250 ms a key; each
key stroke asks for a completion and supersedes the one before, as in an editor. Times are from the request leaving to
its last line being there, of requests that were answered. In the end requests come in a storm, to see whether memory
stays flat. With `--fake` the model is a table and a pass takes a given time: that looks at the scheduler alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from infill_engine import process
from infill_engine.protocol import ANSWERED, Candidate, Final, InfillRequest, Reason
from rich.progress import track

from bench.latency import modules
from bench.score import quantile
from infill_lsp.client import EngineClient

#: Seconds between two keys of one typist.
KEY_S = (0.15, 0.25)
#: Lines of a file that are typed again, from a place where so many precede.
TYPED_LINES, LEAST_BEFORE = 8, 100
#: Characters of the file that are sent before and after the cursor line, as by the language server.
BEFORE, AFTER = 64 * 1024, 8 * 1024
DEADLINE_MS = 400
#: The storm: typists, seconds between their keys, and seconds it may take at most.
STORM, STORM_KEY_S, STORM_S = 32, 0.05, 120


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    ms: float
    text: str
    final: Final


@dataclass(slots=True)
class Row:
    """One line of the table."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    rss_mb: tuple[float, float] = (0.0, 0.0)

    def cells(self) -> list[str]:
        answered = [answer for answer in self.answers if answer.final.reason in ANSWERED]
        ms = [answer.ms for answer in answered] or [float("nan")]
        steps = sum(answer.final.timing.steps for answer in self.answers)
        kept = sum(answer.final.timing.steps for answer in answered)
        committed = sum(answer.final.timing.committed for answer in answered)
        empty = sum(not answer.text for answer in answered)

        def share(part: float, whole: float) -> str:
            return f"{part / whole:.0%}" if whole else ""

        def ended(*reasons: Reason) -> str:
            return share(sum(answer.final.reason in reasons for answer in self.answers), len(self.answers))

        return [
            self.name,
            str(len(self.answers)),
            ended(*ANSWERED),
            ended("superseded", "cancelled"),
            ended("busy"),
            ended("starting", "error"),
            f"{statistics.median(ms):.0f}",
            f"{quantile(ms, 0.95):.0f}",
            share(empty, len(answered)),
            share(steps - kept, steps),
            f"{committed / kept:.2f}" if kept else "",
            f"{self.rss_mb[0]:.0f} → {self.rss_mb[1]:.0f}",
        ]


HEADER = [
    "typists",
    "requests",
    "answered",
    "superseded",
    "busy",
    "failed",
    "p50 ms",
    "p95 ms",
    "empty",
    "wasted passes",
    "tokens/pass",
    "RSS MB",
]


def key_strokes(client: str, choose: random.Random) -> Iterator[InfillRequest]:
    """The requests of somebody who types a few lines of one file after another, without end."""
    paths = modules()
    while True:
        path = choose.choice(paths)
        lines = path.read_text(encoding="utf-8").split("\n")
        if len(lines) < LEAST_BEFORE + 2 * TYPED_LINES:
            continue
        row = choose.randrange(LEAST_BEFORE, len(lines) - TYPED_LINES)
        before = "".join(line + "\n" for line in lines[:row])
        after = "".join("\n" + line for line in lines[row + TYPED_LINES :])[:AFTER]
        document = f"{path.stem}-{choose.randrange(1 << 30)}"
        for line in lines[row : row + TYPED_LINES]:
            indent = len(line) - len(line.lstrip())
            for typed in range(indent, len(line) + 1):
                head = line[:typed]
                yield InfillRequest(
                    client=client,
                    document=document,
                    language="python",
                    prefix=before[-BEFORE:][before[-BEFORE:].find("\n") + 1 :] if len(before) > BEFORE else before,
                    head=head,
                    suffix=after,
                    max_lines=1 if head.strip() else 8,
                    min_indent=indent,
                    deadline_ms=DEADLINE_MS,
                )
            before += line + "\n"


async def typist(
    engine: EngineClient, name: str, until: float, key_s: tuple[float, float], row: Row, most: int | None = None
) -> None:
    """Types until a moment of the loop's time, or until the row has `most` answers; every key asks for a completion."""
    choose = random.Random(name)
    asked: set[asyncio.Task[None]] = set()

    async def ask(request: InfillRequest) -> None:
        began, text = time.perf_counter(), ""
        async with aclosing(engine.infill(request)) as events:
            async for event in events:
                if isinstance(event, Candidate):
                    text = event.text
                elif isinstance(event, Final):
                    row.answers.append(Answer((time.perf_counter() - began) * 1000, text, event))

    await asyncio.sleep(choose.uniform(0, key_s[1]))  # they do not begin as one
    for request in key_strokes(name, choose):
        if asyncio.get_running_loop().time() > until or (most is not None and len(row.answers) >= most):
            break
        task = asyncio.create_task(ask(request))
        asked.add(task)
        task.add_done_callback(asked.discard)
        await asyncio.sleep(choose.uniform(*key_s))
    await asyncio.gather(*asked)


def rss_mb(pid: int) -> float:
    """Memory of a process that lies in RAM; 0 where the system does not tell."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmRSS"))


async def measure(model: str, levels: list[int], seconds: float, storm: int) -> list[Row]:
    """A row for each number of typists, then one for the storm of `storm` requests."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        # A client each, as each editor has one.
        clients = [EngineClient(model) for _ in range(max([*levels, STORM]))]
        for client in clients:
            stack.push_async_callback(client.aclose)
        async for status in clients[0].bring_up():
            if status.state == "error":
                raise SystemExit(status.message)
        stack.push_async_callback(asyncio.to_thread, process.stop, model)

        async def run(row: Row, count: int, for_s: float, key_s: tuple[float, float], most: int | None) -> None:
            until, before = asyncio.get_running_loop().time() + for_s, rss_mb(status.pid)
            names = (f"{row.name}-{i}" for i in range(count))
            typists = (
                typist(client, name, until, key_s, row, most) for client, name in zip(clients, names, strict=False)
            )
            await asyncio.gather(*typists)
            row.rss_mb = (before, rss_mb(status.pid))
            rows.append(row)

        for level in track(levels, "typing"):
            await run(Row(str(level)), level, seconds, KEY_S, None)
        if storm:
            keys = (STORM_KEY_S, STORM_KEY_S)
            await run(Row(f"storm, first {storm // 5}"), STORM, STORM_S / 5, keys, storm // 5)
            await run(Row(f"storm, other {storm - storm // 5}"), STORM, STORM_S, keys, storm - storm // 5)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64], help="typists at once, one row each")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each row takes")
    parser.add_argument("--storm", type=int, default=10_000, help="requests of the storm in the end; 0: none")
    parser.add_argument("--fake", action="store_true", help="a model that is a table, to look at the scheduler alone")
    parser.add_argument("--step-ms", type=float, default=10.0, help="what a pass of the fake model takes")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        model = "embedded"
        if arguments.fake:
            table = {"step_s": arguments.step_ms / 1000, "": "value(first)"}
            (Path(folder) / "table.json").write_text(json.dumps(table), encoding="utf-8")
            model = f"fake:{folder}/table.json"
        else:
            from infill_engine.fetch import ensure_weights

            os.environ["INFILL_MODEL_FILE"] = str(ensure_weights(lambda message, progress: None))
        # An engine of our own: one that runs already may be of older code, and is somebody's.
        os.environ["INFILL_RUNTIME_DIR"], os.environ["INFILL_CACHE_DIR"] = folder, f"{folder}/cache"
        rows = asyncio.run(measure(model, arguments.clients, arguments.seconds, arguments.storm))
    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{model.partition(':')[0]}\n"
    )
    cells = [row.cells() for row in rows]
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for row in cells:
        print("| " + " | ".join(row) + " |")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode([dict(zip(HEADER, row, strict=True)) for row in cells]))


if __name__ == "__main__":
    main()
