"""What a person sees and gets in VS Code: packaged extension, fresh profile, real server, real engine."""

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


@pytest.fixture(scope="session")
def code_server() -> Path:
    return Path(installed("install-code-server.sh"))


@pytest.fixture(scope="session")
def vsix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension as a person gets it."""
    target = tmp_path_factory.mktemp("vsix") / "infill.vsix"
    subprocess.run(["npm", "ci", "--no-fund", "--no-audit", "--loglevel=error"], cwd=EXTENSION, check=True)
    subprocess.run(["npm", "run", "package", "--", "--out", target], cwd=EXTENSION, check=True)
    return target


Window = Callable[[dict[str, Any]], str]


@pytest.fixture
def open_window(code_server: Path, vsix: Path, tmp_path: Path, server_command: str) -> Iterator[Window]:
    """Starts VS Code with the given user settings on the folder `tmp_path/project`; returns its address."""
    profile, extensions, project = tmp_path / "profile", tmp_path / "extensions", tmp_path / "project"
    project.mkdir()
    folders = [f"--user-data-dir={profile}", f"--extensions-dir={extensions}"]
    install = [code_server, *folders, "--install-extension", vsix]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    started: list[subprocess.Popen[bytes]] = []

    def open_window(settings: dict[str, Any]) -> str:
        # A browser's VS Code saves by itself, and a clean tab would not tell that the journey's save came through.
        quiet = {"workbench.secondarySideBar.defaultVisibility": "hidden", "files.autoSave": "off"}
        write_settings(profile / "User", quiet | settings)
        # Which program and which model runs is for the machine that runs it: user settings must not reach there.
        machine = {name: value for name, value in settings.items() if name == "infill.model"}
        write_settings(profile / "Machine", {"infill.server.path": server_command, **machine})
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
        return f"http://127.0.0.1:{port}/?folder={project}"

    yield open_window
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


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


def travel(code_server: Path, **journey: object) -> dict[str, str]:
    """What the journey saw; fails the test with its reason if it did not arrive."""
    home = code_server.parent
    result = subprocess.run(
        [home / "bin" / "node", HERE / "vscode_journey.cjs", json.dumps(journey)],
        env={**os.environ, "NODE_PATH": str(home / "node_modules")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{result.stderr}\nsee failed.png in {journey['artifacts']}"
    seen: dict[str, str] = json.loads(result.stdout)
    return seen


@pytest.mark.parametrize("eol", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_two_lines_are_shown_accepted_and_saved(
    eol: str, open_window: Window, engine: Engine, code_server: Path, tmp_path: Path, artifacts: Path
) -> None:
    gap = "\n        a = b\n        print('the second')"
    engine.answers({"    if a is None:": gap})
    before = "def first(a, b):\n    \n    return a\n\n\nprint(first(None, 2))\n"
    after = before.replace("    \n", f"    if a is None:{gap}\n", 1)
    file = tmp_path / "project" / "first.py"
    file.write_bytes(before.replace("\n", eol).encode())
    url = open_window({"infill.model": engine.model, "infill.deadline.automatic": 10_000})

    seen = travel(
        code_server,
        url=url,
        file=file.name,
        line=2,
        type="if a is None:",
        ghost="print('the second')",
        artifacts=str(artifacts),
    )

    assert "a = b" in seen["ghost"]
    assert "Infill" in seen["status"]
    assert f"ready: {engine.model}" in seen["tooltip"]
    assert file.read_bytes() == after.replace("\n", eol).encode()
