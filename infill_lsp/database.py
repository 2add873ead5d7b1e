"""The index of one workspace folder on disk: files, their chunks, and which words are in which chunk.

One SQLite database a folder, with FTS5 over the chunks' words (contentless: the text is stored once), and a table of
how many chunks have each word, which FTS5 itself would have to count. Nothing in it is newer than SQLite 3.34. Several
processes may have it open: each change is one short transaction, and the same file written twice is written once.

It does not know which files may be read, nor when. A `Database` belongs to one thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infill_lsp.chunks import Chunk, words

#: Raised whenever what is stored, how text is cut, or what a word is changes: a new version starts an empty database.
VERSION = 4
#: Days after which the database of a folder that nobody opened is removed; and one of a folder that was opened, with
#: other patterns of what is left out of it: what is left out now may stand in that.
KEPT_DAYS, KEPT_OTHERWISE_DAYS = 30, 1
#: Definitions of one name that are looked at.
MAX_DEFINITIONS = 200
#: Pages of an FTS5 merge in one transaction, some milliseconds.
MERGE_PAGES = 64

_SCHEMA = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    hash BLOB NOT NULL,
    size INTEGER NOT NULL,
    mtime INTEGER NOT NULL,
    ctime INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    refused TEXT NOT NULL
);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,
    file INTEGER NOT NULL,
    name TEXT NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    text TEXT NOT NULL
);
CREATE INDEX chunks_file ON chunks (file);
CREATE INDEX chunks_name ON chunks (name) WHERE name <> '';
CREATE VIRTUAL TABLE words USING fts5 (text, content = '', tokenize = "unicode61 remove_diacritics 0");
CREATE TABLE frequencies (word TEXT PRIMARY KEY, chunks INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE folder (root TEXT NOT NULL, removed INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells that a file is as it was: size in bytes, times in nanoseconds."""

    size: int
    mtime: int
    ctime: int
    #: When it was read.
    seen: int

    @classmethod
    def of(cls, stat: os.stat_result, seen: int) -> Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, seen)

    def fits(self, stat: os.stat_result) -> bool:
        """Whether the file was not written since. One read at once after it was written may have been written again
        in the same tick of the file system's clock, which ticks every 2 s at worst."""
        return self.is_of(stat) and self.seen - self.ctime > 2_000_000_000

    def is_of(self, stat: os.stat_result) -> bool:
        return (self.size, self.ctime) == (stat.st_size, stat.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was read: its chunks, or why there are none ("" otherwise)."""

    path: str
    #: Of its text, or of why there is none.
    hash: bytes
    stamp: Stamp
    #: None where the text is as it is stored.
    chunks: Sequence[Chunk] | None = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk of the file at `path`, with its BM25 score (the higher the better; 0 where it was not asked for)."""

    path: str
    chunk: Chunk
    score: float
    #: None for an open document.
    stamp: Stamp | None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many files with text there are, chunks, and files without text, by why."""

    files: int
    chunks: int
    refused: dict[str, int]


class NotOurs(sqlite3.DatabaseError):
    """A damaged database, or a sound one of something else."""


def fingerprint(text: str) -> bytes:
    """16 bytes that stand for the text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_broken(error: sqlite3.Error) -> bool:
    """Whether the database itself is at fault, and a new one would do."""
    return isinstance(error, NotOurs) or _code(error) in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,  # What a missing table gives.
    )


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process had the database for too long."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def called(root: str, *what: str) -> str:
    """The name of a folder's databases; `what` else decides what is in them."""
    return "-".join(fingerprint(text).hex()[:16] for text in (root, "\0".join(what)))


def newest(folder: Path, name: str) -> Path:
    """The database called `name` that is in use.

    A broken one is never mended in place, for others may have it open, but followed by one of the next generation.
    """
    return folder / f"{name}.{max(_generations(folder, name), default=0)}.db"


def discard(path: Path) -> None:
    """Removes a broken database; from now on another one is the `newest`."""
    name, generation, _ = path.name.split(".")
    path.with_name(f"{name}.{int(generation) + 1}.db").touch(mode=0o600)
    _remove(path)


def prune(folder: Path, kept: Path) -> None:
    """Removes the databases of folders that were not opened for long, but for `kept`."""
    own, now = kept.name.partition("-")[0], time.time()
    for path in folder.glob("*.db"):
        days = KEPT_OTHERWISE_DAYS if path.name.startswith(f"{own}-") else KEPT_DAYS
        with suppress(FileNotFoundError):
            if path != kept and path.stat().st_mtime < now - days * 86_400:
                _remove(path)


def forget(folder: Path, root: str) -> None:
    """Removes all databases of a folder. Whoever has one open makes another."""
    for path in folder.glob(f"{called(root).partition('-')[0]}-*.db"):
        _remove(path)


class Database:
    """Raises `sqlite3.Error` in all that it does; see `is_broken`.

    `wal`: readers and the writer do not wait for one another; only where the file is on a local disk. `wait_s` is how
    long it waits for another process. `make`: where there is none.
    """

    def __init__(self, path: Path, root: str, *, wal: bool, wait_s: float, make: bool = True) -> None:
        self.path = path
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'rwc' if make else 'rw'}",
            uri=True,
            timeout=wait_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._open(root, wal, make)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def known(self, path: str = "") -> dict[str, Stamp]:
        """The files that are stored: all, or the one at `path` and those below a folder of that name."""
        query = "SELECT path, size, mtime, ctime, seen FROM files"
        if path:
            # "0" is the character after "/".
            query += " WHERE path = ? OR (path >= ? AND path < ?)"
        rows = self._connection.execute(query, (path, f"{path}/", f"{path}0") if path else ())
        return {path: Stamp(*stamp) for path, *stamp in rows}

    def hash_of(self, path: str) -> bytes | None:
        """Of the file's text as it is stored."""
        row = self._connection.execute("SELECT hash FROM files WHERE path = ?", (path,)).fetchone()
        return row[0] if row else None

    def words_of(self, path: str) -> Counter[str]:
        """In how many chunks of the file each word is."""
        query = "SELECT text FROM files JOIN chunks ON file = files.id WHERE path = ?"
        return Counter(word for (text,) in self._connection.execute(query, (path,)) for word in set(words(text)))

    def manifest(self, paths: Collection[str] | None = None) -> dict[str, bytes]:
        """Path and hash of each file that has text; of these paths alone, where some are given."""
        query = "SELECT path, hash FROM files WHERE refused = ''"
        if paths is None:
            return dict(self._connection.execute(query))
        return dict(self._connection.execute(f"{query} AND path IN ({_marks(paths)})", tuple(paths)))

    def counts(self) -> Counts:
        refused = dict(self._connection.execute("SELECT refused, count(*) FROM files GROUP BY refused"))
        (chunks,) = self._connection.execute("SELECT count(*) FROM chunks").fetchone()
        return Counts(refused.pop("", 0), chunks, refused)

    @property
    def removed(self) -> int:
        """How many chunks were taken out since the last `purge`, by whichever process."""
        count: int = self._connection.execute("SELECT removed FROM folder").fetchone()[0]
        return count

    def write(self, files: Iterable[File]) -> None:
        """Stores files in place of what was stored of them."""
        with self._transaction() as change:
            for file in files:
                row = self._connection.execute("SELECT id, hash FROM files WHERE path = ?", (file.path,)).fetchone()
                if row is not None and row[1] == file.hash:
                    self._connection.execute(
                        "UPDATE files SET size = ?, mtime = ?, ctime = ?, seen = ? WHERE id = ?",
                        (file.stamp.size, file.stamp.mtime, file.stamp.ctime, file.stamp.seen, row[0]),
                    )
                    continue
                if file.chunks is None:
                    continue  # Another process stored another text meanwhile.
                if row is not None:
                    change.remove(row[0])
                change.add(file)

    def remove(self, paths: Iterable[str]) -> None:
        """Forgets files."""
        with self._transaction() as change:
            for path in paths:
                row = self._connection.execute("SELECT id FROM files WHERE path = ?", (path,)).fetchone()
                if row is not None:
                    change.remove(row[0])

    def frequencies(self, asked: Sequence[str]) -> dict[str, int]:
        """How many chunks have each word, of those that any has."""
        query = f"SELECT word, chunks FROM frequencies WHERE word IN ({_marks(asked)})"
        return dict(self._connection.execute(query, asked))

    def search(self, asked: Sequence[str], without: Collection[str], limit: int) -> list[Found]:
        """The best chunks that have any of the words (as `words` makes them), none of the files `without`."""
        match = " OR ".join(f'"{word}"' for word in asked)
        query = f"""
            SELECT path, name, first, last, text, -score, size, mtime, ctime, seen
            FROM (
                SELECT rowid AS chunk, rank AS score FROM words WHERE words MATCH ? AND rowid NOT IN (
                    SELECT chunks.id FROM files JOIN chunks ON file = files.id WHERE path IN ({_marks(without)})
                )
                ORDER BY rank LIMIT ?
            )
            JOIN chunks ON chunks.id = chunk JOIN files ON files.id = file ORDER BY score
            """
        return [_found(row) for row in self._connection.execute(query, (match, *without, limit))]

    def definition(self, name: str, fits: Callable[[str], int]) -> Found | None:
        """A definition of this name, of the file whose path `fits` best; None where none does (0)."""
        query = "SELECT chunks.id, path FROM chunks JOIN files ON files.id = file WHERE name = ? AND name <> '' LIMIT ?"
        rows = self._connection.execute(query, (name, MAX_DEFINITIONS)).fetchall()
        chunk, path = max(rows, key=lambda row: fits(row[1]), default=(0, ""))
        if not path or not fits(path):
            return None
        query = """
            SELECT path, name, first, last, text, 0.0, size, mtime, ctime, seen
            FROM chunks JOIN files ON files.id = file WHERE chunks.id = ?
            """
        row = self._connection.execute(query, (chunk,)).fetchone()
        return _found(row) if row else None

    def watch_clock(self, late: Callable[[], bool]) -> None:
        """Has queries end with `sqlite3.OperationalError` once `late`."""
        self._connection.set_progress_handler(late, 2_000)

    def purge(self, stop: Callable[[], bool]) -> None:
        """Takes what was removed out of the file, too: FTS5 keeps the words of a removed chunk till it merges them.
        Where it is stopped the next one goes on."""
        pages, removed = -MERGE_PAGES, self.removed  # Negative: begin with everything.
        while True:
            if stop():
                return
            before = self._connection.total_changes
            self._connection.execute("INSERT INTO words (words, rank) VALUES ('merge', ?)", (pages,))
            if self._connection.total_changes - before < 2:
                break
            pages = MERGE_PAGES
        self._connection.execute("UPDATE folder SET removed = max(0, removed - ?)", (removed,))
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def check(self, thorough: bool = False) -> None:
        """Raises `sqlite3.DatabaseError` if the file is damaged; thorough: also if the words' index is."""
        ((said,),) = self._connection.execute("PRAGMA quick_check(1)").fetchall()
        if said != "ok":
            raise NotOurs(said)
        if thorough:
            self._connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")

    def _open(self, root: str, wal: bool, make: bool) -> None:
        self._connection.execute("PRAGMA secure_delete = ON")
        if wal:
            self._connection.execute("PRAGMA journal_mode = WAL").fetchall()
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._version() == 0:
            if not make:
                raise sqlite3.OperationalError("it is empty")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self._version() == 0:  # Nobody else was faster.
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        self._connection.execute(statement)
                    self._connection.execute("INSERT INTO folder VALUES (?, 0)", (root,))
                    self._connection.execute(f"PRAGMA user_version = {VERSION}")
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
        if self._version() != VERSION:
            raise NotOurs(f"its version is {self._version()}, not {VERSION}")
        if self._connection.execute("SELECT root FROM folder").fetchall() != [(root,)]:
            raise NotOurs("it is of another folder")

    def _version(self) -> int:
        version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
        return version

    @contextmanager
    def _transaction(self) -> Iterator[_Change]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            change = _Change(self._connection)
            yield change
            change.finish()
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


class _Change:
    """What one transaction does, with the words counted in one go at its end."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._counted: Counter[str] = Counter()
        self._removed = 0

    def add(self, file: File) -> None:
        stamp = file.stamp
        row = self._connection.execute(
            "INSERT INTO files (path, hash, size, mtime, ctime, seen, refused) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.path, file.hash, stamp.size, stamp.mtime, stamp.ctime, stamp.seen, file.refused),
        ).lastrowid
        for chunk in file.chunks or ():
            found = words(chunk.text)
            values = (row, chunk.name, chunk.first, chunk.last, chunk.text)
            rowid = self._connection.execute(
                "INSERT INTO chunks (file, name, first, last, text) VALUES (?, ?, ?, ?, ?)", values
            ).lastrowid
            self._connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (rowid, " ".join(found)))
            self._counted.update(set(found))

    def remove(self, file: int) -> None:
        chunks = self._connection.execute("SELECT id, text FROM chunks WHERE file = ?", (file,)).fetchall()
        for rowid, text in chunks:
            found = words(text)
            self._connection.execute(
                "INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", (rowid, " ".join(found))
            )
            self._counted.subtract(set(found))
        self._connection.execute("DELETE FROM chunks WHERE file = ?", (file,))
        self._connection.execute("DELETE FROM files WHERE id = ?", (file,))
        self._removed += len(chunks)

    def finish(self) -> None:
        self._connection.executemany(
            "INSERT INTO frequencies VALUES (?, ?) ON CONFLICT (word) DO UPDATE SET chunks = chunks + excluded.chunks",
            [(word, count) for word, count in self._counted.items() if count],
        )
        gone = [(word,) for word, count in self._counted.items() if count < 0]
        self._connection.executemany("DELETE FROM frequencies WHERE word = ? AND chunks <= 0", gone)
        if self._removed:
            self._connection.execute("UPDATE folder SET removed = removed + ?", (self._removed,))


def _code(error: sqlite3.Error) -> int | None:
    """The primary result code; None for an error of our own."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _generations(folder: Path, name: str) -> list[int]:
    found = (re.fullmatch(rf"{re.escape(name)}\.(\d+)\.db", path.name) for path in folder.glob(f"{name}.*.db"))
    return [int(match[1]) for match in found if match]


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _found(row: Sequence[str | int | float]) -> Found:
    path, name, first, last, text, score, size, mtime, ctime, seen = row
    chunk = Chunk(str(name), int(first), int(last), str(text))
    return Found(str(path), chunk, float(score), Stamp(int(size), int(mtime), int(ctime), int(seen)))
