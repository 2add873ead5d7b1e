"""The workspace's memory: `python -m bench.memory [--tokens N ...]`. No model runs.

For workspaces of so many tokens, made of the corpus's files: time a look-up takes for a slot, space on disk and in
memory, time to take a changed file in, time to start. Then the same of an open file, and of the whole way from a canvas
to candidates. Times are medians, with the 95th percentile behind them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from infill_engine import models, ngrams, weights
from infill_engine.fetch import ensure_weights
from infill_engine.memory import Memory
from infill_engine.protocol import cache_dir
from infill_engine.tokenizer import LineTokenizer
from infill_engine.training.corpus import documents
from infill_engine.workspace import MERGED, MOST_FILE, Workspace
from rich.progress import track

from bench.plot import table
from bench.score import quantile

VOCAB = 49_152
LOOKUPS, CHANGES, STARTS = 1000, 50, 5
#: Slots of a pass: the frontier and four proposals.
ROWS = 5
#: Lines of the open file, and tokens of the files that change.
LINES, CHANGED = 5000, 5000

Files = list[npt.NDArray[Any]]


def corpus(tokens: int) -> Files:
    """The tokens of the first files of the corpus, so many in all; kept, since tokenising takes minutes."""
    kept = cache_dir() / "bench" / f"memory-{tokens}.npz"
    if not kept.exists():
        path = ensure_weights(lambda message, progress: None)
        _, codec = weights.load(path, models.prepared(path, models.BASE))
        tokenizer, files, size = LineTokenizer(codec), Files(), 0
        for document in track(documents(cache_dir() / "corpus", "train"), "tokenising"):
            files.append(np.array(tokenizer.encode(document.text), np.uint16))
            size += len(files[-1])
            if size >= tokens:
                break
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(kept, tokens=np.concatenate(files), sizes=[len(file) for file in files])
    with np.load(kept) as data:
        return np.split(data["tokens"], data["sizes"].cumsum()[:-1])


def first(files: Files, tokens: int) -> Files:
    """The first files, of so many tokens together."""
    ends = np.cumsum([len(file) for file in files])
    return files[: int(np.searchsorted(ends, tokens)) + 1]


def milliseconds(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - began) * 1000


def both(times: Sequence[float]) -> str:
    """Median and 95th percentile, in ms."""
    return f"{statistics.median(times):.3f} ({quantile(times, 0.95):.3f})"


def build(folder: Path, files: Files) -> Workspace:
    memory = Workspace(folder, VOCAB, background=False)
    waiting = 0
    for i, file in enumerate(files):
        if len(file) <= MOST_FILE:
            memory.put(str(i), "1", file)
            waiting += len(file)
        if waiting > MERGED:
            memory.merge()
            waiting = 0
    memory.merge()
    return memory


def lookups(memory: Workspace, files: Files, chance: random.Random) -> Iterator[float]:
    """ms a slot, at places of files that are left out."""
    for _ in range(LOOKUPS):
        i = chance.randrange(len(files))
        if len(files[i]) > ROWS + ngrams.LONGEST:
            at = chance.randrange(len(files[i]) - ROWS - ngrams.LONGEST)
            known = files[i][at : at + ngrams.LONGEST + ROWS].astype(np.int32)
            found = ngrams.found(ROWS)
            yield milliseconds(memory.search, known, len(known) - ROWS, found, str(i)) / ROWS


def changes(memory: Workspace, files: Files, chance: random.Random) -> Iterator[float]:
    """ms to take in a file of `CHANGED` tokens, as a list, in place of another."""
    for i in range(CHANGES):
        text = np.concatenate([files[chance.randrange(len(files))] for _ in range(40)])[:CHANGED].tolist()
        path = str(chance.randrange(len(files)))
        yield milliseconds(memory.put, path, f"new {i}", text)


RESIDENT = """
import re, sys
from pathlib import Path
import numpy as np
from infill_engine import ngrams
from infill_engine.workspace import Workspace
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
with_none = Workspace(Path(sys.argv[1]) / "none", 49152, background=False)
with_none.put("a", "1", [1, 2, 3] * 9)
with_none.merge()
known = np.arange(20, dtype=np.int32)
with_none.search(known, 15, ngrams.found(5))
before = anonymous()
memory = Workspace(Path(sys.argv[1]), 49152)
for i in range(2000):
    memory.search(known + 10 * i % 40000, 15, ngrams.found(5))
for i in range(40):
    memory.put(str(i), "new", np.arange(5000) + i)
print(anonymous() - before)
"""


def resident(folder: Path) -> str:
    """MiB that a process of its own holds of a workspace after 10,000 look-ups and 200,000 changed tokens."""
    if not Path("/proc/self/status").exists():
        return ""
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(folder)], check=True, capture_output=True, text=True)
    return f"{float(done.stdout):.0f}"


def of_workspace(files: Files) -> list[str]:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="infill-") as name:
        folder, began = Path(name), time.perf_counter()
        memory = build(folder, files)
        seconds, size, on_disk = time.perf_counter() - began, memory.tokens, memory.disk_bytes
        times = list(lookups(memory, files, chance))
        memory.close()
        starts = [milliseconds(partial(Workspace, folder, VOCAB, background=False)) for _ in range(STARTS)]
        held = resident(folder)
        memory = Workspace(folder, VOCAB, background=False)
        taken = list(changes(memory, files, chance))
        merged = milliseconds(memory.merge)
        memory.close()
    sized = f"{size:,}", f"{seconds:.1f}", f"{on_disk / size:.2f}", held
    return [*sized, both(times), both(taken), f"{merged / 1000:.2f}", f"{statistics.median(starts):.1f}"]


def of_file(files: Files) -> list[list[str]]:
    """An open file of `LINES` lines: rows of a table."""
    tokens = np.concatenate(files)[: LINES * 10].tolist()
    lines = [tuple(tokens[i : i + 10]) for i in range(0, len(tokens), 10)]
    chance, memory = random.Random(1), Memory(VOCAB)
    at = len(lines) // 2

    def look(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> object:
        return memory.view("file", before, after).candidates()

    def cold() -> object:
        return Memory(VOCAB).view("file", lines[:at], lines[at:]).candidates()

    cold()
    unknown = [milliseconds(cold) for _ in range(20)]
    moved, typed = [], []
    for _ in range(200):
        at = chance.randrange(20, len(lines))
        moved.append(milliseconds(look, lines[:at], lines[at:]))
        typed.append(milliseconds(look, [*lines[:at], (chance.randrange(VOCAB),)], lines[at:]))
    view = memory.view("file", lines[:at], lines[at:])
    again = [milliseconds(view.candidates, lines[0][: ROWS - 1]) for _ in range(200)]
    proposed = [milliseconds(view.propose, 4) for _ in range(200)]
    return [
        ["first sight of the file", both(unknown)],
        ["after the cursor moved", both(moved)],
        ["after a token was typed", both(typed)],
        [f"candidates for {ROWS} rows", both(again)],
        ["a proposal of up to 4 tokens", both(proposed)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--tokens", type=lambda n: int(float(n)), nargs="+", default=[100_000, 1_000_000, 20_000_000])
    options = parser.parse_args()
    files = corpus(max(options.tokens))
    build_none = [np.arange(100, dtype=np.uint16)] * 2  # compiles
    of_workspace(build_none)
    rows = [of_workspace(first(files, tokens)) for tokens in options.tokens]
    columns = [
        "tokens",
        "build s",
        "bytes a token",
        "MiB held",
        "look-up ms a slot",
        "changed file ms",
        "merge s",
        "start ms",
    ]
    print(table(columns, rows))
    print(f"\nAn open file of {LINES} lines:\n")
    print(table(["", "ms"], of_file(files)))


if __name__ == "__main__":
    main()
