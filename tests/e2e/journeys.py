"""What every editor journey needs: where things are, patience with a limit, the engine seen from outside.

The fake model answers from a table, so that a journey can ask for exact bytes; everything between the editor
and the model is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpcore
import pytest
from infill_engine import protocol

T = TypeVar("T")

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
#: How many times longer than on a quiet machine a journey waits for what it expects.
PATIENCE = float(os.environ.get("INFILL_E2E_PATIENCE", "1"))
TOOLS = Path(os.environ.get("INFILL_E2E_TOOLS", HERE / ".tools"))


def wait_for(
    condition: Callable[[], T], what: str, seconds: float = 30.0, seen: Callable[[], object] | None = None
) -> T:
    """The first truthy value of `condition`; after `seconds` the test fails with what is `seen` instead."""
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds:g} s still no {what}" + (f"; there is {seen()!r}" if seen else ""))
        time.sleep(0.02)
    return value


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def running(program: str, **environment: str) -> list[int]:
    """The processes that run a program, or a module of Python's, and have this in their environment."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            given = (process / "cmdline").read_bytes().split(b"\0")
            names = {Path(os.fsdecode(each)).name for each in given[:3]}
            if program in names and wanted <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
        except OSError:
            continue  # It has ended meanwhile, or is another user's.
    return found


def installed(script: str) -> str:
    """The launcher that an install script provides; the script installs it first where it is missing."""
    result = subprocess.run([HERE / script, TOOLS], check=True, stdout=subprocess.PIPE, text=True)
    return result.stdout.splitlines()[-1]


def program(path: Path, script: str) -> Path:
    """A program that a shell runs."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class Engine:
    """The resident engine of one test, as another process sees it."""

    def __init__(self, table: Path) -> None:
        self.model = f"fake:{table}"
        self._table = table

    def answers(self, table: dict[str, str]) -> None:
        """Sets the fake model: text that the left context ends with -> completion. Before the editor."""
        self._table.write_text(json.dumps(table))

    @property
    def status(self) -> protocol.Status | None:
        """What the serving process says of itself, None if there is none."""
        try:
            with httpcore.ConnectionPool(uds=str(protocol.socket_path(self.model))) as pool:
                return protocol.decode_status(pool.request("GET", "http://engine/v1/status").content)
        except (httpcore.NetworkError, httpcore.ProtocolError):
            return None

    def wait_until_ready(self) -> protocol.Status:
        """A person types on until the engine is there; a journey that types once waits for it instead."""

        def ready() -> protocol.Status | None:
            status = self.status
            return status if status is not None and status.state == "ready" else None

        return wait_for(ready, "engine that is ready", seconds=60, seen=lambda: self.status)

    def kill(self) -> None:
        """Ends the serving process as a crash would."""
        os.kill(self.wait_until_ready().pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ends, in order, what serves in this test's runtime folder, and what is only about to."""
        pids = running("infill_engine", INFILL_RUNTIME_DIR=os.environ["INFILL_RUNTIME_DIR"])
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not any(map(is_running, pids)), "end of the engine")
