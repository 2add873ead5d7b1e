"""`infill-lsp doctor`: looks at everything a completion needs, then makes one, and says how to cure what is not well.

Prints a line a check. Imports nothing that it looks for: the engine's packages are asked for in the engine's own
Python.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata

from infill_engine import protocol
from infill_engine.protocol import ANSWERED, Candidate, Final, InfillRequest, Status

from infill_lsp import __version__
from infill_lsp.client import EngineClient, EngineError, interpreter
from infill_lsp.languages import LANGUAGES, grammar
from infill_lsp.remote import engine_of
from infill_lsp.settings import Settings

#: The torch that the engine runs on: from the first version, up to the second and without it; and so for pip.
TORCH = ((2, 11), (2, 14))
TORCH_REQUIREMENT = "torch>=2.11,<2.14"
#: What the engine needs, besides torch.
PACKAGES = (
    "gguf",
    "llvmlite",
    "numba",
    "numpy",
    "prometheus-client",
    "rich",
    "safetensors",
    "starlette",
    "tokenizers",
    "uvicorn",
)
#: Run in the engine's Python: the versions of the packages named, null where there is none.
PROBE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
#: Seconds that the engine's list of models may take: torch is imported for it.
LIST_S = 120.0
#: A gap that every model fills.
REQUEST = InfillRequest(
    client=f"doctor-{os.getpid()}",
    document="doctor",
    language="python",
    prefix="def add(a, b):\n",
    head="    return ",
    deadline_ms=5000,
)


async def examine(settings: Settings, problems: Sequence[str] = ()) -> bool:
    """Prints what it finds with these settings, of whose files `problems` are told; True if all is well."""
    report = _Report()
    _server(report)
    for problem in problems:
        report.failed(problem, "change it there: docs/settings.md has what there is to set")
    if settings.engine.address:  # What it needs is there.
        startable = reachable = True
    else:
        startable = _packages(report, settings.engine.interpreter)
        if startable and report.well:
            _suiting(report, settings)
        reachable = _places(report, settings.model)
    if startable and reachable:
        engine = engine_of(settings)
        if await _ready(report, engine):
            await _completion(report, engine)
        await engine.aclose()
    print("All is well." if report.well else "Not all is well: see ✗.")
    return report.well


class _Report:
    """Prints the checks, and knows whether all went well."""

    def __init__(self) -> None:
        self.well = True

    def ok(self, text: str) -> None:
        print(f"✓ {text}", flush=True)

    def waiting(self, text: str) -> None:
        print(f"… {text}", flush=True)

    def missing(self, text: str, cure: str) -> None:
        """Something that nobody has to have."""
        print(f"- {text}\n  to have it: {cure}", flush=True)

    def failed(self, text: str, cure: str) -> None:
        self.well = False
        print(f"✗ {text}\n  cure: {cure}", flush=True)


def _server(report: _Report) -> None:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("pygls", "tree-sitter", "httpcore"))
    report.ok(f"infill-lsp {__version__}, Python {platform.python_version()}, {versions}")
    _grammars(report)


def _grammars(report: _Report) -> None:
    """Which languages are read by a grammar, and which go by lines and brackets."""
    found: list[str] = []
    missing: list[str] = []
    for name, language in LANGUAGES.items():
        try:
            version = metadata.version(language.package)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if grammar(name) is not None:
            found.append(f"{name} {version}")
        else:
            cure = f"{sys.executable} -m pip install -U {language.package}"
            report.failed(f"grammar {name} {version}: does not load, {name} goes by lines and brackets", cure)
    report.ok(f"grammars: {', '.join(found) or 'none'}")
    if missing:
        cure = f'{sys.executable} -m pip install "infill-lsp[grammars]"'
        report.missing(f"no grammar, lines and brackets instead: {', '.join(missing)}", cure)


def _packages(report: _Report, python: str) -> bool:
    """Whether there is a Python to start the engine with; what that lacks is reported, and the engine tells, too."""
    try:
        program = interpreter(python)
        names = ("torch", *PACKAGES)
        probe = subprocess.run([program, "-c", PROBE, *names], capture_output=True, check=True, cwd="/")
        found: Mapping[str, str | None] = json.loads(probe.stdout)
    except (EngineError, OSError, subprocess.CalledProcessError, ValueError) as error:
        report.failed(f"Python of the engine: {error}", "set infill.engine.python to a Python interpreter")
        return False
    torch = found["torch"]
    if torch is None:
        report.failed(f"torch is not installed in {program}", _torch_cure(program))
    elif not _fits(torch):
        report.failed(f"torch {torch} in {program} does not fit {TORCH_REQUIREMENT}", _torch_cure(program))
    else:
        report.ok(f"torch {torch} in {program}")
    missing = [name for name in PACKAGES if not found[name]]
    if missing:
        cure = f'{program} -m pip install "infill-lsp[engine]"'
        report.failed(f"not installed in {program}: {', '.join(missing)}", cure)
    else:
        report.ok(", ".join(f"{name} {found[name]}" for name in PACKAGES))
    return True


def _suiting(report: _Report, settings: Settings) -> None:
    """Which model suits this machine, as the engine's own list has it; one that cannot be had is no fault."""
    program = interpreter(settings.engine.interpreter)
    command = [program, "-m", "infill_engine", "models", "--json", "--device", settings.device]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, cwd="/", timeout=LIST_S)
        found = json.loads(listed.stdout)
        used = found["chosen"] if settings.model == "auto" else settings.model
        best, machine = found["recommended"], found["machine"]["line"]
        titles = {model["name"]: model["title"] for model in found["models"]}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        report.missing(f"models: not listed ({said.decode(errors='replace').strip()})", " ".join(command[:-3]))
        return
    name = best.partition(":")[0]
    if used.partition(":")[0] == name:
        report.ok(f"model: {used} suits this machine ({machine})")
        return
    first = "" if settings.model == "auto" else "set infill.model to auto, then "
    text = f"model: {used}; this machine ({machine}) could run {titles.get(name, name)}, which fills gaps better"
    report.missing(text, f"{first}{program} -m infill_engine use {best}")


def _fits(torch: str) -> bool:
    release = re.match(r"(\d+)\.(\d+)", torch)
    return release is not None and TORCH[0] <= (int(release[1]), int(release[2])) < TORCH[1]


def _torch_cure(program: str) -> str:
    """The size first: on Linux the default build is the one for CUDA."""
    if sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        pip = f'{program} -m pip install --index-url https://download.pytorch.org/whl/cpu "{TORCH_REQUIREMENT}"'
        return f"{pip} (about 200 MB, instead of several GB)"
    return f'{program} -m pip install "{TORCH_REQUIREMENT}"'


def _places(report: _Report, model: str) -> bool:
    """Whether the engine has a socket; without a cache it tells itself what it cannot do."""
    cache = protocol.cache_dir()
    reachable = True
    try:
        report.ok(f"socket: {protocol.socket_path(model)}")
    except OSError as error:
        reachable = False
        report.failed(f"socket: {error}", "set INFILL_RUNTIME_DIR to a short path in a folder of your own")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK)
    except OSError:
        writable = False
    if writable:
        report.ok(f"weights and logs: {cache}")
    else:
        report.failed(f"{cache} cannot be written", "set INFILL_CACHE_DIR to a folder of your own")
    return reachable


async def _ready(report: _Report, engine: EngineClient) -> bool:
    """Waits for the engine, telling why; reports what came of it."""
    told = ""
    try:
        async for status in engine.bring_up():
            line = _progress(status)
            if status.state in ("starting", "fetching") and line != told:
                told = line
                report.waiting(line)
    except EngineError as error:
        report.failed(f"engine: {error}", f"the lines above, or the logs in {protocol.cache_dir()}")
        return False
    if status.state == "error":
        report.failed(f"engine: {status.message}", f"see above; its log is in {protocol.cache_dir()}")
        return False
    device = f"{status.device}, {status.dtype}"
    report.ok(f"engine: process {status.pid} serves {status.model} on {device}")
    return True


def _progress(status: Status) -> str:
    """In steps of a tenth: each is a line."""
    if status.progress is None:
        return status.message
    return f"{status.message} ({int(10 * status.progress) * 10}%)"


async def _completion(report: _Report, engine: EngineClient) -> None:
    start = time.perf_counter()
    text, final = "", Final("error")
    async for event in engine.infill(REQUEST):
        if isinstance(event, Candidate):
            text = event.text
        elif isinstance(event, Final):
            final = event
    milliseconds = 1000 * (time.perf_counter() - start)
    asked = f"{REQUEST.prefix}{REQUEST.head}".replace("\n", "⏎")
    if text.strip() and final.reason in ANSWERED:
        report.ok(f"completion: {asked}[{text}] in {milliseconds:.0f} ms")
    else:
        reason = final.message or final.reason
        report.failed(f"completion: no text ({reason})", f"see the engine's log in {protocol.cache_dir()}")
