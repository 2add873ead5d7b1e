"""The tokens of a workspace's files, kept on disk so that what followed their n-grams is found in microseconds.

Files come as token lists and are known by a path and a content hash; this module opens no file of the user's, and
knows no model. What is new lies in a chained text in memory. In the background it is sorted, written as a *segment* and
merged with the segments of its size, so that there are few; a deleted file is no longer found from then on, and what it
held leaves the disk with the next merge. Nothing that is written is changed in place: a segment gets its name when it
is complete, and counts when the index names it, so that an engine that is killed leaves what was there before.

A segment is a header (a page: magic, CRC-32 and length of a JSON document), the table of files, the tokens of all files
with a separator behind each, and the order of `infill_engine.ngrams`: 6 bytes a token for vocabularies below 65,535 and
8 for others. Several engines may have one folder open. Whoever writes holds its lock meanwhile, begins from what lies
there, and leaves out what it was told is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from infill_engine import ngrams

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

#: Raised whenever what lies on disk changes its meaning; what is older is built again.
FORMAT = 1
#: Tokens of a file and of a workspace at most. What is beyond is left out.
MOST_FILE, MOST_TOKENS = 1 << 19, 1 << 26
#: Tokens in memory that are merged, those beyond which no file is taken before they are, and the seconds after which
#: any change is merged: well before an idle engine is let go (`EngineConfig.idle_release_s`).
MERGED, MOST_RECENT, MERGED_S = 1 << 18, 1 << 21, 120.0
#: Tokens on disk up to which what was deleted is taken out of them when the workspace is closed (half a second for as
#: many); a larger workspace is written again some time after it is next opened.
REWRITTEN = 1 << 20
#: Seconds after which a deletion is noted on disk, and after which what failed is tried again.
NOTED_S, AGAIN_S = 0.5, 30.0
#: Seconds that a merge under way may go on when the workspace is closed.
CLOSED_S = 1.0
#: Tokens of a segment up to which all of it is read and verified at the start; a larger one is before the first merge.
VERIFIED = 1 << 19
#: The share of a segment's tokens that may be of deleted files before it is written again early.
MOST_DEAD = 0.25

_PAGE, _MAGIC = 4096, b"INFMEM\0\1"
_NO_BITS = np.zeros(0, np.uint32)
_NO_PLACES = np.frombuffer(b"", np.uint32)


class _Header(msgspec.Struct, frozen=True):
    """What a segment begins with."""

    format: int
    vocab: int
    files: int
    tokens: int
    places: int
    #: CRC-32 of all that follows the header.
    content: int = 0

    def columns(self) -> list[tuple[np.dtype[Any], int, int]]:
        """The arrays that follow: type, length, where in the file each begins; then where the file ends."""
        lengths: list[tuple[Any, int]] = [
            (np.uint64, self.files),
            (np.uint64, self.files),
            (np.int32, self.files),
            (np.int32, self.files),
        ]
        lengths += [(_dtype(self.vocab), self.tokens), (np.uint32, self.places)]
        at, columns = _PAGE, []
        for kind, length in lengths:
            columns.append((np.dtype(kind), length, at))
            at += -(-length * np.dtype(kind).itemsize // 64) * 64
        return [*columns, (np.dtype(np.uint8), 0, at)]

    def mapped(self, data: mmap.mmap) -> list[Array]:
        """The same in a file."""
        return [np.frombuffer(data, kind, length, at) for kind, length, at in self.columns()[:-1]]


class _Index(msgspec.Struct, frozen=True):
    """Which segments count, and the files of each that are deleted, by their place in its table."""

    format: int
    vocab: int
    segments: dict[str, list[int]]


class _Unsound(Exception):
    """Something on disk that is not what it should be."""


def folder(root: Path, user: str, workspace: str, tokenizer: str) -> Path:
    """Where a workspace's memory lies below `root`: nothing of it is shared between users, workspaces or tokenizers."""
    name = hashlib.sha256("\0".join((user, workspace, tokenizer)).encode(errors="surrogatepass")).hexdigest()
    return root / name[:32]


def _number(text: str) -> int:
    """64 bits of a hash: two of 200,000 files collide once in a thousand million workspaces."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class _Segment:
    """A sorted text, mapped from disk. Raises `_Unsound`."""

    def __init__(self, path: Path, vocab: int, dead: Sequence[int] = ()) -> None:
        self.name = path.name
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _Unsound(f"{path.name} cannot be read: {error}") from None
        header: _Header = _unpacked(self._map[:_PAGE], _Header)
        self.header = header
        if (header.format, header.vocab) != (FORMAT, vocab) or len(self._map) != header.columns()[-1][2]:
            raise _Unsound(f"{path.name} is of another format")
        #: The files, in the order of their paths: path, content, where the tokens begin, how many there are.
        self.paths, self.contents, self.starts, self.sizes, self.tokens, self.order = header.mapped(self._map)
        self.dead = np.zeros(header.files, np.bool_)
        self.live_tokens = header.tokens
        #: A bit a place, as `ngrams.search_sorted` wants them; none as long as all live.
        self.live = _NO_BITS
        for at in dead:
            if not 0 <= at < header.files:
                raise _Unsound(f"{path.name} has no file {at}")
            self.kill(at)

    @property
    def sound(self) -> bool:
        """Whether its content is what was written; reads all of it."""
        return bool(zlib.crc32(memoryview(self._map)[_PAGE:]) == self.header.content)

    def find(self, path: int) -> int | None:
        """The place of a live file in the table."""
        at = int(np.searchsorted(self.paths, np.uint64(path)))
        return at if at < len(self.paths) and self.paths[at] == path and not self.dead[at] else None

    def span(self, at: int) -> tuple[int, int]:
        """Where a file's tokens begin and where they and their separator end."""
        start, tokens = int(self.starts[at]), int(self.sizes[at])
        if not 0 < start <= start + tokens < len(self.tokens):
            return 0, 0  # damaged on disk, which is noticed elsewhere
        return start, start + tokens + 1

    def kill(self, at: int) -> None:
        """Lets a file be found no more."""
        if self.dead[at]:
            return
        if not len(self.live):
            self.live = _bits(len(self.tokens))
        start, end = self.span(at)
        ngrams.clear(self.live, start, end)
        self.dead[at] = True
        self.live_tokens -= end - start


def _dtype(vocab: int) -> np.dtype[Any]:
    """The type of tokens on disk; its largest value is no id."""
    return np.dtype(np.uint16 if vocab <= np.iinfo(np.uint16).max else np.int32)


def _bits(places: int) -> Array:
    """All live."""
    return np.full(-(-places // 32), 0xFFFFFFFF, np.uint32)


def _packed(document: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(document)
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body


def _unpacked(data: bytes, kind: type[Any]) -> Any:
    """Raises `_Unsound` for anything but what `_packed` made of a document of this kind."""
    crc, size = int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")
    body = data[16 : 16 + size]
    if data[:8] != _MAGIC or len(body) != size or zlib.crc32(body) != crc:
        raise _Unsound("the checksum is wrong")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise _Unsound(str(error)) from None


class _Recent:
    """The files that came since the last merge, chained: path -> (content, where its tokens begin, how many)."""

    def __init__(self) -> None:
        self.files: dict[int, tuple[int, int, int]] = {}
        self.tokens = np.empty(1 << 12, np.int32)
        self.previous = np.empty(1 << 12, np.int32)
        self.heads = np.full(1 << 16, -1, np.int32)
        self.tokens[0], self.previous[0], self.size = ngrams.separator(np.int32), -2, 1

    def put(self, path: int, content: int, tokens: Array) -> None:
        start, end = self.size, self.size + len(tokens) + 1
        if end > len(self.tokens):
            room = max(2 * len(self.tokens), end)
            self.tokens, self.previous = np.resize(self.tokens, room), np.resize(self.previous, room)
        self.tokens[start : end - 1], self.tokens[end - 1] = tokens, ngrams.separator(np.int32)
        ngrams.link(self.tokens, self.previous, self.heads, start, end)
        self.size = end
        self.files[path] = content, start, len(tokens)

    def remove(self, path: int) -> None:
        """Overwrites what the file held: a separator matches nothing."""
        _, start, tokens = self.files.pop(path)
        self.tokens[start : start + tokens] = ngrams.separator(np.int32)

    def text(self) -> tuple[Array, dict[int, tuple[int, int, int]]]:
        """A copy of what it holds, int32, without what was removed, and the files in it."""
        parts, files, at = [self.tokens[:1]], {}, 1
        for path, (content, start, tokens) in self.files.items():
            parts.append(self.tokens[start : start + tokens + 1])
            files[path] = content, at, tokens
            at += tokens + 1
        return np.concatenate(parts), files

    def span(self, path: int) -> tuple[int, int]:
        if path not in self.files:
            return 0, 0
        _, start, tokens = self.files[path]
        return start, start + tokens + 1


@dataclass(slots=True)
class _Change:
    """Since when something is to be done."""

    deleted: float = 0.0
    changed: float = 0.0
    #: Before which nothing is tried, since it failed.
    again: float = 0.0


@dataclass(slots=True)
class _Merged:
    """A segment to be, with what of its sources was deleted when the merge began."""

    sources: list[_Segment]
    dead: list[Array]
    result: _Segment | None = None


class _Side:
    """What goes into a merge of one segment."""

    def __init__(self, segment: _Segment, dead: Array, behind: int) -> None:
        """dead: the files that are left out; behind: whether it comes behind another, whose last separator serves."""
        self.segment, self._dead = segment, dead
        self.live = _bits(len(segment.tokens))
        ngrams.clear(self.live, len(segment.tokens), 32 * len(self.live))
        ngrams.clear(self.live, 0, behind)
        for at in np.flatnonzero(dead):
            ngrams.clear(self.live, *segment.span(int(at)))
        #: Places that live before each word of `live`, and all of them.
        self.before = np.empty(len(self.live) + 1, np.int64)
        ngrams.live_before(self.live, self.before)
        self.live_tokens = int(self.before[-1])

    @property
    def text(self) -> tuple[Array, Array, Array, Array]:
        """What `ngrams.merge` wants of it."""
        return self.segment.tokens, self.segment.order, self.live, self.before

    def table(self, shift: int) -> list[Array]:
        """The columns of its files that live, with where they begin `shift` places further behind."""
        paths, contents, starts, sizes = (
            column[~self._dead]
            for column in (self.segment.paths, self.segment.contents, self.segment.starts, self.segment.sizes)
        )
        ngrams.move(self.live, self.before, starts, shift)
        return [paths, contents, starts, sizes]


class Workspace:
    """The memory of one workspace, for one tokenizer. Its methods may be called from any thread.

    What cannot be kept on disk is kept in memory, as far as there is room; what lies there damaged, or is of an older
    format, is forgotten, and `sync` asks for its files again.
    """

    def __init__(self, folder: Path, vocab: int, *, background: bool = True) -> None:
        """folder: its own, created on demand. vocab: ids are below it. background: merge in a thread of its own; else
        only `merge` does."""
        self._folder, self._vocab = folder, vocab
        self._lock = threading.Condition(threading.RLock())
        self._segments: list[_Segment] = []
        self._recent = _Recent()
        #: What a merge under way has taken over.
        self._sealed: _Recent | None = None
        #: Paths and contents that were deleted since the index was written last.
        self._gone: set[tuple[int, int]] = set()
        self._stamp: tuple[int, ...] = ()
        self._change = _Change()
        self._verified: set[str] = set()
        #: Whether the folder's lock is held here, and what guards that and the writing of the index.
        self._mine = False
        self._noting = threading.Lock()
        self._closed = False
        self._load()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="workspace memory", daemon=True)
            self._thread.start()

    @property
    def tokens(self) -> int:
        """Tokens that can be found, a separator a file included."""
        with self._lock:
            tokens: int = sum(s.live_tokens for s in self._segments) + sum(r.size for r in self._chains)
            return tokens

    @property
    def disk_bytes(self) -> int:
        """What its segments take on disk."""
        with self._lock:
            return sum(s.header.columns()[-1][2] for s in self._segments)

    @property
    def files(self) -> int:
        """Files that can be found."""
        with self._lock:
            return sum(int((~s.dead).sum()) for s in self._segments) + sum(len(r.files) for r in self._chains)

    @property
    def _chains(self) -> list[_Recent]:
        return [self._recent] if self._sealed is None else [self._recent, self._sealed]

    def has(self, path: str, content: str) -> bool:
        """Whether a file is there with this content hash."""
        with self._lock:
            return self._content(_number(path)) == _number(content)

    def sync(self, manifest: Mapping[str, str]) -> list[str]:
        """Forgets every file that is not in the manifest, path -> content hash; returns the paths of those that are
        missing or have another content: they are to be `put`. The old content counts until then."""
        numbers = [(path, _number(path), _number(content)) for path, content in manifest.items()]
        wanted = {number for _, number, _ in numbers}
        with self._lock:
            known = self._contents()
            for number in known.keys() - wanted:
                self._remove(number)
            return [path for path, number, content in numbers if known.get(number) != content]

    def put(self, path: str, content: str, tokens: Sequence[int] | Array) -> bool:
        """Takes in a file, in place of what was there under its path. False where there is no room for it: then it is
        not there, and may be put again later, unless it has more than `MOST_FILE` tokens."""
        ids = np.asarray(tokens, np.int32)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab:
            raise ValueError(f"a token is no id of a vocabulary of {self._vocab}: the files of another tokenizer?")
        number, of_content = _number(path), _number(content)
        with self._lock:
            if self._content(number) == of_content:
                return True
            self._remove(number)
            room = self.tokens + len(ids) < MOST_TOKENS and self._recent.size + len(ids) < MOST_RECENT
            if len(ids) > MOST_FILE or not room:
                return False
            self._recent.put(number, of_content, ids)
            self._change.changed = self._change.changed or time.monotonic()
            if self._recent.size > MERGED:
                self._lock.notify_all()
            return True

    def remove(self, path: str) -> None:
        """Forgets a file; it may be unknown."""
        with self._lock:
            self._remove(_number(path))

    def search(
        self, known: Array, first: int, found: tuple[Array, Array, Array, Array], without: str | None = None
    ) -> None:
        """Gathers what followed the longest matches, as `infill_engine.ngrams` has it. without: a path to leave out."""
        with self._lock:
            path = None if without is None else _number(without)
            for chain in self._chains:
                skip = (0, 0) if path is None else chain.span(path)
                arrays = chain.tokens, chain.previous, chain.heads, chain.size
                ngrams.search_chain(*arrays, *skip, known, first, self._vocab, *found)
            for segment in self._segments:
                at = None if path is None else segment.find(path)
                skip = (0, 0) if at is None else segment.span(at)
                text = segment.tokens, segment.order, segment.live
                ngrams.search_sorted(*text, *skip, known, first, self._vocab, *found)

    def merge(self, alone: bool = False) -> bool:
        """Brings disk and memory to one state: afterwards the disk holds what was put and nothing that was deleted.
        False where another engine is writing, or the disk could not be written; memory stays as it was then.

        alone: only what is new is written, in a segment of its own, which is quick."""
        try:
            with self._writing() as mine:
                if mine:
                    self._merge(alone)
                return mine
        except Exception as error:
            with self._lock:
                self._unseal()
                self._change.changed = time.monotonic()
            _log_failure(error)
            return False

    def close(self) -> None:
        """Ends the background work, and writes to disk what is new and what was deleted, as it is. Where that cannot be
        done at once, what was put since the last merge is not kept: the next `sync` asks for it."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSED_S)
        merging = self._thread is not None and self._thread.is_alive()
        has_dead = any(segment.dead.any() for segment in self._segments)
        rewrites = has_dead and sum(segment.header.tokens for segment in self._segments) <= REWRITTEN
        if (self._recent.files or rewrites) and not merging:
            self.merge(alone=not rewrites)
        if self._gone and not self._note():
            with self._noting, contextlib.suppress(OSError):
                if self._mine:  # by the merge under way, which this process may not live to see the end of
                    self._write_index(tidy=False)

    # What follows is called with the lock held.

    def _contents(self) -> dict[int, int]:
        """All files that can be found, with their contents."""
        contents: dict[int, int] = {}
        for segment in self._segments:
            alive = ~segment.dead
            contents |= zip(segment.paths[alive].tolist(), segment.contents[alive].tolist(), strict=True)
        for chain in self._chains:
            contents |= {path: content for path, (content, _, _) in chain.files.items()}
        return contents

    def _content(self, path: int) -> int | None:
        for chain in self._chains:
            if path in chain.files:
                return chain.files[path][0]
        for segment in self._segments:
            if (at := segment.find(path)) is not None:
                return int(segment.contents[at])
        return None

    def _remove(self, path: int) -> None:
        for chain in self._chains:
            if path in chain.files:
                self._gone.add((path, chain.files[path][0]))
                chain.remove(path)
        for segment in self._segments:
            if (at := segment.find(path)) is not None:
                self._gone.add((path, int(segment.contents[at])))
                segment.kill(at)
        if self._gone:
            self._change.deleted = self._change.deleted or time.monotonic()
            self._change.changed = self._change.changed or time.monotonic()
            self._lock.notify_all()

    def _unseal(self) -> None:
        """Gives back what a merge that failed had taken over."""
        if self._sealed is not None:
            for path, (content, start, tokens) in self._sealed.files.items():
                self._recent.put(path, content, self._sealed.tokens[start : start + tokens])
            self._sealed = None

    # What lies on disk.

    def _load(self) -> None:
        """Takes over what lies on disk; where that is not sound, nothing does."""
        path = self._folder / "index"
        try:
            stamp = _stamp(path)
            index = _unpacked(path.read_bytes(), _Index)
            if (index.format, index.vocab) != (FORMAT, self._vocab):
                raise _Unsound("the index is of another format")
        except (OSError, _Unsound):
            index, stamp = _Index(FORMAT, self._vocab, {}), ()
        segments = []
        for name, dead in index.segments.items():
            with contextlib.suppress(_Unsound):
                segment = _Segment(self._folder / Path(name).name, self._vocab, dead)
                if segment.header.tokens > VERIFIED or segment.sound:
                    segments.append(segment)
        with self._lock:
            self._segments, self._stamp = segments, stamp
            if any(segment.dead.any() for segment in segments):  # What was deleted is to leave the disk, too.
                self._change.changed = self._change.changed or time.monotonic()
            # What was done here since, and what came here, is newer than what lies there.
            for number, content in self._gone:
                _kill(segments, number, content)
            for segment in segments:
                for chain in self._chains:
                    for number in chain.files:
                        if (at := segment.find(number)) is not None:
                            segment.kill(at)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """Holds the folder's lock, with what lies there taken over; False where another has it. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if _stamp(self._folder / "index") != self._stamp:
                self._load()
            self._mine = True
            try:
                yield True
            finally:
                with self._noting:
                    self._mine = False

    def _note(self) -> bool:
        """Notes on disk what was deleted; False where that has to be tried again."""
        try:
            with self._writing() as mine:
                if mine:
                    with self._noting:
                        self._write_index()
                return mine
        except Exception as error:
            _log_failure(error)
            return False

    def _write_index(self, tidy: bool = True) -> None:
        """Called with `_noting` held, and the folder's lock. tidy: removes what nobody names any more."""
        with self._lock:
            segments = {s.name: np.flatnonzero(s.dead).tolist() for s in self._segments}
            noted = self._gone.copy()
        index = _Index(FORMAT, self._vocab, segments)
        path, temporary = self._folder / "index", self._folder / f"index.{os.getpid()}.tmp"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_packed(index))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._stamp = _stamp(path)
        with self._lock:
            self._gone -= noted
            self._change.deleted = time.monotonic() if self._gone else 0.0
        for other in self._folder.iterdir() if tidy else ():  # what was replaced, and what a killed engine left
            if other.name not in ("index", "lock", *segments):
                with contextlib.suppress(OSError):
                    other.unlink()

    def _merge(self, alone: bool) -> None:
        """`merge`, with the folder's lock held. The memory's own lock is taken for moments only."""
        with self._lock:
            self._unseal()
            damaged = [s for s in self._segments if s.name not in self._verified and not alone]
        damaged = [s for s in damaged if not s.sound]
        with self._lock:
            self._segments = [s for s in self._segments if s not in damaged]
            self._verified |= set() if alone else {s.name for s in self._segments}
            self._change.changed = 0.0
            sealed = self._recent
            plan = [_Merged([], [])] if alone else self._plan(sealed.size if sealed.files else 0)
            tokens, fresh = sealed.text()
            self._sealed, self._recent = sealed, _Recent()
        young = self._sorted(tokens, fresh) if fresh else None
        for step in plan:
            sources, dead = step.sources, step.dead
            if young is not None and step is plan[0]:
                sources, dead = [*sources, young], [*dead, np.zeros_like(young.dead)]
            result: _Segment | None = None
            for source, gone in zip(sources, dead, strict=True):
                result = self._joined(result, source, gone)
            step.result = result
        with self._lock:
            merged = [s for step in plan for s in step.sources]
            results = [step.result for step in plan if step.result is not None]
            for step in plan:  # what was deleted meanwhile
                for source, gone in zip(step.sources, step.dead, strict=True):
                    for at in np.flatnonzero(source.dead & ~gone):
                        _kill(results, int(source.paths[at]), int(source.contents[at]))
            for path, (content, _, _) in fresh.items():
                if sealed.files.get(path, (None,))[0] != content:
                    _kill(results, path, content)
            self._segments = [s for s in self._segments if s not in merged] + results
            self._verified &= {s.name for s in self._segments}
            self._sealed = None
        with self._noting:
            self._write_index()

    def _plan(self, fresh: int) -> list[_Merged]:
        """Which segments are written anew: first those that are joined with what is fresh, as they are not much larger,
        then each of which something was deleted."""
        together, rest, size = [], [], fresh
        for segment in sorted(self._segments, key=lambda s: s.live_tokens):
            if size and segment.live_tokens < 2 * size:
                together.append(segment)
                size += segment.live_tokens
            elif segment.dead.any():
                rest.append(segment)
        groups = ([together] if together else []) + [[segment] for segment in rest]
        if fresh and not together:
            groups.insert(0, [])
        return [_Merged(group, [segment.dead.copy() for segment in group]) for group in groups]

    def _sorted(self, tokens: Array, files: Mapping[int, tuple[int, int, int]]) -> _Segment:
        """A segment of a text that lies in memory."""
        dtype = _dtype(self._vocab)
        tokens = np.minimum(tokens, ngrams.separator(dtype)).astype(dtype)
        order = ngrams.sort(tokens)
        with self._new_segment(len(files), len(tokens), len(order)) as (path, columns):
            paths = sorted(files)
            table = [[path, *files[path]] for path in paths]
            for column, values in zip(columns, [*zip(*table, strict=True), tokens, order], strict=True):
                column[:] = values
        return _Segment(path, self._vocab)

    def _joined(self, a: _Segment | None, b: _Segment, dead: Array) -> _Segment | None:
        """What lives of two segments, as a new one; a is all alive, of b `dead` is gone. None where nothing lives."""
        if a is None and not dead.any():
            return b
        first = [] if a is None else [_Side(a, np.zeros_like(a.dead), 0)]
        sides = [*first, _Side(b, dead, len(first))]
        shift = first[0].live_tokens if first else 0
        tables = [side.table(shift if side.segment is b else 0) for side in sides]
        table = [np.concatenate(columns) for columns in zip(*tables, strict=True)]
        order = np.argsort(table[0])
        if not len(order):
            return None
        places = int(np.maximum(table[3] - 1, 0).sum())
        with self._new_segment(len(order), sum(s.live_tokens for s in sides), places) as (path, columns):
            for column, values in zip(columns, table, strict=False):
                column[:] = values[order]
            tokens, places_in_order = columns[4:]
            at = 0
            for side in sides:
                at += ngrams.copy_live(side.segment.tokens, side.live, tokens[at:])
            nothing = (sides[0].segment.tokens, _NO_PLACES, sides[0].live, sides[0].before)
            ngrams.merge(*sides[0].text, *(sides[1].text if len(sides) > 1 else nothing), places_in_order)
        return _Segment(path, self._vocab)

    @contextlib.contextmanager
    def _new_segment(self, files: int, tokens: int, places: int) -> Iterator[tuple[Path, list[Array]]]:
        """Room for a segment's columns, to be filled; it gets the returned path when that is done."""
        header = _Header(FORMAT, self._vocab, files, tokens, places)
        size = header.columns()[-1][2]
        path = self._folder / f"{os.getpid():x}-{time.time_ns():x}.segment"
        temporary = path.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and not a signal in a write later
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # pragma: no cover - macOS
                file.truncate(size)
            data = mmap.mmap(file.fileno(), 0)
            yield path, header.mapped(data)
            packed = _packed(msgspec.structs.replace(header, content=zlib.crc32(memoryview(data)[_PAGE:])))
            data[: len(packed)] = packed
            data.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        self._verified.add(path.name)

    def _run(self) -> None:
        """The background work."""
        while True:
            with self._lock:
                self._lock.wait(self._pause())
                if self._closed:
                    return
                now = time.monotonic()
                if now < self._change.again:
                    continue
                merge, note = self._due(now), self._change.deleted and now >= self._change.deleted + NOTED_S
            if merge or note:
                done = self.merge() if merge else self._note()
                self._change.again = 0.0 if done else time.monotonic() + AGAIN_S

    def _due(self, now: float) -> bool:
        """Whether to merge now."""
        late = self._change.changed and now >= self._change.changed + MERGED_S
        dead = sum(s.header.tokens - s.live_tokens for s in self._segments)
        return bool(
            late
            or self._recent.size > MERGED
            or dead > MERGED + MOST_DEAD * sum(s.header.tokens for s in self._segments)
        )

    def _pause(self) -> float | None:
        """Seconds until there may be something to do; None: until told."""
        change, now = self._change, time.monotonic()
        if now < change.again:
            return change.again - now
        if self._due(now):
            return 0.0
        due = [since + after for since, after in ((change.deleted, NOTED_S), (change.changed, MERGED_S)) if since]
        return max(0.0, min(due) - now) if due else None


def _log_failure(error: Exception) -> None:
    """A disk that cannot be written is tried again; a fault is told, without the error's text, which may quote."""
    if not isinstance(error, OSError):
        log.error("what is remembered could not be written: %s", type(error).__name__)


def _kill(segments: Sequence[_Segment], path: int, content: int) -> None:
    """Lets a file with this content be found no more."""
    for segment in segments:
        at = segment.find(path)
        if at is not None and segment.contents[at] == content:
            segment.kill(at)


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes with the file at a path; () where there is none."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_ino, info.st_mtime_ns, info.st_size
