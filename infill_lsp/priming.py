"""Chooses the pieces of the workspace that may help to fill a gap.

First come definitions of what the file imports and uses near the gap, or in the header of the definition around it,
whose names are in scope however far above it stands; then the chunks that are best by BM25 for the rarest words near
the gap, a little ahead if they are of the same folder, open, or written lately. What the model sees anyway, and what
says the same again, is left out.

It does not know what a model makes of it, nor how many of them fit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile

from infill_engine import protocol
from infill_engine.protocol import MAX_SNIPPET

from infill_lsp import imports
from infill_lsp.chunks import words
from infill_lsp.core import Gap, Snapshot, Snippet
from infill_lsp.database import Found
from infill_lsp.index import Index, Seen

#: Lines above and below the cursor whose words are asked for.
ABOVE, BELOW = 20, 6
#: Lines of the definition around the cursor, from its first one, that say what is in scope: types of parameters.
HEADER = 3
#: Words that are asked for at most, the rarest ones, and how many chunks all of them together may be in: BM25 looks at
#: each of these, some 2 us a chunk, and frequent words say little.
MOST_WORDS, MOST_CHUNKS = 8, 500
#: A word in a larger share of the chunks than this (and in more than a few) says nothing, as those of the language.
MOST_SHARE, FEW = 0.2, 3
#: Characters above and below the cursor that a model sees whatever it is given besides.
SEEN_ABOVE, SEEN_BELOW = 3_000, 400
#: Lines of a file in which its imports are, and names whose definitions are looked up.
IMPORT_LINES, MOST_NAMES = 400, 8
#: Chunks of BM25 that are looked at.
CANDIDATES = 16
#: The share of a snippet's lines that, seen elsewhere, makes it a repetition.
REPEATED = 0.6
#: What a chunk's score is multiplied by: in the same folder, open in the editor, and written just now (which halves
#: every `RECENT_DAYS`).
SAME_FOLDER, OPEN, RECENT, RECENT_DAYS = 1.15, 1.1, 1.15, 3.0
#: Seconds after which an answer is not waited for.
BUDGET_S = 0.02
#: Files that stand for their folder.
_WHOLE_FOLDER = {"__init__", "index", "mod", "lib", "main"}

#: A name, and an attribute or a member of it.
_DOTTED = re.compile(r"(?<![\w.:])([^\W\d]\w*)(?:(?:\.|::)(\w+))?")


def retrieve(index: Index, snapshot: Snapshot, gap: Gap, limit: int) -> list[Snippet]:
    """The best `limit` snippets for the gap, the best one first; fewer, or none, where there are none."""
    path = index.relative(snapshot.uri)
    seen = _seen(snapshot, path)
    near = _near(gap)
    until = time.monotonic() + BUDGET_S
    shown = _lines(gap.prefix[-SEEN_ABOVE:] + gap.head + gap.tail + gap.suffix[:SEEN_BELOW])
    chosen: list[Snippet] = []
    scope = _header(snapshot, gap) + near
    for snippet in chain(_imported(index, snapshot, scope, seen, until), _similar(index, near, seen, until)):
        if len(chosen) >= limit:
            break
        lines = _lines(snippet.text)
        if lines and len(lines & shown) < REPEATED * len(lines):
            chosen.append(snippet)
            shown |= lines
    return chosen


def sent(snippet: Snippet) -> protocol.Snippet:
    """The snippet as the engine gets it: whole lines, and no half of a surrogate pair, which JSON does not carry."""
    text = snippet.text
    if len(text) > MAX_SNIPPET:
        text = text[: text.rfind("\n", 0, MAX_SNIPPET) + 1] or text[:MAX_SNIPPET]
    return protocol.Snippet(*(part.encode(errors="replace").decode() for part in (text, snippet.path)))


def _imported(index: Index, snapshot: Snapshot, near: str, seen: Seen | None, until: float) -> Iterator[Snippet]:
    """Definitions of what the file imports, those used nearest to the cursor's end of the text first."""
    for rank, (written, (module, name)) in enumerate(list(used(snapshot, near).items())[:MOST_NAMES]):
        best = index.definition(name, partial(_agreement, module=module), until)
        if best is not None and index.holds(best) and not (seen is not None and seen.hides(best.path, best.chunk)):
            # Before all that is only similar.
            yield _snippet(best, 1_000.0 - rank, partial("{} is imported, and used here".format, written))


def _similar(index: Index, near: str, seen: Seen | None, until: float) -> Iterator[Snippet]:
    rare = rarest(index.frequencies(list(dict.fromkeys(words(near))), seen, until), index.size)
    if not rare:
        return
    now = time.time_ns()
    folder = seen.path.rpartition("/")[0] if seen is not None else None
    found = index.search(rare, seen, CANDIDATES, until)
    scored = sorted(((each.score * _favour(each, folder, now), each) for each in found), key=lambda pair: -pair[0])
    for score, each in scored:
        if index.holds(each):
            yield _snippet(each, score, partial(_shared, each.chunk.text, rare))


def rarest(frequencies: dict[str, int], total: int) -> dict[str, int]:
    """The words that tell some of `total` chunks from the others, rarest first, as many as may be asked for."""
    rare: dict[str, int] = {}
    for word, count in sorted(frequencies.items(), key=lambda item: item[1])[:MOST_WORDS]:
        if count > max(FEW, MOST_SHARE * total) or (rare and sum(rare.values()) + count > MOST_CHUNKS):
            break
        rare[word] = count
    return rare


def used(snapshot: Snapshot, near: str) -> dict[str, tuple[str, str]]:
    """Names of other modules as they are written near the gap, the last one first -> the module, and its name there."""
    imported = imports.read("\n".join(snapshot.lines[:IMPORT_LINES]), snapshot.language)
    names, modules = imported.names, imported.modules
    found: dict[str, tuple[str, str]] = {}
    for match in reversed(list(_DOTTED.finditer(near)) if names or modules else []):
        first, member = match.groups()
        if first in modules and member:
            found.setdefault(f"{first}.{member}", (modules[first], member))
        if first in names:
            found.setdefault(first, names[first])
            module, name = names[first]
            if member and first not in modules:
                # What is imported may be a module itself.
                found.setdefault(f"{first}.{member}", (f"{module}.{name}", member))
    return found


def _agreement(path: str, module: str) -> int:
    """How many of the last parts of a module's name its file's path ends with, or its folder's, where a folder is a
    module; for "." any file agrees."""
    names = imports.parts(module)
    if not names:
        return 1
    folder, _, file = path.rpartition("/")
    around = folder.split("/") if folder else []
    stem = file.partition(".")[0] if file.count(".") == 1 else file.rpartition(".")[0]
    whole = around if stem in _WHOLE_FOLDER else [*around, stem]
    count = max(_common(whole, names), _common(around, names))
    # A package's name: what it offers is often defined in a module of it; or the last name is a type's.
    return 2 * count if count else int(names[-1] in whole or _common(whole, names[:-1]) > 0)


def _common(parts: Sequence[str], names: Sequence[str]) -> int:
    """How many of the last ones are the same."""
    both = zip(reversed(parts), reversed(names), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _favour(found: Found, folder: str | None, now: int) -> float:
    favour = SAME_FOLDER if folder is not None and found.path.rpartition("/")[0] == folder else 1.0
    if found.stamp is None:
        return favour * OPEN * RECENT
    days = max(0.0, (now - found.stamp.mtime) / 86_400e9)
    return favour * (1 + (RECENT - 1) * math.exp2(-days / RECENT_DAYS))


def _shared(text: str, asked: Iterable[str]) -> str:
    has = set(words(text))
    return "has " + ", ".join(word for word in asked if word in has)


def _snippet(found: Found, score: float, why: Callable[[], str]) -> Snippet:
    chunk = found.chunk
    return Snippet(chunk.text, found.path, chunk.first, chunk.last, score, why)


def _seen(snapshot: Snapshot, path: str | None) -> Seen | None:
    """The rows around the cursor that a model sees anyway."""
    if path is None:
        return None
    first, characters = snapshot.row, 0
    while first > 0 and characters < SEEN_ABOVE:
        first -= 1
        characters += len(snapshot.lines[first]) + 1
    last, characters = snapshot.row, 0
    while last + 1 < len(snapshot.lines) and characters < SEEN_BELOW:
        last += 1
        characters += len(snapshot.lines[last]) + 1
    return Seen(path, first, last)


def _near(gap: Gap) -> str:
    """The text around the cursor, cut at lines."""
    above = gap.prefix.rsplit("\n", 1 + ABOVE)[-1 - ABOVE :]
    below = gap.suffix.split("\n", 1 + BELOW)[: 1 + BELOW]
    return "\n".join(above) + gap.head + "\n" + gap.tail + "\n".join(below)


def _header(snapshot: Snapshot, gap: Gap) -> str:
    """The first lines of the definition around the cursor, those that are not near anyway."""
    if gap.definition is None:
        return ""
    first = gap.definition[0]
    lines = snapshot.lines[first : min(first + HEADER, snapshot.row - ABOVE)]
    return "".join(f"{line}\n" for line in lines)


def _lines(text: str) -> set[str]:
    """What tells two pieces of code apart: their lines, without indentation and without those of a bracket or two."""
    return {line for line in map(str.strip, text.split("\n")) if len(line) > 2}
