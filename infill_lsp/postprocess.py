"""Turns a candidate's text into an edit that belongs at the cursor, or into nothing.

Every step is a function of text. Brackets and quotes are counted in the lines around the cursor only, up to a
blank line, and a count alone decides nothing: text is taken away where that leaves no more of them unmatched.
So what was unbalanced before, or is misread (an apostrophe in a comment), weighs the same on both sides.

It does not know LSP, nor how sure the model was of its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from infill_engine.protocol import Candidate, best_end

from infill_lsp.core import Edit, Gap, Snapshot
from infill_lsp.extraction import MAX_LINE, indentation, is_word

#: Lines read above and below the cursor line.
NEIGHBOURS = 16

#: What no document gains by: control characters but tab and newline, line ends foreign to LSP, marks that
#: make text read in another order than it runs, halves of surrogate pairs, the sign of a broken character.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffd]")
#: Closers and punctuation alone are what an editor or the next key gives; a pair of quotes is a value.
_NOISE = re.compile(r"""(?:(?!""|'')[\s)\]}>,;:'"`])*""")
#: What may stand after the cursor without being code of its own.
_CLOSING = frozenset(")]}'\"`:;, \t")

_OPENERS = {")": "(", "]": "[", "}": "{"}
#: Strings, so that their brackets do not count, and brackets.
_TOKENS = re.compile(
    r"""
      (?P<long>\"{3}|'{3}) (?: \\. | (?!(?P=long)). )* (?P<long_end>(?P=long))?
    | (?P<short>["']) (?: \\. | (?!(?P=short))[^\\\n] )* (?P<short_end>(?P=short))?
    | [()\[\]{}]
    """,
    re.VERBOSE | re.DOTALL,
)


def edit(snapshot: Snapshot, gap: Gap, candidate: Candidate) -> Edit | None:
    """The edit that inserts what of the candidate belongs at the cursor, None where nothing worth it does."""
    if _FORBIDDEN.search(candidate.text):
        return None
    place = _Place.of(snapshot)
    text = _to_best_end(candidate, gap)
    text = _within_limits(text, gap)
    text = _without_doubled_indentation(text, place)
    text = _without_tail(text, place)
    text = _without_following_lines(text, place)
    text = _to_closed_brackets(text, place)
    replaced = _replaced_tail(text, place)
    if not replaced:
        text = _to_stray_closer(text, place)
    text = _without_trailing_space(text, place)
    if _NOISE.fullmatch(text) or _is_glued(text, place):
        return None
    end = snapshot.column + len(replaced)
    return Edit(snapshot.row, snapshot.column, end, text.replace("\n", snapshot.eol))


@dataclass(frozen=True, slots=True)
class _Place:
    """The cursor line and its neighbours, nearest first."""

    head: str
    tail: str
    above: tuple[str, ...]
    below: tuple[str, ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Place:
        row = snapshot.row
        return cls(
            head=snapshot.head,
            tail=snapshot.tail,
            above=snapshot.lines[max(0, row - NEIGHBOURS) : row][::-1],
            below=snapshot.lines[row + 1 : row + 1 + NEIGHBOURS],
        )

    @property
    def before(self) -> str:
        """The paragraph's text before the cursor."""
        return "\n".join([*reversed(list(takewhile(_is_code, self.above))), self.head])

    def unmatched(self, text: str, tail: str | None = None) -> int:
        """Brackets and quotes of the paragraph without a partner, with `text` at the cursor before `tail`."""
        after = [self.tail if tail is None else tail, *takewhile(_is_code, self.below)]
        return _unmatched(self.before + text + "\n".join(after))


def _to_best_end(candidate: Candidate, gap: Gap) -> str:
    """Up to the end where the gap is most probably over; a gap of one line ends with that line."""
    text = candidate.text
    if gap.max_lines == 1:
        return text.partition("\n")[0]
    end = best_end(candidate.ends)
    return text[: end.offset] if end is not None else text


def _within_limits(text: str, gap: Gap) -> str:
    """The lines before the first that is indented too little to be the gap's, `gap.max_lines` at most."""
    first, *later = text.split("\n")[: gap.max_lines]
    least = gap.min_indent or 0
    return "\n".join([first, *takewhile(lambda line: not line.strip() or indentation(line) >= least, later)])


def _without_doubled_indentation(text: str, place: _Place) -> str:
    """Without the head's indentation where the candidate repeats it; a head that is not yet a level stays."""
    if not place.head.isspace() or not text.startswith(place.head):
        return text
    column = len(place.head.expandtabs(8))
    levels = [indentation(line) for line in (*place.above, *place.below) if line.strip()]
    nearest = next((indentation(line) for line in place.above if line.strip()), 0)
    return text.removeprefix(place.head) if column > nearest or column in levels else text


def _without_tail(text: str, place: _Place) -> str:
    """Without its end where that is the tail's beginning."""
    tail = place.tail.rstrip()
    for size in range(min(len(text), len(tail)), 0, -1):
        kept, overlap = text[:-size], text[-size:]
        in_word = is_word(kept[-1:]) and is_word(overlap[0])
        if tail.startswith(overlap) and not in_word and place.unmatched(kept) <= place.unmatched(text):
            return kept
    return text


def _without_following_lines(text: str, place: _Place) -> str:
    """Without its last lines where they are the next lines of the document, indentation ignored.

    They stay where they close what the text opens: with a bracket, or as the only line of a body.
    """
    lines = (place.head + text + place.tail).split("\n")
    rows = [row for row, line in enumerate(lines) if line.strip()]
    following = [line.strip() for line in place.below if line.strip()]
    for size in range(min(len(rows), len(following)), 0, -1):
        if [lines[row].strip() for row in rows[-size:]] != following[:size]:
            continue
        kept = "\n".join(lines[: rows[-size]])[len(place.head) :].rstrip()
        if not kept.endswith(":") and place.unmatched(kept) <= place.unmatched(text):
            return kept
    return text


def _to_closed_brackets(text: str, place: _Place) -> str:
    """The lines up to the one that closes all the brackets left open before the cursor."""
    if not place.unmatched(""):
        return text
    for end in (found.start() for found in re.finditer("\n", text)):
        if not place.unmatched(text[:end]):
            return text[:end]
    return text


def _replaced_tail(text: str, place: _Place) -> str:
    """The tail if the text brings all of it again and only then balances: `f(|)` and `a) -> int`; else "".

    Editors draw a replacement only where the replaced characters occur in the new text in order.
    """
    tail = place.tail.rstrip()
    rest = iter(text)
    if tail and _CLOSING.issuperset(tail) and all(character in rest for character in tail):
        return tail if place.unmatched(text, tail="") < place.unmatched(text) else ""
    return ""


def _to_stray_closer(text: str, place: _Place) -> str:
    """The text before a closer whose opener it does not hold; the longest that leaves the fewest unmatched."""
    if not place.unmatched(text):
        return text
    start = len(place.before)
    ends = [
        closer - start
        for opener, closer in _pairs(place.before + text)
        if closer is not None and closer >= start and (opener is None or opener < start)
    ]
    return min([text, *(text[:end] for end in sorted(ends, reverse=True))], key=place.unmatched)


def _without_trailing_space(text: str, place: _Place) -> str:
    """Without space at its end, but before code, which it may be meant to part from the text."""
    return text.rstrip() if _CLOSING.issuperset(place.tail) else text


def _is_glued(text: str, place: _Place) -> bool:
    """Whether the text's last word would become one with the word after the cursor."""
    return is_word(text[-1:]) and is_word(place.tail[:1])


def _unmatched(text: str) -> int:
    return sum(None in pair for pair in _pairs(text))


def _pairs(text: str) -> Iterator[tuple[int | None, int | None]]:
    """Offsets of each opener and its closer, None for the one that is missing; a string that ends is no pair."""
    opened: list[tuple[str, int]] = []
    for token in _TOKENS.finditer(text):
        if token["long"] or token["short"]:
            if not (token["long_end"] or token["short_end"]):
                yield token.start(), None
        elif token[0] not in _OPENERS:
            opened.append((token[0], token.start()))
        elif opened and opened[-1][0] == _OPENERS[token[0]]:
            yield opened.pop()[1], token.start()
        else:
            yield None, token.start()
    yield from ((offset, None) for _, offset in opened)


def _is_code(line: str) -> bool:
    """Whether the line belongs to a paragraph whose brackets are counted."""
    return bool(line.strip()) and len(line) <= MAX_LINE
