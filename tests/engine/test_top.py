"""`infill-engine top`: figures from scrapes, frames, and the live view on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infill_engine import cli, process
from infill_engine.metrics import Metrics
from infill_engine.protocol import Final, Status, Timing
from infill_engine.top import Reading, Scrape, frame, watch
from rich.console import Console
from scripted import ask, wait_for

SCRIPT = Path(__file__).with_name("scripted_process.py")


def scrape_of(metrics: Metrics, at: float, uptime_s: float = 100.0) -> Scrape:
    reading = Reading.parse(metrics.exposition(live=2, background=1, cache_bytes=0).decode())
    status = Status(
        version="1",
        pid=7,
        state="ready",
        model="embedded",
        device="cpu",
        dtype="float32",
        kernels="torch",
        uptime_s=uptime_s,
        live=2,
        background=1,
        cache_bytes=100 * 2**20,
        rss_bytes=512 * 2**20,
    )
    return Scrape(at, status, reading)


def shown(*scrapes: Scrape) -> str:
    console = Console(file=StringIO(), width=100, highlight=False, markup=False)
    console.print(frame(*scrapes))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def answered(metrics: Metrics, times: int, total_ms: float = 80.0) -> None:
    timing = Timing(queue_ms=0.0, encode_ms=0.0, denoise_ms=total_ms, steps=4, committed=10, encoded=30, reused=90)
    for _ in range(times):
        metrics.finished(ask(), Final("end", timing=timing))


def row(text: str, name: str) -> str:
    found = re.search(rf"^{name}  +(.*?) *$", text, re.MULTILINE)
    assert found, text
    return found[1]


def test_a_frame_says_what_happened_since_the_start() -> None:
    metrics = Metrics()
    answered(metrics, 50)
    metrics.finished(ask(), Final("cancelled"))
    metrics.stepped(canvases=3, rows=12, seconds=0.02)
    text = shown(scrape_of(metrics, at=0.0))
    assert row(text, "model") == "embedded  cpu float32 torch"
    assert row(text, "process") == "7, up 0:01:40"
    assert row(text, "memory") == "512 MiB, 100 MiB of them contexts"
    assert row(text, "now") == "2 live, 1 to be encoded ahead"
    assert "since its start" in text
    assert row(text, "requests").split(maxsplit=1) == ["0.51/s", "50 end, 1 cancelled"]
    assert row(text, "tokens a pass").startswith("2.50 ")
    assert row(text, "canvases a pass") == "3.00"
    assert row(text, "cache hits").startswith("75% ")
    assert row(text, "total").split() == ["87.5", "ms", "98.8", "ms"]


def test_a_frame_with_an_earlier_scrape_says_what_happened_since() -> None:
    metrics = Metrics()
    answered(metrics, 50)
    before = scrape_of(metrics, at=0.0)
    answered(metrics, 20, total_ms=450.0)
    text = shown(scrape_of(metrics, at=10.0), before)
    assert "since the last 10 s" in text
    assert row(text, "requests").split(maxsplit=1) == ["2.00/s", "20 end"]
    assert row(text, "total").split() == ["500.0", "ms", "590.0", "ms"]


def test_an_engine_that_did_nothing_yet_has_no_figures() -> None:
    text = shown(scrape_of(Metrics(), at=0.0, uptime_s=0.0))
    assert row(text, "total").split() == ["-", "-"]
    assert row(text, "tokens a pass").startswith("- ")


@given(st.lists(st.floats(0.0, 9.9), min_size=1, max_size=30), st.sampled_from([0.5, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(seconds: list[float], q: float) -> None:
    metrics = Metrics()
    for value in seconds:
        metrics.stepped(1, 1, value)
    reading = Reading.parse(metrics.exposition(live=0, background=0, cache_bytes=0).decode())
    bounds = sorted(float(bound) for bound in reading.by("infill_step_seconds_bucket", "le"))
    rank = max(1, -int(-q * len(seconds) // 1))
    true = sorted(seconds)[rank - 1]
    upper = next(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in bounds if bound < true), default=0.0)
    found = reading.quantile("infill_step_seconds", q)
    assert found is not None
    assert lower <= found <= upper


def test_what_is_not_on_a_terminal_gets_one_frame() -> None:
    console = Console(file=StringIO(), width=100)
    assert watch("m", console, scrape=lambda model: scrape_of(Metrics(), at=0.0)) == 0
    assert watch("m", console, scrape=lambda model: None) == 1
    assert isinstance(console.file, StringIO)
    assert "no engine serves m" in console.file.getvalue()


class Terminal:
    """`infill-engine top` on a terminal of its own."""

    def __init__(self, model: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "infill_engine", "top", "--model", model]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.text = ""

    def shows(self, words: str) -> Callable[[], bool]:
        def look() -> bool:
            with contextlib.suppress(OSError):  # Nothing to read yet, or no more.
                self.text += os.read(self._ours, 65536).decode(errors="replace")
            return words in self.text

        return look

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(home: Path) -> Iterator[Callable[[str], Terminal]]:
    started: list[Terminal] = []

    def start(model: str) -> Terminal:
        started.append(Terminal(model))
        return started[-1]

    yield start
    for one in started:
        one.end()


def engine() -> subprocess.Popen[str]:
    started = subprocess.Popen([sys.executable, str(SCRIPT), "serve", "--model", "instant"], text=True)
    wait_for(lambda: (found := process.status("instant")) is not None and found.state == "ready", 20)
    return started


@pytest.mark.process
def test_it_follows_an_engine_that_goes_and_comes_back(terminal: Callable[[str], Terminal]) -> None:
    running = engine()
    try:
        view = terminal("instant")
        wait_for(view.shows(f"{running.pid}, up"), 20)
        assert process.stop("instant") == "stopped"
        wait_for(view.shows("no engine serves instant: waiting for one"), 10)
        running.wait(5)
        running = engine()
        wait_for(view.shows(f"{running.pid}, up"), 10)
        view.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 5
        while view.process.poll() is None and time.monotonic() < deadline:
            view.shows("")()
            time.sleep(0.01)
        assert view.process.poll() == 0
        assert "Traceback" not in view.text
    finally:
        running.kill()
        running.wait()


@pytest.mark.process
def test_one_frame_for_pipes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = engine()
    try:
        assert cli.main(["top", "--once", "--model", "instant"]) == 0
        assert f"{running.pid}, up" in capsys.readouterr().out
        assert process.stop("instant")
        assert cli.main(["top", "--once", "--model", "instant"]) == 1
        assert capsys.readouterr().out == "no engine serves instant\n"
    finally:
        running.kill()
        running.wait()
