"""Longest matches of the last tokens, and what followed them: compiled loops over arrays of token ids.

It knows integers, neither files nor text. Texts lie one behind the other in an array, each followed by `SEPARATOR` of
the array's type, which also stands at its beginning; no match goes across one. Two structures answer the same question:

- a *chain*: for each pair of tokens the places where it stands, the latest first, linked as they come. Cheap to extend
  and to take back; the time to search it grows with how often the pair stands there, so only the latest are looked at.
- a *sorted* text: all places, in the order of the tokens before them read backwards (a suffix array of the reversed
  text, compared up to `LONGEST` tokens). Two binary searches find all places of the longest match.

A search is for several rows at once. Row r's context is `known[: first + r + 1]`. What is found is gathered over
several texts in four arrays: `length` int32 [R], the longest match so far (0: none); `used` int32 [R]; `ids` int32 [R,
D] and `counts` float32 [R, D], what followed matches of that length and how often.

Sources: suffix arrays (Manber and Myers 1993), with their prefix doubling for the sort; n-gram language models of any
length over one (Liu et al. 2024, arXiv 2401.17377).
"""

# What is compiled here is typed by numba, whose integers are not Python's.
# mypy: disable-error-code="no-any-return,assignment"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[Any]

#: Tokens of a context that are compared at most, and that a match has at least.
LONGEST, SHORTEST = 16, 2
#: Places that are looked at for a row: of a chain the latest, of a sorted text so many that lie evenly in the order.
#: The latter are spread over all of a file on disk.
PLACES, SPREAD = 512, 128
#: Different followers that are counted for a row.
DISTINCT = 64


def separator(dtype: npt.DTypeLike) -> int:
    """What stands between texts in an array of this type: its largest value, so that it is sorted last."""
    return int(np.iinfo(dtype).max)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiles at the first call, and keeps what was compiled on disk where there is a folder for it."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's own folder nor the user's cache can be written to
        return njit(nogil=True, error_model="numpy")(function)


def available() -> bool:
    """Whether numba may compile here; interpreted, this would be far too slow to serve."""
    return not numba.config.DISABLE_JIT  # type: ignore[attr-defined]  # numba sets its names at run time


def found(rows: int) -> tuple[Array, Array, Array, Array]:
    """Empty `length`, `used`, `ids`, `counts`."""
    ids, counts = np.zeros((rows, DISTINCT), np.int32), np.zeros((rows, DISTINCT), np.float32)
    return np.zeros(rows, np.int32), np.zeros(rows, np.int32), ids, counts


@_compiled
def _note(row, n, token, weight, length, used, ids, counts):  # type: ignore[no-untyped-def]
    """Counts a follower of a match of n tokens; a longer match makes shorter ones forgotten."""
    if n < length[row]:
        return
    if n > length[row]:
        length[row], used[row] = n, 0
    for i in range(used[row]):
        if ids[row, i] == token:
            counts[row, i] += weight
            return
    if used[row] < ids.shape[1]:
        ids[row, used[row]], counts[row, used[row]] = token, weight
        used[row] += 1


@_compiled
def _bucket(a, b, buckets):  # type: ignore[no-untyped-def]
    """The list of a pair of tokens; buckets: a power of two."""
    mixed = (np.uint64(a) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(b) * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(buckets - 1))


@_compiled
def link(tokens, previous, heads, start, end):  # type: ignore[no-untyped-def]
    """Adds the places `start` to `end` - 1 of a text to its chains. tokens, previous: int32 [at least end]; heads:
    int32 [a power of two], -1 where a list is empty."""
    stop = np.iinfo(np.int32).max
    for i in range(start, end):
        if i == 0 or tokens[i] == stop or tokens[i - 1] == stop:
            previous[i] = -2  # in no chain
        else:
            bucket = _bucket(tokens[i - 1], tokens[i], len(heads))
            previous[i] = heads[bucket]
            heads[bucket] = i


@_compiled
def unlink(tokens, previous, heads, start, end):  # type: ignore[no-untyped-def]
    """Takes back `link` of the last places, from `start` to `end` - 1, whose tokens are still the same."""
    for i in range(end - 1, start - 1, -1):
        if previous[i] != -2:
            heads[_bucket(tokens[i - 1], tokens[i], len(heads))] = previous[i]


@_compiled
def search_chain(  # type: ignore[no-untyped-def]
    tokens, previous, heads, size, skip_start, skip_end, known, first, vocab, length, used, ids, counts
):
    """Gathers from a chained text of `size` tokens, but for the places from `skip_start` to `skip_end` - 1."""
    for row in range(len(length)):
        end = first + row
        if end < 1:
            continue
        at = heads[_bucket(known[end - 1], known[end], len(heads))]
        for _ in range(PLACES):
            if at < 0:
                break
            if at + 1 < size and tokens[at + 1] < vocab and not skip_start <= at < skip_end:
                n = 0
                while n < LONGEST and n <= end and n <= at and tokens[at - n] == known[end - n]:
                    n += 1
                if n >= SHORTEST:
                    _note(row, n, tokens[at + 1], 1.0, length, used, ids, counts)
            at = previous[at]


@_compiled
def search_written(known, begin, first, vocab, length, used, ids, counts):  # type: ignore[no-untyped-def]
    """Gathers from what is being written: the places in `known` whose follower stands at `begin` or later, and before
    the row's own end."""
    for row in range(len(length)):
        end = first + row
        for at in range(end - 1, max(begin - 1, 1) - 1, -1):
            if known[at + 1] < vocab:
                n = 0
                while n < LONGEST and n <= at and known[at - n] == known[end - n]:
                    n += 1
                if n >= SHORTEST:
                    _note(row, n, known[at + 1], 1.0, length, used, ids, counts)


@_compiled
def _compare(tokens, at, known, end, n):  # type: ignore[no-untyped-def]
    """How the last n tokens up to a place stand to those of a context: the first difference, read backwards."""
    at = min(at, len(tokens) - 1)  # an index that was damaged on disk must not be followed out of the text
    for k in range(n):
        a, b = np.int64(tokens[at - k]), np.int64(known[end - k])
        if a != b:
            return a - b
    return 0


@_compiled
def _bound(tokens, order, known, end, n, low, high, least):  # type: ignore[no-untyped-def]
    """The first of the sorted places from `low` to `high` that compares as `least` or more."""
    while low < high:
        middle = (low + high) // 2
        if _compare(tokens, np.int64(order[middle]), known, end, n) < least:
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def _same(tokens, at, known, end):  # type: ignore[no-untyped-def]
    """Length of the match at a place."""
    at, n = min(at, len(tokens) - 1), 0
    while n < LONGEST and n <= end and tokens[at - n] == known[end - n]:
        n += 1
    return n


@_compiled
def _lives(live, at):  # type: ignore[no-untyped-def]
    return len(live) == 0 or (np.int64(live[at >> 5]) >> (at & 31)) & 1 == 1


@_compiled
def search_sorted(  # type: ignore[no-untyped-def]
    tokens, order, live, skip_start, skip_end, known, first, vocab, length, used, ids, counts
):
    """Gathers from a sorted text, but for the places from `skip_start` to `skip_end` - 1. Of more than `SPREAD` equal
    places, each that is looked at counts for more. live: uint32 words, a bit a place, 0 where it is deleted; none: all
    live."""
    for row in range(len(length)):
        end = first + row
        n = min(LONGEST, end + 1)
        low, high = len(order), 0
        while n >= max(SHORTEST, length[row]):
            low = _bound(tokens, order, known, end, n, 0, low, 0)
            high = _bound(tokens, order, known, end, n, max(low, high), len(order), 1)
            looked = min(high - low, SPREAD)
            some = False
            for i in range(looked):
                at = np.int64(order[low + i * (high - low) // looked])
                if at + 1 >= len(tokens) or not _lives(live, at) or skip_start <= at < skip_end:
                    continue
                token = np.int64(tokens[at + 1])
                if token < vocab:
                    some = True
                    _note(row, n, token, (high - low) / looked, length, used, ids, counts)
            if some:
                break
            # None of that length, or none that counts: the next one is that of a neighbour in the order.
            n = 0
            if low > 0:
                n = _same(tokens, np.int64(order[low - 1]), known, end)
            if high < len(order):
                n = max(n, _same(tokens, np.int64(order[high]), known, end))


@_compiled
def top(length, used, ids, counts, most, token, share, total):  # type: ignore[no-untyped-def]
    """The `most` most frequent followers of each row, the smallest id of equals first: their ids in `token` int32
    [R, most], their shares of what these were seen in `share` float64 [R, most], 0 where there are fewer, and in
    `total` float64 [R] how often they were seen."""
    for row in range(len(length)):
        total[row] = 0.0
        for i in range(min(most, used[row])):
            best = i
            for j in range(i + 1, used[row]):
                more = counts[row, j] - counts[row, best]
                if more > 0 or (more == 0 and ids[row, j] < ids[row, best]):
                    best = j
            ids[row, i], ids[row, best] = ids[row, best], ids[row, i]
            counts[row, i], counts[row, best] = counts[row, best], counts[row, i]
            token[row, i], share[row, i] = ids[row, i], counts[row, i]
            total[row] += counts[row, i]
        for i in range(min(most, used[row])):
            share[row, i] /= total[row]


def sort(tokens: Array) -> Array:
    """uint32: the places of a text that a token follows, in the order that `search_sorted` needs.

    tokens: [N], beginning and ending with the separator of its type. By prefix doubling: from the order of contexts of
    k tokens follows that of 2 k.
    """
    stop, places = separator(tokens.dtype), np.arange(len(tokens))
    ends = tokens == stop
    #: Tokens since the last separator: a context that is cut short by it is no longer compared beyond.
    back = places - np.maximum.accumulate(np.where(ends, places, 0))
    rank, order = tokens.astype(np.uint64), places
    for k in (1, 2, 4, 8):
        key = rank << np.uint64(32)
        key[k:] |= np.where(back[k:] >= k, rank[:-k] + np.uint64(1), np.uint64(0))
        order = np.argsort(key, kind="stable")
        in_order = key[order]
        rank[order] = np.concatenate([[0], np.cumsum(in_order[1:] != in_order[:-1])]).astype(np.uint64)
    followed = ~ends
    followed[:-1] &= ~ends[1:]
    return order[followed[order]].astype(np.uint32)


@_compiled
def _ones(word):  # type: ignore[no-untyped-def]
    """The number of bits set in 32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101 & 0xFFFFFFFF) >> 24


@_compiled
def live_before(live, before):  # type: ignore[no-untyped-def]
    """Writes to `before`, int64 [words + 1], how many places live before each word of `live`."""
    before[0] = 0
    for i in range(len(live)):
        before[i + 1] = before[i] + _ones(np.int64(live[i]))


@_compiled
def clear(live, start, end):  # type: ignore[no-untyped-def]
    """Deletes the places from `start` to `end` - 1."""
    for at in range(start, end):
        live[at >> 5] = np.uint32(np.int64(live[at >> 5]) & ~(1 << (at & 31)))


@_compiled
def _moved(live, before, at):  # type: ignore[no-untyped-def]
    """Where a place stands once all deleted ones before it are gone."""
    return before[at >> 5] + _ones(np.int64(live[at >> 5]) & ((1 << (at & 31)) - 1))


@_compiled
def move(live, before, places, shift):  # type: ignore[no-untyped-def]
    """Replaces each place by where it stands once all deleted ones before it are gone, and `shift` further behind."""
    for i in range(len(places)):
        places[i] = _moved(live, before, places[i]) + shift


@_compiled
def copy_live(tokens, live, out):  # type: ignore[no-untyped-def]
    """Copies what lives to the beginning of `out`; returns how much that is."""
    n = 0
    for at in range(len(tokens)):
        if _lives(live, at):
            out[n] = tokens[at]
            n += 1
    return n


@_compiled
def merge(tokens_a, order_a, live_a, before_a, tokens_b, order_b, live_b, before_b, out):  # type: ignore[no-untyped-def]
    """The order of what lives of one sorted text and then of another, from theirs, to `out`; returns how many places
    that are."""
    stop = np.int64(np.iinfo(tokens_a.dtype).max)
    shift = before_a[-1]
    i = j = n = 0
    while True:
        while i < len(order_a) and not _lives(live_a, np.int64(order_a[i])):
            i += 1
        while j < len(order_b) and not _lives(live_b, np.int64(order_b[j])):
            j += 1
        if i == len(order_a) and j == len(order_b):
            return n
        first = j == len(order_b)
        if i < len(order_a) and j < len(order_b):
            a, b, first = np.int64(order_a[i]), np.int64(order_b[j]), True
            for k in range(LONGEST):
                x, y = np.int64(tokens_a[a - k]), np.int64(tokens_b[b - k])
                if x != y:
                    first = x < y
                    break
                if x == stop:
                    break
        if first:
            out[n] = _moved(live_a, before_a, np.int64(order_a[i]))
            i += 1
        else:
            out[n] = shift + _moved(live_b, before_b, np.int64(order_b[j]))
            j += 1
        n += 1
