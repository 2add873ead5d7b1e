"""Keeps a `Database` equal to what may be read of a folder: looks the folder through, then follows its changes.

It does not know what is open in an editor; whoever made it is asked again and again whether there is something else to
do. All of it runs in one thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal

from infill_lsp.chunks import cut, language_of
from infill_lsp.database import Database, File, Stamp, fingerprint
from infill_lsp.ignore import IGNORE_FILES, Ignore, Refused

log = logging.getLogger(__name__)

#: Files that go into one transaction, and characters: it takes some 0.1 s.
BATCH_FILES = 64
BATCH_CHARACTERS = 500_000
#: Fewer changed files are not worth being told about.
WORTH_TELLING = 32
#: Seconds between two questions whether there is something else to do, and between two reports.
TICK_S = 0.2
#: Milliseconds for which changes on disk are gathered: at least, and at most while they go on.
GATHER_MS, GATHER_MOST_MS = 100, 400
#: More changes than this at once (another branch), and the folder is looked through: the system may have dropped some.
MANY_CHANGES = 1_000
#: Folders that are watched; where there are more, or the system refuses, the folder is looked through again and again.
MAX_WATCHED = 20_000
#: Seconds between two looks through the folder where it is not watched, and where it is (a change may not be told), and
#: how many times what the last look took they are apart at least, as is other work that comes again; and the same where
#: a watch began meanwhile.
POLL_S, SAFETY_S, APART, SOON = 5.0, 600.0, 20, 4
#: Seconds between two times that what was removed is taken out of the database's file, too.
PURGE_S = 60.0
#: Seconds for that where the index ends before.
FAREWELL_S = 0.5

#: File systems of which the kernel does not tell what others change, and on which memory cannot be shared.
REMOTE = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "gfs2", "glusterfs", "lustre", "nfs", "nfs4", "ocfs2", "prl_fs"}
    | {"smb3", "smbfs", "vboxsf", "virtiofs"}
)

State = Literal["stopped", "filling", "ready", "off"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond these a folder is indexed in part, from its top down."""

    files: int = 50_000
    #: Of all files together.
    bytes: int = 256 * 1024 * 1024


#: Why a folder is looked through again and again, whose system does not tell of what other machines change.
ELSEWHERE = "it is not on a disk of this machine"


@dataclass(frozen=True, slots=True)
class Status:
    """How it stands with the index of a folder."""

    state: State = "stopped"
    #: Files with text, and their chunks.
    files: int = 0
    chunks: int = 0
    #: Files that changed, of which `done` are in.
    done: int = 0
    total: int = 0
    #: "events" where the system tells of changes.
    watching: Literal["events", "polling", ""] = ""
    #: Whether all of the folder is within the limits.
    complete: bool = True
    #: Files that hold nothing to read, by why, and folders that may not be looked into.
    refused: dict[str, int] = field(default_factory=dict)
    unreadable: int = 0
    #: Why changes are noticed late, where the system would tell of them.
    late: str = ""
    #: Files that the engine does not remember: they are too long for it, or it has no room.
    forgotten: int = 0
    #: Why it is off.
    error: str = ""
    #: Grows with each change of what is stored.
    changes: int = 0

    @property
    def message(self) -> str:
        """What a person should know, in one line; "" where all is well."""
        if self.error:
            return self.error
        said = [
            "" if self.complete else "only a part of it is indexed, it is too large",
            _counted(self.unreadable, "folder", "may not be looked into"),
            _counted(self.refused.get("huge", 0), "file", "is too large", "are too large"),
            _counted(
                self.forgotten, "file", "does not fit into the engine's memory", "do not fit into the engine's memory"
            ),
            f"changes are noticed late ({self.late})" if self.late else "",
        ]
        return "; ".join(filter(None, said))


class Filler:
    """`report` gets each new status; `meanwhile` is called every `TICK_S` or so, also while files are read.

    Raises what `Database` raises.
    """

    def __init__(
        self,
        root: str,
        exclude: Sequence[str],
        stored: Database,
        limits: Limits,
        stop: threading.Event,
        report: Callable[[Status], None],
        meanwhile: Callable[[Ignore, Database], None],
    ) -> None:
        self._root = root
        self._exclude = exclude
        self._stored = stored
        self._limits = limits
        self._stop = stop
        self._report = report
        self._meanwhile = meanwhile
        self._rules = Ignore(root, exclude)
        local = is_local(root)
        self._status = Status("filling", watching="events" if local else "polling", late="" if local else ELSEWHERE)
        #: The folders there are, and those of them that are watched.
        self._folders = {""}
        self._watched: set[str] = set()
        self._ticked = 0.0
        #: Seconds that the last look took, when it ended, and when the next one is due.
        self._took = self._looked = 0.0
        self._due = 0.0
        self._changes = 0
        self._purged = time.monotonic()

    def run(self) -> None:
        """Until `stop` is set."""
        self._report(self._status)
        self._look()
        while not self._stop.is_set():
            if self._status.watching == "events":
                self._watch()
            else:
                self._poll()
        if self._stored.removed:
            until = time.monotonic() + FAREWELL_S
            self._stored.purge(lambda: time.monotonic() > until)  # The next to open it does the rest.

    def _poll(self) -> None:
        self._due = time.monotonic() + max(POLL_S, APART * self._took)
        while time.monotonic() < self._due and not self._stop.wait(TICK_S):
            self._rest()
        if not self._stop.is_set():
            self._look()

    def _watch(self) -> None:
        """Follows changes in the folders that there are, till there are others."""
        from watchfiles import watch

        if len(self._folders) > MAX_WATCHED:
            self._tell(watching="polling", late=f"it has more than {MAX_WATCHED:,} folders")
            return
        # Each folder by itself: as a tree, also what is ignored would be watched, and what links lead to.
        changes = watch(
            *(os.path.join(self._root, folder) for folder in self._folders),
            *filter(os.path.isdir, [os.path.join(self._root, ".git", "info"), *self._rules.outside]),
            watch_filter=None,
            step=GATHER_MS,
            debounce=GATHER_MOST_MS,
            rust_timeout=round(1000 * TICK_S),
            yield_on_timeout=True,
            stop_event=self._stop,
            raise_interrupt=False,
            recursive=False,
            ignore_permission_denied=True,
        )
        # What changed before the watch began was not told: in new folders much, in the others hardly anything.
        new = _outermost(self._folders - self._watched)
        self._due = min(self._due, self._looked + SOON * self._took)
        self._watched = set(self._folders)
        root = _identity(self._root)
        with closing(changes):
            while self._watched == self._folders:
                try:
                    told = next(changes, None)
                except FileNotFoundError:  # A folder went away meanwhile.
                    self._watched.clear()
                    self._stop.wait(TICK_S)
                    self._look()
                    return
                except (OSError, RuntimeError) as error:
                    self._tell(watching="polling", late=str(error))
                    return
                if told is None:
                    return
                if new == [""] or time.monotonic() >= self._due:
                    self._look()
                elif new:
                    self._fill([path for folder in new for path in self._compare(folder)])
                new = []
                if told:
                    self._apply({(change, os.path.relpath(path, self._root)) for change, path in told})
                if _identity(self._root) != root:
                    self._watched.clear()
                self._rest()

    def _apply(self, told: set[tuple[int, str]]) -> None:
        """Takes in what changed: files, folders or rules, that are new, other or gone."""
        from watchfiles import Change

        # Of the folders around it only the rules are of interest.
        told = {(change, path) for change, path in told if not path.startswith("..") or _is_rule(path)}
        for change, path in told:
            if change != Change.modified and path in self._watched:
                # If there is one of this name again, it is not the one that is watched.
                self._watched = {each for each in self._watched if not _is_in(each, path)}
        paths = {path for _, path in told} - {"."}
        if any(map(_is_rule, paths)) or len(paths) > MANY_CHANGES:
            self._look()
        else:
            self._take(paths)

    def _take(self, paths: Collection[str]) -> None:
        """Takes in each of these files and folders as it is now."""
        gone: list[str] = []
        changed: list[str] = []
        for path in paths:
            full = os.path.join(self._root, path)
            is_folder = os.path.isdir(full) and not os.path.islink(full)
            if is_folder or path in self._folders:
                self._folders = {each for each in self._folders if not _is_in(each, path)}
                gone += [] if is_folder else self._stored.known(path)
            if is_folder:
                changed += self._compare(path)
            elif os.path.lexists(full) and self._rules.refusal(path) is None:
                changed.append(path)
            else:
                gone += self._stored.known(path)
        self._remove(gone)
        if changed:
            self._fill(changed)

    def _look(self) -> None:
        """Takes in all that is other than it is stored."""
        started = time.monotonic()
        self._rules = Ignore(self._root, self._exclude)
        self._folders = {""}
        changed = self._compare()
        self._looked = time.monotonic()
        self._took = self._looked - started
        self._due = self._looked + max(SAFETY_S, APART * self._took)
        self._fill(changed)

    def _compare(self, start: str = "") -> list[str]:
        """The files below `start` that are new or may have changed, the last written first; removes those gone."""
        known = self._stored.known(start)
        changed: list[tuple[int, str]] = []
        files, size, unreadable, complete = 0, 0, 0, True
        for listing in self._rules.walk(start):
            self._tick()
            if self._stop.is_set():
                return []
            self._folders.add(listing.folder)
            unreadable += not listing.readable
            for path, stat in listing.files:
                files += 1
                size += stat.st_size
                complete = files <= self._limits.files and size <= self._limits.bytes
                if not complete:
                    break
                stamp = known.pop(path, None)
                if stamp is None or not stamp.fits(stat):
                    changed.append((stat.st_mtime_ns, path))
            if not complete:
                break
        self._remove(known)
        if not start:
            self._tell(unreadable=unreadable, complete=complete)
        return [path for _, path in sorted(changed, reverse=True)]

    def _fill(self, paths: Sequence[str]) -> None:
        """Reads files and stores what is in them."""
        worth = len(paths) >= WORTH_TELLING
        for done, batch in self._batches(paths):
            self._stored.write(batch)
            self._changes += 1
            if worth:
                self._tell(state="filling", done=done, total=len(paths))
        self._meanwhile(self._rules, self._stored)
        self._tell(state="ready", done=0, total=0)

    def _batches(self, paths: Sequence[str]) -> Iterator[tuple[int, list[File]]]:
        batch: list[File] = []
        characters = 0
        for done, path in enumerate(paths, 1):
            if self._stop.is_set():
                return
            self._tick()
            file = self._read(path)
            if file is None:
                self._remove([path])
            else:
                batch.append(file)
                characters += file.stamp.size
            if batch and (len(batch) >= BATCH_FILES or characters >= BATCH_CHARACTERS or done == len(paths)):
                yield done, batch
                batch, characters = [], 0

    def _read(self, path: str) -> File | None:
        """None where there is nothing to know about: the file is gone or not ours to read."""
        seen = time.time_ns()
        try:
            source = self._rules.read(path)
        except Refused as refused:
            if refused.reason in ("ignored", "secret", "unreadable"):
                return None
            try:
                stat = os.lstat(os.path.join(self._root, path))
            except OSError:
                return None
            # Stored, so that it is not read again and again.
            return File(path, refused.reason.encode(), Stamp.of(stat, seen), refused=refused.reason)
        hash = fingerprint(source.text)
        unchanged = self._stored.hash_of(path) == hash
        chunks = None if unchanged else cut(source.text, language_of(path))
        return File(path, hash, Stamp.of(source.stat, seen), chunks)

    def _remove(self, paths: Collection[str]) -> None:
        if paths:
            self._stored.remove(paths)
            self._changes += 1
            self._tell()

    def _rest(self) -> None:
        """What there is time for while nothing changes."""
        self._tick()
        if time.monotonic() - self._purged > PURGE_S and self._stored.removed:
            started = time.monotonic()
            self._stored.purge(self._stop.is_set)
            # A large index is purged less often.
            self._purged = time.monotonic() + APART * (time.monotonic() - started)

    def _tick(self) -> None:
        if time.monotonic() - self._ticked > TICK_S:
            self._meanwhile(self._rules, self._stored)
            self._ticked = time.monotonic()

    def _tell(self, **changes: object) -> None:
        counts = self._stored.counts()
        status = replace(
            self._status,
            files=counts.files,
            chunks=counts.chunks,
            refused=counts.refused,
            changes=self._changes,
            **changes,  # type: ignore[arg-type]
        )
        if status != self._status:
            self._status = status
            self._report(status)


def _is_rule(path: str) -> bool:
    """Whether a file says what is left out."""
    return path.rpartition("/")[2] in IGNORE_FILES or ".git" in path.split("/")[:-1]


def _counted(count: int, what: str, one: str, many: str = "") -> str:
    """`1 file is ...`, `2 files are ...`; "" for none."""
    if not count:
        return ""
    return f"1 {what} {one}" if count == 1 else f"{count:,} {what}s {many or one}"


def _is_in(path: str, folder: str) -> bool:
    """Whether the path is the folder or below it."""
    return path == folder or path.startswith(f"{folder}/") or not folder


def _outermost(folders: Collection[str]) -> list[str]:
    found: list[str] = []
    for folder in sorted(folders):
        if not found or not _is_in(folder, found[-1]):
            found.append(folder)
    return found


def _identity(folder: str) -> tuple[int, int] | None:
    """What differs where a folder was made anew; None without one."""
    try:
        stat = os.stat(folder)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def is_local(path: str | os.PathLike[str], mountinfo: str = "/proc/self/mountinfo") -> bool:
    """Whether a path lies on a disk of this machine; taken for granted where the system does not say."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return True
    path = os.path.realpath(path)
    found, kind = "", ""
    for fields in mounts:
        mount = fields[4].replace("\\040", " ")
        if (path == mount or path.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(found):
            found, kind = mount, fields[fields.index("-") + 1]
    return kind not in REMOTE and (not kind.startswith("fuse.") or kind == "fuse.fuse-overlayfs")
