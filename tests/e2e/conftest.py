"""Fixtures of the editor journeys."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from journeys import HERE, Engine, installed
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


@pytest.fixture
def profile(code_server: Path, tmp_path: Path) -> Profile:
    return Profile(code_server, tmp_path / "profile")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder that is open."""
    project = tmp_path / "project"
    project.mkdir()
    return project


@pytest.fixture
def open_window(
    code_server: Path, vsix: Path, profile: Profile, project: Path, server_command: str, engine: Engine, artifacts: Path
) -> Iterator[Open]:
    """Starts VS Code with a file of the project open, with the installed server and a model that answers from a table.

    settings: the person's; machine: those of the machine, beside the server and the model; where: what is open instead
    of the project; keys: bindings of the person's."""
    profile.install(vsix)

    def open_window(
        content: bytes,
        answers: dict[str, str],
        name: str = "shapes.py",
        settings: dict[str, Any] | None = None,
        status: str = "ready",
        machine: dict[str, Any] | None = None,
        where: str = "",
        keys: Sequence[dict[str, str]] = (),
        trusted: bool = True,
    ) -> Window:
        engine.answers(answers)
        (project / name).write_bytes(content)
        profile.settings(
            {"infill.deadline.automatic": 10_000} | (settings or {}),  # The fake model writes a byte a step.
            {"infill.server.path": server_command, "infill.model": engine.model} | (machine or {}),
        )
        profile.keys(keys)
        window = stack.enter_context(Window(code_server, artifacts))
        address = f"{stack.enter_context(profile.served(trusted=trusted))}/?{where or f'folder={project}'}"
        window.open(address, str(project / name) if where else name, status)
        return window

    with ExitStack() as stack:
        yield open_window


@pytest.fixture(scope="session")
def vsix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension as a person gets it."""
    return package(tmp_path_factory.mktemp("vsix") / "infill.vsix")
