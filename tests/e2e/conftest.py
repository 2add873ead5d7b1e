"""Fixtures of the editor journeys."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from journeys import HERE, Engine, installed, program, running, wait_for
from vscode import Open, Profile, Window, package


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine of this test's own: not running until an editor's server asks for it."""
    # A Unix socket's path is short: pytest's own temporary folders are too deep.
    runtime = Path(tempfile.mkdtemp(prefix="infill-"))
    monkeypatch.setenv("INFILL_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("INFILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("INFILL_CONFIG_DIR", str(tmp_path / "config"))
    engine = Engine(tmp_path / "table.json")
    yield engine
    engine.stop()
    shutil.rmtree(runtime)


@pytest.fixture(scope="session")
def server_command() -> str:
    """The installed `infill-lsp`: the one beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "infill-lsp"
    command = str(beside) if beside.exists() else shutil.which("infill-lsp")
    assert command, "infill-lsp is not installed: pip install -e '.[engine,dev]'"
    return command


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Where journeys leave what they looked like."""
    folder = HERE / ".artifacts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def code_server() -> Path:
    return Path(installed("install-code-server.sh"))


@pytest.fixture(scope="session")
def window(code_server: Path, artifacts: Path) -> Iterator[Window]:
    """The one window of all journeys: to start a browser anew, and to have it read VS Code anew, takes seconds."""
    with Window(code_server, artifacts) as window:
        yield window


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder that is open."""
    project = tmp_path / "project"
    project.mkdir()
    return project


@pytest.fixture
def profile(code_server: Path, tmp_path: Path) -> Profile:
    """For a journey that needs one of its own: the others share one, and have settings and a folder of their own."""
    return Profile(code_server, tmp_path / "profile")


@pytest.fixture(scope="session")
def shared(code_server: Path, vsix: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Profile, str]]:
    """The profile of the journeys that need none of their own, with the extension in it, and its address."""
    home = tmp_path_factory.mktemp("shared")
    profile = Profile(code_server, home / "profile")
    profile.install(vsix)
    own = {f"INFILL_{name}_DIR": str(home / name.lower()) for name in ("RUNTIME", "CACHE", "CONFIG")}
    with profile.served(os.environ | own) as address:
        yield profile, address


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The installed server in this journey's environment, whatever that of the VS Code which starts it: `open_window`
    puts it there."""
    return tmp_path / "infill-lsp"


@pytest.fixture
def open_window(
    shared: tuple[Profile, str], window: Window, project: Path, server: Path, server_command: str, engine: Engine
) -> Iterator[Open]:
    """Opens VS Code with a file of the project, with the installed server and a model that answers from a table.

    settings: the person's; machine: those of the machine, beside the server and the model; where: what is open instead
    of the project; keys: bindings of the person's; profile: one with the extension in it, instead of the shared one."""

    runtime = os.environ["INFILL_RUNTIME_DIR"]

    def open_window(
        content: bytes,
        answers: dict[str, str],
        name: str = "shapes.py",
        settings: dict[str, Any] | None = None,
        status: str = "ready",
        machine: dict[str, Any] | None = None,
        where: str = "",
        keys: Sequence[dict[str, str]] = (),
        profile: Profile | None = None,
    ) -> Window:
        engine.answers(answers)
        (project / name).write_bytes(content)
        environment = " ".join(shlex.quote(f"{name}={value}") for name, value in os.environ.items())
        program(server, f'exec env {environment} {shlex.quote(server_command)} "$@"')
        used, address = shared if profile is None else (profile, stack.enter_context(profile.served()))
        used.settings(
            {"infill.deadline.automatic": 10_000} | (settings or {}),  # The fake model writes a byte a step.
            {"infill.server.path": str(server), "infill.model": engine.model} | (machine or {}),
        )
        used.keys(keys)
        stack.callback(wait_for, lambda: not running("infill-lsp", INFILL_RUNTIME_DIR=runtime), "end of the server")
        stack.enter_context(window.visiting(address))
        window.open(f"{address}/?{where or f'folder={project}'}", str(project / name) if where else name, status)
        return window

    with ExitStack() as stack:
        yield open_window


@pytest.fixture(scope="session")
def vsix(tmp_path_factory: pytest.TempPathFactory, artifacts: Path) -> Path:
    """The extension as a person gets it. Where several processes run journeys, they make it one after the other."""
    with open(artifacts / "vsix.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return package(tmp_path_factory.mktemp("vsix") / "infill.vsix")
