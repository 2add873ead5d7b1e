"""The workspaces that an engine remembers: opened when somebody names them, fed piece by piece between its requests.

Documents come as text, which waits in memory until the engine has a moment; `digest` then tokenises some of it. What is
replaced or removed meanwhile is never taken in. Knows no HTTP and no model but its vocabulary, opens no file of the
user's, and is used by one thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from infill_engine import ngrams
from infill_engine.protocol import Document, Remembered
from infill_engine.scheduler import Unavailable
from infill_engine.tokenizer import REMEMBERED, Codec, LineTokenizer
from infill_engine.workspace import MOST_FILE, Workspace, folder

log = logging.getLogger(__name__)

#: Seconds of tokenising at a time: a request that comes meanwhile waits so long.
DIGEST_S = 0.004
#: Characters that may wait, of all documents together.
MOST_WAITING = 1 << 25
#: Workspaces that are open; of more the one that was named longest ago is closed.
MOST_OPEN = 16


class Full(Unavailable):
    """More waits to be taken in than there is room for."""


@dataclass(eq=False, slots=True)
class _Batch:
    """Documents that came together."""

    left: int
    refused: list[str] = field(default_factory=list)
    done: Future[list[str]] = field(default_factory=Future)

    def finish(self, path: str, taken: bool) -> None:
        """One of them waits no more."""
        self.left -= 1
        if not taken:
            self.refused.append(path)
        if self.left == 0 and self.done.set_running_or_notify_cancel():
            self.done.set_result(self.refused)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A document on its way, with the tokens of the segments that were cut off its beginning."""

    batch: _Batch
    content: str
    size: int
    segments: Iterator[str]
    tokens: list[int] = field(default_factory=list)


class Workspaces:
    """All workspaces of one user and one tokenizer."""

    def __init__(self, root: Path, codec: Codec) -> None:
        """root: the folder below which each has its own; created on demand."""
        self._root, self._codec = root, codec
        self._tokenizer = hashlib.sha256(msgspec.msgpack.encode(list(codec.tokens))).hexdigest()
        self._open: OrderedDict[str, Workspace] = OrderedDict()
        #: Those that write what is new, before they are gone.
        self._closing: dict[str, threading.Thread] = {}
        #: By workspace and path, in the order in which they came.
        self._waiting: dict[tuple[str, str], _Waiting] = {}

    @property
    def remembered(self) -> Remembered:
        """What is there of the workspaces that are open; may be asked for from any thread."""
        workspaces = list(self._open.values())
        return Remembered(
            tokens=sum(one.tokens for one in workspaces),
            files=sum(one.files for one in workspaces),
            disk_bytes=sum(one.disk_bytes for one in workspaces),
            waiting=len(self._waiting),
        )

    def warm_up(self) -> None:
        """Uses a small workspace, so that what is compiled at its first use, in seconds once on a machine, is there
        before the first request."""
        with tempfile.TemporaryDirectory() as where:
            workspace = Workspace(Path(where), len(self._codec.tokens), background=False)
            for content in ("1", "2"):  # as a segment, then in memory beside it; then a deletion and a merge of both
                workspace.put(content, content, [1, 2, 3])
                workspace.search(np.array([1, 2], np.int32), 1, ngrams.found(1))
                workspace.merge(alone=True)
            workspace.remove("1")
            workspace.put("3", "3", [1, 2, 3])
            workspace.search(np.array([1, 2], np.int32), 1, ngrams.found(1))
            workspace.merge()

    def of(self, name: str) -> Workspace:
        """The workspace of that name, opened where it is not."""
        if name not in self._open:
            if (closing := self._closing.pop(name, None)) is not None:
                closing.join()
            where = folder(self._root, str(os.getuid()), name, self._tokenizer)
            self._open[name] = Workspace(where, len(self._codec.tokens))
        self._open.move_to_end(name)
        if len(self._open) > MOST_OPEN:
            self._close_behind(*self._open.popitem(last=False))
        return self._open[name]

    def _close_behind(self, name: str, workspace: Workspace) -> None:
        """Closes a workspace, which may take a second, while the engine goes on."""
        self._closing = {of: thread for of, thread in self._closing.items() if thread.is_alive()}
        self._closing[name] = threading.Thread(target=workspace.close, name="workspace memory ends")
        self._closing[name].start()

    def sync(self, name: str, manifest: Mapping[str, str]) -> list[str]:
        """Forgets all documents but those in the manifest, path -> content hash; returns the paths of those whose text
        is to be `put`, because they are unknown or have another content. What waits already is not among them."""
        for of, path in list(self._waiting):
            if of == name and self._waiting[of, path].content != manifest.get(path):
                self._drop(of, path)
        return [path for path in self.of(name).sync(manifest) if (name, path) not in self._waiting]

    def put(self, name: str, documents: Sequence[Document]) -> Future[list[str]]:
        """Lets documents wait to be taken in. Its result, once they are: the paths of those that were not, because they
        were too long, there was no room, or they were removed or replaced meanwhile. Raises `Full`."""
        if sum(one.size for one in self._waiting.values()) + sum(len(one.text) for one in documents) > MOST_WAITING:
            raise Full("too much waits to be remembered: send the rest in a moment")
        batch = _Batch(len(documents))
        for document in documents:
            self._drop(name, document.path)
            segments = LineTokenizer.cut(document.text)
            self._waiting[name, document.path] = _Waiting(batch, document.hash, len(document.text), segments)
        if not documents:
            batch.done.set_result([])
        return batch.done

    def remove(self, name: str, paths: Sequence[str]) -> None:
        """Forgets documents, which may be unknown."""
        workspace = self.of(name)
        for path in paths:
            self._drop(name, path)
            workspace.remove(path)

    def forget(self, name: str) -> None:
        """Forgets a whole workspace, on disk too."""
        self.sync(name, {})
        if self._open[name].merge():
            self._open.pop(name).close()
        # Else another engine writes there: it stays open until its background work has done so, or the engine ends.

    def digest(self) -> bool:
        """Takes in some of what waits, in `DIGEST_S` or so; returns whether more does."""
        if not self._waiting:
            return False
        (name, path), document = next(iter(self._waiting.items()))
        until = time.monotonic() + DIGEST_S
        try:
            for segment in document.segments:
                document.tokens += self._codec.encode(segment[:REMEMBERED])
                if len(document.tokens) > MOST_FILE:
                    break
                if time.monotonic() > until:
                    return True
            fits = len(document.tokens) <= MOST_FILE
            taken = fits and self.of(name).put(path, document.content, document.tokens)
        except Exception as error:  # of this document alone; the error's text may quote it
            log.error("a document cannot be remembered: %s", type(error).__name__)
            taken = False
        del self._waiting[name, path]
        document.batch.finish(path, taken)
        return bool(self._waiting)

    def close(self) -> None:
        """Writes to disk what is new, and closes all workspaces; what waits is dropped."""
        for name, path in list(self._waiting):
            self._drop(name, path)
        while self._open:
            self._open.popitem()[1].close()
        for thread in self._closing.values():
            thread.join()

    def _drop(self, name: str, path: str) -> None:
        """Lets a document wait no more, if it does."""
        if (document := self._waiting.pop((name, path), None)) is not None:
            document.batch.finish(path, taken=False)
