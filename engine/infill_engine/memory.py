"""What followed the last tokens elsewhere in this file and in this workspace, mixed into what the model says.

A small model does not know a project's names; the project does. For a slot whose left neighbours are known, the longest
match of the last 2 to 16 tokens is looked up in the open file (its lines around the gap, and what has
been written into it) and in the workspace's other files, and what followed there is counted:

    p(t) = (1 - p_model(END)) (w0 p_model(t | not END) + w1 p_file(t) + w2 p_workspace(t)),    p(END) = p_model(END)

with weights from a small table by the matches' lengths and counts, fitted on held-out code at temperature 1
(`infill_engine.training.memory`). Outside the memory's few candidates the mixture is a multiple of the model, so its
most probable token is the model's own or one of the candidates, and is found exactly without the model's other logits;
so is its entropy. The same counts propose tokens to be checked.

It knows token ids; no model by name, no file, no grammar.

Sources: mixture with counts of n-grams of any length (Liu et al. 2024, Infini-gram, arXiv 2401.17377, section 5; Grave
et al. 2017, continuous cache, arXiv 1612.04426); expectation-maximisation for mixture weights (Dempster et al. 1977);
prompt look-up decoding (Saxena 2023).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from infill_engine import ngrams
from infill_engine.ngrams import LONGEST
from infill_engine.workspace import Workspace

Array = npt.NDArray[Any]

#: Candidates that each part of the memory names for a slot, those that followed most often.
NAMED = 16
#: Files whose chains are kept.
KEPT_FILES = 16
#: The shipped table.
WEIGHTS = Path(__file__).with_name("memory.json")


class Match(NamedTuple):
    """What one part of the memory knows of some rows."""

    #: int32 [R], tokens that agree; 0 where nothing is found.
    length: Array
    #: float64 [R], how often that stands there.
    times: Array
    #: int32 [R, NAMED], what followed, the most frequent first.
    ids: Array
    #: float64 [R, NAMED], the share of each in those named; 0 where there are fewer.
    share: Array

    def only(self, admitted: Array) -> Match:
        """The same without ids that are not admitted, bool [R, NAMED]; no match where none is left."""
        share = np.where(admitted, self.share, 0.0)
        total = share.sum(1, keepdims=True)
        share = share / np.where(total > 0, total, 1.0)
        return Match(np.where(total[:, 0] > 0, self.length, 0), self.times, self.ids, share)


class _Fitted(msgspec.Struct, frozen=True):
    """The table as a file."""

    #: What it was fitted on and with; for people.
    note: str
    #: The lower ends of the buckets of lengths, and of counts.
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    #: [buckets of lengths in the file][in the workspace][buckets of counts in the workspace][3].
    weights: list[list[list[tuple[float, float, float]]]]


@dataclass(frozen=True, slots=True)
class Weights:
    """The mixing weights by bucket. A bucket of lengths begins at each of `lengths`, one of counts at each of `counts`;
    what is below the first has a bucket of its own."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    #: float64 [lengths + 1, lengths + 1, counts + 1, 3], each three at least 0 with the sum 1.
    table: Array
    note: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.lengths) + 1, len(self.lengths) + 1, len(self.counts) + 1, 3)
        if self.table.shape != shape:
            raise ValueError(f"the memory's weights must have the shape {shape}, not {self.table.shape}")
        if self.table.min() < 0 or not np.allclose(self.table.sum(-1), 1.0, atol=0.002):
            raise ValueError("the memory's weights must be at least 0, with the sum 1")

    @staticmethod
    def load(path: Path = WEIGHTS) -> Weights:
        """Raises `ValueError` for a file that is no such table, `OSError` where there is none."""
        try:
            fitted = msgspec.json.decode(path.read_bytes(), type=_Fitted)
            return Weights(fitted.lengths, fitted.counts, np.array(fitted.weights), fitted.note)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"{path} is no table of the memory's weights: {error}") from None

    def save(self, path: Path) -> None:
        """Writes the table with three digits."""
        rounded = self.table.round(3)
        rounded[..., 0] = np.maximum(0.0, 1.0 - rounded[..., 1] - rounded[..., 2]).round(3)
        fitted = _Fitted(self.note, self.lengths, self.counts, rounded.tolist())
        path.write_bytes(msgspec.json.format(msgspec.json.encode(fitted), indent=0) + b"\n")

    def bucket(self, file: Match, workspace: Match) -> tuple[Array, Array, Array]:
        """Where in the table each row stands, three int64 [R]."""
        count = np.where(workspace.length > 0, workspace.times, 0)
        in_file, in_workspace = (np.searchsorted(self.lengths, match.length, "right") for match in (file, workspace))
        return in_file, in_workspace, np.searchsorted(self.counts, count, "right")

    def of(self, file: Match, workspace: Match) -> Array:
        """float64 [R, 3]: the weights of model, file and workspace. A part without a match has none."""
        weights: Array = self.table[self.bucket(file, workspace)].copy()
        weights[:, 1] *= file.length > 0
        weights[:, 2] *= workspace.length > 0
        total = weights.sum(1, keepdims=True)
        normed: Array = np.where(total > 0, weights / np.where(total > 0, total, 1.0), [[1.0, 0.0, 0.0]])
        return normed


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the memory says of R rows; row i is of the slot i after the frontier. No id stands twice in a row."""

    #: int64 [R, C]; where both shares are 0 nothing is named, and the id is 0.
    ids: Array
    #: float64 [R, C], p_file and p_workspace of each.
    file: Array
    workspace: Array
    #: float64 [R, 3], w0, w1 and w2.
    weights: Array
    #: int32 [R, 2], the lengths of the matches in file and workspace.
    lengths: Array

    @staticmethod
    def of(file: Match, workspace: Match, weights: Weights) -> Candidates:
        """Joins what both parts name."""
        both = (file.ids[:, :, None] == workspace.ids[:, None, :]) & (file.share[:, :, None] > 0)
        of_file = np.concatenate([file.share, np.zeros_like(workspace.share)], 1)
        shared = np.where(both, workspace.share[:, None, :], 0.0).sum(2)
        of_workspace = np.concatenate([shared, np.where(both.any(1), 0.0, workspace.share)], 1)
        named = of_file + of_workspace > 0
        ids = np.where(named, np.concatenate([file.ids, workspace.ids], 1), 0).astype(np.int64)
        used = named.any(0)  # columns that no row needs cost a dot product each
        lengths = np.stack([file.length, workspace.length], 1)
        return Candidates(ids[:, used], of_file[:, used], of_workspace[:, used], weights.of(file, workspace), lengths)

    @staticmethod
    def stacked(parts: Sequence[tuple[int, Candidates]], rows: int) -> Candidates:
        """Those of several canvases as one, for a pass of so many rows: each with the row at which it begins. Of rows
        between them nothing is named, and all is left to the model."""
        width = max((part.ids.shape[1] for _, part in parts), default=0)
        ids, weights = np.zeros((rows, width), np.int64), np.tile([1.0, 0.0, 0.0], (rows, 1))
        file, workspace, lengths = np.zeros((rows, width)), np.zeros((rows, width)), np.zeros((rows, 2), np.int32)
        for at, part in parts:
            own, columns = slice(at, at + len(part.ids)), slice(part.ids.shape[1])
            ids[own, columns], file[own, columns], workspace[own, columns] = part.ids, part.file, part.workspace
            weights[own], lengths[own] = part.weights, part.lengths
        return Candidates(ids, file, workspace, weights, lengths)

    @property
    def named(self) -> Array:
        """bool [R, C]: where a candidate stands."""
        named: Array = self.file + self.workspace > 0
        return named

    @property
    def remembered(self) -> Array:
        """float64 [R, C]: the memory's share of each candidate's probability, w1 p_file + w2 p_workspace."""
        remembered: Array = self.weights[:, 1:2] * self.file + self.weights[:, 2:] * self.workspace
        return remembered


class Mixed(NamedTuple):
    """What a mixture says of R rows."""

    #: int64 [R], the most probable id, the smallest of equals.
    token: Array
    #: float64 [R], its probability.
    prob: Array
    #: float64 [R], in nats.
    entropy: Array
    #: float64 [R, C], the probability of each candidate.
    candidates: Array


def mix(
    candidates: Candidates,
    token: Array,
    prob: Array,
    lse: Array,
    entropy: Array,
    logits: Array,
    end_id: int,
    end_prob: Array,
) -> Mixed:
    """The mixture of what a model says, at temperature 1 or any other, with the memory.

    token: int64 [R], the model's most probable id; prob, lse, entropy: [R], as `infill_kernels.unmask` has them;
    logits: [R, C] of the candidates, divided by the temperature; end_prob: [R], the model's probability of END, which
    is no candidate, 0 where END is not admitted. Exact, if the model and the candidates admit the same ids: with e the
    probability of END and q = w0 p + (1 - e) r for the candidates C, r what the memory says, any other id has w0 p, so

        argmax q = the model's, END, or one of C;
        H(q) = w0 (H(p) + sum_C p log p + e log e) - w0 log w0 (1 - e - sum_C p) - sum_C q log q - e log e.
    """
    named, w0 = candidates.named, candidates.weights[:, 0]
    p = np.where(named, np.exp(np.minimum(logits - lse[:, None], 0.0)), 0.0)
    own = named & (candidates.ids == token[:, None])
    p = np.where(own, prob[:, None], p)  # the one number where a head and its single rows round differently
    end = np.where(token == end_id, prob, np.minimum(end_prob, prob))
    q = np.where(named, w0[:, None] * p + (1.0 - end)[:, None] * candidates.remembered, 0.0)
    first = np.where(token == end_id, prob, np.where(own.any(1), 0.0, w0 * prob))
    best = np.concatenate([first[:, None], end[:, None], q], 1)
    ids = np.concatenate([token[:, None], np.full_like(token, end_id)[:, None], candidates.ids], 1)
    highest = best.max(1)
    chosen = np.where(best == highest[:, None], ids, np.iinfo(np.int64).max).min(1)
    others = np.maximum(entropy + _x_log_x(p).sum(1) + _x_log_x(end), 0.0)
    left = np.clip(1.0 - end - p.sum(1), 0.0, 1.0)
    mixed = w0 * others - _x_log_x(w0) * left - _x_log_x(q).sum(1) - _x_log_x(end)
    return Mixed(chosen, highest, np.maximum(mixed, 0.0), q)


def draw(candidates: Candidates, sample: Array, component: Array, follower: Array, end_id: int) -> Array:
    """int64 [R]: a sample of the mixture. Where the model draws END, that; else the part is drawn, then its token.

    sample: int64 [R], drawn from the model; component, follower: float64 [R], uniform in [0, 1).
    """
    bounds = candidates.weights.cumsum(1)
    part = np.minimum((component[:, None] >= bounds).sum(1), 2)
    shares = np.where((part == 1)[:, None], candidates.file, candidates.workspace).cumsum(1)
    if not shares.size:
        return sample.astype(np.int64)
    at = np.minimum((follower[:, None] * shares[:, -1:] >= shares).sum(1), shares.shape[1] - 1)
    remembered = np.take_along_axis(candidates.ids, at[:, None], 1)[:, 0]
    return np.where((sample == end_id) | (part == 0) | (shares[:, -1] <= 0), sample, remembered)


def _x_log_x(x: Array) -> Array:
    return x * np.log(np.where(x > 0, x, 1.0))


class FileMemory:
    """One open file: the lines after the gap and then those before it, chained. What did not change since the last time
    is neither converted nor linked again."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, ...]] = []
        self._flat = np.empty(0, np.int32)  # the tokens of all lines, in the order of the file
        self._ends = np.zeros(1, np.int64)  # where each line begins in it, and where the last one ends
        self._tokens = np.full(1, ngrams.separator(np.int32), np.int32)
        self._previous = np.full(1, -2, np.int32)
        self._heads = np.full(1 << 16, -1, np.int32)
        #: Counts the times that it changed.
        self.version = 0

    def update(self, before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> None:
        """Takes in the file as it is now: the tokens of the lines before and after a gap."""
        lines = [*before, *after]
        first = _same(self._lines, lines)
        shorter = min(len(self._lines), len(lines)) - first
        last = _same(self._lines[::-1][:shorter], lines[::-1][:shorter])
        changed = lines[first : len(lines) - last]
        sizes = np.concatenate(
            [
                np.diff(self._ends)[:first],
                [len(line) for line in changed],
                np.diff(self._ends)[len(self._lines) - last :],
            ]
        ).astype(np.int64)
        start, end = self._ends[first], self._ends[len(self._lines) - last]
        middle = np.fromiter(itertools.chain.from_iterable(changed), np.int32)
        self._flat = np.concatenate([self._flat[:start], middle, self._flat[end:]])
        self._ends = np.concatenate([[0], sizes.cumsum()])
        self._lines = lines
        self._arrange(int(self._ends[len(before)]))

    def _arrange(self, gap: int) -> None:
        """Puts the tokens behind the gap in front of those before it, and links what that changed."""
        stop = [ngrams.separator(np.int32)]
        tokens = np.concatenate([stop, self._flat[gap:], stop, self._flat[:gap]]).astype(np.int32)
        shorter = min(len(tokens), len(self._tokens))
        different = tokens[:shorter] != self._tokens[:shorter]
        kept = int(different.argmax()) if different.any() else shorter
        if kept == len(tokens) == len(self._tokens):
            return
        ngrams.unlink(self._tokens, self._previous, self._heads, kept, len(self._tokens))
        previous = np.empty(len(tokens), np.int32)
        previous[:kept] = self._previous[:kept]
        ngrams.link(tokens, previous, self._heads, kept, len(tokens))
        self._tokens, self._previous = tokens, previous
        self.version += 1

    def search(self, known: Array, first: int, vocab: int, found: tuple[Array, Array, Array, Array]) -> None:
        """Gathers what followed the longest matches, as `infill_engine.ngrams` has it."""
        chain = self._tokens, self._previous, self._heads, len(self._tokens)
        ngrams.search_chain(*chain, 0, 0, known, first, vocab, *found)


def _same(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix, by comparing slices: lines that are the same object cost nothing."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda i: a[: i + 1] != b[: i + 1])


class View:
    """What the memory knows at one gap. `append` what is written into it; ask for `candidates` and for proposals."""

    def __init__(
        self,
        memory: Memory,
        file: FileMemory,
        before: Sequence[tuple[int, ...]],
        after: Sequence[tuple[int, ...]],
        workspace: Workspace | None,
        path: str | None,
    ) -> None:
        self._memory, self._file, self._workspace, self._path = memory, file, workspace, path
        self._before, self._after = before, after
        self._version = -1
        last = list(itertools.islice(itertools.chain.from_iterable(map(reversed, reversed(before))), LONGEST))
        self._known = last[::-1]
        #: Where in `_known` the gap begins.
        self._begin = len(last)

    @property
    def written(self) -> tuple[int, ...]:
        """What has been written into the gap."""
        return tuple(self._known[self._begin :])

    def append(self, token: int) -> None:
        """The next token of the gap."""
        self._known.append(token)

    def cut(self, written: int) -> None:
        """Takes back all but the first `written` tokens of the gap."""
        del self._known[self._begin + written :]

    def refresh(self) -> None:
        """Takes in the file as this gap has it, at first and where it has had another request since."""
        if self._file.version != self._version:
            self._file.update(self._before, self._after)
            self._version = self._file.version

    def candidates(
        self, proposal: Sequence[int] = (), allowed: Mapping[int, Array] | None = None, free: Array | None = None
    ) -> Candidates:
        """What may stand in the slot after what is written, and in the slot after each token of `proposal`, if those
        before it are right: R = 1 + len(proposal) rows.

        allowed: rows that are restricted, each to its ids, bool [V]; free: bool [V], the ids that may be produced at
        all. What they leave out counts for nothing here, as it does in the model's own distribution.
        """
        file, workspace = self.matches(proposal)
        if free is not None or allowed:
            file, workspace = (match.only(_admitted(match.ids, allowed or {}, free)) for match in (file, workspace))
        return Candidates.of(file, workspace, self._memory.weights)

    def propose(self, most: int) -> tuple[int, ...]:
        """The most probable continuation as far as the memory knows: at most `most` tokens and no more than agree with
        what stands before them; () without a match. At 2,324 places of held-out packages 4 tokens at most were 3.1, of
        which 1.5 were right (`Lookup` 2.4 and 1.2); 8 at most were 4.8, of which 2.1 were."""
        proposal: list[int] = []
        while len(proposal) < most:
            found = self.matches(proposal, rows=1)
            if not proposal:
                most = min(most, max(int(match.length[0]) for match in found))
            shares: dict[int, float] = {}
            for match, weight in zip(found, self._memory.weights.of(*found)[0, 1:].tolist(), strict=True):
                for token, share in zip(match.ids[0].tolist(), match.share[0].tolist(), strict=True):
                    if share * weight > 0:
                        shares[token] = shares.get(token, 0.0) + share * weight
            if not shares:
                break
            proposal.append(max(shares, key=shares.__getitem__))
        return tuple(proposal)

    def matches(self, proposal: Sequence[int], rows: int | None = None) -> tuple[Match, Match]:
        """What file and workspace say of the rows of `candidates`, or of the last `rows` of them."""
        self.refresh()
        known = np.array([*self._known, *proposal], np.int32)
        rows = rows or 1 + len(proposal)
        first, vocab = len(known) - rows, self._memory.vocab
        in_file, in_workspace = ngrams.found(rows), ngrams.found(rows)
        self._file.search(known, first, vocab, in_file)
        ngrams.search_written(known, self._begin, first, vocab, *in_file)
        if self._workspace is not None:
            self._workspace.search(known, first, in_workspace, self._path)
        return _match(in_file), _match(in_workspace)


def _match(found: tuple[Array, Array, Array, Array]) -> Match:
    length, used, ids, counts = found
    match = Match(
        length, np.zeros(len(length)), np.zeros((len(length), NAMED), np.int32), np.zeros((len(length), NAMED))
    )
    ngrams.top(length, used, ids, counts, NAMED, match.ids, match.share, match.times)
    return match


def _admitted(ids: Array, allowed: Mapping[int, Array], free: Array | None) -> Array:
    """bool [R, C]: which ids may stand in their row."""
    admitted = np.ones(ids.shape, np.bool_) if free is None else free[ids]
    for row, mask in allowed.items():
        if row < len(ids):
            admitted[row] &= mask[ids[row]]
    return admitted


class Memory:
    """The memory of an engine: its weights, and the files that are open. Not safe to share between threads."""

    def __init__(self, vocab: int, weights: Weights | None = None) -> None:
        """vocab: ids are below it. weights: the shipped ones by default."""
        self.vocab = vocab
        self.weights = weights or Weights.load()
        self._files: OrderedDict[Hashable, FileMemory] = OrderedDict()

    def view(
        self,
        document: Hashable,
        before: Sequence[tuple[int, ...]],
        after: Sequence[tuple[int, ...]],
        workspace: Workspace | None = None,
        path: str | None = None,
    ) -> View:
        """What is known at a gap of a document, between the tokens of the lines before and after it; the cursor line's
        own tokens are the last of `before` and the first of `after`. path: the document's in the workspace, where what
        was put of it counts for nothing."""
        file = self._files.setdefault(document, FileMemory())
        self._files.move_to_end(document)
        if len(self._files) > KEPT_FILES:
            self._files.popitem(last=False)
        return View(self, file, before, after, workspace, path)
