"""The memory against its definition, spelled out: what is found, what is mixed, and what lies on disk."""

from __future__ import annotations

import fcntl
import gzip
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from infill_engine import ngrams, workspace
from infill_engine.fake import FakeDenoiser
from infill_engine.memory import NAMED, WEIGHTS, Candidates, FileMemory, Match, Memory, Weights, draw, mix
from infill_engine.tokenizer import ByteCodec, LineTokenizer
from infill_engine.training import memory as training
from infill_engine.training.corpus import Document
from infill_engine.workspace import Workspace, folder

VOCAB = 5

texts = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def spelled_out(texts: list[list[int]], context: list[int], start: int = 0) -> tuple[int, dict[int, int]]:
    """The longest match of a context in texts, and what followed; of the last text only followers from `start` on."""
    best, counts = 0, Counter[int]()
    for text in texts:
        for at in range(len(text) - 1):
            if text is texts[-1] and at + 1 < start:
                continue
            n = 0
            while n < min(16, len(context), at + 1) and text[at - n] == context[-1 - n]:
                n += 1
            if n >= max(2, best):
                counts = counts if n == best else Counter()
                best = n
                counts[text[at + 1]] += 1
    return best, dict(counts)


def of_row(found: tuple[np.ndarray, ...], row: int) -> tuple[int, dict[int, int]]:
    length, used, ids, counts = found
    n = int(used[row])
    return int(length[row]), dict(zip(ids[row, :n].tolist(), counts[row, :n].astype(int).tolist(), strict=True))


# The workspace.


class Engines(RuleBasedStateMachine):
    """Files come, change and go, are merged, and engines start again; the truth is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, list[int]] = {}

    @initialize(vocab=st.sampled_from([VOCAB, 100_000]))
    def start(self, vocab: int) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="infill-")
        self.vocab = vocab
        self.workspace = Workspace(Path(self.home.name), vocab, background=False)

    @rule(path=st.sampled_from("abcdef"), text=texts)
    def put(self, path: str, text: list[int]) -> None:
        assert self.workspace.put(path, str(text), text)
        assert self.workspace.has(path, str(text))
        self.files[path] = text

    @rule(path=st.sampled_from("abcdef"))
    def remove(self, path: str) -> None:
        self.workspace.remove(path)
        self.files.pop(path, None)

    @rule(kept=st.sets(st.sampled_from("abcdef")), changed=st.sampled_from("abcdef"))
    def sync(self, kept: set[str], changed: str) -> None:
        manifest = {path: str(self.files.get(path)) for path in kept}
        if changed in kept:
            manifest[changed] = "new"
        missing = {path for path in kept if path not in self.files or path == changed}
        assert set(self.workspace.sync(manifest)) == missing
        self.files = {path: text for path, text in self.files.items() if path in kept}

    @rule()
    def merge(self) -> None:
        assert self.workspace.merge()

    @rule()
    def restart(self) -> None:
        assert self.workspace.merge()
        self.workspace.close()
        self.workspace = Workspace(Path(self.home.name), self.vocab, background=False)

    @rule()
    def restart_at_once(self) -> None:
        """What was not merged is asked for again; nothing that was removed comes back."""
        self.workspace.close()
        self.workspace = Workspace(Path(self.home.name), self.vocab, background=False)
        for path in self.workspace.sync({path: str(text) for path, text in self.files.items()}):
            self.workspace.put(path, str(self.files[path]), self.files[path])

    @rule(context=texts.filter(bool), without=st.sampled_from(["", *"abcdef"]), data=st.data())
    def search(self, context: list[int], without: str, data: st.DataObject) -> None:
        if self.files:  # something that is there, so that there are long matches
            text = data.draw(st.sampled_from(list(self.files.values())))
            context = context + text[: data.draw(st.integers(0, len(text)))]
        found = ngrams.found(2)
        self.workspace.search(np.array(context, np.int32), len(context) - 2, found, without or None)
        others = [text for path, text in self.files.items() if path != without]
        assert of_row(found, 0) == spelled_out([*others, []], context[:-1])
        assert of_row(found, 1) == spelled_out([*others, []], context)

    @invariant()
    def holds_what_is_there(self) -> None:
        if hasattr(self, "workspace"):
            assert self.workspace.files == len(self.files)

    def teardown(self) -> None:
        if hasattr(self, "workspace"):
            self.workspace.close()
            self.home.cleanup()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def look(memory: Workspace, context: list[int], without: str | None = None) -> tuple[int, dict[int, int]]:
    found = ngrams.found(1)
    memory.search(np.array(context, np.int32), len(context) - 1, found, without)
    return of_row(found, 0)


def on_disk(at: Path) -> bytes:
    return b"".join(file.read_bytes() for file in at.iterdir())


@pytest.mark.parametrize("vocab", [60_000, 200_000])
def test_what_was_deleted_leaves_the_disk_with_the_next_merge(tmp_path: Path, vocab: int) -> None:
    memory = Workspace(tmp_path, vocab, background=False)
    secret, other = [50_001, 50_002, 50_003, 50_004], [1, 2, 3, 4]
    memory.put("secret", "1", secret)
    memory.put("other", "1", other)
    assert memory.merge()
    needle = np.array(secret, np.uint16 if vocab < 65_536 else np.int32).tobytes()
    assert needle in on_disk(tmp_path)
    memory.remove("secret")
    assert look(memory, [50_001, 50_002]) == (0, {})
    assert memory.merge()
    assert needle not in on_disk(tmp_path)
    assert look(memory, [1, 2]) == (2, {3: 1})
    memory.remove("other")
    assert memory.merge()
    assert memory.disk_bytes == 0


def test_what_was_deleted_leaves_the_disk_when_the_workspace_is_closed(tmp_path: Path) -> None:
    memory = Workspace(tmp_path, 60_000, background=False)
    secret = [101, 102, 103, 104]
    memory.put("secret", "1", secret)
    memory.put("other", "1", [1, 2, 3, 4])
    assert memory.merge()
    memory.remove("secret")
    memory.close()
    assert np.array(secret, np.uint16).tobytes() not in on_disk(tmp_path)


def test_what_an_engine_that_was_killed_had_deleted_leaves_the_disk_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Workspace(tmp_path, 60_000, background=False)
    secret = [101, 102, 103, 104]
    needle = np.array(secret, np.uint16).tobytes()
    memory.put("secret", "1", secret)
    memory.put("other", "1", [1, 2, 3, 4])
    assert memory.merge()
    memory.remove("secret")
    assert memory._note()
    assert needle in on_disk(tmp_path)
    monkeypatch.setattr("infill_engine.workspace.MERGED_S", 0.05)
    again = Workspace(tmp_path, 60_000, background=True)
    until = time.monotonic() + 30
    while needle in on_disk(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    assert needle not in on_disk(tmp_path)
    assert look(again, [1, 2]) == (2, {3: 1})
    again.close()


def test_a_deletion_is_known_after_a_restart_before_any_merge(tmp_path: Path) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    memory.put("a", "1", [1, 2, 3])
    assert memory.merge()
    memory.remove("a")
    memory.close()
    again = Workspace(tmp_path, VOCAB, background=False)
    assert again.files == 0
    assert look(again, [1, 2]) == (0, {})


def test_a_deletion_is_noted_and_changes_are_merged_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "NOTED_S", 0.01)
    monkeypatch.setattr(workspace, "MERGED", 64)
    memory = Workspace(tmp_path, VOCAB)
    try:
        memory.put("a", "1", [1, 2, 3] * 40)
        wait_for(lambda: Workspace(tmp_path, VOCAB, background=False).files == 1)
        memory.remove("a")
        wait_for(lambda: Workspace(tmp_path, VOCAB, background=False).files == 0)
    finally:
        memory.close()


def wait_for(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["index", "*.segment"])
@pytest.mark.parametrize("damage", ["cut", "empty", "head", "middle", "gone"])
def test_what_is_damaged_is_asked_for_again_and_never_an_error(tmp_path: Path, name: str, damage: str) -> None:
    files = {str(i): [i % VOCAB] * 40 + [1, 2, 3] for i in range(50)}
    memory = Workspace(tmp_path, VOCAB, background=False)
    for path, text in files.items():
        memory.put(path, "1", text)
    assert memory.merge()
    memory.close()
    (path,) = tmp_path.glob(name)
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        at = {"head": 20, "middle": len(data) // 2}.get(damage, 0)
        data[at : at + 64] = b"\xff" * len(data[at : at + 64])
        path.write_bytes({"cut": bytes(data[: len(data) // 2]), "empty": b""}.get(damage, bytes(data)))
    again = Workspace(tmp_path, VOCAB, background=False)
    look(again, [1, 2])  # whatever it says
    assert again.merge()
    for missing in again.sync(dict.fromkeys(files, "1")):
        assert again.put(missing, "1", files[missing])
    assert again.merge()
    assert again.files == len(files)
    assert look(again, [0, 1, 2]) == (3, {3: 10})


def test_an_index_of_another_format_or_vocabulary_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    memory.put("a", "1", [1, 2, 3])
    assert memory.merge()
    assert Workspace(tmp_path, VOCAB, background=False).files == 1
    assert Workspace(tmp_path, VOCAB + 1, background=False).files == 0
    monkeypatch.setattr(workspace, "FORMAT", workspace.FORMAT + 1)
    assert Workspace(tmp_path, VOCAB, background=False).files == 0


def test_two_engines_on_one_folder_lose_nothing(tmp_path: Path) -> None:
    a, b = Workspace(tmp_path, VOCAB, background=False), Workspace(tmp_path, VOCAB, background=False)
    a.put("a", "1", [1, 2, 3])
    b.put("b", "1", [1, 2, 4])
    assert a.merge()
    assert b.merge()
    assert look(b, [1, 2]) == (2, {3: 1, 4: 1})
    b.remove("a")
    b.put("b", "2", [1, 2, 0])
    assert b.merge()
    assert look(a, [1, 2]) == (2, {3: 1})  # what it had mapped stays readable
    a.remove("c")
    a.put("c", "1", [4, 4, 4])
    assert a.merge()
    assert look(a, [1, 2]) == (2, {0: 1})
    assert look(b, [4, 4]) == (0, {})


def test_what_was_changed_and_then_deleted_does_not_come_back_with_what_another_engine_wrote(tmp_path: Path) -> None:
    a = Workspace(tmp_path, VOCAB, background=False)
    a.put("a", "1", [1, 2, 3])
    assert a.merge()
    b = Workspace(tmp_path, VOCAB, background=False)
    a.put("a", "2", [1, 2, 4])
    a.remove("a")
    b.put("b", "1", [0, 0, 0])
    assert b.merge()
    assert a.merge()
    assert look(a, [1, 2]) == (0, {})
    assert Workspace(tmp_path, VOCAB, background=False).files == 1


def test_while_another_engine_writes_all_stays_in_memory(tmp_path: Path) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory.put("a", "1", [1, 2, 3])
        assert not memory.merge()
        assert look(memory, [1, 2]) == (2, {3: 1})
    assert memory.merge()


def test_where_the_disk_cannot_be_written_all_stays_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = Workspace(tmp_path / "file" / "folder", VOCAB, background=False)
    memory.put("a", "1", [1, 2, 3])
    assert not memory.merge()
    assert look(memory, [1, 2]) == (2, {3: 1})
    memory.close()


def test_a_merge_that_fails_half_way_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    memory.put("a", "1", [1, 2, 3])
    assert memory.merge()
    memory.put("b", "1", [1, 2, 4])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert not memory.merge()
    assert look(memory, [1, 2]) == (2, {3: 1, 4: 1})
    assert memory.merge()
    assert look(memory, [1, 2]) == (2, {3: 1, 4: 1})
    assert len(list(tmp_path.iterdir())) == 3  # index, lock, one segment


def test_a_deletion_is_noted_where_a_merge_goes_on_for_longer_than_closing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "CLOSED_S", 0.01)
    monkeypatch.setattr(workspace, "NOTED_S", 600.0)
    memory = Workspace(tmp_path, VOCAB)
    memory.put("a", "1", [1, 2, 3])
    memory.put("b", "1", [1, 2, 4])
    assert memory.merge()
    sort, sorting, go_on = ngrams.sort, threading.Event(), threading.Event()

    def slow(tokens: np.ndarray) -> np.ndarray:
        sorting.set()
        assert go_on.wait(30.0)
        return sort(tokens)

    monkeypatch.setattr(ngrams, "sort", slow)
    monkeypatch.setattr(workspace, "MERGED", 64)
    memory.put("c", "1", [1, 2, 0] * 40)
    assert sorting.wait(30.0)
    memory.remove("a")
    memory.close()
    killed_now = Workspace(tmp_path, VOCAB, background=False)
    assert (killed_now.files, look(killed_now, [1, 2])) == (1, (2, {4: 1}))
    go_on.set()
    wait_for(lambda: Workspace(tmp_path, VOCAB, background=False).files == 2)  # or it lives, and loses nothing
    assert look(Workspace(tmp_path, VOCAB, background=False), [1, 2]) == (2, {4: 1, 0: 40})


def test_the_background_work_survives_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workspace, "AGAIN_S", 0.01)
    monkeypatch.setattr(workspace, "MERGED", 64)
    sort, failed = ngrams.sort, threading.Event()

    def broken(tokens: np.ndarray) -> np.ndarray:
        if failed.is_set():
            return sort(tokens)
        failed.set()
        raise ValueError("what a user wrote")

    monkeypatch.setattr(ngrams, "sort", broken)
    memory = Workspace(tmp_path, VOCAB)
    try:
        memory.put("a", "1", [1, 2, 3] * 40)
        wait_for(lambda: Workspace(tmp_path, VOCAB, background=False).files == 1)
        assert failed.is_set()
        assert look(memory, [1, 2]) == (2, {3: 40})
    finally:
        memory.close()
    assert "ValueError" in caplog.text
    assert "what a user wrote" not in caplog.text


def test_what_is_deleted_or_changed_during_a_merge_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    for path, last in (("old", 0), ("old changed", 1)):
        memory.put(path, "1", [1, 2, last])
    assert memory.merge()
    memory.put("new", "1", [1, 2, 2])
    memory.put("new changed", "1", [1, 2, 3])
    sort = ngrams.sort

    def meanwhile(tokens: np.ndarray) -> np.ndarray:
        memory.remove("old")
        memory.remove("new")
        memory.put("old changed", "2", [1, 2, 4, 4])
        memory.put("new changed", "2", [1, 2, 4, 3])
        return sort(tokens)

    monkeypatch.setattr(ngrams, "sort", meanwhile)
    assert memory.merge()
    assert look(memory, [1, 2]) == (2, {4: 2})
    monkeypatch.setattr(ngrams, "sort", sort)
    assert memory.merge()
    assert look(memory, [1, 2]) == (2, {4: 2})
    assert memory.files == 2


KILLED = """
import sys
from pathlib import Path
from infill_engine.workspace import Workspace
memory = Workspace(Path(sys.argv[1]), 5, background=False)
step = 0
while True:
    memory.put(str(step % 7), str(step), [step % 5, 1, 2, 3] * 50)
    memory.remove(str((step + 3) % 7))
    memory.merge()
    step += 1
    print(step, flush=True)
"""


@pytest.mark.process
def test_an_engine_that_is_killed_while_it_writes_leaves_a_sound_index(tmp_path: Path) -> None:
    for after in (0.0, 0.003, 0.007, 0.012):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        memory = Workspace(tmp_path, VOCAB, background=False)
        assert memory.files > 0
        assert look(memory, [1, 2])[1].keys() == {3}
        assert memory.merge()
        assert all(segment.sound for segment in memory._segments)
        memory.close()


def test_of_a_common_pair_the_shares_are_right_without_looking_at_all_places(tmp_path: Path) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    for i in range(40):
        memory.put(str(i), "1", [1, 2, 3 if i % 4 else 4] * 100)
    assert memory.merge()
    _, counts = look(memory, [0, 1, 2])
    assert sum(counts.values()) == pytest.approx(4000, rel=0.02)
    assert counts[4] / sum(counts.values()) == pytest.approx(0.25, abs=0.1)


def test_ids_of_another_tokenizer_are_refused_and_huge_files_left_out(tmp_path: Path) -> None:
    memory = Workspace(tmp_path, VOCAB, background=False)
    with pytest.raises(ValueError, match="no id of a vocabulary of 5"):
        memory.put("a", "1", [1, 5])
    with pytest.raises(ValueError, match="another tokenizer"):
        memory.put("a", "1", [-1])
    assert not memory.put("a", "1", np.zeros(workspace.MOST_FILE + 1, np.int32))
    assert memory.files == 0


def test_a_folder_is_of_one_user_workspace_and_tokenizer(tmp_path: Path) -> None:
    keys = [("u", "w", "t"), ("v", "w", "t"), ("u", "x", "t"), ("u", "w", "s"), ("u\0w", "", "t")]
    assert len({folder(tmp_path, *key) for key in keys}) == len(keys)
    memory = Workspace(folder(tmp_path, *keys[0]), VOCAB, background=False)
    memory.put("a", "1", [1, 2, 3])
    assert memory.merge()
    at = folder(tmp_path, *keys[0])
    assert {path.stat().st_mode & 0o077 for path in (at, *at.iterdir())} == {0}


# The open file.

lines = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5).map(tuple), max_size=8)


def joined(lines: list[tuple[int, ...]]) -> list[int]:
    return [token for line in lines for token in line]


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.tuples(lines, lines), min_size=1, max_size=5), texts)
def test_the_open_file_is_found_however_it_changed(states, context):
    file = FileMemory()
    for before, after in states:
        file.update(before, after)
        for rest in (context, joined(before), joined(after)):
            if not rest:
                continue
            found = ngrams.found(1)
            file.search(np.array(rest, np.int32), len(rest) - 1, VOCAB, found)
            assert of_row(found, 0) == spelled_out([joined(after), joined(before), []], rest)


@settings(deadline=None)
@given(lines, lines, texts, texts, st.data())
def test_a_view_counts_the_file_and_what_is_written(before, after, written, proposal, data):
    proposal = proposal[:4]
    view = Memory(VOCAB, EVEN).view("d", before, after)
    kept = data.draw(st.integers(0, len(written)))
    for token in written:
        view.append(token)
    view.cut(kept)
    assert view.written == tuple(written[:kept])
    candidates = view.candidates(proposal)
    for row in range(len(proposal) + 1):
        text = joined(before) + written[:kept] + proposal[:row]
        n, counts = spelled_out([joined(after), text], text)
        assert candidates.lengths[row].tolist() == [n, 0]
        named = candidates.named[row]
        assert dict(zip(candidates.ids[row][named].tolist(), candidates.file[row][named].tolist(), strict=True)) == (
            pytest.approx({token: count / sum(counts.values()) for token, count in counts.items()})
        )


def test_two_gaps_of_one_file_do_not_disturb_each_other():
    memory = Memory(VOCAB, EVEN)
    first = memory.view("d", [(1, 2, 3), (1, 2)], [])
    assert first.propose(1) == (3,)
    second = memory.view("d", [(1, 2, 4), (1, 2)], [])
    assert second.propose(1) == (4,)
    assert first.propose(1) == (3,)
    assert memory.view("d", [(1, 2)], []).propose(1) == ()


def test_the_document_itself_is_left_out_of_the_workspace(tmp_path: Path) -> None:
    other = Workspace(tmp_path, VOCAB, background=False)
    other.put("here", "1", [1, 2, 3])
    other.put("there", "1", [1, 2, 4])
    memory = Memory(VOCAB, EVEN)
    assert memory.view("d", [(1, 2)], [], other, "here").candidates().ids.tolist() == [[4]]
    both = memory.view("d", [(1, 2, 0, 1, 2)], [], other).candidates()
    assert both.lengths.tolist() == [[2, 2]]
    assert dict(zip(both.ids[0].tolist(), both.remembered[0].tolist(), strict=True)) == (
        pytest.approx({0: 1 / 3, 3: 1 / 6, 4: 1 / 6})
    )


def test_the_longest_continuation_is_proposed(tmp_path: Path) -> None:
    other = Workspace(tmp_path, 100, background=False)
    other.put("there", "1", [11, 12, 13, 14, 15, 16, 17])
    memory = Memory(100, EVEN)
    assert memory.view("d", [(10, 11, 12, 13)], [], other).propose(8) == (14, 15, 16)
    assert memory.view("d", [(10, 11, 12, 13, 14)], [], other).propose(8) == (15, 16, 17)
    assert memory.view("d", [(10, 11, 12, 13, 14)], [], other).propose(2) == (15, 16)
    assert memory.view("d", [(13,)], [], other).propose(8) == ()
    assert memory.view("d", [], [], other).propose(8) == ()
    assert memory.view("d", [], [], other).candidates().ids.shape == (1, 0)


# The mixture.

EVEN = Weights((2,), (), np.full((2, 2, 1, 3), 1 / 3))
shares = st.dictionaries(st.integers(0, 9), st.integers(1, 9), max_size=4)
logits = st.lists(st.floats(-4, 4, width=32), min_size=10, max_size=10)


def match(counts: dict[int, int]) -> Match:
    ids, share = np.zeros((1, NAMED), np.int32), np.zeros((1, NAMED))
    for i, (token, count) in enumerate(counts.items()):
        ids[0, i], share[0, i] = token, count / sum(counts.values())
    return Match(np.array([3 if counts else 0], np.int32), np.array([float(sum(counts.values()))]), ids, share)


def dense(match: Match, admitted: np.ndarray) -> np.ndarray:
    p = np.zeros(10)
    for token, share in zip(match.ids[0], match.share[0], strict=True):
        p[token] += share
    p *= admitted
    return p / p.sum() if p.sum() > 0 else p


END = 9


@settings(deadline=None)
@given(
    shares.map(lambda counts: {token: count for token, count in counts.items() if token != END}),
    shares.map(lambda counts: {token: count for token, count in counts.items() if token != END}),
    logits,
    st.sets(st.integers(0, 9), max_size=9),
    st.tuples(*[st.floats(0.01, 1)] * 3),
    st.floats(0.3, 2),
)
def test_the_mixture_is_exact(in_file, in_workspace, z, refused, weights, temperature):
    admitted = np.array([token not in refused for token in range(10)])
    w = np.array(weights) / sum(weights)
    table = Weights((2,), (), np.broadcast_to(w, (2, 2, 1, 3)))
    file, other = match(in_file), match(in_workspace)
    # Dense: each part over the ids that are admitted, a part without any left out; END as the model has it.
    y = np.where(admitted, np.array(z) / temperature, -np.inf)
    p = np.exp(y - y.max())
    lse, p = y.max() + math.log(p.sum()), p / p.sum()
    end, text = p[END], np.where(np.arange(10) == END, 0.0, p)
    parts = [text / max(1.0 - end, 1e-300), dense(file, admitted), dense(other, admitted)]
    used = np.array([w[i] * bool(i == 0 or part.any()) for i, part in enumerate(parts)])
    used /= used.sum()
    q = (1.0 - end) * sum(weight * part for weight, part in zip(used, parts, strict=True))
    q[END] = end

    candidates = Candidates.of(*(part.only(admitted[part.ids]) for part in (file, other)), table)
    assert len(set(candidates.ids[candidates.named].tolist())) == candidates.named.sum()
    entropy = np.array([-(p[p > 0] * np.log(p[p > 0])).sum()])
    model = np.array([y.argmax()]), p.max(keepdims=True), np.array([lse]), entropy
    mixed = mix(candidates, *model, y[candidates.ids], END, p[END:])
    assert mixed.prob[0] == pytest.approx(q.max())
    assert q[mixed.token[0]] == pytest.approx(q.max())
    assert admitted[mixed.token[0]]
    assert mixed.entropy[0] == pytest.approx(-(q[q > 0] * np.log(q[q > 0])).sum(), abs=1e-6)
    named = candidates.named
    assert mixed.candidates[named] == pytest.approx(q[candidates.ids[named]])

    # Drawn evenly over both draws, each id comes as often as it is probable where the model's sample is not END.
    grid = (np.arange(60) + 0.5) / 60
    component, follower = (g.ravel() for g in np.meshgrid(grid, grid))
    repeated = Candidates(*(np.repeat(getattr(candidates, name), 3600, 0) for name in Candidates.__slots__))
    drawn = draw(repeated, np.full(3600, -1), component, follower, END)
    for token in range(10):
        remembered = used[1] * parts[1][token] + used[2] * parts[2][token]
        assert (drawn == token).mean() == pytest.approx(remembered, abs=0.06)
    assert (drawn == -1).mean() == pytest.approx(used[0], abs=0.02)
    assert (draw(repeated, np.full(3600, END), component, follower, END) == END).all()


def test_where_the_text_ends_is_the_models_alone_to_say():
    """However sure the memory is of what follows: a model that ends the text at 60% ends it."""
    candidates = Candidates.of(match({1: 5}), match({1: 7}), EVEN)
    ends = np.array([END]), np.array([0.6]), np.zeros(1), np.array([1.0]), np.log(np.full((1, 1), 0.1))
    mixed = mix(candidates, *ends, END, np.array([0.6]))
    assert (mixed.token[0], mixed.prob[0]) == (END, 0.6)
    assert mixed.candidates[0, 0] == pytest.approx(0.1 / 3 + 0.4 * 2 / 3)
    # Less probable than another of the model's tokens, but more than all are once the memory has its share.
    goes_on = np.array([5]), np.array([0.5]), np.zeros(1), np.array([1.0]), np.log(np.full((1, 1), 0.01))
    mixed = mix(candidates, *goes_on, END, np.array([0.4]))
    assert (mixed.token[0], mixed.prob[0]) == (1, pytest.approx(0.01 / 3 + 0.6 * 2 / 3))
    mixed = mix(candidates, *goes_on, END, np.array([0.45]))
    assert mixed.token[0] == END


def test_without_a_match_the_model_is_left_alone():
    candidates = Candidates.of(match({}), match({}), EVEN)
    assert candidates.weights.tolist() == [[1.0, 0.0, 0.0]]
    model = np.array([7]), np.array([0.4]), np.array([3.0]), np.array([1.2]), np.zeros((1, 0))
    mixed = mix(candidates, *model, END, np.array([0.2]))
    assert (mixed.token[0], mixed.prob[0], mixed.entropy[0]) == (7, 0.4, pytest.approx(1.2))


def test_rows_of_several_canvases_are_mixed_as_one():
    one = Candidates.of(match({1: 2, 2: 1}), match({3: 1}), EVEN)
    other = Candidates.of(match({}), match({4: 1}), EVEN)
    stacked = Candidates.stacked([(1, one), (3, other)], 5)
    rows = np.arange(5)
    scores = np.log(np.full(stacked.ids.shape, 0.1))
    model, end = (rows % 2 + 5, np.full(5, 0.5), np.zeros(5), np.full(5, 1.5)), np.full(5, 0.01)
    mixed = mix(stacked, *model, scores, END, end)
    for row, candidates in ((1, one), (3, other)):
        of_row = *(a[row : row + 1] for a in model), scores[:1, : candidates.ids.shape[1]]
        alone = mix(candidates, *of_row, END, end[:1])
        assert (mixed.token[row], mixed.prob[row], mixed.entropy[row]) == pytest.approx(
            (alone.token[0], alone.prob[0], alone.entropy[0])
        )
    left_alone = [0, 2, 4]
    assert mixed.token[left_alone].tolist() == [5, 5, 5]
    assert mixed.prob[left_alone].tolist() == [0.5, 0.5, 0.5]
    assert mixed.entropy[left_alone] == pytest.approx(1.5)
    assert Candidates.stacked([], 2).ids.shape == (2, 0)


def test_restrictions_hold_for_their_own_rows():
    view = Memory(10, EVEN).view("d", [(1, 2, 3, 1, 2, 4, 1, 2)], [])
    allowed = {0: np.arange(10) == 4, 1: np.arange(10) == 9}
    free = np.arange(10) != 2
    candidates = view.candidates((3, 1), allowed, free)
    rows = [candidates.ids[row][candidates.named[row]].tolist() for row in range(3)]
    assert rows == [[4], [], []]
    assert candidates.weights[1].tolist() == [1.0, 0.0, 0.0]
    assert candidates.lengths[:, 0].tolist() == [2, 0, 0]


# The weights.


def test_the_shipped_weights_trust_long_matches_more():
    weights = Weights.load()
    table = weights.table
    assert np.allclose(table.sum(-1), 1.0, atol=0.002)
    assert table[-1, 0, 0, 1] > table[1, 0, 0, 1]
    assert table[0, -1, -1, 2] > table[0, 1, -1, 2]
    assert WEIGHTS.stat().st_size < 64_000


def test_weights_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no table"):
        Weights.load(path)
    with pytest.raises(ValueError, match="shape"):
        Weights((2,), (1,), np.ones((1, 1, 1, 3)))
    with pytest.raises(ValueError, match="sum 1"):
        Weights((2,), (), np.full((2, 2, 1, 3), 0.5))


def test_weights_survive_their_file(tmp_path: Path) -> None:
    table = np.random.default_rng(0).dirichlet(np.ones(3), (3, 3, 2))
    Weights((2, 4), (3,), table, "made up").save(tmp_path / "w.json")
    loaded = Weights.load(tmp_path / "w.json")
    assert (loaded.lengths, loaded.counts, loaded.note) == ((2, 4), (3,), "made up")
    assert np.allclose(loaded.table, table, atol=0.002)


# Fitting.


def observed(rows: int, rng: np.random.Generator) -> training.Observed:
    """Tokens of a vocabulary of two: the model gives 1 a probability of 0.3; where there is a match of 8 tokens, the
    file says 1, which is right nine times in ten, else 1 is right three times in ten."""
    matched = rng.random(rows) < 0.5
    token = (rng.random(rows) < np.where(matched, 0.9, 0.3)).astype(np.int64)
    ids, share = np.zeros((rows, NAMED), np.int32), np.zeros((rows, NAMED))
    ids[:, 0], share[:, 0] = 1, matched
    file = Match(np.where(matched, 8, 0).astype(np.int32), matched * 2.0, ids, share)
    none = Match(np.zeros(rows, np.int32), np.zeros(rows), np.zeros_like(ids), np.zeros_like(share))
    named = np.zeros((rows, 2 * NAMED))
    named[:, 0] = 0.3
    entropy = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    model, name = np.where(token == 1, 0.3, 0.7), np.array([f"p{i % 8}" for i in range(rows)])
    kind, top = np.repeat("line", rows), np.zeros(rows, np.int64)
    zeros = np.zeros(rows)
    return training.Observed(
        name, kind, token, model, top, np.full(rows, 0.7), np.full(rows, entropy), zeros, named, file, none, end_id=2
    )


def test_the_fitted_mixture_is_the_true_distribution():
    seen = observed(4000, np.random.default_rng(0))
    fitted = training.fit(seen)
    p, token, prob = training.mixed(seen, fitted)
    matched = seen.file.length > 0
    assert fitted.of(seen.file, seen.workspace)[~matched].tolist() == [[1.0, 0.0, 0.0]] * int((~matched).sum())
    # 0.3 w0 + w1 = 0.9 where w0 + w1 = 1
    assert p[matched & (seen.token == 1)] == pytest.approx(0.9, abs=0.02)
    assert p[~matched] == pytest.approx(seen.model[~matched])
    assert (token == matched).all()
    assert prob[matched] == pytest.approx(0.9, abs=0.02)
    lines = list(training.report(seen, training.halves(seen)))
    assert lines[2].startswith("| all | 4000 | 0.")
    assert len(training.Observed.joined([part for part, _ in training.halves(seen)]).token) == 4000


def test_packages_are_not_in_both_halves():
    (one, _), (other, _) = training.halves(observed(100, np.random.default_rng(0)))
    assert set(one.package) ^ set(other.package) == set(one.package) | set(other.package)
    assert set(one.package)
    assert set(other.package)


@given(st.randoms(use_true_random=False))
def test_gaps_are_cut_out_of_their_document(chance):
    tokenizer = LineTokenizer(ByteCodec())
    document = Document("p", "python", "a.py", "".join(f"line {i} {'x' * (i % 7)}\n" for i in range(60)))
    gaps = training.cut(document, tokenizer, training.WINDOW, chance)
    starts = []
    for gap in gaps:
        before, after = ([token for line in lines for token in line] for lines in (gap.before, gap.after))
        assert bytes([*before, *gap.middle, *after]) == document.text.encode()
        assert len(before) >= training.BEFORE
        assert bytes(gap.middle).count(b"\n") in {"rest": (0,), "line": (1,), "lines": (2, 3)}[gap.kind]
        starts.append(len(before))
    assert starts == sorted(starts, reverse=True)


def test_what_a_model_says_is_observed(tmp_path: Path) -> None:
    """With a model that writes what a table says, and files that say it too."""
    tokenizer = LineTokenizer(ByteCodec())
    text = "".join(f"call(a{i})\n" for i in range(60))
    write_corpus(tmp_path, [Document("p", "python", f"{i}.py", text + f"end {i}\n") for i in range(3)])
    denoiser = FakeDenoiser({"\ncall(": "a"})
    seen = training.collect(tmp_path, "held", 16, denoiser, tokenizer)
    known = (seen.token == ord("a")) & (seen.top == ord("a"))
    assert known.any()
    assert (seen.model[known] > 0.99).all()
    assert np.allclose(seen.model[known], seen.prob[known])
    assert (seen.end[seen.top == seen.end_id] > 0.99).all()
    assert (seen.workspace.length > 0).any()
    assert (seen.parts()[:, 2] > 0).mean() > 0.3
    assert set(seen.package) == {"p"}


def write_corpus(folder: Path, documents: list[Document]) -> None:
    with gzip.open(folder / "held.jsonl.gz", "wb") as file:
        file.writelines(msgspec.json.encode(document) + b"\n" for document in documents)
