"""`infill-engine`, the whole process, with models made for the tests in place of real ones. The tests run it.

The model's name says how it behaves: "instant" answers at once, "endless" never ends by itself, "brief" takes
half a second, "loading" is at 50% of its download until stopped, "broken" cannot be loaded,
"uninstalled" misses a library.
"""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

from infill_engine import cli, protocol
from infill_engine.config import EngineConfig
from infill_engine.fetch import Report
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
    if config.model == "broken":
        raise RuntimeError("no such model: use embedded")
    if config.model == "uninstalled":
        import no_such_library.part  # type: ignore[import-not-found]  # noqa: F401
    while config.model == "loading":
        report("fetching weights", 0.5)
        time.sleep(0.01)
    return ScriptedEngine({"instant": instant, "endless": endless, "brief": brief}[config.model])


models = types.ModuleType("infill_engine.models")
models.load = load  # type: ignore[attr-defined]
sys.modules["infill_engine.models"] = models
sys.exit(cli.main())
