"""The gap as text while it is being written: what its tokens say, and where it may end.

Knows bytes, lines and indentation; no tensors, no grammar. Which end is taken is decided elsewhere; this module says
when there is no use in going on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from infill_engine.protocol import Candidate, End, InfillRequest, Reason, end_scores, is_open

#: A tab stands for this many columns.
TAB = 8

#: The best end is clear when it leads all later ones that are not open, of which there is one at least, by so much of
#: `end_scores`. On held-out gaps that takes 2.0 lines beyond the true end, and 2.9 without it; it then is the true one
#: in 67% instead of 68%.
CLEAR_MARGIN = 3.0

#: A text is stuck if it ends with the same run of up to so many bytes, so many times over, for so many bytes in all.
LONGEST_STUTTER, STUTTERS, STUTTER_BYTES = 48, 4, 24


@dataclass(slots=True)
class GapText:
    """Grows by tokens; `rest` is what healing took back and the first tokens write again."""

    request: InfillRequest
    rest: bytes
    _bytes: bytearray = field(default_factory=bytearray)
    _probs: list[float] = field(default_factory=list)
    _ends_at: list[int] = field(default_factory=list)  # in bytes, a token
    _ends: list[End] = field(default_factory=list)  # with offsets in bytes
    #: The product of the probabilities of the gap's own tokens.
    _product: float = 1.0
    #: Byte length of the text that counts, once a rule has cut it.
    _limit: int | None = None

    @property
    def pending(self) -> bytes:
        """What of `rest` is still to be written."""
        return self.rest[len(self._bytes) :]

    @property
    def tokens(self) -> int:
        """Tokens written, those that only write `rest` again included."""
        return len(self._probs)

    @property
    def length(self) -> int:
        """Bytes of the gap written; negative while `rest` is being written again."""
        return len(self._bytes) - len(self.rest)

    @property
    def is_begun(self) -> bool:
        """Whether a gap of one line has become several, and what they opened is not closed yet."""
        gap = self._gap
        return self.request.max_lines == 1 and b"\n" in gap and is_open(gap.decode(errors="ignore"))

    @property
    def probs(self) -> list[float]:
        """The probability of each token."""
        return self._probs

    def append(self, token: bytes, prob: float) -> Reason | None:
        """Takes one more token; returns why nothing should follow it, or None."""
        before = self.length
        self._bytes += token
        self._probs.append(prob)
        self._ends_at.append(self.length)
        return self._stop(max(before, 0)) or self._break_off(prob)

    def score(self, at: int, suffix_logprob: float | None, end_prob: float) -> Reason | None:
        """Records a line end, at a byte offset of the gap, as a place to stop; says whether the best end is clear. Then
        the text ends here, whatever was written in the same pass after it."""
        self._ends.append(End(at, suffix_logprob, end_prob, is_open(self._gap[:at].decode(errors="ignore"))))
        opened = [end.open for end in self._ends]
        if suffix_logprob is not None and is_clear(end_scores(self._ends), opened, CLEAR_MARGIN):
            self._limit = at
            return "end"
        return None

    def close(self) -> None:
        """Drops a word that may be half written, unless it is all there is."""
        if self._limit is None:
            self._limit = self._whole_words()

    def candidate(self, whole_words: bool = False) -> Candidate:
        """The text so far with its probabilities and scored ends; with `whole_words` as if it were closed here."""
        gap = self._gap
        limit = self._limit
        if limit is None:
            limit = self._whole_words() if whole_words else len(gap)
        raw = gap[:limit]
        ascii_only = raw.isascii()

        def chars(offset: int) -> int:
            return max(offset, 0) if ascii_only else len(raw[: max(offset, 0)].decode(errors="ignore"))

        kept = [(p, chars(e)) for p, e in zip(self._probs, self._ends_at, strict=True) if 0 < e <= limit]
        return Candidate(
            text=raw.decode(errors="ignore"),
            probs=tuple(p for p, _ in kept),
            offsets=tuple(e for _, e in kept),
            ends=tuple(replace(end, offset=chars(end.offset)) for end in self._ends if end.offset <= limit),
        )

    def _whole_words(self) -> int:
        """The length without a word at the end that may be half written, unless it is all there is."""
        gap = self._gap
        whole = gap.rstrip(_WORD)
        return len(whole) if whole.strip() else len(gap)

    @property
    def _gap(self) -> bytes:
        return bytes(self._bytes[len(self.rest) :])

    def _stop(self, before: int) -> Reason | None:
        gap, request = self._gap, self.request
        new_line = gap.find(b"\n", before)
        if new_line >= 0 and request.max_lines == 1 and self._is_over(gap[:new_line]):
            return self._cut(new_line)
        lines = gap.split(b"\n")
        start = gap.rfind(b"\n") + 1
        last = lines[-1]
        if len(lines) > 1 and last.strip():
            if request.min_indent is not None and columns(last) < request.min_indent:
                return self._cut(start)
            if request.max_lines == 1 and self._is_left(gap[:start], last):
                return self._cut(start)
            if sum(1 for line in lines if line.strip()) > max(request.max_lines, request.open_lines):
                return self._cut(start, "limit")
        if new_line >= 0:
            finished = gap[:new_line].rsplit(b"\n", 1)[-1]
            whole = finished if len(finished) < new_line else request.head.encode() + finished
            if self._repeats_suffix(whole):
                return self._cut(new_line - len(finished))
        if (once := _stutter(gap)) is not None:
            # What repeats itself is worth nothing, and seldom is what led there: keep the lines before it.
            return self._cut(max(gap.rfind(b"\n", 0, once), 0) or once, "limit")
        return "limit" if self.tokens >= request.max_tokens else None

    def _is_over(self, lines: bytes) -> bool:
        """Whether a gap of one line ends with these whole lines: what the first has opened is closed, on a line that
        stands no deeper."""
        first, *later = lines.split(b"\n")
        if self.request.open_lines <= 1 or not (later or is_open(first.decode(errors="ignore"))):
            return True
        own = columns(self.request.head.encode())
        return bool(later) and columns(later[-1]) <= own and not is_open(lines.decode(errors="ignore"))

    def _is_left(self, lines: bytes, begun: bytes) -> bool:
        """Whether the line that has begun after these is no part of a gap of one line: it stands less deep than the
        first, or as deep while nothing is open."""
        own = columns(self.request.head.encode())
        return columns(begun) < own or (columns(begun) == own and not is_open(lines.decode(errors="ignore")))

    def _break_off(self, prob: float) -> Reason | None:
        """Where the text has become less sure than anybody is shown. The token that made it so stays: what stands
        before it may be told from a whole text, and a word from its beginning."""
        if self.length > 0:
            self._product *= prob
        if self._product >= self.request.min_prob:
            return None
        self._limit = self.length
        return "unsure"

    def _cut(self, at: int, reason: Reason = "end") -> Reason:
        self._limit = len(self._gap[:at].rstrip(b"\n"))
        return reason

    def _repeats_suffix(self, line: bytes) -> bool:
        """Whether a finished line is the suffix's next line: the gap is over before it."""
        following = self.request.suffix.lstrip("\n").split("\n", 1)[0].strip().encode()
        return len(following) > 3 and line.strip() == following


_NO_WORD = bytes(c for c in range(0x80) if not chr(c).isalnum())
_WORD = bytes(c for c in range(256) if chr(c).isalnum() or c == ord("_") or c >= 0x80)


def is_clear(scores: Sequence[float], opened: Sequence[bool], margin: float) -> bool:
    """Whether the best of the line ends so far leads all later ones that are not open by the margin."""
    best = scores.index(max(scores))
    later = [score for score, one in zip(scores[best + 1 :], opened[best + 1 :], strict=True) if not one]
    return bool(later) and max(later) < scores[best] - margin


def _stutter(text: bytes) -> int | None:
    """Where the first of the equal runs ends that the text ends with, if it does. One character again and again, as in
    a ruler or a number, is none, nor is what holds no word."""
    if len(text) < STUTTER_BYTES:
        return None
    for period in range(2, LONGEST_STUTTER + 1):
        if text[-1 - period : -period] != text[-1:]:
            continue
        run = text[-period:]
        times = max(STUTTERS, -(-STUTTER_BYTES // period))
        if text.endswith(run * times) and len(set(run)) > 1 and run.strip(_NO_WORD):
            return len(text) - (times - 1) * period
    return None


def stays(text: bytes, line_end: int) -> bool:
    """Whether the line that ends at byte `line_end` of a growing gap stays, however the gap goes on.

    An empty line may be cut off with what follows it; any line may, as long as it can turn out to be one of the equal
    runs of a text that is stuck.
    """
    if text[:line_end].endswith(b"\n"):
        return False
    periods = range(2, min(LONGEST_STUTTER, line_end) + 1)
    return not any(text[line_end - period : len(text) - period] == text[line_end:] for period in periods)


def columns(line: bytes) -> int:
    """The columns that the whitespace at the line's beginning takes."""
    columns = 0
    for byte in line:
        if byte == ord(" "):
            columns += 1
        elif byte == ord("\t"):
            columns += TAB - columns % TAB
        else:
            break
    return columns
