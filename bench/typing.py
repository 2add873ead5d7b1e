"""Real files typed by somebody who takes what is right: `python -m bench.typing [--files N] [--characters N]`.

Files of packages that the model was not trained on lose some lines in the middle, which are typed again with human
pauses, key by key, through the real server process and its engine. Each key asks for a completion, and takes the
question before back, as an editor does. What is offered is accepted only if all of it is what the file says, whole or
word by word: two typists, told apart. Of an editor's own helps there is one: a new line begins indented.

Latency is from the question leaving to its answer being there: of the first one in a file (cold), of those that the
engine answered (warm), of those answered without it (type-through); and from taking a question back to its end
(cancelled). The engine's work is all that it computed, for answers and ahead of need; wasted is what went into no text
that was accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from infill_engine.protocol import cache_dir
from infill_engine.training.corpus import Document, documents
from rich.progress import track

from bench.plot import table
from bench.score import quantile
from bench.session import Asked, Session
from infill_lsp.languages import name_of

#: Lines that stand above what is typed, at least, and below.
LEAST_ABOVE, LEAST_BELOW = 20, 5
#: Median seconds before a key in a word, before one that begins something, and before a new line, and how they spread
#: (sigma of the logarithm). 52 words a minute, as 168,000 people typed on average, are 0.24 s a key (Dhakal et al.,
#: Observations on typing from 136 million keystrokes, CHI 2018); programmers think between lines.
IN_WORD_S, BEGINNING_S, NEW_LINE_S, SPREAD = 0.14, 0.25, 0.7, 0.5
#: Seconds that a suggestion has to stand there to be noticed.
NOTICED_S = 0.2

Accept = Literal["whole", "word"]
Kind = Literal["cold", "warm", "type-through", "cancelled"]
KINDS: tuple[Kind, ...] = ("cold", "warm", "type-through", "cancelled")
#: What was shown at a cursor before the next key: what the file says, or its beginning, something else, nothing; or
#: there was no answer by then.
Outcome = Literal["right", "begun", "wrong", "quiet", "late"]

_KEY = re.compile(r"\n[ \t]*|^[ \t]+|.", re.DOTALL)
_WORD = re.compile(r"\s*(?:\w+|[^\w\s]+)|\s+")


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines of a file that are to be typed again."""

    document: Document
    before: str
    typed: str
    after: str

    @classmethod
    def of(cls, document: Document, characters: int, choose: random.Random) -> Piece | None:
        """Whole lines of about so many characters; None where the file is too short for them."""
        lines = document.text.split("\n")
        first = range(LEAST_ABOVE, len(lines) - LEAST_BELOW)
        starts = [row for row in first if lines[row].strip() and len("\n".join(lines[row:-LEAST_BELOW])) >= characters]
        if not starts:
            return None
        row = last = choose.choice(starts)
        while len("\n".join(lines[row : last + 1])) < characters:
            last += 1
        above, typed, below = ("\n".join(part) for part in (lines[:row], lines[row : last + 1], lines[last + 1 :]))
        return cls(document, above + "\n", typed, "\n" + below)


@dataclass(slots=True)
class Tally:
    """What came of typing."""

    model: str
    accept: Accept
    #: Keys that the text takes without help, keys that were pressed, characters of the text, those that were accepted.
    keys: int = 0
    pressed: int = 0
    characters: int = 0
    accepted: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    ms: dict[Kind, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    #: Seconds that the engine computed, and those that went into accepted texts.
    worked_s: float = 0.0
    used_s: float = 0.0

    def cells(self) -> list[str]:
        """Of the table of what was offered."""
        shares = {outcome: self.outcomes.count(outcome) / max(1, len(self.outcomes)) for outcome in set(self.outcomes)}
        shown = sum(shares.get(outcome, 0.0) for outcome in ("right", "begun", "wrong"))
        named = [shares.get(outcome, 0.0) for outcome in ("right", "begun", "wrong", "quiet", "late")]
        return [
            self.model,
            self.accept,
            f"{self.characters:,}",
            f"{self.accepted / max(1, self.characters):.1%}",
            f"{1 - self.pressed / max(1, self.keys):.1%}",
            f"{shown:.1%}",
            *(f"{share:.1%}" for share in named),
        ]

    def latency(self) -> list[str]:
        """Of the table of times: p50 / p95 in milliseconds, and how many there were."""
        wasted = 1 - min(1.0, self.used_s / self.worked_s) if self.worked_s else 0.0
        return [
            self.model,
            self.accept,
            *(quantiles(self.ms[kind]) for kind in KINDS),
            f"{1000 * self.worked_s / max(1, self.characters):.0f}",
            f"{wasted:.0%}",
        ]


OFFERED = [
    "model",
    "accept",
    "characters",
    "accepted",
    "keys saved",
    "shown",
    "right",
    "begun",
    "wrong",
    "quiet",
    "late",
]
TIMES = ["model", "accept", *(f"{kind} ms" for kind in KINDS), "engine ms a character", "of that wasted"]


def quantiles(ms: Sequence[float]) -> str:
    """p50 / p95 and how many; "" of none."""
    if not ms:
        return ""
    return f"{quantile(ms, 0.5):.0f} / {quantile(ms, 0.95):.0f} ({len(ms)})"


def keys(text: str) -> list[str]:
    """What is typed one after the other: a character, or a new line with its indentation."""
    return _KEY.findall(text)


def pause_s(key: str, before: str, choose: random.Random) -> float:
    """Seconds from the key before to this one."""
    in_word = key.isalnum() and before[-1:].isalnum()
    on_new_line = not before.rpartition("\n")[2].strip()
    median = IN_WORD_S if in_word else NEW_LINE_S if on_new_line else BEGINNING_S
    return median * math.exp(SPREAD * choose.gauss(0, 1))


def right_part(text: str, wanted: str, accept: Accept) -> str:
    """What of an offered text is taken: all of it if it is what the file says; or its words up to the first that is
    not. "" where that saves no key."""
    if accept == "whole":
        return text if wanted.startswith(text) and len(text) > 1 else ""
    words: list[str] = []
    for word in _WORD.findall(text):
        if not wanted.startswith("".join([*words, word])):
            break
        words.append(word)
    return "".join(words) if sum(map(len, words)) > len(words) else ""


def outcome(offered: str | None, wanted: str) -> Outcome:
    """What an answer was worth; None: there was none in time."""
    if offered is None:
        return "late"
    if not offered:
        return "quiet"
    if wanted.startswith(offered):
        return "right"
    return "begun" if right_part(offered, wanted, "word") else "wrong"


class Typist:
    """Types one piece into one document."""

    def __init__(self, session: Session, piece: Piece, uri: str, tally: Tally, choose: random.Random) -> None:
        self._session, self._piece, self._uri, self._tally, self._choose = session, piece, uri, tally, choose
        self._at = 0
        self._pending: Asked | None = None
        self._cold = True
        #: What is shown behind the cursor, and since when.
        self._shown, self._since = "", 0.0
        #: The engine's seconds for each suggestion, by its id; spent on once.
        self._cost: dict[str, float] = {}
        self._ended: list[Asked] = []

    async def type(self) -> None:
        session, piece, tally = self._session, self._piece, self._tally
        session.open(self._uri, piece.before + piece.after, name_of(piece.document.language))
        tally.keys += len(keys(piece.typed))
        tally.characters += len(piece.typed)
        while wanted := piece.typed[self._at :]:
            await asyncio.sleep(pause_s(wanted[0], piece.typed[: self._at], self._choose))
            taken = self._look(wanted)
            if taken:
                tally.pressed += 1 if tally.accept == "whole" else len(_WORD.findall(taken))
                tally.accepted += len(taken)
            else:
                taken = keys(wanted)[0]
                tally.pressed += 1
            self._write(taken)
        if self._pending is not None:
            self._take_back(self._pending)
        await asyncio.gather(*(asked.answer for asked in self._ended), return_exceptions=True)
        for asked in self._ended:
            self._time(asked)
        session.close(self._uri)

    def _look(self, wanted: str) -> str:
        """What is accepted of what is shown now."""
        asked = self._pending
        if asked is None:
            return ""
        if not asked.answer.done():
            self._tally.outcomes.append("late")
            self._take_back(asked)
            return ""
        self._ended.append(asked)
        offered, key = self._offered(asked)
        self._tally.outcomes.append(outcome(offered, wanted))
        if offered != self._shown:  # What is typed into stays where it is.
            self._shown, self._since = offered, asked.answered
        seen = time.perf_counter() - self._since >= NOTICED_S
        taken = right_part(offered, wanted, self._tally.accept) if seen else ""
        if taken:
            self._tally.used_s += self._cost.pop(key, 0.0)
        return taken

    def _offered(self, asked: Asked) -> tuple[str, str]:
        """The text that would stand behind the cursor, and the suggestion's id. One that replaces what is behind the
        cursor counts where that is its end, less that."""
        timing = self._session.timing(self._uri, asked.version)
        items = asked.items or []
        if not items:
            return "", ""
        item = items[0]
        text, where = str(item.insert_text), item.range
        arguments = item.command.arguments if item.command is not None else None
        key = str(arguments[0]) if arguments else ""
        if timing:
            self._cost.setdefault(key, (timing["encodeMs"] + timing["denoiseMs"]) / 1000)
        replaced = where.end.character - where.start.character if where is not None else 0
        if replaced:
            behind = self._piece.after[:replaced]
            text = text.removesuffix(behind) if self._at == len(self._piece.typed) else text
        return text, key

    def _write(self, text: str) -> None:
        """Puts text at the cursor, and asks what comes next."""
        piece = self._piece
        line, character = position(piece.before + piece.typed[: self._at])
        self._session.insert(self._uri, line, character, text)
        self._shown = self._shown[len(text) :] if self._shown.startswith(text) else ""
        self._at += len(text)
        self._pending = self._session.ask(self._uri, *position(piece.before + piece.typed[: self._at]))

    def _take_back(self, asked: Asked) -> None:
        if not asked.answer.done():
            self._session.cancel(asked)
        self._ended.append(asked)

    def _time(self, asked: Asked) -> None:
        """Counts a question where it belongs: nowhere, if it was answered with nothing and without the engine."""
        ms = self._tally.ms
        if asked.cancelled:
            ms["cancelled"].append(1000 * (asked.answered - asked.cancelled))
        elif self._session.timing(self._uri, asked.version):
            ms["cold" if self._cold else "warm"].append(1000 * (asked.answered - asked.asked))
            self._cold = False
        elif asked.items:
            ms["type-through"].append(1000 * (asked.answered - asked.asked))


def position(text: str) -> tuple[int, int]:
    """Line and UTF-16 units of the end of a text."""
    last = text[text.rfind("\n") + 1 :]
    return text.count("\n"), len(last.encode("utf-16-le")) // 2


def pieces(corpus: Path, files: int, characters: int, seed: int) -> list[Piece]:
    """Files of held-out packages, one a package as far as there are so many, with what of each is typed."""
    choose = random.Random(seed)
    by_package: dict[str, list[Document]] = {}
    for document in documents(corpus, "held"):
        by_package.setdefault(document.package, []).append(document)
    for of_package in by_package.values():
        choose.shuffle(of_package)
    found = (Piece.of(document, characters, choose) for document in _in_turn(by_package, choose))
    return list(islice((piece for piece in found if piece is not None), files))


def _in_turn(by_package: dict[str, list[Document]], choose: random.Random) -> Iterator[Document]:
    packages = [by_package[name] for name in sorted(by_package)]
    choose.shuffle(packages)
    for number in range(max(map(len, packages), default=0)):
        yield from (of_package[number] for of_package in packages if number < len(of_package))


async def run(model: str, accept: Accept, chosen: Sequence[Piece], seed: int) -> Tally:
    """All pieces with one model and one way to accept, with an engine that begins anew."""
    tally = Tally(model, accept)
    async with Session({"model": model, "statistics": False}) as session:
        await session.ready()
        await session.idle()
        began = worked_s(await session.metrics())
        for number, piece in enumerate(track(chosen, f"{model}, {accept}")):
            suffix = Path(piece.document.path).suffix
            uri = f"file:///bench/{number}/{Path(piece.document.path).stem}{suffix}"
            await Typist(session, piece, uri, tally, random.Random(f"{seed}-{number}")).type()
        await session.idle()
        tally.worked_s = worked_s(await session.metrics()) - began
        await session.stop_engine()
    return tally


def worked_s(metrics: str) -> float:
    """Seconds that the engine has computed so far, in passes and in encoding."""
    found = dict(re.findall(r"^(infill_step_seconds_sum|infill_encoding_seconds_total) (\S+)$", metrics, re.MULTILINE))
    return sum(map(float, found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.typing", description=__doc__)
    parser.add_argument("--model", nargs="+", default=["embedded", "embedded:base"], help="as infill.model")
    parser.add_argument("--accept", nargs="+", default=["whole", "word"], choices=("whole", "word"))
    parser.add_argument("--files", type=int, default=24, help="pieces of files (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=400, help="typed of each, about (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="chooses files, pieces and pauses (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, default=cache_dir() / "corpus", help="folder of `infill-engine corpus`")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    chosen = pieces(arguments.corpus, arguments.files, arguments.characters, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        os.environ["INFILL_RUNTIME_DIR"] = folder  # an engine of our own: one that runs already may be of older code
        tallies = [
            asyncio.run(run(model, accept, chosen, arguments.seed))
            for model in arguments.model
            for accept in arguments.accept
        ]
    print(f"\n{len(chosen)} files, seed {arguments.seed}\n")
    print(table(OFFERED, [tally.cells() for tally in tallies]), end="\n\n")
    print(table(TIMES, [tally.latency() for tally in tallies]))
    if arguments.json:
        rows = [dict(zip(OFFERED + TIMES[2:], tally.cells() + tally.latency()[2:], strict=True)) for tally in tallies]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
