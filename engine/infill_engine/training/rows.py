"""Windows of documents with gaps, as rows of tokens to learn from.

What a canvas will see when the model serves is laid out here from text: the stream up to the gap, healed at the cursor;
the tail and suffix as a block of the length that serving affords; the true middle with END behind it; and groups of
masks hung onto places in it. It knows text and tokens, no tensors of the model.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from infill_engine.config import EngineConfig
from infill_engine.smollm import END_ID, LEFT_TOKENS, MASK_ID, SINK_ID
from infill_engine.tokenizer import LineTokenizer
from infill_engine.training.model import Row, Window

#: Tokens of the suffix that serving affords, and of a snippet.
SUFFIX, SNIPPET = EngineConfig().suffix_tokens, EngineConfig().snippet_tokens


class GapRecord(msgspec.Struct, frozen=True):
    """A gap of a window: its text is `text[start:end]`."""

    made: str
    start: int
    end: int


class WindowRecord(msgspec.Struct, frozen=True):
    """A run of whole lines of a document, with the gaps cut out of it; a line of a file of gaps."""

    package: str
    language: str
    path: str
    text: str
    snippet: str
    gaps: list[GapRecord]


@dataclass(frozen=True, slots=True)
class Mix:
    """What rows are made of. Shares are probabilities."""

    #: Of gaps that see no suffix; of windows whose gaps see a block as long as serving affords. In the others it has
    #: `suffix` tokens at most, but as many in all gaps of a window: blocks are padded to the longest.
    no_suffix: float = 0.06
    whole_suffix: float = 0.15
    suffix: tuple[int, int] = (8, 48)
    #: Of windows whose snippet is used, where they have one.
    snippet: float = 0.8
    #: Of gaps whose block stands farther away, as behind a longer prefix.
    far: float = 0.3
    #: Of the loss that is of known tokens; the rest is of masks.
    dense: float = 0.82
    #: Groups of masks a gap: at most, and one for so many tokens.
    groups: int = 5
    every: int = 3
    #: Masks in a group, at most; mask j weighs `fading` to the power of j - 1.
    masks: int = 5
    fading: float = 0.8
    #: Tokens of a middle at most: longer gaps are left out.
    middle: int = 160


def records(path: Path) -> Iterator[WindowRecord]:
    """The windows of a file of gaps."""
    decoder = msgspec.json.Decoder(WindowRecord)
    with gzip.open(path, "rb") as file:
        for line in file:
            yield decoder.decode(line)


def window(
    record: WindowRecord, tokenizer: LineTokenizer, chance: random.Random, mix: Mix, still: bool = False
) -> Window | None:
    """The window's rows, None where no gap of it can be learned from. still: for measuring, without what is only
    there for variety."""
    stream = [SINK_ID, *tokenizer.encode(record.text)]
    snippet: list[int] = []
    if record.snippet and (still or chance.random() < mix.snippet):
        snippet = [SINK_ID, *tokenizer.encode(record.snippet)[:SNIPPET]]
    suffix = SUFFIX if still or chance.random() < mix.whole_suffix else chance.randint(*mix.suffix)
    made = (_row(record.text, gap, stream, tokenizer, chance, mix, still, bool(snippet), suffix) for gap in record.gaps)
    rows = [row for row in made if row is not None]
    return Window(stream, snippet, _shared(rows, mix)) if rows else None


def _row(
    text: str,
    gap: GapRecord,
    stream: Sequence[int],
    tokenizer: LineTokenizer,
    chance: random.Random,
    mix: Mix,
    still: bool,
    snippet: bool,
    suffix: int,
) -> Row | None:
    """None for a gap whose text before it is not the beginning of the window's tokens, or that is too long."""
    segments = tokenizer.segments(text[: gap.start])
    if not segments:
        return None
    head = tokenizer.heal(segments[-1])
    before = [SINK_ID, *(t for segment in segments[:-1] for t in tokenizer.encode_segment(segment)), *head.tokens]
    size = len(before)
    middle = tokenizer.continuation(segments[-1], head, text[gap.start : gap.end])
    if middle is None or len(middle) > mix.middle or stream[:size] != before or size <= LEFT_TOKENS[0] + 1:
        return None
    left = _left(size, len(head.tokens), chance, still)
    blind = not still and chance.random() < mix.no_suffix
    block = [] if blind else _block(text[gap.end :], tokenizer, suffix)
    origin, known = size - left, left + len(middle)
    tokens, positions = [*before[origin:], *middle], list(range(origin, size + len(middle)))
    answers = [*middle, END_ID]
    targets, ahead = [*[-1] * (left - 1), *answers], [0] * known
    groups, seen = [-1] * known, []
    for group, at in enumerate(_places(len(middle), chance, mix, still)):
        count = mix.masks if still else chance.randint(1, mix.masks)
        count = min(count, len(middle) - at)
        for j in range(1, count + 1):
            tokens.append(MASK_ID)
            positions.append(size + at + j - 1)
            groups.append(group)
            targets.append(answers[at + j])
            ahead.append(j)
        seen.append(left + at)
    return Row(
        tokens=tokens,
        positions=positions,
        groups=groups,
        seen=seen,
        known=known,
        origin=origin,
        block=block,
        distance=0 if still or chance.random() > mix.far else chance.randrange(700),
        snippet=snippet,
        targets=targets,
        weights=[_weight(t, j, mix) for t, j in zip(targets, ahead, strict=True)],
        ahead=ahead,
        allowed=dict(enumerate(tokenizer.restricted(head.rest, middle), left - 1)),
    )


def _left(size: int, head: int, chance: random.Random, still: bool) -> int:
    """Known tokens on the canvas: as a request that finds nothing cached has it, or as after some typing."""
    least, most = LEFT_TOKENS
    if still or chance.random() < 0.6:
        return min(size - 1, max(least, min(head, most)))
    return min(size - 1, chance.randint(least, most))


def _block(text: str, tokenizer: LineTokenizer, most: int) -> list[int]:
    """The first `most` tokens of the text after the gap as a block; [] where only space follows."""
    return [SINK_ID, *tokenizer.beginning(text, most)[:most]] if text.strip() else []


def _places(middle: int, chance: random.Random, mix: Mix, still: bool) -> list[int]:
    """How many tokens of the middle are known where each group of masks is hung."""
    count = min(mix.groups, -(-middle // mix.every))
    if still:
        return list(range(0, middle, max(1, -(-middle // count)))) if count else []
    return sorted(chance.sample(range(middle), count))


def _weight(target: int, ahead: int, mix: Mix) -> float:
    """What a prediction weighs among those of its sort. All known tokens weigh the same: to let END weigh twice would
    double its odds, and gaps would end too soon."""
    if target < 0:
        return 0.0
    return mix.fading ** max(0, ahead - 1)


def _shared(rows: Sequence[Row], mix: Mix) -> list[Row]:
    """The rows with weights of which all known tokens have their share, and all masks theirs, of 1 in all."""
    sums = [1e-9, 1e-9]
    for row in rows:
        for ahead, weight in zip(row.ahead, row.weights, strict=True):
            sums[ahead > 0] += weight
    factors = mix.dense / sums[0], (1 - mix.dense) / sums[1]
    return [
        replace(row, weights=[w * factors[ahead > 0] for ahead, w in zip(row.ahead, row.weights, strict=True)])
        for row in rows
    ]
