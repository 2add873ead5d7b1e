"""The index of a workspace: `python -m bench.index [--chunks N ...] [--soak EVENTS] [--json FILE]`.

Writes files of the training corpus into a folder until they make so many chunks, fills an index from it, and asks for
snippets at random lines of them. Times are wall time unless it says CPU; latency is of `infill_lsp.priming.retrieve`
as the language server calls it, the file at hand being open. With `--soak` a folder changes at random instead, with a
model of the truth beside, and in the end the index must equal it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.score import quantile
from infill_lsp.core import Silence
from infill_lsp.database import fingerprint
from infill_lsp.documents import Document
from infill_lsp.extraction import cut
from infill_lsp.filling import Limits
from infill_lsp.index import Index
from infill_lsp.priming import retrieve

#: Snippets that are asked for at once.
SNIPPETS = 4
#: Seconds the index may take to be equal to the folder after a round of changes, and changes of a round.
SETTLED_S, ROUND = 60.0, 500


@dataclass(slots=True)
class Row:
    """One line of the table."""

    chunks: int
    files: int
    mb: float
    #: Seconds a MB of text: wall time and CPU time of filling an empty database.
    fill_s_mb: float
    fill_cpu_s_mb: float
    database_mb: float
    #: Resident memory of this process before filling, and at most.
    rss_mb: tuple[float, float]
    #: Seconds until a start without changes is ready.
    restart_s: float
    p50_ms: float
    p95_ms: float
    cpu_p95_ms: float
    found: float


class Folder:
    """A folder as a person, their editor and git change it. `contents` is what is in it: path -> text.

    The model of the truth: what of it may be read is told by a rule of one line, `readable`.
    """

    NAMES = ("a", "b", "c", "d", "tmp", "out")

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root = root
        self.contents: dict[str, str] = {}
        self.ignored: set[str] = set()
        self._chance = chance
        self._number = 0
        self._branches: list[dict[str, str]] = []

    def readable(self) -> dict[str, bytes]:
        """What an index of the folder must hold: path -> fingerprint."""
        return {
            path: fingerprint(text)
            for path, text in self.contents.items()
            if self.ignored.isdisjoint(path.split("/")[:-1])
        }

    def change(self) -> None:
        """Something happens."""
        events = [self._write] * 8 + [self._edit] * 8 + [self._delete] * 4 + [self._rename] * 4
        events += [self._rename_folder, self._delete_folder, self._rules]
        self._chance.choice(events)()

    def switch(self, files: int) -> None:
        """Another branch: many files at once, and back to one that was there before now and then."""
        if self._branches and self._chance.random() < 0.5:
            wanted = self._branches.pop()
        else:
            wanted = {f"branch/{self._chance.choice(self.NAMES)}/f{number}.py": self._text() for number in range(files)}
            self._branches.append({path: text for path, text in self.contents.items() if path.startswith("branch/")})
        for path in [path for path in self.contents if path.startswith("branch/") and path not in wanted]:
            (self.root / path).unlink()
            del self.contents[path]
        for path, text in wanted.items():
            self._put(path, text)

    def _text(self) -> str:
        self._number += 1
        body = "\n".join(f"    {self._chance.choice(self.NAMES)}_{self._chance.randrange(50)} = x" for _ in range(8))
        return f"def shared_{self._number}(x):\n{body}\n    return x\n" * self._chance.randrange(1, 4)

    def _put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if self._chance.random() < 0.5:
            file.write_text(text)
        else:  # As most editors and git do.
            temporary = file.with_name(f"{file.name}.part~")
            temporary.write_text(text)
            temporary.replace(file)
        self.contents[path] = text

    def _folder(self) -> str:
        return "/".join(self._chance.choices(self.NAMES, k=self._chance.randrange(0, 4)))

    def _write(self) -> None:
        folder = self._folder()
        name = f"f{self._chance.randrange(60)}.py"
        self._put(f"{folder}/{name}" if folder else name, self._text())

    def _some(self) -> str | None:
        """A file; not the one with the rules, which is written as a whole."""
        files = sorted(self.contents.keys() - {".gitignore"})
        return self._chance.choice(files) if files else None

    def _edit(self) -> None:
        if (path := self._some()) is not None:
            self._put(path, self.contents[path] + self._text())
            if len(self.contents[path]) > 5_000:
                self._put(path, self._text())

    def _delete(self) -> None:
        if (path := self._some()) is not None:
            (self.root / path).unlink()
            del self.contents[path]

    def _rename(self) -> None:
        if (path := self._some()) is not None:
            to = f"{path.rpartition('/')[0]}/r{self._chance.randrange(60)}.py".lstrip("/")
            (self.root / path).replace(self.root / to)
            self.contents[to] = self.contents.pop(path)

    def _folders(self) -> list[str]:
        return sorted({path.split("/")[0] for path in self.contents if "/" in path} - {"branch"})

    def _rename_folder(self) -> None:
        folders = self._folders()
        free = [name for name in (*self.NAMES, "e", "f") if not (self.root / name).exists()]
        if folders and free:
            old, new = self._chance.choice(folders), self._chance.choice(free)
            (self.root / old).rename(self.root / new)
            for path in [path for path in self.contents if path.startswith(f"{old}/")]:
                self.contents[new + path[len(old) :]] = self.contents.pop(path)

    def _delete_folder(self) -> None:
        if folders := self._folders():
            folder = self._chance.choice(folders)
            shutil.rmtree(self.root / folder)
            for path in [path for path in self.contents if path.startswith(f"{folder}/")]:
                del self.contents[path]

    def _rules(self) -> None:
        self.ignored = set(self._chance.sample(self.NAMES, self._chance.randrange(3)))
        self._put(".gitignore", "".join(f"{name}/\n" for name in sorted(self.ignored)))


def soak(events: int, seed: int, home: Path, root: Path) -> float:
    """Seconds the index took to be equal to the folder after a round of changes, at most. Raises where it is not."""
    chance = random.Random(seed)
    folder = Folder(root, chance)
    index = Index(str(root), home=home)
    index.start()
    longest = 0.0
    for event in range(1, events + 1):
        folder.change()
        if event % (4 * ROUND) == 0:
            folder.switch(2_000)
        time.sleep(chance.choice([0, 0, 0, 0.01]))
        if event % ROUND == 0 or event == events:
            started = time.monotonic()
            while index.manifest() != folder.readable():
                if time.monotonic() - started > SETTLED_S:
                    raise AssertionError(f"after {event} events the index differs: {difference(index, folder)}")
                time.sleep(0.05)
            longest = max(longest, time.monotonic() - started)
    index.stop()
    return longest


def difference(index: Index, folder: Folder) -> list[str]:
    """Paths that are in one of them alone, or with another text."""
    has, wants = index.manifest(), folder.readable()
    if has is None:
        return ["the index gives no answer"]
    return sorted(path for path in has.keys() | wants.keys() if has.get(path) != wants.get(path))[:10]


def files() -> Iterator[tuple[str, str]]:
    """Path and text of real files."""
    from infill_engine.protocol import cache_dir
    from infill_engine.training.corpus import documents

    for number, document in enumerate(documents(cache_dir() / "corpus", "train")):
        if document.path.endswith(".py"):
            yield f"p{number // 200}/{document.path}", document.text


def measure(chunks: int, home: Path, root: Path, requests: int) -> Row:
    """Fills a folder and an index of it, and asks."""
    from infill_lsp.chunks import cut as chunks_of

    made, size, paths = 0, 0, []
    for path, text in files():
        if made >= chunks:
            break
        made += len(chunks_of(text, "python"))
        size += len(text.encode())
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        paths.append(path)
    before = rss_mb()
    clock, cpu = time.perf_counter(), time.process_time()
    index = Index(str(root), home=home, limits=Limits(files=1_000_000, bytes=1 << 40))
    index.start()
    assert index.settle(3_600)
    fill, fill_cpu = time.perf_counter() - clock, time.process_time() - cpu
    peak = rss_mb()
    index.stop()
    clock = time.perf_counter()
    index = Index(str(root), home=home, limits=Limits(files=1_000_000, bytes=1 << 40))
    index.start()
    assert index.settle(3_600)
    restart = time.perf_counter() - clock
    walls, cpus, found = ask(index, root, paths, requests)
    row = Row(
        chunks=index.status.chunks,
        files=index.status.files,
        mb=size / 1e6,
        fill_s_mb=fill / size * 1e6,
        fill_cpu_s_mb=fill_cpu / size * 1e6,
        database_mb=sum(path.stat().st_size for path in home.iterdir()) / 1e6,
        rss_mb=(before, peak),
        restart_s=restart,
        p50_ms=statistics.median(walls),
        p95_ms=quantile(walls, 0.95),
        cpu_p95_ms=quantile(cpus, 0.95),
        found=found,
    )
    index.stop()
    return row


def ask(index: Index, root: Path, paths: list[str], requests: int) -> tuple[list[float], list[float], float]:
    """Milliseconds of wall time and of CPU time of each request, and how many snippets it got in the mean."""
    chance = random.Random(3)
    walls: list[float] = []
    cpus: list[float] = []
    found = 0
    while len(walls) < requests:
        path = root / chance.choice(paths)
        text = path.read_text()
        lines = text.split("\n")
        row = chance.randrange(len(lines))
        document = Document(path.as_uri(), "python", 0, "\n".join([*lines[:row], "", *lines[row + 1 :]]))
        snapshot = document.snapshot(row, 0, "utf-16")
        gap = cut(snapshot, "automatic")
        if isinstance(gap, Silence):
            continue
        index.update(document.uri, document.text)
        assert index.settle(60)
        clock, cpu = time.perf_counter(), time.thread_time()
        found += len(retrieve(index, snapshot, gap, SNIPPETS))
        walls.append(1000 * (time.perf_counter() - clock))
        cpus.append(1000 * (time.thread_time() - cpu))
        index.close(document.uri)
    return walls, cpus, found / requests


def rss_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.index", description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--soak", type=int, metavar="EVENTS", help="check instead that the index follows so many changes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for count in [0] if options.soak else options.chunks:
        with tempfile.TemporaryDirectory() as folder:
            home, root = Path(folder) / "index", Path(folder) / "project"
            root.mkdir()
            if options.soak:
                longest = soak(options.soak, options.seed, home, root)
                print(f"equal after {options.soak:,} events; at most {longest:.1f} s after a round of {ROUND}")
                return
            rows.append(measure(count, home, root, options.requests))
            print(" ".join(f"{name}={value}" for name, value in asdict(rows[-1]).items()), flush=True)
    print(f"\nSQLite {sqlite3.sqlite_version}, Python {platform.python_version()}, {os.cpu_count()} cores\n")
    print("| chunks | files | MB | fill s/MB (CPU) | database MB | memory MB | restart s | p50 ms | p95 ms (CPU) |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.chunks:,} | {row.files:,} | {row.mb:.1f} | {row.fill_s_mb:.2f} ({row.fill_cpu_s_mb:.2f}) "
            f"| {row.database_mb:.0f} | {row.rss_mb[0]:.0f} -> {row.rss_mb[1]:.0f} | {row.restart_s:.2f} "
            f"| {row.p50_ms:.1f} | {row.p95_ms:.1f} ({row.cpu_p95_ms:.1f}) |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
