"""The index of a folder: in the end it holds what may be read there, whatever happened meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.index import Folder
from infill_lsp import filling
from infill_lsp.chunks import cut, language_of, words
from infill_lsp.database import Database, File, Stamp, fingerprint
from infill_lsp.filling import Limits, Status, is_local
from infill_lsp.ignore import Ignore
from infill_lsp.index import APART, Index, Seen, forget

#: Seconds that something may take on a machine under load.
PATIENCE_S = 20.0
Make = Callable[..., Index]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    return made


@pytest.fixture
def make(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes running indexes of `folder`, all with their databases in one place."""
    monkeypatch.setattr("infill_lsp.index.READ_WAIT_S", PATIENCE_S)
    running = []

    def start(root: Path = folder, **options: object) -> Index:
        index = Index(str(root), home=tmp_path / "cache", **options)  # type: ignore[arg-type]
        index.start()
        running.append(index)
        return index

    yield start
    for index in running:
        index.stop()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def function(name: str, word: str = "nothing") -> str:
    return f"def {name}(x):\n    {word} = x\n    return {word}\n"


def eventually(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not (so := is_so()) and time.monotonic() < end:
        time.sleep(0.05)
    return so


def texts(index: Index, word: str, seen: Seen | None = None) -> set[str]:
    """The paths of chunks that are found by a word, as somebody who asks would get them."""
    asked = index.frequencies(words(word), seen)
    found = index.search(asked, seen, 100) if asked else []
    return {each.path for each in found if index.holds(each)}


def of_names(index: Index, name: str, paths: Iterable[str] = ()) -> set[str]:
    """The paths of the files that have a definition of this name."""
    found = index.definition(name, lambda path: path not in paths)
    if found is None:
        return set()
    return of_names(index, name, {*paths, found.path}) | ({found.path} if index.holds(found) else set())


def uri(folder: Path, path: str) -> str:
    return (folder / path).as_uri()


def truth(folder: Path) -> dict[str, bytes]:
    """What an index of a folder must hold where nothing is left out: no more than walking through it and reading it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): fingerprint(path.read_text()) for path in files}


def dump(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All that a database says, without what depends on the order in which it was told."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab(main, words, row)")
    connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
    queries = {
        "chunks": "SELECT path, name, first, last, text FROM chunks JOIN files ON files.id = file",
        "frequencies": "SELECT word, chunks FROM frequencies",
        "words": "SELECT term, doc, cnt FROM temp.terms",
        "match": "SELECT path, first FROM words JOIN chunks ON chunks.id = words.rowid JOIN files ON files.id = file "
        "WHERE words MATCH 'shared'",
    }
    said = {name: sorted(connection.execute(query).fetchall()) for name, query in queries.items()}
    connection.close()
    return said


def rebuilt(folder: Path, at: Path) -> dict[str, list[tuple[object, ...]]]:
    """What a database of the folder says that was filled in one go."""
    stored = Database(at, "", wal=False, wait_s=1)
    rules = Ignore(str(folder))
    paths = [path for listing in rules.walk() for path, _ in listing.files]
    files = [(path, rules.read(path).text) for path in paths]
    stamp = Stamp(0, 0, 0, 0)
    stored.write(File(path, fingerprint(text), stamp, cut(text, language_of(path))) for path, text in files)
    stored.close()
    return dump(at)


def stored_at(home: Path) -> Path:
    (path,) = home.glob("*.db")
    return path


def test_finds_by_words_and_by_names(make: Make, folder: Path) -> None:
    write(folder, a=function("parse_config"), **{"sub/b": function("other", "httpDate")})
    index = make()
    assert index.settle(PATIENCE_S)
    assert texts(index, "parseConfig") == {"a.py"}
    assert texts(index, "date") == {"sub/b.py"}
    assert texts(index, "absent") == set()
    assert of_names(index, "other") == {"sub/b.py"}
    assert index.frequencies(["parse", "def", "absent"], None) == {"parse": 1, "def": 2}
    assert (index.status.files, index.status.chunks, index.status.state) == (2, 2, "ready")
    assert index.manifest() == truth(folder)


def test_follows_changes_on_disk(make: Make, folder: Path) -> None:
    write(folder, a=function("first"), b=function("kept"))
    index = make()
    assert index.settle(PATIENCE_S)
    write(folder, a=function("second"))
    assert eventually(lambda: of_names(index, "second") == {"a.py"})
    assert of_names(index, "first") == set()
    write(folder, **{"new/deep/c": function("third")})
    assert eventually(lambda: of_names(index, "third") == {"new/deep/c.py"})
    write(folder, **{"new/deep/d": function("fourth")})
    assert eventually(lambda: of_names(index, "fourth") == {"new/deep/d.py"})
    (folder / "new").rename(folder / "moved")
    assert eventually(lambda: set(index.manifest() or ()) == {"a.py", "b.py", "moved/deep/c.py", "moved/deep/d.py"})
    shutil.rmtree(folder / "moved")
    assert eventually(lambda: set(index.manifest() or ()) == {"a.py", "b.py"})
    assert of_names(index, "third") == set()


def test_a_file_may_become_a_folder_and_back(make: Make, folder: Path) -> None:
    write(folder, **{"x": function("inner"), "a.py/b": function("inner")})
    index = make()
    assert index.settle(PATIENCE_S)
    shutil.rmtree(folder / "a.py")
    write(folder, a=function("outer"))
    assert eventually(lambda: index.manifest() == truth(folder))
    (folder / "a.py").unlink()
    write(folder, **{"a.py/b": function("inner")})
    assert eventually(lambda: index.manifest() == truth(folder))


def test_what_is_gone_is_not_found_even_before_the_index_knows(make: Make, folder: Path) -> None:
    write(folder, a=function("first"), b=function("first"))
    index = make()
    assert index.settle(PATIENCE_S)
    index.stop()
    (folder / "a.py").unlink()
    assert of_names(index, "first") == {"b.py"}
    write(folder, b=function("other"))
    assert of_names(index, "first") == set()


def test_new_rules_take_out_and_bring_back(make: Make, folder: Path) -> None:
    write(folder, a=function("first"), **{"sub/b": function("second")})
    index = make()
    assert index.settle(PATIENCE_S)
    index.update(uri(folder, "sub/b.py"), function("third"))
    assert eventually(lambda: of_names(index, "third") == {"sub/b.py"})
    (folder / ".gitignore").write_text("sub/\n")
    assert eventually(lambda: set(index.manifest() or ()) == {"a.py", ".gitignore"})
    assert of_names(index, "third") == set()
    (folder / ".gitignore").unlink()
    assert eventually(lambda: set(index.manifest() or ()) == {"a.py", "sub/b.py"})
    assert eventually(lambda: of_names(index, "third") == {"sub/b.py"})


def test_an_open_document_stands_in_place_of_its_file(make: Make, folder: Path) -> None:
    write(folder, a=function("saved"), b=function("shared"))
    index = make()
    assert index.settle(PATIENCE_S)
    index.update(uri(folder, "a.py"), function("unsaved").replace("\n", "\r\n"))
    assert of_names(index, "saved") == set()
    assert index.settle(PATIENCE_S)
    assert of_names(index, "unsaved") == texts(index, "unsaved") == {"a.py"}
    assert (index.manifest() or {})["a.py"] == fingerprint(function("unsaved"))
    index.close(uri(folder, "a.py"))
    assert of_names(index, "unsaved") == texts(index, "unsaved") == set()
    assert of_names(index, "saved") == {"a.py"}


def test_a_document_that_is_long_to_cut_is_cut_seldom_while_somebody_types(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = []

    def slowly(text: str, language: str) -> object:
        cuts.append(text)
        time.sleep(0.2)
        return cut(text, language)

    index = make()
    index.settle(PATIENCE_S)
    monkeypatch.setattr("infill_lsp.index.cut", slowly)
    uri, began = (folder / "a.py").as_uri(), time.monotonic()
    while (took := time.monotonic() - began) < 3.0:
        index.update(uri, function("typed", f"word{len(cuts)}"))
        time.sleep(0.02)
    assert 1 <= len(cuts) <= 1 + took / (0.2 * APART)
    index.update(uri, function("last"))
    assert index.settle(PATIENCE_S)
    assert texts(index, "last") == {"a.py"}
    (folder / ".gitignore").write_text("a.py\n")  # It is out at once, however long it takes.
    began = time.monotonic()
    assert eventually(lambda: not texts(index, "last"))
    assert time.monotonic() - began < 0.2 * APART


def test_words_are_counted_as_documents_are_now(make: Make, folder: Path) -> None:
    write(folder, a=function("target"), b=function("target"), c=function("other"))
    index = make()
    index.update(uri(folder, "a.py"), function("changed"))
    index.update(uri(folder, "c.py"), function("target") + "\n\n" + function("target"))
    assert eventually(lambda: index.frequencies(["target", "changed", "other"], None) == {"target": 3, "changed": 1})
    write(folder, c=function("other") + function("target"))
    assert eventually(lambda: index.frequencies(["target", "other"], None) == {"target": 3})
    index.close(uri(folder, "a.py"))
    index.close(uri(folder, "c.py"))
    assert eventually(lambda: index.frequencies(["target", "changed", "other"], None) == {"target": 3, "other": 1})


def test_unsaved_text_is_never_written(make: Make, folder: Path, tmp_path: Path) -> None:
    write(folder, a=function("saved"))
    index = make()
    index.update(uri(folder, "a.py"), function("zebra"))
    index.update(uri(folder, "new.py"), function("zebra"))
    assert index.settle(PATIENCE_S)
    assert of_names(index, "zebra") == {"a.py", "new.py"}
    index.stop()
    assert all(b"zebra" not in path.read_bytes() for path in (tmp_path / "cache").iterdir())


@pytest.mark.parametrize("path", [".env.py/../.env", "ignored/a.py", "link/a.py", "../outside.py", "a.min.js"])
def test_documents_that_may_not_be_read_are_not_used(make: Make, folder: Path, path: str) -> None:
    write(folder, **{"ignored/b": function("b")})
    (folder / ".gitignore").write_text("ignored/\n")
    (folder / "link").symlink_to(folder.parent)
    index = make()
    index.update(f"{folder.as_uri()}/{path}", function("opened"))
    index.update("untitled:Untitled-1", function("opened"))
    assert index.settle(PATIENCE_S)
    assert of_names(index, "opened") == texts(index, "opened") == set()


def test_what_is_seen_is_not_found(make: Make, folder: Path) -> None:
    write(folder, a=function("target"), b=function("target"))
    index = make()
    index.update(uri(folder, "a.py"), function("target") + "\n\n" * 50 + function("target"))
    assert index.settle(PATIENCE_S)
    seen = Seen("a.py", 0, 10)
    asked = index.frequencies(["target"], seen)
    assert asked == {"target": 2}
    assert {(each.path, each.chunk.first) for each in index.search(asked, seen, 10)} == {("a.py", 103), ("b.py", 0)}


def test_starts_from_what_was_stored(make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, a=function("first"), b=function("second"))
    for name in ("a.py", "b.py"):
        os.utime(folder / name, (1, 1))
    monkeypatch.setattr(Stamp, "fits", Stamp.is_of)  # As if the files had been written long before.
    first = make()
    assert first.settle(PATIENCE_S)
    first.stop()
    write(folder, b=function("third"))
    read = []
    monkeypatch.setattr(filling, "cut", lambda text, language: read.append(text) or cut(text, language))
    second = make()
    assert second.settle(PATIENCE_S)
    assert read == [function("third")]
    assert of_names(second, "first") == {"a.py"}
    assert of_names(second, "third") == {"b.py"}


def test_another_exclude_is_another_index(make: Make, folder: Path) -> None:
    write(folder, a=function("first"), b=function("second"))
    both, one = make(), make(exclude=("b.py",))
    assert both.settle(PATIENCE_S)
    assert one.settle(PATIENCE_S)
    assert set(both.manifest() or ()) == {"a.py", "b.py"}
    assert set(one.manifest() or ()) == {"a.py"}


def test_two_on_one_folder_agree(make: Make, folder: Path, tmp_path: Path) -> None:
    for number in range(200):
        write(folder, **{f"f{number}": function(f"f{number}", "shared")})
    first, second = make(), make()
    for number in range(0, 200, 3):
        write(folder, **{f"f{number}": function(f"g{number}", "shared")})
        (folder / f"f{number + 1}.py").unlink(missing_ok=True)
    assert eventually(lambda: first.manifest() == truth(folder))
    assert eventually(lambda: second.manifest() == truth(folder))
    first.stop()
    second.stop()
    assert dump(stored_at(tmp_path / "cache")) == rebuilt(folder, tmp_path / "rebuilt.db")


def test_limits_are_kept_and_said(make: Make, folder: Path) -> None:
    for number in range(20):
        write(folder, **{f"f{number}": function(f"f{number}")})
    index = make(limits=Limits(files=5))
    assert index.settle(PATIENCE_S)
    assert (index.status.files, index.status.complete) == (5, False)


def test_files_without_text_are_counted_and_not_read_again(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.py").write_bytes(b"\0")
    (folder / "b.py").write_text("x=1;" * 5_000)
    monkeypatch.setattr(Stamp, "fits", Stamp.is_of)
    index = make()
    assert index.settle(PATIENCE_S)
    assert (index.status.refused, index.status.files) == ({"binary": 1, "minified": 1}, 0)
    index.stop()
    monkeypatch.setattr(Ignore, "read", lambda *_: pytest.fail("read again"))
    again = make()
    assert again.settle(PATIENCE_S)
    assert again.status.refused == {"binary": 1, "minified": 1}


def test_links_and_loops_do_not_matter(make: Make, folder: Path) -> None:
    write(folder, **{"sub/a": function("first")})
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "root").symlink_to("/")
    index = make()
    assert index.settle(PATIENCE_S)
    assert set(index.manifest() or ()) == {"sub/a.py"}
    (folder / "sub" / "again").symlink_to(folder / "sub")
    write(folder, **{"sub/b": function("second")})
    assert eventually(lambda: set(index.manifest() or ()) == {"sub/a.py", "sub/b.py"})


@pytest.mark.parametrize("watching", ["refused", "remote"])
def test_a_folder_that_cannot_be_watched_is_looked_through(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, watching: str
) -> None:
    monkeypatch.setattr(filling, "POLL_S", 0.1)
    if watching == "refused":
        monkeypatch.setattr(filling, "MAX_WATCHED", 0)
    else:
        monkeypatch.setattr(filling, "is_local", lambda path: False)
    write(folder, a=function("first"))
    index = make()
    assert eventually(lambda: index.status.watching == "polling")
    assert index.status.message.startswith("changes are noticed late (")
    write(folder, a=function("second"))
    assert eventually(lambda: of_names(index, "second") == {"a.py"})
    (folder / "a.py").unlink()
    assert eventually(lambda: index.manifest() == {})


def test_a_folder_that_comes_and_goes(make: Make, folder: Path) -> None:
    write(folder, a=function("first"))
    index = make()
    assert index.settle(PATIENCE_S)
    shutil.rmtree(folder)
    assert eventually(lambda: index.manifest() == {})
    write(folder, b=function("second"))
    assert eventually(lambda: set(index.manifest() or ()) == {"b.py"})


@pytest.mark.parametrize("root", ["/", os.path.expanduser("~"), "/nowhere/at/all"])
def test_folders_that_are_not_indexed(tmp_path: Path, root: str) -> None:
    index = Index(root, home=tmp_path)
    index.start()
    assert index.settle(PATIENCE_S)
    index.stop()
    assert index.status.state == "off"
    assert index.status.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["garbage", "other version", "other folder", "no tables", "words", "pages"])
def test_a_database_that_does_not_fit_is_made_again(make: Make, folder: Path, tmp_path: Path, damage: str) -> None:
    for number in range(30):
        write(folder, **{f"f{number}": function(f"f{number}", f"word{number}")})
    first = make()
    assert first.settle(PATIENCE_S)
    first.stop()
    path = stored_at(tmp_path / "cache")
    if damage == "garbage":
        path.write_bytes(b"no database" * 1000)
    elif damage == "pages":
        content = bytearray(path.read_bytes())
        for place in range(4096, len(content), 8192):
            content[place : place + 200] = os.urandom(200)
        path.write_bytes(content)
    else:
        connection = sqlite3.connect(path)
        connection.execute(
            {
                "other version": "PRAGMA user_version = 99",
                "other folder": "UPDATE folder SET root = 'elsewhere'",
                "no tables": "DROP TABLE chunks",
                "words": "UPDATE words_data SET block = x'0011223344'",
            }[damage]
        )
        connection.commit()
        connection.close()
    second = make()
    assert eventually(lambda: "f7.py" in texts(second, "word7"))
    assert eventually(lambda: second.manifest() == truth(folder))
    second.stop()
    assert dump(stored_at(tmp_path / "cache")) == rebuilt(folder, tmp_path / "rebuilt.db")


def test_a_cache_that_is_emptied_meanwhile_is_filled_again(make: Make, folder: Path, tmp_path: Path) -> None:
    write(folder, a=function("first"))
    index = make()
    assert index.settle(PATIENCE_S)
    shutil.rmtree(tmp_path / "cache")
    assert eventually(lambda: (tmp_path / "cache").exists() and of_names(index, "first") == {"a.py"})


def test_a_cache_that_cannot_be_written_turns_the_index_off(make: Make, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    index = make()
    assert index.settle(PATIENCE_S)
    assert index.status.state == "off"
    assert "cannot be used" in index.status.error


def test_old_databases_are_removed(make: Make, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name in ("old.0.db", "old.0.db-wal", "young.0.db"):
        (tmp_path / "cache" / name).touch()
    os.utime(tmp_path / "cache" / "old.0.db", (1, 1))
    assert make().settle(PATIENCE_S)
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert "young.0.db" in left
    assert not {"old.0.db", "old.0.db-wal"} & left


def test_what_was_removed_leaves_no_trace_in_the_file(tmp_path: Path) -> None:
    stored = Database(tmp_path / "a.0.db", "", wal=True, wait_s=1)
    stamp = Stamp(0, 0, 0, 0)
    for number in range(50):
        text = function(f"f{number}", "pineapple" if number == 7 else "shared")
        stored.write([File(f"{number}.py", fingerprint(text), stamp, cut(text, "python"))])
    stored.remove(["7.py"])
    assert stored.removed == 1
    stored.purge(lambda: False)
    assert stored.removed == 0
    stored.close()
    assert all(b"pineapple" not in path.read_bytes() for path in tmp_path.iterdir())


def holding(home: Path, word: bytes) -> list[str]:
    return [path.name for path in home.iterdir() if word in path.read_bytes()]


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_what_is_removed_before_the_end_leaves_no_trace_either(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Not where the editor is closed a moment later; nor, once the folder is opened again, where it was killed."""
    if killed:
        monkeypatch.setattr(filling, "FAREWELL_S", -1.0)
    write(folder, **{f"f{number}": function(f"f{number}", "shared") for number in range(50)})
    write(folder, a=function("secret", "pineapple"))
    index = make()
    assert index.settle(PATIENCE_S)
    assert holding(tmp_path / "cache", b"pineapple")
    (folder / "a.py").unlink()
    assert eventually(lambda: "a.py" not in (index.manifest() or {"a.py": b""}))
    index.stop()
    if killed:
        assert holding(tmp_path / "cache", b"pineapple")
        monkeypatch.setattr(filling, "PURGE_S", 0.0)
        again = make()
        assert again.settle(PATIENCE_S)
        assert eventually(lambda: not holding(tmp_path / "cache", b"pineapple"))
    assert not holding(tmp_path / "cache", b"pineapple")


def test_what_was_removed_is_purged_while_it_goes_on(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "PURGE_S", 0.1)
    write(folder, a=function("secret", "pineapple"), b=function("b"))
    index = make()
    assert index.settle(PATIENCE_S)
    (folder / "a.py").unlink()
    assert eventually(lambda: not holding(tmp_path / "cache", b"pineapple"))


def test_rules_of_the_repository_around_it_count_at_once(make: Make, tmp_path: Path) -> None:
    (tmp_path / "project" / ".git" / "info").mkdir(parents=True)
    inner = tmp_path / "project" / "inner"
    write(inner, a=function("a"), b=function("b"), c=function("c"))
    index = make(root=inner)
    assert index.settle(PATIENCE_S)
    assert set(index.manifest() or ()) == {"a.py", "b.py", "c.py"}
    (tmp_path / "project" / ".gitignore").write_text("inner/a.py\n")
    assert eventually(lambda: set(index.manifest() or ()) == {"b.py", "c.py"})
    (tmp_path / "project" / ".git" / "info" / "exclude").write_text("b.py\n")
    assert eventually(lambda: set(index.manifest() or ()) == {"c.py"})
    (tmp_path / "project" / "README.py").write_text(function("outside"))  # No file of the folder.
    (inner / "d.py").write_text(function("d"))
    assert eventually(lambda: set(index.manifest() or ()) == {"c.py", "d.py"})


def test_what_was_stored_of_a_folder_is_removed_with_what_is_left_out(make: Make, folder: Path, tmp_path: Path) -> None:
    """With other patterns the database is another: the former is removed a day later, at once where it is forgotten."""
    write(folder, a=function("a", "pineapple"), b=function("b"))
    first = make()
    assert first.settle(PATIENCE_S)
    first.stop()
    before = stored_at(tmp_path / "cache")
    other = make(exclude=("a.py",))
    assert other.settle(PATIENCE_S)
    other.stop()
    assert before.exists()
    days = time.time() - 1.1 * 86_400
    os.utime(before, (days, days))
    again = make(exclude=("a.py",))
    assert again.settle(PATIENCE_S)
    again.stop()
    assert not before.exists()
    forget(str(folder), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_progress_is_told(make: Make, folder: Path) -> None:
    for number in range(200):
        write(folder, **{f"f{number}": function(f"f{number}")})
    told: list[Status] = []
    index = make(report=told.append)
    assert index.settle(PATIENCE_S)
    index.stop()
    filled = [status.done for status in told if status.state == "filling" and status.total == 200]
    assert len(filled) >= 2
    assert filled == sorted(filled)
    assert told[-1].state == "stopped"


def test_a_status_says_what_a_person_should_know() -> None:
    assert Status().message == ""
    assert Status(error="it is off", unreadable=1).message == "it is off"
    status = Status(
        unreadable=1, refused={"huge": 2, "binary": 9}, complete=False, late="no more watches", forgotten=1_000
    )
    assert status.message == (
        "only a part of it is indexed, it is too large; 1 folder may not be looked into; 2 files are too large; "
        "1,000 files do not fit into the engine's memory; changes are noticed late (no more watches)"
    )


WRITER = """
import sys
from infill_lsp.index import Index
from pathlib import Path
index = Index(sys.argv[1], home=Path(sys.argv[2]), report=lambda status: print(status.done, flush=True))
index.start()
index._worker.join()
"""


@pytest.mark.process
def test_two_processes_on_one_folder(make: Make, folder: Path, tmp_path: Path) -> None:
    for number in range(200):
        write(folder, **{f"f{number}": function(f"f{number}", "shared") * 5})
    command = [sys.executable, "-c", WRITER, str(folder), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            index = make()
            for number in range(0, 200, 3):
                write(folder, **{f"f{number}": function(f"g{number}", "shared")})
                (folder / f"f{number + 1}.py").unlink(missing_ok=True)
            assert eventually(lambda: index.manifest() == truth(folder))
        finally:
            process.send_signal(signal.SIGKILL)
    assert eventually(lambda: index.manifest() == truth(folder))
    index.stop()
    assert dump(stored_at(tmp_path / "cache")) == rebuilt(folder, tmp_path / "rebuilt.db")


@pytest.mark.process
@pytest.mark.parametrize("reports", [1, 3])
def test_killed_in_the_middle_of_writing(make: Make, folder: Path, tmp_path: Path, reports: int) -> None:
    files = 800
    for number in range(files):
        write(folder, **{f"f{number}": function(f"f{number}", "shared") * 8})
    # Lest it be done before this process has its turn.
    command = ["nice", "-n", "19", sys.executable, "-c", WRITER, str(folder), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(reports + 1):
            process.stdout.readline()
        time.sleep(0.02 * reports)
        process.send_signal(signal.SIGKILL)
    with closing(sqlite3.connect(stored_at(tmp_path / "cache"))) as left:
        assert 0 < left.execute("SELECT count(*) FROM files").fetchone()[0] < files
    index = make()
    assert index.settle(PATIENCE_S)
    assert index.manifest() == truth(folder)
    index.stop()
    assert dump(stored_at(tmp_path / "cache")) == rebuilt(folder, tmp_path / "rebuilt.db")


def test_random_events_leave_the_index_equal_to_the_folder(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "MANY_CHANGES", 150)
    index = make()
    chance = random.Random(5)
    happening = Folder(folder, chance)
    for number in range(200):
        happening.change()
        time.sleep(chance.choice([0, 0, 0, 0.01]))
        if number % 100 == 50:
            happening.switch(200)
        if number % 50 == 49:
            assert eventually(lambda: index.manifest() == happening.readable())
    index.stop()
    assert dump(stored_at(tmp_path / "cache")) == rebuilt(folder, tmp_path / "rebuilt.db")


@pytest.mark.parametrize(
    ("path", "local"),
    [("/", True), ("/home/me", True), ("/mnt/far away/x", False), ("/mnt/farther", True), ("/mnt/box/x/y", False)],
)
def test_local_disks(tmp_path: Path, path: str, local: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /mnt/far\\040away rw,relatime shared:2 - nfs4 server:/x rw\n"
        "31 22 0:41 / /mnt/box rw,relatime - fuse.sshfs box:/y rw\n"
    )
    assert is_local(path, str(mounts)) is local
    assert is_local("/proc/self")
    assert is_local("/", str(tmp_path / "none"))


def test_a_folder_that_may_not_be_looked_into_is_said(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, a=function("first"), **{"closed/b": function("second")})
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    index = make()
    assert index.settle(PATIENCE_S)
    assert set(index.manifest() or ()) == {"a.py"}
    assert index.status.message == "1 folder may not be looked into"
