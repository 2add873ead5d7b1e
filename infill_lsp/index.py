"""Keeps the index of one workspace folder fresh in the background, and finds chunks in it.

What is on disk is in a database (`infill_lsp.database`) in the user's cache, filled by a thread that then follows the
file system. What is open in the editor is in memory alone, never written anywhere, and stands in place of what is on
disk until it is closed. Asking never waits for filling: it answers from what is there.

It does not know what a gap is, nor LSP; `infill_lsp.ignore` alone knows what may be read.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from infill_engine.protocol import cache_dir

from infill_lsp import database
from infill_lsp.chunks import Chunk, cut, language_of, words
from infill_lsp.database import Database, Found, fingerprint
from infill_lsp.filling import APART, Filler, Limits, Status, is_local
from infill_lsp.ignore import Ignore, Refused, is_secret, lf, unfit

log = logging.getLogger(__name__)

#: Seconds the writer and a reader wait for another process, and the next try after that and after another error.
WRITE_WAIT_S, READ_WAIT_S, BUSY_S, RETRY_S = 5.0, 0.01, 1.0, 30.0
#: Databases in a row that turned out broken before it is given up.
MAX_REBUILDS = 3
#: BM25's parameters in FTS5, for the open documents to be scored alike.
K1, B = 1.2, 0.75

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows of a file, both included, that whoever asks has before them anyway."""

    path: str
    first: int
    last: int

    def hides(self, path: str, chunk: Chunk) -> bool:
        return path == self.path and chunk.first <= self.last and chunk.last >= self.first


def forget(root: str, home: Path | None = None) -> None:
    """Removes what is stored of a folder, whoever stored it. Raises `OSError`."""
    database.forget(home or cache_dir() / "index", os.path.realpath(root))


class Index:
    """The index of the folder `root`. `start` begins, `stop` ends; all other methods may be called from any thread.

    `exclude` holds patterns as in a `.gitignore`. `report` is called from the index's thread with each new status, a
    few times a second at most. `home` is where databases lie, by default in the user's cache.

    A question that takes `until` a later time (of the monotonic clock) gets an answer from what is open alone.
    """

    def __init__(
        self,
        root: str,
        *,
        exclude: Sequence[str] = (),
        report: Callable[[Status], None] = lambda status: None,
        home: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it is immutable
    ) -> None:
        self.root = os.path.realpath(root)
        self._exclude = tuple(exclude)
        self._report = report
        self._home = home or cache_dir() / "index"
        self._limits = limits
        self._status = Status()
        self._stop = threading.Event()
        #: Set where an answer failed as it does with a broken database.
        self._suspect = threading.Event()
        self._worker: threading.Thread | None = None
        #: Guards the documents that are open, and says when the thread has taken in what was given to it.
        self._changed = threading.Condition()
        self._texts: dict[str, str] = {}
        self._dirty: set[str] = set()
        #: When, of the monotonic clock, a document may be cut again: of 5,000 lines each cut takes 40 ms of a CPU.
        self._cut_at: dict[str, float] = {}
        self._open = _Open()
        #: Those by which the open documents were judged.
        self._rules: Ignore | None = None
        #: How often they changed.
        self._judged = 0
        #: Each key stroke asks for it several times, and a real path takes a look at each folder above.
        self._real_path = lru_cache(maxsize=1024)(self._relative)
        #: Guards the connection that answers, of which `_path` says where.
        self._reading = threading.Lock()
        self._path: Path | None = None
        self._reader: Database | None = None
        self._late_at = math.inf

    @property
    def status(self) -> Status:
        return self._status

    @property
    def size(self) -> int:
        """How many chunks there are, about."""
        return self._status.chunks + self._open.size

    def start(self) -> None:
        """Begins to fill and to watch, in a thread. Once."""
        self._worker = threading.Thread(target=self._run, name="index", daemon=True)
        self._worker.start()

    def stop(self) -> None:
        """Ends within a second or so; what is stored stays."""
        self._stop.set()
        if self._worker is not None:
            self._worker.join()
        with self._reading:
            self._drop_reader()

    @property
    def revision(self) -> tuple[int, int]:
        """Another one where `manifest` may say something else, but of open documents."""
        return self._status.changes, self._judged

    def relative(self, uri: str) -> str | None:
        """The path in the folder of the document at `uri`; None where it is not a file of it."""
        return self._real_path(uri)

    def ignores(self, uri: str) -> bool:
        """Whether a `.gitignore` or the like leaves the document out."""
        rules, path = self._rules, self.relative(uri)
        return rules is not None and path is not None and rules.ignored(path)

    def _relative(self, uri: str) -> str | None:
        path = local_path(uri)
        if path is None:
            return None
        folder, name = os.path.split(os.path.normpath(path))
        full = os.path.join(os.path.realpath(folder), name)
        return full[len(self.root) + 1 :] if full.startswith(f"{self.root}/") else None

    def update(self, uri: str, text: str) -> str | None:
        """The document is open, and this is its text; from now on what is on disk of it does not count.

        Returns its path, None where it is not of this folder.
        """
        path = self.relative(uri)
        if path is not None:
            with self._changed:
                self._texts[path] = text
                self._dirty.add(path)
        return path

    def close(self, uri: str) -> str | None:
        """The document is closed: its text is forgotten at once. Returns its path, as `update`."""
        path = self.relative(uri)
        if path is not None:
            with self._changed:
                self._texts.pop(path, None)
                self._dirty.discard(path)
                self._cut_at.pop(path, None)
                self._open.remove(path)
        return path

    def settle(self, timeout_s: float) -> bool:
        """Waits until the folder is filled and what was open before is taken in. Whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._dirty and self._status.state in ("ready", "off"), timeout_s)

    def manifest(self, paths: Collection[str] | None = None) -> dict[str, bytes] | None:
        """Path and hash (`fingerprint`) of each file's text as it counts now: of what is open, else of what is on disk;
        of these paths alone, where some are given. None where the database gives no answer now.
        """
        with self._reading:
            found = self._ask(lambda reader: reader.manifest(paths))
        if found is None:
            return None
        with self._changed:
            for path in self._texts:
                found.pop(path, None)
            opened = self._open.fingerprints
            found.update(opened if paths is None else {path: opened[path] for path in paths if path in opened})
        return found

    def texts(self, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Path and text, LF only, of those of the files that may be read now, as they count: open, else on disk."""
        rules = Ignore(self.root, self._exclude)
        for path in paths:
            with self._changed:
                text = self._texts.get(path)
            if text is None:
                with suppress(Refused):
                    yield path, rules.read(path).text
            elif _may_be_used(rules, path, text):
                yield path, lf(text)

    def frequencies(self, asked: Sequence[str], seen: Seen | None, until: float = math.inf) -> dict[str, int]:
        """How many chunks have each word, of those that any has, without what is `seen`."""
        with self._reading:
            found = self._ask(lambda reader: reader.frequencies(asked), until) or {}
        with self._changed:
            hidden = self._open.hidden(seen) if seen is not None else frozenset()
            for word in asked:
                count = found.pop(word, 0) + self._open.count(word, hidden) - self._open.count_covered(word)
                if count > 0:
                    found[word] = count
        return found

    def search(self, asked: dict[str, int], seen: Seen | None, limit: int, until: float = math.inf) -> list[Found]:
        """The best chunks that have any of the words, the best one first, without what is `seen`.

        `asked` is what `frequencies` said of them. Of the file that is seen only what is open counts.
        """
        with self._changed:
            covered = {*self._texts, *([seen.path] if seen is not None else [])}
            found = self._open.search(asked, self._status.chunks, seen)
        with self._reading:
            found += self._ask(lambda reader: reader.search(list(asked), covered, limit), until) or []
        return sorted(found, key=lambda each: -each.score)[:limit]

    def definition(self, name: str, fits: Callable[[str], int], until: float = math.inf) -> Found | None:
        """A definition of this name, of the file whose path `fits` best; None where none does (0)."""
        with self._changed:
            opened = self._open.definition(name, fits)
            covered = set(self._texts)
        best = fits(opened.path) if opened is not None else 0
        with self._reading:
            stored = self._ask(
                lambda reader: reader.definition(name, lambda path: 0 if path in covered else fits(path)), until
            )
        return stored if stored is not None and fits(stored.path) > best else opened

    def holds(self, found: Found) -> bool:
        """Whether what was found is still there, as it was: told by the file itself, before anybody else does."""
        if found.stamp is None:
            with self._changed:
                return found.path in self._texts
        try:
            return found.stamp.is_of(os.lstat(os.path.join(self.root, found.path)))
        except OSError:
            return False

    def _ask(self, question: Callable[[Database], T], until: float = math.inf) -> T | None:
        """With `_reading` held. None where there is no database yet, or it gives no answer in time."""
        path = self._path
        if path is None:
            return None
        try:
            if self._reader is None or self._reader.path != path:
                self._drop_reader()
                self._reader = Database(path, self.root, wal=is_local(path.parent), wait_s=READ_WAIT_S, make=False)
                self._reader.watch_clock(lambda: time.monotonic() > self._late_at)
            self._late_at = until
            return question(self._reader)
        except sqlite3.Error as error:
            log.debug("the index gave no answer: %s", type(error).__name__)
            if database.is_broken(error):
                self._suspect.set()
            return None

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _run(self) -> None:
        reason = _unfit_root(self.root)
        if reason:
            self._tell(Status("off", error=reason))
            return
        rebuilds = 0
        while not self._stop.is_set():
            try:
                self._follow()
            except (sqlite3.Error, OSError) as error:
                log.warning("the index of a folder failed: %s", error)
                broken = isinstance(error, sqlite3.Error) and database.is_broken(error)
                if broken and self._path is not None and rebuilds < MAX_REBUILDS:
                    rebuilds += 1
                    with suppress(OSError):
                        database.discard(self._path)
                    self._path = None
                elif isinstance(error, sqlite3.Error) and database.is_busy(error):
                    self._stop.wait(BUSY_S)
                else:
                    self._tell(Status("off", error=f"the index in {self._home} cannot be used: {error}"))
                    self._stop.wait(RETRY_S)
            except Exception:
                log.exception("a fault in the index of a folder")
                self._tell(Status("off", error="a fault in the index: see the log"))
                return
        self._tell(replace(self._status, state="stopped"))

    def _follow(self) -> None:
        """Fills the database and keeps it fresh until it is to stop. Raises `sqlite3.Error` and `OSError`."""
        if self._path is None:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Another Unicode may split words otherwise.
            what = str(database.VERSION), unicodedata.unidata_version, *self._exclude
            path = database.newest(self._home, database.called(self.root, *what))
            database.prune(self._home, path)
            self._path = path
        stored = Database(self._path, self.root, wal=is_local(self._home), wait_s=WRITE_WAIT_S)
        with closing(stored):
            os.utime(self._path)
            stored.check()
            self._suspect.clear()
            Filler(self.root, self._exclude, stored, self._limits, self._stop, self._tell, self._take_in).run()

    def _tell(self, status: Status) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()
        self._report(status)

    def _take_in(self, rules: Ignore, stored: Database) -> None:
        """Cuts what is open and changed. Called by the thread again and again, also while it fills."""
        if self._suspect.is_set():
            self._suspect.clear()
            stored.check(thorough=True)
        if not stored.path.exists():
            raise database.NotOurs("somebody removed it")
        with self._changed:
            opened = list(self._texts)
        for path in opened:
            hash = stored.hash_of(path)
            if self._open.covers(path) != hash:
                covered = stored.words_of(path)
                with self._changed:
                    if path in self._texts:
                        self._open.cover(path, hash, covered)
        with self._changed:
            other_rules = self._rules is not None and rules is not self._rules
            if rules is not self._rules:
                self._rules = rules
                self._judged += 1
                self._dirty.update(self._texts)
                self._cut_at.clear()
            now = time.monotonic()
            todo = {path: self._texts[path] for path in self._dirty if self._cut_at.get(path, now) <= now}
        for path, text in todo.items():
            began = time.monotonic()
            fit = _may_be_used(rules, path, text)
            lines = lf(text)
            chunks = cut(lines, language_of(path)) if fit else []
            counted = [(chunk, Counter(words(chunk.text))) for chunk in chunks]
            ended = time.monotonic()
            with self._changed:
                if path in self._texts:
                    self._cut_at[path] = ended + APART * (ended - began)
                if self._texts.get(path) is text:  # Neither closed nor changed meanwhile.
                    self._dirty.discard(path)
                    self._open.replace(path, lines if fit else None, counted)
                    self._changed.notify_all()
        if other_rules:
            self._report(self._status)


class _Open:
    """The chunks of the open documents, scored as FTS5 scores those in the database. Not thread-safe."""

    def __init__(self) -> None:
        self._next = 0
        self._files: dict[str, list[int]] = {}
        self._fingerprints: dict[str, bytes] = {}
        self._chunks: dict[int, tuple[str, Chunk, int]] = {}
        #: Word -> chunk -> how often.
        self._words: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._counts: dict[int, Counter[str]] = {}
        #: Of the same files in the database: the hash, and how many chunks have each word.
        self._covered: dict[str, tuple[bytes | None, Counter[str]]] = {}

    @property
    def size(self) -> int:
        return len(self._chunks)

    @property
    def fingerprints(self) -> dict[str, bytes]:
        """Of the texts that may be used, by path."""
        return self._fingerprints

    def replace(self, path: str, text: str | None, chunks: Sequence[tuple[Chunk, Counter[str]]]) -> None:
        """The chunks of an open document, LF only, with their words; no text: it may not be used."""
        self._remove(path)
        if text is not None:
            self._fingerprints[path] = fingerprint(text)
        for chunk, counted in chunks:
            self._next += 1
            self._chunks[self._next] = path, chunk, counted.total()
            self._counts[self._next] = counted
            self._files.setdefault(path, []).append(self._next)
            for word, count in counted.items():
                self._words[word][self._next] = count

    def remove(self, path: str) -> None:
        self._remove(path)
        self._covered.pop(path, None)

    def covers(self, path: str) -> bytes | None:
        """The hash of the stored file that the open document stands in place of."""
        return self._covered.get(path, (None, None))[0]

    def cover(self, path: str, hash: bytes | None, counted: Counter[str]) -> None:
        """What is stored of an open document, which does not count."""
        self._covered[path] = hash, counted

    def _remove(self, path: str) -> None:
        self._fingerprints.pop(path, None)
        for each in self._files.pop(path, ()):
            del self._chunks[each]
            for word in self._counts.pop(each):
                del self._words[word][each]
                if not self._words[word]:
                    del self._words[word]

    def hidden(self, seen: Seen) -> Set[int]:
        """The chunks that are seen."""
        return {each for each in self._files.get(seen.path, ()) if seen.hides(*self._chunks[each][:2])}

    def count(self, word: str, hidden: Set[int]) -> int:
        """How many chunks have the word, without those that are hidden."""
        having = self._words.get(word)
        return len(having) - len(having.keys() & hidden) if having else 0

    def count_covered(self, word: str) -> int:
        """How many stored chunks of open documents have the word."""
        return sum(counted[word] for _, counted in self._covered.values())

    def search(self, asked: dict[str, int], stored: int, seen: Seen | None) -> list[Found]:
        """`asked`: the words with their frequencies among the `stored` chunks and those here."""
        total = stored + len(self._chunks)
        mean = sum(length for _, _, length in self._chunks.values()) / max(1, len(self._chunks))
        scores: defaultdict[int, float] = defaultdict(float)
        for word, frequency in asked.items():
            weight = max(1e-6, math.log((total - frequency + 0.5) / (frequency + 0.5))) if frequency < total else 1e-6
            for each, count in self._words.get(word, {}).items():
                length = self._chunks[each][2]
                scores[each] += weight * count * (K1 + 1) / (count + K1 * (1 - B + B * length / mean))
        found = []
        for each, score in scores.items():
            path, chunk, _ = self._chunks[each]
            if seen is None or not seen.hides(path, chunk):
                found.append(Found(path, chunk, score, None))
        return found

    def definition(self, name: str, fits: Callable[[str], int]) -> Found | None:
        named = [(path, chunk) for path, chunk, _ in self._chunks.values() if chunk.name == name and fits(path)]
        best = max(named, key=lambda each: fits(each[0]), default=None)
        return Found(*best, 0.0, None) if best is not None else None


def local_path(uri: str) -> str | None:
    """The path that a URI names; None where it is not of a file of this machine."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" and parts.netloc in ("", "localhost") else None


def _may_be_used(rules: Ignore, path: str, text: str) -> bool:
    """Whether the text of an open document may: what a file may be read for."""
    return rules.refusal(path) is None and not rules.leads_away(path) and unfit(text) is None


def _unfit_root(root: str) -> str:
    """Why the folder is not indexed; "" where it is."""
    if not os.path.isdir(root):
        return f"{root} is no folder"
    if root in ("/", os.path.expanduser("~")):
        return f"{root} is too much to index: open a project's folder"
    if is_secret(f"{root}/file"):
        return f"{root} may hold secrets"
    return ""
