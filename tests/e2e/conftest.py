"""Fixtures of the editor journeys."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from journeys import HERE, Engine, installed
from vscode import EXTENSION


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
def vsix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension as a person gets it."""
    target = tmp_path_factory.mktemp("vsix") / "infill.vsix"
    lock, installed_lock = EXTENSION / "package-lock.json", EXTENSION / "node_modules" / ".package-lock.json"
    if not installed_lock.exists() or installed_lock.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run(["npm", "ci", "--no-fund", "--no-audit", "--loglevel=error"], cwd=EXTENSION, check=True)
    subprocess.run(["npm", "run", "package", "--", "--out", target], cwd=EXTENSION, check=True)
    return target
