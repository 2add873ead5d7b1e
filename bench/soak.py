"""Random changes of a folder, with a model of the truth beside: `python -m bench.soak [--events N] [--editors N]`.

A person, their editors and git create, change, rename and delete files and folders, change what is ignored, and switch
branches of 2,000 files. Several editors have the folder open, with one database of the index and one memory between
them, and open, edit and close documents without saving. After each round the indexes and the memory must equal the
truth. Fails where they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from infill_engine.protocol import Document
from infill_engine.tokenizer import ByteCodec
from infill_engine.workspaces import Workspaces

from bench.index import ROUND, SETTLED_S, Folder
from infill_lsp.folders import Folders, workspace_name

#: Rounds between two switches of a branch, and files of a branch.
SWITCH, BRANCH = 2, 2_000
#: Documents that an editor has open at most.
OPEN = 4


class Engine:
    """The memory of an engine, as its clients meet it."""

    def __init__(self, home: Path) -> None:
        self.workspaces = Workspaces(home, ByteCodec())

    async def sync(self, workspace: str, manifest: Mapping[str, str]) -> list[str]:
        return self.workspaces.sync(workspace, manifest)

    async def put(self, workspace: str, documents: Iterable[Document]) -> list[str]:
        taken = self.workspaces.put(workspace, tuple(documents))
        while not taken.done() and self.workspaces.digest():  # noqa: ASYNC110 - it is this that does it
            await asyncio.sleep(0)
        return taken.result()

    async def remove(self, workspace: str, paths: Iterable[str]) -> None:
        self.workspaces.remove(workspace, tuple(paths))

    async def forget(self, workspace: str) -> None:
        self.workspaces.forget(workspace)


class Editor:
    """An editor that has the folder open. Documents of its own are open in it and not saved."""

    def __init__(self, engine: Engine, folder: Folder, number: int) -> None:
        self.folders = Folders(lambda: engine, lambda index, status: None)  # type: ignore[arg-type, return-value]
        self._folder, self._number = folder, number
        self._texts: dict[str, str] = {}

    async def start(self) -> None:
        await self.folders.settle({self._folder.root.as_uri(): []})
        self.folders.ask()

    def change(self, chance: random.Random) -> None:
        """A document is opened, edited or closed."""
        self.folders.ask()
        uri = chance.choice(sorted(self._texts)) if self._texts else None
        if uri is None or (len(self._texts) < OPEN and chance.random() < 0.4):
            uri = (self._folder.root / f"mine{self._number}-{chance.randrange(10)}.py").as_uri()
            self._texts[uri] = f"unsaved = {chance.random()}\n"
            self.folders.open(uri, partial(self._texts.__getitem__, uri))
        elif chance.random() < 0.6:
            self._texts[uri] += f"more = {chance.random()}\n"
            self.folders.edit(uri)
        else:
            self._close(uri)

    def close_all(self) -> None:
        for uri in list(self._texts):
            self._close(uri)

    def _close(self, uri: str) -> None:
        self.folders.close(uri)
        del self._texts[uri]

    def manifest(self) -> dict[str, bytes] | None:
        (folder,) = self.folders._folders.values()
        return None if folder.index is None else folder.index.manifest()


async def equal(engine: Engine, editors: Iterable[Editor], folder: Folder) -> float:
    """Seconds until indexes and memory equal the folder. Raises `AssertionError` where they do not in time."""
    name, began = workspace_name(str(folder.root)), time.monotonic()
    checks: list[Callable[[Mapping[str, bytes]], bool]] = [
        *((lambda truth, editor=editor: editor.manifest() == truth) for editor in editors),
        lambda truth: _remembers(engine, name, truth),
    ]
    for number, check in enumerate(checks):
        while not check(folder.readable()):
            if time.monotonic() - began > SETTLED_S:
                raise AssertionError("the memory differs" if number == len(checks) - 1 else "an index differs")
            await asyncio.sleep(0.1)
    return time.monotonic() - began


def _remembers(engine: Engine, name: str, truth: Mapping[str, bytes]) -> bool:
    """Whether the memory has exactly these contents. Asks without telling: telling would make it so."""
    workspace = engine.workspaces.of(name)
    has = all(workspace.has(path, hash.hex()) for path, hash in truth.items())
    return has and workspace.files == len(truth)


async def soak(root: Path, home: Path, events: int, editors: int, seed: int, branch: int = BRANCH) -> float:
    """Runs it; returns the most seconds until all was equal after a round."""
    chance = random.Random(seed)
    folder, engine = Folder(root, chance), Engine(home)
    opened = [Editor(engine, folder, number) for number in range(editors)]
    longest = 0.0
    for editor in opened:
        await editor.start()
    for event in range(1, events + 1):
        folder.change()
        if chance.random() < 0.3:
            chance.choice(opened).change(chance)
        await asyncio.sleep(chance.choice([0, 0, 0, 0.01]))
        if event % ROUND == 0 or event == events:
            if event // ROUND % SWITCH == 0 or event == events:
                folder.switch(branch)
            for editor in opened:
                editor.close_all()
            longest = max(longest, await equal(engine, opened, folder))
    for editor in opened:
        await editor.folders.aclose()
    engine.workspaces.close()
    again = Engine(home)  # what lies on disk is the same
    assert _remembers(again, workspace_name(str(root)), folder.readable()), "the memory differs after a restart"
    again.workspaces.close()
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--editors", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infill-") as name:
        root, home = Path(name) / "project", Path(name) / "memory"
        root.mkdir()
        began = time.monotonic()
        longest = asyncio.run(soak(root, home, options.events, options.editors, options.seed))
        seconds = time.monotonic() - began
    print(f"equal after {options.events:,} events in {seconds:.0f} s; at most {longest:.1f} s after a round of {ROUND}")


if __name__ == "__main__":
    main()
