"""One VS Code in a browser: a person's hands and eyes, and how it is started. Knows no journey."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from journeys import HERE, REPOSITORY, Engine, installed, wait_for

WANTED = os.environ.get("INFILL_E2E_VSCODE") != "0"
EXTENSION = REPOSITORY / "editors" / "vscode"

#: What marks a module of such journeys.
MARKS = [
    pytest.mark.e2e,
    pytest.mark.skipif(not WANTED, reason="INFILL_E2E_VSCODE=0 leaves VS Code out"),
]


#: Starts VS Code with a file of the project open, and what the model answers.
Open = Callable[..., "Window"]


class Window:
    """One window of a browser, with a person's hands and eyes; VS Code after VS Code may be open in it."""

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
        """file: its name in the folder that is open, or its whole path."""
        self.do("open", url=url)
        if file.startswith("/"):
            self.quick_open(file, status)
        else:
            self.do("file", name=file)
            self.wait_for_status(status)

    def type(self, text: str) -> None:
        self.do("type", text=text)

    def press(self, *keys: str) -> None:
        self.do("press", keys=keys)

    def go(self, line: int) -> None:
        """To the end of a line, from 1."""
        self.press("Control+Home", *["ArrowDown"] * (line - 1), "End")

    def quick_open(self, path: str | Path, status: str) -> None:
        self.do("quickOpen", path=str(path))
        self.wait_for_status(status)

    def click(self, selector: str, label: str | None = None) -> None:
        self.do("click", selector=selector, label=label)

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

    def wait_for_status(self, words: str, seconds: float = 60.0) -> None:
        wait_for(lambda: words in self.status, f"status {words!r}", seconds, seen=lambda: self.status)

    def wait_for_ghost(self, text: str) -> None:
        wait_for(lambda: self.ghost == text, f"ghost text {text!r}", seen=lambda: self.ghost)

    def wait_for_cursor(self, place: str) -> None:
        wait_for(lambda: self.cursor == place, f"cursor at {place}", seen=lambda: self.cursor)

    def wait_for_text(self, text: str, selector: str = ".editor-instance .view-lines") -> None:
        def texts() -> str:
            return "".join(self.texts(selector))

        wait_for(lambda: text in texts(), f"text {text!r}", seen=texts)

    def wait_for_notice(self, words: str) -> None:
        def notices() -> list[str]:
            return self.texts(".notification-toast .notification-list-item-message")

        wait_for(lambda: any(words in notice for notice in notices()), f"notice {words!r}", seen=notices)

    def answer(self, button: str) -> None:
        """To a notice."""
        self.click(".notification-toast .monaco-button", button)

    def save(self) -> None:
        self.do("saved")

    def shoot(self, name: str) -> None:
        self.do("shoot", name=name)

    @contextmanager
    def visiting(self, address: str) -> Iterator[None]:
        """Afterwards the window, its extensions and what the browser kept of it are gone: the next finds it new."""
        try:
            yield
        finally:
            self.shoot("vscode-last.png")  # Where a journey failed, what it looked like then.
            self.do("leave", origin=address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait(timeout=30)


class Profile:
    """A person's VS Code: settings, extensions and what those keep."""

    def __init__(self, code_server: Path, home: Path) -> None:
        self.code_server = code_server
        self.home = home
        self._folders = [f"--user-data-dir={home}", f"--extensions-dir={home / 'extensions'}"]
        self._log = home / "code-server.log"

    def install(self, vsix: Path) -> None:
        command = [self.code_server, *self._folders, "--install-extension", vsix]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def settings(self, user: dict[str, Any], machine: dict[str, Any]) -> None:
        """Which program and which model runs is for the machine that runs it: user settings do not reach there."""
        # A browser's VS Code saves by itself, and a clean tab would not tell that the journey's save came through.
        # What moves or talks by itself takes time from what is looked at.
        quiet = {
            "workbench.secondarySideBar.defaultVisibility": "hidden",
            "workbench.reduceMotion": "on",
            "chat.disableAIFeatures": True,
            "files.autoSave": "off",
            "security.workspace.trust.enabled": False,
            # Playwright scrolls to what it clicks while that still moves, and its line is under another then.
            "editor.scrollBeyondLastLine": False,
        }
        write_settings(self.home / "User", quiet | user)
        write_settings(self.home / "Machine", machine)

    def keys(self, bindings: Sequence[Mapping[str, str]]) -> None:
        (self.home / "User" / "keybindings.json").write_text(json.dumps(bindings))

    @contextmanager
    def served(self, environment: Mapping[str, str] | None = None) -> Iterator[str]:
        """Its address while it runs."""
        port = free_port()
        # A page's last word, that it is gone, is lost now and then: its extensions would wait three hours for it.
        arguments = [
            f"--bind-addr=127.0.0.1:{port}",
            *self._folders,
            "--auth=none",
            "--disable-telemetry",
            "--disable-update-check",
            "--disable-getting-started-override",
            "--reconnection-grace-time=10",
        ]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [self.code_server, *arguments], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            wait_for(lambda: is_listening(port), "VS Code")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


@contextmanager
def real_window(home: Path, name: str, content: str, model: str, settings: dict[str, Any]) -> Iterator[Window]:
    """A window on one file in a fresh profile, with the installed server, and a real model in an engine of its own.

    home: an empty folder with a short path, since the engine's socket lies in it."""
    os.environ["INFILL_RUNTIME_DIR"] = str(home)
    engine = Engine(home / "no table")
    engine.model = model
    profile = Profile(Path(installed("install-code-server.sh")), home / "profile")
    profile.install(package(home / "infill.vsix"))
    server = Path(sys.executable).parent / "infill-lsp"
    profile.settings(settings, {"infill.server.path": str(server), "infill.model": model})
    project, artifacts = home / "project", HERE / ".artifacts"
    project.mkdir()
    artifacts.mkdir(exist_ok=True)
    (project / name).write_text(content)
    try:
        with profile.served() as address, Window(profile.code_server, artifacts) as window, window.visiting(address):
            window.open(f"{address}/?folder={project}", name, "ready")
            yield window
    finally:
        engine.stop()


def package(target: Path) -> Path:
    """Makes the .vsix, and says where it is: at `target`, or where INFILL_E2E_VSIX says that it is ready."""
    if ready := os.environ.get("INFILL_E2E_VSIX"):
        return Path(ready)
    lock, installed_lock = EXTENSION / "package-lock.json", EXTENSION / "node_modules" / ".package-lock.json"
    if not installed_lock.exists() or installed_lock.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run(["npm", "ci", "--no-fund", "--no-audit", "--loglevel=error"], cwd=EXTENSION, check=True)
    subprocess.run(["npm", "run", "package", "--", "--out", target], cwd=EXTENSION, check=True)
    return target


def extension(
    path: Path, publisher: str, name: str, display_name: str, source: str = "exports.activate = () => {};"
) -> Path:
    """Another extension, which is active at once; without a source it does nothing."""
    manifest = {
        "name": name,
        "publisher": publisher,
        "displayName": display_name,
        "version": "1.0.0",
        "engines": {"vscode": "^1.91.0"},
        "activationEvents": ["*"],
        "main": "main.js",
    }
    identity = f'<Identity Language="en-US" Id="{name}" Version="1.0.0" Publisher="{publisher}"/>'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("extension/package.json", json.dumps(manifest))
        archive.writestr("extension/main.js", source)
        archive.writestr(
            "extension.vsixmanifest",
            '<PackageManifest Version="2.0.0" xmlns="http://schemas.microsoft.com/developer/vsx-schema/2011"><Metadata>'
            f"{identity}<DisplayName>{display_name}</DisplayName></Metadata><Installation>"
            '<InstallationTarget Id="Microsoft.VisualStudio.Code"/></Installation></PackageManifest>',
        )
    return path


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
