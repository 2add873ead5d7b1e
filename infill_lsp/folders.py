"""The workspace folders of an editor: each is indexed, and the engine remembers what the index says is there.

The index fills from the start. The engine is told once somebody asks for completions, and of new text only while they
go on doing so: it would otherwise stay loaded for nobody. What is deleted it is told at once. It is never started from
here; one that was away is told everything again. For a gap the indexes are asked for snippets.

It does not know LSP, nor what may be read: the index does.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from infill_engine.protocol import Document

from infill_lsp.client import EngineClient, EngineError
from infill_lsp.core import Gap, Snapshot, Snippet
from infill_lsp.database import fingerprint
from infill_lsp.index import Index, forget, local_path
from infill_lsp.priming import retrieve

if TYPE_CHECKING:
    from infill_lsp.filling import Status

log = logging.getLogger(__name__)

#: Seconds for which edits are gathered before the index gets them, and changes before the engine does.
EDITS_S, CHANGES_S = 0.2, 0.3
#: Seconds after which the engine is asked again where it refused.
RETRY_S = 2.0
#: Seconds since the last completion after which the engine gets no new text: it gives back the model's memory later.
QUIET_S = 240.0
#: Seconds that the index may take to take in what is open, and the engine to forget unsaved text at the end.
SETTLE_S, FAREWELL_S = 0.5, 1.0
#: Files that are read at a time; and of more that are gone the whole list of those that are left is sent.
READ_FILES, MANY = 32, 1_000
#: Seconds after which the engine is given again what it had no room for, and how often in all.
REFUSED_S, TRIES = 300.0, 3
#: Snippets for a gap, of which the engine takes the best that are encoded, and seconds after which those of the last
#: question about the document have to do.
SNIPPETS, RETRIEVED_S = 3, 0.03


class Folders:
    """All folders of one editor. All methods belong to one event loop.

    `engine` gives the engine as it is set; `report` is called with each new status of a folder's index.
    """

    def __init__(self, engine: Callable[[], EngineClient], report: Callable[[Index, Status], None]) -> None:
        self._engine = engine
        self._report = report
        self._folders: dict[str, _Folder] = {}
        #: The last snippets for a document.
        self._snippets: dict[str, list[Snippet]] = {}
        #: The documents that are open, and those of them that were edited since the indexes got them.
        self._open: dict[str, Callable[[], str]] = {}
        self._edited: set[str] = set()
        self._due: asyncio.TimerHandle | None = None
        self._asked_at = -math.inf
        self._settling = asyncio.Lock()
        #: One folder after the other gives texts: each holds a connection meanwhile, of which there are a few.
        self._turn = asyncio.Lock()

    async def settle(self, folders: Mapping[str, Sequence[str] | None]) -> None:
        """From now on these are the folders, by URI, each with the patterns of what is left out. None in their place:
        it is not indexed, and what the engine remembers of it is removed."""
        async with self._settling:
            wanted = {
                root: None if exclude is None else tuple(exclude)
                for uri, exclude in folders.items()
                if (root := _root(uri)) is not None
            }
            off = [root for root, exclude in wanted.items() if exclude is None]
            for root, exclude in wanted.items():
                if exclude is not None:
                    # What is off in a folder is off for the folders around it, too.
                    inner = (_anchored(inner[len(root) :]) for inner in off if inner.startswith(f"{root}/"))
                    wanted[root] = (*exclude, *inner)
            changed = set()
            for root, folder in list(self._folders.items()):
                if root not in wanted or folder.exclude != wanted[root]:
                    changed.add(root)
                    del self._folders[root]
                    await folder.aclose(self._open)
            for root in sorted(wanted.keys() - self._folders.keys()):
                if root in changed or wanted[root] is None:  # What is left out now may be in what was stored.
                    with suppress(OSError):
                        await asyncio.to_thread(forget, root)
                folder = _Folder(root, wanted[root], self._engine, self._report, self._turn)
                self._folders[root] = folder
                folder.asked_at = self._asked_at
                for uri, text in self._open.items():
                    folder.update(uri, text())
                folder.start()

    @property
    def indexed(self) -> set[str]:
        """The real paths of the folders that have an index."""
        return {root for root, folder in self._folders.items() if folder.index is not None}

    def open(self, uri: str, text: Callable[[], str]) -> None:
        """A document is open; `text` gives its text as it is whenever that is needed."""
        self._open[uri] = text
        self._edited.add(uri)
        self._update()

    def edit(self, uri: str) -> None:
        """An open document was edited."""
        self._edited.add(uri)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(EDITS_S, self._update)

    def close(self, uri: str) -> None:
        """Its unsaved text is forgotten."""
        self._open.pop(uri, None)
        self._edited.discard(uri)
        self._snippets.pop(uri, None)
        for folder in self._folders.values():
            folder.close(uri)

    def place(self, uri: str) -> tuple[str, str]:
        """The workspace of a document and its path there, as the engine knows them; two empty texts without one."""
        folder = self._innermost(uri)
        path = folder.index.relative(uri) if folder is not None and folder.index is not None else None
        return (folder.name, path) if folder is not None and path is not None and path.isprintable() else ("", "")

    def ignores(self, uri: str) -> bool:
        """Whether a `.gitignore` or the like of an indexed folder leaves the document out."""
        folder = self._innermost(uri)
        return folder is not None and folder.index is not None and folder.index.ignores(uri)

    async def snippets(self, snapshot: Snapshot, gap: Gap, file: str = "") -> list[Snippet]:
        """The best pieces of the folder for a gap, looked up in a thread; where that takes too long those of the last
        question about the document. file: the URI of what it is in, as a notebook's cell is."""
        placed = replace(snapshot, uri=file or snapshot.uri)
        folder = self._innermost(placed.uri)
        if folder is None or folder.index is None:
            return []
        found = asyncio.create_task(asyncio.to_thread(retrieve, folder.index, placed, gap, SNIPPETS))
        found.add_done_callback(lambda task: self._retrieved(snapshot.uri, task))
        await asyncio.wait([found], timeout=RETRIEVED_S)
        return self._snippets.get(snapshot.uri, [])

    def ask(self) -> None:
        """A completion is asked for."""
        self._asked_at = time.monotonic()
        for folder in self._folders.values():
            folder.ask(self._asked_at)

    async def tell_again(self) -> None:
        """The engine is another one: it is told everything."""
        async with self._settling:
            for folder in self._folders.values():
                await folder.restart()

    async def aclose(self) -> None:
        """Ends the indexes, and lets the engine forget what is open and not saved."""
        if self._due is not None:
            self._due.cancel()
        async with self._settling:
            folders = list(self._folders.values())
            self._folders.clear()
            await asyncio.gather(*(folder.aclose(self._open) for folder in folders))

    def _innermost(self, uri: str) -> _Folder | None:
        """The innermost folder that a document lies in, as far as its index takes the document: one that is off inside
        of another is left out there."""
        path = local_path(uri)
        around = [
            folder
            for folder in self._folders.values()
            if (folder.index is not None and folder.index.relative(uri) is not None)
            or (folder.index is None and path is not None and os.path.realpath(path).startswith(f"{folder.root}/"))
        ]
        return max(around, key=lambda folder: len(folder.root), default=None)

    def _retrieved(self, uri: str, found: asyncio.Task[list[Snippet]]) -> None:
        if found.cancelled() or uri not in self._open:
            return
        if (error := found.exception()) is not None:  # its text may quote the document
            log.error("a fault in looking for snippets: %s", type(error).__name__)
        else:
            self._snippets[uri] = found.result()

    def _update(self) -> None:
        self._due = None
        for uri in self._edited & self._open.keys():
            text = self._open[uri]()
            for folder in self._folders.values():
                folder.update(uri, text)
        self._edited.clear()


def _anchored(folder: str) -> str:
    """A pattern as in a `.gitignore` for the folder of this path, which begins with "/"."""
    return re.sub(r"([\\*?\[])", r"\\\1", folder) + "/"


class _Folder:
    """One folder, its index, and what the engine was told of it. `exclude` None: no index, and it is told nothing."""

    def __init__(
        self,
        root: str,
        exclude: tuple[str, ...] | None,
        engine: Callable[[], EngineClient],
        report: Callable[[Index, Status], None],
        turn: asyncio.Lock,
    ) -> None:
        self.root = root
        self.exclude = exclude
        self.name = workspace_name(root)
        self.asked_at = -math.inf
        self._engine = engine
        self._report = report
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self.index = None if exclude is None else Index(root, exclude=exclude, report=self._reported)
        #: Path -> hash of what the engine has or is about to get ("" while it is read); None: it has to be told all.
        self._told: dict[str, str] | None = None
        #: The index' revision then, and documents that were opened, edited or closed since.
        self._revision: tuple[int, int] | None = None
        self._touched: set[str] = set()
        #: Paths whose text it is to get.
        self._wanted: dict[str, None] = {}
        #: Those that it has no room for: the hash, and how often it was given. When it is given them again.
        self._refused: dict[str, tuple[str, int]] = {}
        self._given_again = math.inf
        self._changed = asyncio.Event()
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if self.index is not None:
            self.index.start()
        self._begin()

    async def restart(self) -> None:
        """Tells the engine everything again."""
        await self._end()
        self._begin()

    async def aclose(self, opened: Collection[str]) -> None:
        """`opened` are the documents whose text may be another than on disk."""
        await self._end()
        if self.index is not None:
            for uri in opened:
                self.index.close(uri)
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._farewell(self.index, opened)
            await asyncio.to_thread(self.index.stop)

    def update(self, uri: str, text: str) -> None:
        if self.index is not None and (path := self.index.update(uri, text)) is not None:
            self._touched.add(path)
            self._changed.set()

    def close(self, uri: str) -> None:
        if self.index is not None and (path := self.index.close(uri)) is not None:
            self._touched.add(path)
            self._changed.set()

    def ask(self, now: float) -> None:
        self.asked_at = now
        if self._told is None:
            self._changed.set()
        self._more.set()

    def _reported(self, status: Status) -> None:
        """Called by the index's thread."""
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._heard, status)

    def _heard(self, status: Status) -> None:
        self._changed.set()
        if self.index is not None and self._tasks:
            self._report(self.index, replace(status, forgotten=len(self._refused)))

    def _begin(self) -> None:
        """The engine has to be told everything."""
        self._told = None
        self._wanted.clear()
        self._refused.clear()
        self._changed.set()
        self._tasks = [
            asyncio.create_task(self._again_and_again(self._changed, self._tell, CHANGES_S)),
            asyncio.create_task(self._again_and_again(self._more, self._feed, 0)),
        ]

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _again_and_again(self, event: asyncio.Event, do: Callable[[], Awaitable[None]], gather_s: float) -> None:
        """Does it after each event, of which those of `gather_s` seconds count as one."""
        while True:
            await event.wait()
            await asyncio.sleep(gather_s)
            event.clear()
            try:
                await do()
            except Exception as error:
                # Nobody needs to hear of an engine's: whoever asks for a completion does if it lasts.
                if isinstance(error, EngineError):
                    log.debug("the engine was not told of a folder: %s", error)
                else:  # The text of a fault may quote a document.
                    log.error("a fault in telling the engine of a folder: %s", type(error).__name__)
                self._told = None
                self._wanted.clear()
                await asyncio.sleep(RETRY_S)

    @property
    def _is_busy(self) -> bool:
        return time.monotonic() - self.asked_at < QUIET_S

    async def _tell(self) -> None:
        """Tells the engine which files there are, and finds out which texts it needs. Raises `EngineError`."""
        if self.index is None:
            if self._told is None and self.asked_at > -math.inf:
                await self._engine().forget(self.name)
                self._told = {}
            return
        state = self.index.status.state
        if state not in ("ready", "filling") or (self._told is None and (state == "filling" or not self._is_busy)):
            return
        # While somebody types only open documents change: the other files are not looked through for that.
        touched, self._touched = self._touched, set()
        told, revision = self._told, self.index.revision
        some = touched if told is not None and revision == self._revision else None
        settled = await asyncio.to_thread(self.index.settle, SETTLE_S)
        manifest = await asyncio.to_thread(_manifest, self.index, some)
        if not settled or manifest is None:
            self._touched |= touched
            self._changed.set()  # It is looked at again.
        if manifest is None:
            return
        known = told if told is None or some is None else {path: told[path] for path in some & told.keys()}
        gone = known.keys() - manifest.keys() if known is not None else set()
        if told is None or known is None or (some is None and len(gone) > MANY):
            wanted = dict.fromkeys(await self._engine().sync(self.name, manifest))
            self._told = {path: hash for path, hash in manifest.items() if path not in wanted}
            self._wanted = wanted
        else:
            for path in gone:
                del told[path]
                self._wanted.pop(path, None)
            if gone:
                await self._engine().remove(self.name, gone)
            self._wanted |= dict.fromkeys(path for path, _ in manifest.items() - known.items())
            self._give_again(told)
        self._revision = revision
        if self._wanted:
            self._more.set()

    def _give_again(self, told: Mapping[str, str]) -> None:
        """Wants what the engine had no room for again, after a while: there may be room now."""
        self._refused = {path: of for path, of in self._refused.items() if told.get(path) == of[0]}
        if time.monotonic() > self._given_again:
            self._given_again = math.inf
            self._wanted |= dict.fromkeys(path for path, (_, tries) in self._refused.items() if tries < TRIES)

    async def _feed(self) -> None:
        """Gives the engine the texts that it needs. Raises `EngineError`."""
        while self.index is not None and self._told is not None and self._wanted and self._is_busy:
            told = self._told
            paths = list(islice(self._wanted, READ_FILES))
            for path in paths:
                del self._wanted[path]
                told[path] = ""  # It is on its way: if it is removed meanwhile, the engine must hear of it.
            documents = [
                document for document in await asyncio.to_thread(_read, self.index, paths) if document.path in told
            ]
            told |= {document.path: document.hash for document in documents}
            async with self._turn:
                refused = await self._engine().put(self.name, documents)
            self._note_refused(documents, set(refused))
            # What was removed while it was sent may have come after the removal.
            if late := [document.path for document in documents if document.path not in (self._told or told)]:
                await self._engine().remove(self.name, late)

    def _note_refused(self, documents: Sequence[Document], refused: Collection[str]) -> None:
        """Notes which of the documents the engine did not take, and did not just hear to be gone or replaced."""
        before = len(self._refused)
        for document in documents:
            of = self._refused.pop(document.path, ("", 0))
            if document.path in refused and self._told and self._told.get(document.path) == document.hash:
                self._refused[document.path] = document.hash, 1 + (of[1] if of[0] == document.hash else 0)
                self._given_again = min(self._given_again, time.monotonic() + REFUSED_S)
        if len(self._refused) != before and self.index is not None:
            self._heard(self.index.status)

    async def _farewell(self, index: Index, opened: Collection[str]) -> None:
        """Lets the engine forget of these documents what is not on disk. Raises `EngineError`."""
        told = {path: self._told[path] for uri in opened if self._told and (path := index.relative(uri)) in self._told}
        manifest = await asyncio.to_thread(_manifest, index) if told else None
        if manifest is not None and (unsaved := [path for path, hash in told.items() if manifest.get(path) != hash]):
            await self._engine().remove(self.name, unsaved)


def workspace_name(root: str) -> str:
    """What the engine knows the folder at a real path by."""
    return hashlib.sha256(os.fsencode(root)).hexdigest()[:32]


def _manifest(index: Index, paths: Collection[str] | None = None) -> dict[str, str] | None:
    found = index.manifest(paths)
    return None if found is None else {path: hash.hex() for path, hash in found.items()}


def _read(index: Index, paths: Sequence[str]) -> list[Document]:
    # An editor may send half a surrogate pair, which the protocol does not carry.
    return [
        Document(path, fingerprint(text).hex(), text.encode(errors="replace").decode())
        for path, text in index.texts(paths)
    ]


def _root(uri: str) -> str | None:
    """The real path of a folder on this machine."""
    path = local_path(uri)
    return None if path is None else os.path.realpath(path)
