"""Turns a candidate's text into an edit that belongs at the cursor, or says why it is worth nothing there.

The text is tidied (indentation, spaces), then only cut: where its gap ends, where the document goes on with what it
says already, where its brackets do. Each cut has to leave the document no more broken than the longer text did, which
`damage` measures; so what was broken before, or is misread, weighs the same on both sides.

It does not know LSP, nor how probable a text is: `confidence` says how much of it is sure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from infill_engine.protocol import Candidate, best_end, end_scores, is_open
from msgspec import structs

from infill_lsp.confidence import Gate
from infill_lsp.core import Edit, Gap, Silence, Snapshot
from infill_lsp.damage import NEIGHBOURS, Damage, Measure, TooSlow, measures, pairs
from infill_lsp.extraction import indentation, is_word
from infill_lsp.settings import Aggressiveness

#: What no document gains by: control characters but tab and newline, line ends foreign to LSP, marks that
#: make text read in another order than it runs, halves of surrogate pairs, the sign of a broken character.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffd]")
#: Names of the tokens by which models are told where a document begins, ends or has its gap.
_SPECIAL = re.compile(r"<[|｜][\w▁]+[|｜]>|</?s>|</?(?:fim|file|repo|jupyter|commit)_\w+>|\[/?INST\]")
#: Closers and punctuation alone are what an editor or the next key gives; a pair of quotes is a value.
_NOISE = re.compile(r"""(?:(?!""|'')[\s)\]}>,;:'"`])*""")
#: What may stand after the cursor without being code of its own.
_CLOSING = frozenset(")]}'\"`:;, \t")

#: Of a line, what a text has to have written for it to count as its beginning.
_BEGUN = 4
#: Ends that are tried where the document does not parse with the best one. On 21 held-out gaps, of all line ends up to
#: three lines beyond, the best by score alone is the true one in 12, the best of those that parse best in 17.
_MOST_ENDS = 8
#: Equal lines in a row, and equal runs of several lines, that nobody writes.
_REPEATED_LINES, _REPEATED_RUNS = 3, 2


def edit(
    snapshot: Snapshot,
    gap: Gap,
    candidate: Candidate,
    gate: Gate | None = None,
    aggressiveness: Aggressiveness = "balanced",
    parse_check: bool = True,
    over_tail: bool = True,
) -> Edit | Silence:
    """The edit that inserts what of the candidate belongs at the cursor; why not, where nothing does.

    Without a gate all of it is taken for sure. With `parse_check` a document that parses does so with the edit, too;
    one without a syntax tree, or that takes too long to parse, is not known to parse. Without `over_tail` nothing
    behind the cursor is replaced.
    """
    if _FORBIDDEN.search(candidate.text):
        return Silence("the text holds characters that no document gains by")
    tidy = tidied(snapshot, gap, candidate)
    for measure in measures(snapshot):
        place = _Place.of(snapshot, measure)
        with suppress(TooSlow):
            found = _fitted(tidy, gap, place, over_tail)
            if isinstance(found, Edit) and gate is not None:
                # A text that broke off where it was no longer sure need not parse: what is shown of it has to.
                stands = partial(_stands, place=place, parse_check=parse_check)
                found = gate.sure(found, tidy, gap.kind, aggressiveness, stands)
            elif isinstance(found, Edit) and parse_check:
                found = _to_parsable(found, place)
            if isinstance(found, Edit):
                found = replace(found, text=found.text.replace("\n", snapshot.eol))
            return found
    raise AssertionError("counting is never too slow")


def to_end(snapshot: Snapshot, gap: Gap, candidate: Candidate) -> str:
    """The candidate's text up to the end that is chosen for it, else as it is."""
    for measure in measures(snapshot):
        with suppress(TooSlow):
            return _to_best_end(candidate, gap, _Place.of(snapshot, measure))
    raise AssertionError("counting is never too slow")


def tidied(snapshot: Snapshot, gap: Gap, candidate: Candidate) -> Candidate:
    """The candidate up to the first special token that the document does not name itself, with the document's
    indentation, without space at the ends of its lines, and without blank lines before its first where the cursor has a
    line to itself. Its offsets are those of the new text."""
    text = candidate.text
    for special in _SPECIAL.finditer(text):
        if not any(special[0] in line for line in snapshot.lines):
            text = text[: special.start()]
            break
    skipped = len(text) - len(text.lstrip("\n")) if snapshot.head.isspace() else 0
    lines = text[skipped:].split("\n")
    indent = _Indent.between(lines, snapshot, gap.indent_unit)
    pieces: list[str] = []
    #: Where each place of the old text is in the new one.
    places = [0] * skipped
    size = 0
    for number, line in enumerate(lines):
        old = line[: len(line) - len(line.lstrip(" \t"))]
        content = line[len(old) :]
        if number < len(lines) - 1 and snapshot.language != "markdown":
            content = content.rstrip(" \t")
        new = old if not number else indent.of_margin(old) if content else ""
        places += (size + min(at, len(new)) for at in range(len(old)))
        places += (size + len(new) + min(at, len(content)) for at in range(len(line) - len(old) + 1))
        pieces.append(new + content)
        size += len(pieces[-1]) + 1
    probs = [
        (prob, places[at]) for prob, at in zip(candidate.probs, candidate.offsets, strict=True) if at < len(places)
    ]
    return Candidate(
        "\n".join(pieces),
        tuple(prob for prob, _ in probs),
        tuple(at for _, at in probs),
        tuple(structs.replace(end, offset=places[end.offset]) for end in candidate.ends if end.offset < len(places)),
    )


@dataclass(frozen=True, slots=True)
class _Indent:
    """From the indentation that a text has to the document's."""

    #: Columns of a level in the text, where that has to change, and what the document indents a level with.
    columns: int | None
    level: str

    @classmethod
    def between(cls, lines: Sequence[str], snapshot: Snapshot, unit: str) -> _Indent:
        """For the lines of a text, the first of which goes on behind the cursor, in a document that indents by `unit`.

        Where no line near is indented, a language that indents by tabs gets them.
        """
        row = snapshot.row
        near = [*snapshot.lines[max(0, row - NEIGHBOURS) : row + 1 + NEIGHBOURS]]
        margins = {margin for line in near if (margin := line[: len(line) - len(line.lstrip(" \t"))])}
        own = {margin for line in lines[1:] if line.strip() and (margin := line[: len(line) - len(line.lstrip(" \t"))])}
        used = set("".join(margins)) or {unit}
        if used == {"\t"} and any(" " in margin for margin in own):
            return cls(4 if all(len(margin.expandtabs(4)) % 4 == 0 for margin in own) else 2, "\t")
        if margins and used == {" "} and any("\t" in margin for margin in own):
            return cls(8, unit if unit != "\t" else " " * min(min(map(len, margins)), 8))
        return cls(None, "")

    def of_margin(self, margin: str) -> str:
        """The indentation that stands for `margin`; columns that are no whole level stay as they are."""
        if self.columns is None:
            return margin
        levels, rest = divmod(len(margin.expandtabs(self.columns)), self.columns)
        return self.level * levels + " " * rest


@dataclass(frozen=True, slots=True)
class _Place:
    """The cursor line and its neighbours, nearest first, and how damaged the document is with a text there."""

    head: str
    tail: str
    row: int
    above: tuple[str, ...]
    below: tuple[str, ...]
    measure: Measure

    @classmethod
    def of(cls, snapshot: Snapshot, measure: Measure) -> _Place:
        row = snapshot.row
        return cls(
            head=snapshot.head,
            tail=snapshot.tail,
            row=row,
            above=snapshot.lines[max(0, row - NEIGHBOURS) : row][::-1],
            below=snapshot.lines[row + 1 : row + 1 + NEIGHBOURS],
            measure=measure,
        )

    def damage(self, text: str, replaced: int = 0) -> Damage:
        return self.measure.damage(text, replaced)

    def is_broken_by(self, text: str, replaced: int) -> bool:
        """Whether the document parses, but not with the text in place of so many code points behind the cursor."""
        return self.measure.parsable and self.damage(text, replaced).faults > 0


def _fitted(tidy: Candidate, gap: Gap, place: _Place, over_tail: bool) -> Edit | Silence:
    """What of the text belongs at the cursor, LF only."""
    text = _to_best_end(tidy, gap, place)
    text = _within_limits(text, gap)
    text = _to_own_closer(text, gap, place)
    text = _without_doubled_indentation(text, place)
    written = text
    text = _without_repetition(text, place)
    text = _without_tail(text, place)
    text = _without_following_lines(text, place)
    whole, text = text, _to_stray_closer(text, place)
    replaced = _replaced_tail(whole, text, place) if over_tail else ""
    text = text if replaced else _within_quotes(text, gap, place)
    text = _without_trailing_space(whole if replaced else text, place)
    if _NOISE.fullmatch(text):
        return Silence(_why_noise(tidy.text, written, text))
    if _is_glued(text, place):
        return Silence("the text would run into the word behind the cursor")
    start = len(place.head)
    return Edit(place.row, start, start + len(replaced), text)


def _why_noise(whole: str, written: str, text: str) -> str:
    if not whole.strip():
        return "the model has nothing to add here"
    if _NOISE.fullmatch(written):
        return "closers and punctuation alone are not worth showing"
    return "the model writes what stands around the cursor already"


def _to_best_end(candidate: Candidate, gap: Gap, place: _Place) -> str:
    """Up to the end where the gap is most probably over, of those where the document parses best; a gap of one line
    ends with that line, unless it opens what the next ones close."""
    text = candidate.text
    if gap.max_lines == 1:
        line = text.partition("\n")[0]
        return text if gap.open_lines > 1 and is_open(line) else line
    best = best_end(candidate.ends)
    if best is None:
        return text
    least = place.damage(text[: best.offset]).faults
    if not least:
        return text[: best.offset]
    scores = end_scores(candidate.ends)
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[:_MOST_ENDS]
    others = [text[: candidate.ends[i].offset] for i in ranked]
    return min([text[: best.offset], *others], key=lambda option: place.damage(option).faults)


def _within_limits(text: str, gap: Gap) -> str:
    """The lines before the first that is indented too little to be the gap's, as many as it may have."""
    first, *later = text.split("\n")[: max(gap.max_lines, gap.open_lines)]
    least = indentation(gap.head) if gap.max_lines == 1 else gap.min_indent or 0
    return "\n".join([first, *takewhile(lambda line: not line.strip() or indentation(line) >= least, later)])


def _to_own_closer(text: str, gap: Gap, place: _Place) -> str:
    """The lines up to the one that closes what the gap is in, where that is missing: what follows it belongs elsewhere,
    however well it reads."""
    if gap.closes != "closer" or not gap.closer or gap.max_lines == 1:
        return text
    lines = (place.head + text).split("\n")
    for row, line in enumerate(lines):
        begun, rest = line.lstrip()[: len(gap.closer)], line.lstrip()[len(gap.closer) :]
        is_whole = not (is_word(begun[-1:]) and is_word(rest[:1]))
        closes = begun == gap.closer and is_whole and indentation(line) <= (gap.min_indent or 0)
        if closes and not _unclosed(line):  # `} else {` goes on.
            return "\n".join(lines[: row + 1])[len(place.head) :]
    return text


def _within_quotes(text: str, gap: Gap, place: _Place) -> str:
    """The text before what ends the string or comment that the gap is in: that stands behind the cursor already, and a
    text that leaves it and enters another one reads as well."""
    for found in re.finditer(re.escape(gap.quote), text) if gap.quote else ():
        if place.damage(text[: found.start()]) <= place.damage(text):
            return text[: found.start()]
    return text


def _without_doubled_indentation(text: str, place: _Place) -> str:
    """Without the head's indentation where the candidate repeats it; a head that is not yet a level stays."""
    if not place.head.isspace() or not text.startswith(place.head):
        return text
    column = len(place.head.expandtabs(8))
    levels = [indentation(line) for line in (*place.above, *place.below) if line.strip()]
    nearest = next((indentation(line) for line in place.above if line.strip()), 0)
    return text.removeprefix(place.head) if column > nearest or column in levels else text


def _without_repetition(text: str, place: _Place) -> str:
    """The lines before those that say again and again what stands before them, in the text or above it."""
    lines = (place.head + text).split("\n")
    stripped = [line.strip() for line in lines]
    above = [line.strip() for line in place.above if line.strip()][::-1]
    if "\n" in text and (copied := [line for line in stripped if line]) == above[-len(copied) :]:
        return ""
    for first in range(len(lines)):
        for size in range(1, (len(lines) - first) // 2 + 1):
            run = stripped[first : first + size]
            times = _REPEATED_LINES if size == 1 else _REPEATED_RUNS
            if stripped[first : first + times * size] == run * times and _NOISE.fullmatch("".join(run)) is None:
                return "\n".join(lines[: first + size])[len(place.head) :].rstrip()
    return text


def _without_tail(text: str, place: _Place) -> str:
    """Without its end where that is the tail's beginning."""
    tail = place.tail.rstrip()
    for size in range(min(len(text), len(tail)), 0, -1):
        kept, overlap = text[:-size], text[-size:]
        in_word = is_word(kept[-1:]) and is_word(overlap[0])
        if tail.startswith(overlap) and not in_word and place.damage(kept) <= place.damage(text):
            return kept
    if tail and tail[0] in _CLOSING and text.endswith(tail[0]):
        # Perhaps it is there twice: `"a""` with `"` behind it reads well, too.
        kept = text.rstrip(tail[0])
        return kept if place.damage(kept) <= place.damage(text) else text
    return text


def _without_following_lines(text: str, place: _Place) -> str:
    """Without its last lines where they are the next lines of the document, indentation ignored, the very last perhaps
    only their beginning; or from where two of them stand in it.

    They stay where they close what the text opens: with a bracket, or as the only line of a body.
    """
    lines = (place.head + text + place.tail).split("\n")
    rows = [row for row, line in enumerate(lines) if line.strip()]
    following = [line.strip() for line in place.below if line.strip()]
    for size in range(min(len(rows), len(following)), 0, -1):
        if not _goes_on_as([lines[row].strip() for row in rows[-size:]], following[:size]):
            continue
        kept = "\n".join(lines[: rows[-size]])[len(place.head) :].rstrip()
        if not kept.endswith(":") and place.damage(kept) <= place.damage(text):
            return kept
    pair = following[:2]
    if len(pair) == 2 and not any(_NOISE.fullmatch(line) for line in pair):
        for at, row in enumerate(rows[1:-1], 1):
            if [lines[row].strip(), lines[rows[at + 1]].strip()] == pair:
                kept = "\n".join(lines[:row])[len(place.head) :].rstrip()
                return kept if place.damage(kept) <= place.damage(text) else text
    return text


def _goes_on_as(lines: Sequence[str], following: Sequence[str]) -> bool:
    """Whether the lines are those that follow, or were on the way to be."""
    *whole, last = lines
    begun = len(last) >= _BEGUN and following[-1].startswith(last)
    return whole == list(following[:-1]) and (last == following[-1] or begun)


def _replaced_tail(text: str, trimmed: str, place: _Place) -> str:
    """The tail if the text brings all of it again and only then balances, no worse than what is `trimmed` of it before
    the tail as it is: `f(|)` and `a) -> int`; else "".

    Editors draw a replacement only where the replaced characters occur in the new text in order.
    """
    tail = place.tail.rstrip()
    rest = iter(text)
    if tail and _CLOSING.issuperset(tail) and all(character in rest for character in tail):
        brought = place.damage(text, len(tail))
        return tail if brought < place.damage(text) and brought <= place.damage(trimmed) else ""
    return ""


def _to_stray_closer(text: str, place: _Place) -> str:
    """The text before a closer whose opener it does not hold, or before some of those at its end; the longest that
    leaves the least damage."""
    if not any(place.damage(text)):
        return text
    start = len(place.head)
    ends = {
        closer - start
        for opener, closer in pairs(place.head + text)
        if closer is not None and closer >= start and (opener is None or opener < start)
    }
    unclosed = _unclosed(text)
    ends |= {at for at in range(len(text)) if _CLOSING.issuperset(text[at:]) and _unclosed(text[:at]) <= unclosed}
    return min([text, *(text[:end] for end in sorted(ends, reverse=True))], key=place.damage)


def _unclosed(text: str) -> int:
    """Brackets and quotes that the text opens and does not close."""
    return sum(closer is None for _, closer in pairs(text))


def _without_trailing_space(text: str, place: _Place) -> str:
    """Without space at its end, but before code, which it may be meant to part from the text."""
    return text.rstrip() if _CLOSING.issuperset(place.tail) else text


def _is_glued(text: str, place: _Place) -> bool:
    """Whether the text's last word would become one with the word after the cursor."""
    return is_word(text[-1:]) and is_word(place.tail[:1])


def _to_parsable(edit: Edit, place: _Place) -> Edit | Silence:
    """The edit, or as many of its first lines as leave the document parsable that is so now."""
    if not place.is_broken_by(edit.text, edit.end - edit.start):
        return edit
    ends = [found.start() for found in re.finditer("\n", edit.text)]
    for part in (edit.text[:end].rstrip() for end in reversed(ends)):
        if not _NOISE.fullmatch(part) and not place.is_broken_by(part, 0):
            return replace(edit, end=edit.start, text=part)
    return Silence("the file parses now, and would not with the text in it (infill.parseCheck)")


def _stands(part: Edit, place: _Place, parse_check: bool) -> bool:
    """Whether a part of an edit that belongs at the cursor may be shown alone."""
    if _NOISE.fullmatch(part.text) or _is_glued(part.text, place):
        return False
    return not (parse_check and place.is_broken_by(part.text, part.end - part.start))
