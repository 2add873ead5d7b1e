"""What the engine is told of the workspace's folders: in the end exactly what counts there now, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from editor import until
from infill_engine.protocol import Document
from marked import at

from infill_lsp import folders as module
from infill_lsp.client import EngineAway
from infill_lsp.core import Gap, Snippet
from infill_lsp.extraction import cut
from infill_lsp.folders import Folders
from infill_lsp.index import Index

#: Seconds that something may take on a machine under load.
PATIENCE_S = 20.0


class Engine:
    """Remembers as an engine does; `error` is what it says to everything."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.remembered: dict[str, dict[str, Document]] = {}
        self.asked: list[str] = []
        self.syncs = 0
        #: All paths whose text it ever got.
        self.fed: set[str] = set()
        #: Paths that it has no room for.
        self.full: set[str] = set()
        #: Documents wait here to be taken in.
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    def _hear(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    async def sync(self, workspace: str, manifest: Mapping[str, str]) -> list[str]:
        self._hear("sync")
        self.syncs += 1
        known = self.remembered.setdefault(workspace, {})
        for path in known.keys() - manifest.keys():
            del known[path]
        return [path for path, hash in manifest.items() if path not in known or known[path].hash != hash]

    async def put(self, workspace: str, documents: Iterable[Document]) -> list[str]:
        self._hear("put")
        documents = list(documents)
        self.fed |= {document.path for document in documents}
        self.waiting.set()
        await self.gate.wait()
        taken = [document for document in documents if document.path not in self.full]
        self.remembered[workspace].update((document.path, document) for document in taken)
        return [document.path for document in documents if document.path in self.full]

    async def remove(self, workspace: str, paths: Iterable[str]) -> None:
        self._hear("remove")
        for path in paths:
            self.remembered[workspace].pop(path, None)

    async def forget(self, workspace: str) -> None:
        self._hear("forget")
        self.remembered.pop(workspace, None)

    @property
    def texts(self) -> dict[str, str]:
        return {path: document.text for known in self.remembered.values() for path, document in known.items()}


class Bench:
    """Folders, the engine behind them, and one folder on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine()
        self.statuses: list[Any] = []
        self.folders = Folders(lambda: self.engine, lambda _, status: self.statuses.append(status))  # type: ignore[arg-type, return-value]

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    async def begin(self, **options: Any) -> None:
        await self.folders.settle({self.folder.as_uri(): options.get("exclude", [])})

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    async def eventually(self, **texts: str) -> None:
        """The engine comes to remember exactly these Python files."""
        wanted = {f"{name}.py": text for name, text in texts.items()}
        await until(lambda: self.engine.texts == wanted)

    async def ready(self) -> None:
        await until(lambda: any(status.state == "ready" for status in self.statuses))


@pytest.fixture
async def bench(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    for name in ("EDITS_S", "CHANGES_S", "RETRY_S"):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(module, "FAREWELL_S", PATIENCE_S)
    monkeypatch.setattr("infill_lsp.index.READ_WAIT_S", PATIENCE_S)
    (tmp_path / "project").mkdir()
    made = Bench(tmp_path / "project")
    yield made
    await made.folders.aclose()


async def test_the_files_of_a_folder_are_fed_and_followed(bench: Bench) -> None:
    bench.write(a="a = 1\n", b="b = 1\r\n")
    await bench.begin()
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", b="b = 1\n")
    bench.write(b="b = 2\n", c="c = 1\n")
    await bench.eventually(a="a = 1\n", b="b = 2\n", c="c = 1\n")
    (bench.folder / "a.py").unlink()
    await bench.eventually(b="b = 2\n", c="c = 1\n")
    assert bench.engine.syncs == 1  # After the first time only what changes is told.


async def test_nothing_is_told_before_a_completion_is_asked_for(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    await bench.begin()
    await bench.ready()
    bench.folders.open(bench.uri("a.py"), lambda: "a = 2\n")
    await asyncio.sleep(0.5)
    assert bench.engine.asked == []
    bench.folders.ask()
    await bench.eventually(a="a = 2\n")


async def test_where_nobody_asks_any_more_only_removals_are_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(a="a = 1\n", b="b = 1\n")
    await bench.begin()
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", b="b = 1\n")
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    bench.write(c="c = 1\n")
    (bench.folder / "a.py").unlink()
    await bench.eventually(b="b = 1\n")
    monkeypatch.setattr(module, "QUIET_S", PATIENCE_S)
    bench.folders.ask()
    await bench.eventually(b="b = 1\n", c="c = 1\n")


async def test_unsaved_text_counts_until_the_document_is_closed(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    text = "a = 2\r\n"
    await bench.begin()
    bench.folders.open(bench.uri("a.py"), lambda: text)
    bench.folders.open(bench.uri("new.py"), lambda: "new = 1\n")
    bench.folders.ask()
    await bench.eventually(a="a = 2\n", new="new = 1\n")
    text = "a = 3\n"
    bench.folders.edit(bench.uri("a.py"))
    await bench.eventually(a="a = 3\n", new="new = 1\n")
    bench.folders.close(bench.uri("a.py"))
    bench.folders.close(bench.uri("new.py"))
    await bench.eventually(a="a = 1\n")


async def test_what_was_open_and_not_saved_is_forgotten_at_the_end(bench: Bench) -> None:
    bench.write(a="a = 1\n", b="b = 1\n")
    await bench.begin()
    bench.folders.open(bench.uri("a.py"), lambda: "a = 2\n")
    bench.folders.open(bench.uri("b.py"), lambda: "b = 1\n")
    bench.folders.ask()
    await bench.eventually(a="a = 2\n", b="b = 1\n")
    await bench.folders.aclose()
    assert bench.engine.texts == {"b.py": "b = 1\n"}
    assert "index" not in {thread.name for thread in threading.enumerate()}


async def test_ignored_and_secret_files_are_never_fed(bench: Bench) -> None:
    bench.write(a="a = 1\n", ignored="x = 1\n", excluded="x = 1\n")
    (bench.folder / ".env").write_text("TOKEN=1\n")
    (bench.folder / "id_rsa").write_text("key\n")
    (bench.folder / ".ignore").write_text("ignored.py\n.ignore\n")
    await bench.begin(exclude=["excluded.py"])
    for name in (".env", "ignored.py", "excluded.py"):
        bench.folders.open(bench.uri(name), lambda: "unsaved = 1\n")
    bench.folders.open("file:///elsewhere/a.py", lambda: "elsewhere = 1\n")
    bench.folders.ask()
    await bench.eventually(a="a = 1\n")
    bench.write(b="b = 1\n")  # Once this is told, all of the above had its turn.
    await bench.eventually(a="a = 1\n", b="b = 1\n")
    assert bench.engine.fed == {"a.py", "b.py"}
    (bench.folder / ".ignore").write_text("*.py\n.ignore\n")
    await bench.eventually()


async def test_other_exclude_patterns_take_effect(bench: Bench) -> None:
    bench.write(a="a = 1\n", b="b = 1\n")
    await bench.begin(exclude=["b.py"])
    bench.folders.ask()
    await bench.eventually(a="a = 1\n")
    await bench.begin(exclude=["a.*"])
    await bench.eventually(b="b = 1\n")


async def test_switched_off_what_was_fed_is_removed_and_nothing_more_is_told(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    await bench.begin()
    bench.folders.ask()
    await bench.eventually(a="a = 1\n")
    await bench.begin(exclude=None)
    await bench.eventually()
    assert bench.engine.asked[-1] == "forget"
    told = len(bench.engine.asked)
    bench.folders.open(bench.uri("a.py"), lambda: "a = 2\n")
    bench.folders.ask()
    await asyncio.sleep(0.5)
    assert len(bench.engine.asked) == told
    assert bench.folders.place(bench.uri("a.py")) == ("", "")
    await bench.begin()
    await bench.eventually(a="a = 2\n")


async def test_an_engine_that_was_away_is_told_everything_again(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    await bench.begin()
    bench.engine.error = EngineAway("the engine is not running yet")
    bench.folders.ask()
    await until(lambda: bool(bench.engine.asked))
    bench.engine.error = None
    bench.folders.ask()
    await bench.eventually(a="a = 1\n")
    bench.engine.remembered.clear()
    await bench.folders.tell_again()
    await bench.eventually(a="a = 1\n")
    bench.engine.error = EngineAway("the engine is not running yet")
    bench.write(b="b = 1\n")
    asked = len(bench.engine.asked)
    await until(lambda: len(bench.engine.asked) > asked)
    bench.engine.error = None
    bench.engine.remembered.clear()
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", b="b = 1\n")


async def test_a_file_that_goes_while_it_is_sent_is_removed(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    await bench.begin()
    bench.engine.gate.clear()
    bench.folders.ask()
    await bench.engine.waiting.wait()
    (bench.folder / "a.py").unlink()
    await until(lambda: "remove" in bench.engine.asked)  # At once, not after what is under way.
    bench.engine.gate.set()
    await until(lambda: bench.engine.asked.count("remove") == 2)
    assert bench.engine.texts == {}


async def test_what_the_engine_has_no_room_for_is_told_and_given_again_a_few_times(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(a="a = 1\n", b="b = 1\n")
    bench.engine.full = {"b.py"}
    await bench.begin()
    bench.folders.ask()
    await until(lambda: any("1 file does not fit" in status.message for status in bench.statuses))
    assert bench.engine.texts == {"a.py": "a = 1\n"}
    (folder,) = bench.folders._folders.values()
    for tries in range(2, 6):
        folder._given_again = 0.0
        bench.write(a=f"a = {tries}\n")
        await bench.eventually(a=f"a = {tries}\n")
        await until(lambda tries=tries: folder._refused["b.py"][1] == min(tries, module.TRIES))
    bench.engine.full = set()
    bench.write(b="b = 2\n")
    await bench.eventually(a="a = 5\n", b="b = 2\n")
    await until(lambda: bench.statuses[-1].message == "")


async def test_while_somebody_types_the_other_files_are_not_looked_through(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(a="a = 1\n", b="b = 1\n")
    text = "a = 1\n"
    await bench.begin()
    bench.folders.open(bench.uri("a.py"), lambda: text)
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", b="b = 1\n")
    looked: list[Any] = []
    manifest = Index.manifest
    monkeypatch.setattr(Index, "manifest", lambda self, paths=None: looked.append(paths) or manifest(self, paths))
    for number in range(2, 10):
        text = f"a = {number}\n"
        bench.folders.edit(bench.uri("a.py"))
        await bench.eventually(a=text, b="b = 1\n")
    bench.folders.close(bench.uri("a.py"))
    await bench.eventually(a="a = 1\n", b="b = 1\n")
    # The index looks a second time at files that are as young as these.
    assert looked.count({"a.py"}) >= 6
    assert looked.count(None) <= 3
    bench.write(b="b = 2\n")
    await bench.eventually(a="a = 1\n", b="b = 2\n")


async def test_an_unsaved_document_that_becomes_ignored_is_forgotten(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    (bench.folder / ".ignore").write_text(".ignore\n")
    await bench.begin()
    bench.folders.open(bench.uri("new.py"), lambda: "new = 1\n")
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", new="new = 1\n")
    (bench.folder / ".ignore").write_text(".ignore\nnew.py\n")
    await bench.eventually(a="a = 1\n")


async def test_a_folder_may_be_switched_off_alone(bench: Bench) -> None:
    inner = bench.folder.parent / "other"
    inner.mkdir()
    (inner / "o.py").write_text("o = 1\n")
    bench.write(a="a = 1\n")
    await bench.folders.settle({bench.folder.as_uri(): [], inner.as_uri(): []})
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", o="o = 1\n")
    (kept,) = [folder for folder in bench.folders._folders.values() if folder.root == str(bench.folder)]
    await bench.folders.settle({bench.folder.as_uri(): [], inner.as_uri(): None})
    await bench.eventually(a="a = 1\n")
    assert kept in bench.folders._folders.values()  # its index goes on
    assert bench.folders.place(inner.joinpath("o.py").as_uri()) == ("", "")


async def test_what_is_off_in_a_folder_is_off_for_the_folder_around_it(bench: Bench) -> None:
    inner = bench.folder / "in[n]er"
    inner.mkdir()
    (inner / "o.py").write_text("o = 1\n")
    (bench.folder / "iner").mkdir()
    (bench.folder / "iner" / "p.py").write_text("p = 1\n")
    bench.write(a="a = 1\n")
    await bench.folders.settle({bench.folder.as_uri(): [], inner.as_uri(): None})
    bench.folders.open(inner.joinpath("u.py").as_uri(), lambda: "u = 1\n")
    bench.folders.ask()
    (outer,) = [folder for folder in bench.folders._folders.values() if folder.root == str(bench.folder)]
    assert outer.index is not None
    assert await asyncio.to_thread(outer.index.settle, PATIENCE_S)
    manifest = outer.index.manifest()
    assert manifest is not None
    assert set(manifest) == {"a.py", "iner/p.py"}
    assert bench.folders.place(inner.joinpath("o.py").as_uri()) == ("", "")
    assert bench.folders.place(bench.uri("a.py"))[1] == "a.py"


async def test_snippets_come_from_the_innermost_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIEVED_S", PATIENCE_S)
    monkeypatch.setattr("infill_lsp.priming.BUDGET_S", PATIENCE_S)
    bench.write(shape="def area_of(width):\n    return width * width\n", other="value = 1\nother = 2\n")
    snapshot = at("from shape import area_of\n\nx = area_of(|\n", uri=bench.uri("main.py"))
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    assert await bench.folders.snippets(snapshot, gap) == []
    await bench.begin()
    await bench.ready()
    bench.folders.open(snapshot.uri, lambda: "\n".join(snapshot.lines))
    found = await bench.folders.snippets(snapshot, gap)
    assert [(one.path, one.first_line) for one in found] == [("shape.py", 0)]


async def test_nobody_waits_for_snippets_that_take_long(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = at("x = |\n", uri=bench.uri("main.py"))
    gap = cut(snapshot, "invoked")
    assert isinstance(gap, Gap)
    go_on = threading.Event()
    known = [Snippet("x = 1\n", "x.py", 0, 0, 1.0, lambda: "it was found before")]

    def slow(*_: object) -> list[Snippet]:
        assert go_on.wait(PATIENCE_S)
        return known

    monkeypatch.setattr(module, "retrieve", slow)
    await bench.begin()
    bench.folders.open(snapshot.uri, lambda: "x = \n")
    assert await bench.folders.snippets(snapshot, gap) == []
    go_on.set()
    await until(lambda: bool(bench.folders._snippets))
    go_on.clear()
    assert await bench.folders.snippets(snapshot, gap) == known
    go_on.set()
    bench.folders.close(snapshot.uri)
    assert not bench.folders._snippets


async def test_a_broken_text_and_a_fault_do_not_end_the_feeding(bench: Bench) -> None:
    bench.write(a="a = 1\n")
    await bench.begin()
    bench.folders.open(bench.uri("b.py"), lambda: "b = '\ud83d'\n")
    bench.engine.error = RuntimeError("no error of an engine")
    bench.folders.ask()
    await until(lambda: bool(bench.engine.asked))
    bench.engine.error = None
    bench.folders.ask()
    await bench.eventually(a="a = 1\n", b="b = '?'\n")


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_the_engine_remembers_what_counts_in_the_end(bench: Bench, seed: int) -> None:
    random = Random(seed)
    names = [f"f{i}.py" for i in range(8)]
    opened: dict[str, str] = {}
    await bench.begin()
    for step in range(150):
        name, text = random.choice(names), f"x = {step}\n"
        match random.choice(["write", "write", "delete", "open", "edit", "edit", "close", "ask", "away", "again"]):
            case "write":
                (bench.folder / name).write_text(text)
            case "delete":
                (bench.folder / name).unlink(missing_ok=True)
            case "open" if name not in opened:
                opened[name] = text
                bench.folders.open(bench.uri(name), partial(opened.__getitem__, name))
            case "edit" if name in opened:
                opened[name] = text
                bench.folders.edit(bench.uri(name))
            case "close" if name in opened:
                bench.folders.close(bench.uri(name))
                del opened[name]
            case "ask":
                bench.engine.error = None
                bench.folders.ask()
            case "away":
                bench.engine.error = EngineAway("the engine is not running yet")
                if random.random() < 0.5:
                    bench.engine.remembered.clear()
            case "again":
                await bench.folders.tell_again()
        await asyncio.sleep(random.choice([0, 0, 0.01, 0.1]))
    bench.engine.error = None
    await bench.folders.tell_again()  # As the server does once the engine is ready again.
    bench.folders.ask()
    truth = {path.name: path.read_text() for path in bench.folder.iterdir()} | opened
    await bench.eventually(**{name.removesuffix(".py"): text for name, text in truth.items()})


async def test_many_files_that_go_at_once_are_told_in_one_list(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 3)
    bench.write(**{f"f{i}": f"x = {i}\n" for i in range(6)})
    await bench.begin()
    bench.folders.ask()
    await until(lambda: len(bench.engine.texts) == 6)
    (bench.folder / ".ignore").write_text("f[1-5].py\n.ignore\n")
    await bench.eventually(f0="x = 0\n")


async def test_a_document_belongs_to_the_innermost_folder(bench: Bench) -> None:
    inner = bench.folder / "inner"
    inner.mkdir()
    await bench.folders.settle({bench.folder.as_uri(): [], inner.as_uri(): [], "untitled:x": []})
    outer_name, outer_path = bench.folders.place(bench.uri("a.py"))
    inner_name, inner_path = bench.folders.place(bench.uri("inner/a.py"))
    assert (outer_path, inner_path) == ("a.py", "a.py")
    assert len({outer_name, inner_name, ""}) == 3
    assert str(bench.folder) not in outer_name
    assert bench.folders.place("file:///elsewhere/a.py") == ("", "")
    await bench.folders.settle({bench.folder.as_uri(): []})
    assert bench.folders.place(bench.uri("inner/a.py")) == (outer_name, "inner/a.py")


async def test_the_texts_are_those_that_count_and_may_be_read(bench: Bench) -> None:
    bench.write(a="a = 1\r\n", b="b = 1\n")
    (bench.folder / ".env").write_text("TOKEN=1\n")
    index = Index(str(bench.folder), exclude=["secret.py"])
    index.update(bench.uri("b.py"), "b = 2\r\n")
    index.update(bench.uri("secret.py"), "secret = 1\n")
    index.update(bench.uri("binary.py"), "\0")
    paths = ["a.py", "b.py", ".env", "secret.py", "binary.py", "missing.py"]
    assert list(index.texts(paths)) == [("a.py", "a = 1\n"), ("b.py", "b = 2\n")]
