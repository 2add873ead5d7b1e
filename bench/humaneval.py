"""HumanEval-Infilling (Bavarian et al. 2022, arXiv 2207.14255): its problems, and whether a solution passes its tests.

What a model wrote is run in a process of its own that can do next to nothing: no network, no writing, no other process,
little time and memory. That stops accidents, and what a small model may write; it is no defence against an attacker.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

Subset = Literal["single-line", "random-span-light"]
FILES: dict[Subset, str] = {
    "single-line": "HumanEval-SingleLineInfilling.jsonl.gz",
    "random-span-light": "HumanEval-RandomSpanInfillingLight.jsonl.gz",
}
#: Limits of one solution: seconds of processor and of the clock, and bytes of memory.
CPU_S, WALL_S, MEMORY = 10, 30.0, 1 << 30


class Problem(msgspec.Struct, frozen=True):
    """A function with a hole: `prompt + canonical_solution + suffix` is right."""

    task_id: str
    entry_point: str
    prompt: str
    suffix: str
    canonical_solution: str
    test: str

    @property
    def text(self) -> str:
        return self.prompt + self.canonical_solution + self.suffix

    @property
    def hole(self) -> tuple[int, int]:
        """Where the hole is in `text`. A missing line leaves its newline, as it does in an editor."""
        start, end = len(self.prompt), len(self.prompt) + len(self.canonical_solution)
        return start, end - 1 if self.canonical_solution.endswith("\n") else end

    def program(self, document: str) -> str:
        """The filled document with its tests."""
        return f"{document}\n{self.test}\ncheck({self.entry_point})\n"


def data_dir() -> Path:
    """Where data sets lie: `INFILL_DATA`, or `shared/data` beside the repository."""
    override = os.environ.get("INFILL_DATA")
    return Path(override) if override else Path(__file__).resolve().parents[2] / "shared" / "data"


def problems(folder: Path, subset: Subset) -> Iterator[Problem]:
    """Raises `FileNotFoundError` with what to do where the data set is not there."""
    path = folder / FILES[subset]
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: put the files of github.com/openai/human-eval-infilling there, or name their"
            " folder with --data"
        )
    decode = msgspec.json.Decoder(Problem).decode
    with gzip.open(path, "rb") as file:
        for line in file:
            yield decode(line)


def passes(program: str, cpu_s: int = CPU_S, wall_s: float = WALL_S) -> bool:
    """Whether the program runs to its end without an exception, within its limits."""
    word = secrets.token_hex(16)  # which the program does not know, so it cannot say that it has passed
    job = json.dumps({"program": program, "word": word, "cpu_s": cpu_s, "memory": MEMORY})
    command = [*_without_network(), sys.executable, "-I", "-B", "-c", _CHILD]
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        os.chmod(folder, 0o755)
        child = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(job, timeout=wall_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)
    return said == word


def _end(child: subprocess.Popen[str]) -> None:
    """Ends what is left of the child and of whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


@functools.cache
def _without_network() -> tuple[str, ...]:
    """The command that takes the network away, where this machine permits it."""
    for options in (("--net",), ("--user", "--map-current-user", "--net")):
        command = ("unshare", *options, "--")
        try:
            if subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0:
                return command
        except (OSError, subprocess.TimeoutExpired):
            continue
    return ()


#: What the child runs: gives up all that it can do without, for good, then runs the program. The hook sees every call
#: of the interpreter that reaches outside, and nothing takes it away again (PEP 578).
_CHILD = r"""
import json, os, resource, sys
# What solutions import, while it can be read: the interpreter may lie in a folder that is closed to others.
import array, bisect, cmath, collections, copy, datetime, decimal, fractions, functools, hashlib, heapq, itertools, math
import operator, random, re, statistics, string, typing
job = json.load(sys.stdin)
sys.stdin.close()
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
sys.stdin = open(0)
sys.stdout = sys.stderr = open(1, "w")
sys.setrecursionlimit(2000)
if os.geteuid() == 0:
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    except OSError:
        pass
limits = {"CPU": job["cpu_s"], "AS": job["memory"], "NPROC": 0, "FSIZE": 0, "CORE": 0, "NOFILE": 32}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
harmless = {"os.listdir", "os.scandir"}
refused = ("os.", "shutil.", "socket.", "subprocess.", "ctypes.", "pty.", "resource.", "fcntl.", "mmap.", "gc.")
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def hook(event, arguments, harmless=frozenset(harmless), refused=refused, writing=writing):
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & writing):
            raise PermissionError("no writing")
    elif event.startswith(refused) and event not in harmless:
        raise PermissionError(event)
code = compile(job["program"], "program", "exec")
write, word = os.write, job.pop("word").encode()
run = {"__name__": "__main__", "__builtins__": __builtins__}
def end(write=write, out=out, word=word):
    write(out, word)
del job
sys.addaudithook(hook)
try:
    exec(code, run)
except BaseException:
    pass
else:
    end()
"""
