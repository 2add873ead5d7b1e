"""What a person sees and gets in VS Code: packaged extension, fresh profile, real server, real engine, a fake model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from journeys import HERE, REPOSITORY, Engine, installed, wait_for

WANTED = os.environ.get("INFILL_E2E_VSCODE") != "0"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not WANTED, reason="INFILL_E2E_VSCODE=0 leaves VS Code out"),
]

EXTENSION = REPOSITORY / "editors" / "vscode"


class Window:
    """One VS Code window in a browser, with a person's hands and eyes."""

    def __init__(self, code_server: Path, artifacts: Path) -> None:
        home = code_server.parent
        self._driver = subprocess.Popen(
            [home / "bin" / "node", HERE / "vscode_driver.cjs", artifacts],
            env={**os.environ, "NODE_PATH": str(home / "node_modules")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, step: str, **given: object) -> Any:
        """One step of the driver; fails the test with its reason if it does not come to its end."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps({"step": step, **given}) + "\n")
        self._driver.stdin.flush()
        answer = json.loads(self._driver.stdout.readline())
        if "error" in answer:
            pytest.fail(f"{step} {given}: {answer['error']}\nsee failed.png in the artifacts")
        return answer["value"]

    def open(self, url: str, file: str, status: str) -> None:
        self.do("open", url=url)
        self.do("file", name=file)
        self.wait_for_status(status)

    def type(self, text: str) -> None:
        self.do("type", text=text)

    def press(self, *keys: str) -> None:
        self.do("press", keys=keys)

    def go(self, line: int) -> None:
        """To the end of a line, from 1."""
        self.press("Control+Home", *["ArrowDown"] * (line - 1), "End")

    def command(self, title: str) -> None:
        self.do("command", title=title)

    @property
    def ghost(self) -> str:
        return str(self.do("ghost"))

    @property
    def cursor(self) -> str:
        return str(self.do("cursor"))

    @property
    def status(self) -> str:
        return str(self.do("status"))

    def texts(self, selector: str) -> list[str]:
        return list(self.do("texts", selector=selector))

    def wait_for_status(self, words: str) -> None:
        wait_for(lambda: words in self.status, f"status {words!r}", seconds=60, seen=lambda: self.status)

    def wait_for_ghost(self, text: str) -> None:
        wait_for(lambda: self.ghost == text, f"ghost text {text!r}", seen=lambda: self.ghost)

    def wait_for_notice(self, words: str) -> None:
        def notices() -> list[str]:
            return self.texts(".notification-toast .notification-list-item-message")

        wait_for(lambda: any(words in notice for notice in notices()), f"notice {words!r}", seen=notices)

    def save(self) -> None:
        self.do("saved")

    def shoot(self, name: str) -> None:
        self.do("shoot", name=name)

    def close(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait(timeout=30)


@pytest.fixture(scope="session")
def code_server() -> Path:
    return Path(installed("install-code-server.sh"))


@pytest.fixture(scope="session")
def vsix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension as a person gets it."""
    target = tmp_path_factory.mktemp("vsix") / "infill.vsix"
    lock, installed_lock = EXTENSION / "package-lock.json", EXTENSION / "node_modules" / ".package-lock.json"
    if not installed_lock.exists() or installed_lock.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run(["npm", "ci", "--no-fund", "--no-audit", "--loglevel=error"], cwd=EXTENSION, check=True)
    subprocess.run(["npm", "run", "package", "--", "--out", target], cwd=EXTENSION, check=True)
    return target


Open = Callable[..., Window]


@pytest.fixture
def open_window(
    code_server: Path, vsix: Path, tmp_path: Path, server_command: str, engine: Engine, artifacts: Path
) -> Iterator[Open]:
    """Starts VS Code with a file of the folder `tmp_path/project` open, and what the model answers."""
    profile, extensions, project = tmp_path / "profile", tmp_path / "extensions", tmp_path / "project"
    project.mkdir()
    folders = [f"--user-data-dir={profile}", f"--extensions-dir={extensions}"]
    install = [code_server, *folders, "--install-extension", vsix]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    started: list[subprocess.Popen[bytes]] = []
    windows: list[Window] = []

    def open_window(
        content: bytes,
        answers: dict[str, str],
        name: str = "shapes.py",
        settings: dict[str, Any] | None = None,
        status: str = "ready",
    ) -> Window:
        engine.answers(answers)
        (project / name).write_bytes(content)
        # A browser's VS Code saves by itself, and a clean tab would not tell that the journey's save came through.
        quiet = {
            "workbench.secondarySideBar.defaultVisibility": "hidden",
            "files.autoSave": "off",
            "infill.deadline.automatic": 10_000,  # The fake model writes a byte a step.
        }
        machine = {"infill.server.path": server_command, "infill.model": engine.model}
        write_settings(profile / "User", quiet | (settings or {}))
        # Which program and which model runs is for the machine that runs it: user settings must not reach there.
        write_settings(profile / "Machine", machine)
        port = free_port()
        arguments = [
            f"--bind-addr=127.0.0.1:{port}",
            *folders,
            "--auth=none",
            "--disable-telemetry",
            "--disable-update-check",
            "--disable-workspace-trust",
            "--disable-getting-started-override",
        ]
        with (tmp_path / "code-server.log").open("wb") as log:
            started.append(subprocess.Popen([code_server, *arguments], stdout=log, stderr=log, start_new_session=True))
        wait_for(lambda: is_listening(port), "VS Code")
        windows.append(Window(code_server, artifacts))
        windows[-1].open(f"http://127.0.0.1:{port}/?folder={project}", name, status)
        return windows[-1]

    yield open_window
    for window in windows:
        window.close()
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "project" / "shapes.py"


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_crlf_with_tabs_is_shown_accepted_and_saved(open_window: Open, file: Path, engine: Engine) -> None:
    gap = "\n\t\ta = b\n\t\tprint('the second')"
    before = b"def first(a, b):\r\n\t\r\n\treturn a\r\n\r\n\r\nprint(first(None, 2))\r\n"
    window = open_window(before, {"\tif a is None:": gap}, settings={"editor.detectIndentation": True})
    assert f"ready: {engine.model}" in window.status
    window.go(2)
    window.type("if a is None:")
    wait_for(lambda: "print('the second')" in window.ghost, "ghost text", seen=lambda: window.ghost)
    window.shoot("vscode-ghost.png")
    window.press("Tab")
    wait_for(lambda: window.cursor == "Ln 4, Col 28", "cursor at the end", seen=lambda: window.cursor)
    window.save()
    window.shoot("vscode-accepted.png")
    assert file.read_bytes() == before.replace(
        b"\t\r\n", ("\tif a is None:" + gap + "\n").replace("\n", "\r\n").encode(), 1
    )


def test_a_suggestion_is_taken_by_words_and_by_lines_typed_through_dismissed_and_shown_again(
    open_window: Open, file: Path
) -> None:
    line = "first_side * second_side + margin"
    window = open_window(
        b"def area(w, h):\n    \n", {"return ": line, "if w:": "\n        w = 1\n        h = 2\n        w = 3"}
    )
    window.go(2)
    window.type("return ")
    window.wait_for_ghost(line)

    window.press("Control+ArrowRight")
    window.wait_for_ghost(" * second_side + margin")
    assert window.cursor == "Ln 2, Col 22"

    # Typed through to its end, ghost text never goes away.
    window.do("watch")
    window.type(" * second_side + margi")
    seen = window.do("watched")
    assert seen["frames"] > 20
    assert seen["without"] == 0, seen
    window.wait_for_ghost("n")
    window.press("Tab")
    wait_for(lambda: window.cursor == "Ln 2, Col 45", "cursor at the end", seen=lambda: window.cursor)

    window.press("Enter")
    window.type("if w:")
    wait_for(lambda: "w = 3" in window.ghost, "ghost text", seen=lambda: window.ghost)
    window.press("Escape")
    window.wait_for_ghost("")
    window.command("Infill: Show the last suggestion")
    wait_for(lambda: "w = 3" in window.ghost, "the last suggestion", seen=lambda: window.ghost)
    window.press("Control+Shift+Alt+ArrowRight", "Control+Shift+Alt+ArrowRight")
    # The editor's own lines: the rest of this one, then the next with its end.
    wait_for(lambda: window.cursor == "Ln 5, Col 1", "two lines", seen=lambda: window.cursor)
    window.shoot("vscode-lines.png")
    window.save()
    assert file.read_bytes().startswith(f"def area(w, h):\n    return {line}\n    if w:\n        w = 1".encode())
    assert b"w = 3" not in file.read_bytes()


def test_off_for_a_language_for_a_file_and_for_a_while(open_window: Open) -> None:
    off = {"infill.languages": {"python": False}}
    window = open_window(b"x = 1\n", {"total = ": "price * count"}, settings=off, status="off here")
    window.press("Control+End")
    window.type("total = ")
    window.command("Infill: Switch on or off for this language")
    window.wait_for_status("ready")
    window.press("Backspace")
    window.type(" ")
    window.wait_for_ghost("price * count")
    window.shoot("vscode-on.png")

    window.command("Infill: Switch on or off for this file")
    window.wait_for_status("off here: switched off for this file")
    window.press("Backspace")
    window.type(" ")
    assert window.ghost == ""
    window.command("Infill: Switch on or off for this file")
    window.wait_for_status("ready")

    window.do("click", selector='.statusbar-item[id$="infill.status"]')
    wait_for(lambda: "Infill" in "".join(window.texts(".quick-input-widget")), "menu")
    window.shoot("vscode-menu.png")
    window.do("click", selector=".quick-input-widget .monaco-list-row", label="Snooze for 5 minutes")
    window.wait_for_status("off here: snoozed until")
    window.command("Infill: Wake up")
    window.wait_for_status("ready")


def test_a_secret_file_stays_silent(open_window: Open, tmp_path: Path) -> None:
    window = open_window(b"A=1\n", {"TOTAL=": "12"}, name=".env", status="off here")
    window.press("Control+End")
    window.type("TOTAL=")
    window.command("Infill: Why is nothing offered here?")
    window.wait_for_notice("Infill:")
    assert window.ghost == ""
    window.save()
    assert (tmp_path / "project" / ".env").read_bytes() == b"A=1\nTOTAL="


def test_a_selection_is_written_anew_after_a_look_at_it(open_window: Open, file: Path) -> None:
    window = open_window(b"def area(w, h):\n    return 0\n\n\nprint(area(2, 3))\n", {"return ": "w * h"})
    window.go(2)
    window.press("Shift+ArrowLeft")
    window.command("Infill: Write the selection anew")
    wait_for(lambda: window.do("count", selector=".monaco-diff-editor .line-insert"), "comparison")
    window.shoot("vscode-fill.png")
    window.command("Infill: Accept what Infill would write")
    wait_for(lambda: not window.do("count", selector=".monaco-diff-editor"), "end of the comparison")
    lines = ".editor-instance .view-lines"
    wait_for(lambda: "return w * h" in "".join(window.texts(lines)), "text", seen=lambda: window.texts(lines))
    window.save()
    assert file.read_bytes() == b"def area(w, h):\n    return w * h\n\n\nprint(area(2, 3))\n"


def test_the_canvas_is_shown_as_it_is_denoised(open_window: Open) -> None:
    window = open_window(b"x = 1\n", {"total = ": "price * count"})
    window.command("Infill: Watch the model write")
    window.do("click", selector=".editor-instance .view-lines")
    window.press("Control+End")
    window.type("total = ")
    window.wait_for_ghost("price * count")
    wait_for(
        lambda: "price * count" in "".join(window.do("webview", selector="#canvas")),
        "canvas",
        seen=lambda: window.do("webview", selector="#canvas"),
    )
    wait_for(lambda: "slots written" in "".join(window.do("webview", selector="#says")), "words for screen readers")
    window.shoot("vscode-denoise.png")
