"""`infill-engine`, the whole process, with models made for the tests in place of real ones. The tests run it.

The model's name says how it behaves: "instant" answers at once, "endless" never ends by itself, "brief" takes
half a second, "loading" is at 50% of its download until stopped, or there is a file "go" beside the socket, "broken"
cannot be loaded, "uninstalled" misses a library. Before another one is chosen, "auto" is "instant".
"""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

from infill_engine import catalogue, cli, protocol
from infill_engine.config import EngineConfig
from infill_engine.fetch import FetchError, Report
from infill_engine.protocol import Candidate, Final, InfillRequest
from scripted import ScriptedEngine, Steps


def endless(request: InfillRequest) -> Steps:
    try:
        yield Candidate("first")
        while True:
            time.sleep(0.005)
            yield None
    finally:
        Path(protocol.runtime_dir(), "closed").touch()


def brief(request: InfillRequest) -> Steps:
    yield Candidate("first")
    for _ in range(50):
        time.sleep(0.01)
        yield None
    yield Final("end")


def instant(request: InfillRequest) -> Steps:
    yield Candidate(request.head)
    yield Final("end")


def load(config: EngineConfig, report: Report) -> ScriptedEngine:
    name = catalogue.meant(config.model)
    if name == "broken":
        raise FetchError("no such model: use embedded")
    if name == "uninstalled":
        import no_such_library.part  # type: ignore[import-not-found]  # noqa: F401
    while name == "loading" and not Path(protocol.runtime_dir(), "go").exists():
        report("fetching weights", 0.5)
        time.sleep(0.01)
    scripts = {"embedded": instant, "instant": instant, "endless": endless, "brief": brief, "loading": brief}
    engine = ScriptedEngine(scripts[name])
    engine.name = name
    return engine


models = types.ModuleType("infill_engine.models")
models.load = load  # type: ignore[attr-defined]
models.moved = lambda: lambda device: None  # type: ignore[attr-defined]
models.located = lambda name, report: None  # type: ignore[attr-defined]
sys.modules["infill_engine.models"] = models
sys.exit(cli.main())
