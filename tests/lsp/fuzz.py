"""Sends a server what no editor should send, by seed: `python tests/lsp/fuzz.py --seeds 1000`.

Malformed, reordered, duplicated and huge messages among edits, questions and cancels. The server has to answer every
well-formed request, without a traceback, and to be of use afterwards: what nobody waits for any more leaves the engine
idle, and memory stays bounded, that of the editor and of the engine's script included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from infill_engine.protocol import Candidate, InfillRequest
from strict import Refused, ScriptedEngine, StrictEditor, meeting, scripted, span

#: What is sent in a seed, and seeds of one process.
ACTIONS, SEEDS_EACH = 80, 10
#: Seconds after which an engine that still writes for nobody is a fault, and MiB that the process may take at its peak.
#: In 1,000 seeds on a busy core it was idle after 0.01 s, 0.2 s at most; a process of 10 seeds takes 190 MiB.
IDLE_S, MOST_MIB = 2.0, 320
#: What a refused request may be: cancelled, of no such method, of parameters that do not fit, or of no such form.
CODES = {-32800, -32601, -32602, -32600, -32801}

_PIECES = ["a", "\n", "\r\n", "\r", "😀", "漢", "(", ")", '"', "\t", "    ", "\u2028", "def f():\n", "x = ", "\ufeff"]
_METHODS = [
    *("textDocument/inlineCompletion", "textDocument/didOpen", "textDocument/didChange", "textDocument/didClose"),
    *("workspace/didChangeConfiguration", "workspace/didChangeWorkspaceFolders", "workspace/executeCommand"),
    *("infill/status", "infill/why", "infill/fill", "infill/offered", "infill/accepted", "infill/partiallyAccepted"),
    *("notebookDocument/didOpen", "notebookDocument/didChange", "textDocument/completion", "textDocument/codeAction"),
    *("$/cancelRequest", "$/setTrace", "window/workDoneProgress/cancel", "no/such/method", "initialize", "initialized"),
]


async def trial(seed: int) -> float:
    """One seed against a server of its own; the seconds that the engine went on for nobody. Raises `AssertionError`
    for a fault."""
    choose = random.Random(seed)
    engine = ScriptedEngine(_script(choose))
    async with scripted(engine), meeting() as editor:
        editor.configuration = {"model": "m"}
        await editor.start({"model": "m", "priming": {"enabled": False}}, encodings=[choose.choice(ENCODINGS)])
        editor.open(_text(choose, 40))
        pending: dict[int, asyncio.Future[Any]] = {}
        for _ in range(ACTIONS):
            choose.choice(ACTS)(editor, choose, pending)
            if choose.random() < 0.3:
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            for answer in list(pending.values()):
                try:
                    await answer
                except Refused as refused:
                    assert refused.code in CODES, refused  # noqa: PT017 - others are faults
        engine.script = "1"
        editor.configuration = {"model": "m", "deadline": {"invoked": 60_000}}
        editor.notify("workspace/didChangeConfiguration", {"settings": {"infill": editor.configuration}})
        editor.open("x = |\n", uri="file:///project/after.py")
        assert await editor.accepted(invoked=True) == "x = 1\n"
        idle_s = await _abandoned(editor, engine, choose)
        assert "Traceback" not in json.dumps(editor.told)
        assert idle_s < IDLE_S, f"the engine wrote on for {idle_s:.1f} s"
        return idle_s


async def _abandoned(editor: StrictEditor, engine: ScriptedEngine, choose: random.Random) -> float:
    """Seconds from the message after which nobody waits for an answer to an engine that writes nothing."""
    engine.let_go.clear()
    number, answer = editor.begin(invoked=True)
    async with asyncio.timeout(30):
        while not engine.live:  # noqa: ASYNC110 - the script tells nobody
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        how = choose.choice(["cancelled", "edited", "closed"])
        if how == "cancelled":
            editor.notify("$/cancelRequest", {"id": number})
        elif how == "edited":
            editor.type("y")
        else:
            editor.shut()
        while engine.live:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        idle_s = time.perf_counter() - began
        engine.let_go.set()
        try:
            assert await answer is None, how
        except Refused as refused:
            assert (how, refused.code) == ("cancelled", -32800)  # noqa: PT017
    return idle_s


def _script(choose: random.Random) -> Callable[[InfillRequest], Candidate | str]:
    def write(request: InfillRequest) -> Candidate | str:
        if choose.random() < 0.1:
            return Candidate(_text(choose, 20), (0.5,), (3, 9))  # No candidate of that form can be.
        return _text(choose, 12)

    return write


def _text(choose: random.Random, most: int) -> str:
    return "".join(choose.choices(_PIECES, k=choose.randrange(most)))


Pending = dict[int, "asyncio.Future[Any]"]


def _edit(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    text = editor.buffer.text
    a, b = sorted(choose.choices(range(len(text) + 1), k=2))
    a, b = (at - (text[at - 1 : at + 1] == "\r\n") for at in (a, min(b, a + 5)))
    editor.edit(editor.buffer.place(a), editor.buffer.place(max(a, b)), _text(choose, 4))


def _complete(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    number, answer = editor.begin(choose.random() < 0.5)
    pending[number] = answer


def _cancel(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    number = choose.choice([*pending, 99_999, "x", None, -1])  # type: ignore[list-item]
    editor.notify("$/cancelRequest", {"id": number})


def _odd_place(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    where = {"line": choose.choice([0, 1, 2**31 - 1]), "character": choose.choice([0, 7, 2**31 - 1])}
    params = {
        "textDocument": {"uri": choose.choice([editor.buffer.uri, "file:///none", "", "::", "file:///%ff%"])},
        "position": where,
        "context": {"triggerKind": choose.choice([1, 2])},
    }
    number, answer = editor.ask("textDocument/inlineCompletion", params)
    pending[number] = answer


def _misfit(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    """A method with parameters of another shape; as a request or, without an answer, as a notification."""
    method = choose.choice(_METHODS)
    params = _junk(choose, 3)
    if choose.random() < 0.5:
        editor.notify(method, params)
    elif method not in ("initialize", "initialized") and not method.startswith("$/"):
        number, answer = editor.ask(method, params)
        if not (method.startswith(("textDocument/did", "notebookDocument/did", "workspace/did", "window/"))):
            pending[number] = answer


def _raw(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    """Bytes that are no message."""
    editor.write(
        choose.choice(
            [
                *(b"", b"{]", b"\xff\xfe", b"null", b"[]", b"3", b'"x"', b"{}", b'{"jsonrpc": "2.0"}', b"[" * 5_000),
                *(b'{"jsonrpc": "2.0", "id": 3, "result": {}}', b'{"jsonrpc": "1.0", "id": 1, "method": "x"}'),
            ]
        )
    )


def _again(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    """What was said before, or comes too early: opened twice, closed twice, changed after it was closed."""
    item = {"uri": "file:///project/other.py", "languageId": "python", "version": 1, "text": _text(choose, 9)}
    document = {"uri": item["uri"], "version": choose.choice([-1, 0, 2])}
    change = {"range": span((choose.randrange(9), 3), (1, 1)), "text": _text(choose, 4)}
    for method, params in choose.choices(
        [
            ("textDocument/didOpen", {"textDocument": item}),
            ("textDocument/didClose", {"textDocument": document}),
            ("textDocument/didChange", {"textDocument": document, "contentChanges": [change, change]}),
            ("initialized", {}),
        ],
        k=3,
    ):
        editor.notify(method, params)


def _huge(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    if choose.random() < 0.2:
        text = _text(choose, 9) + choose.choice(["[", "x", "\n", "(\n"]) * choose.choice([1_000, 300_000])
        item = {"uri": "file:///project/huge.py", "languageId": "python", "version": 1, "text": text}
        editor.notify("textDocument/didOpen", {"textDocument": item})
        params = {"textDocument": item, "position": {"line": 0, "character": 3}, "context": {"triggerKind": 1}}
        number, answer = editor.ask("textDocument/inlineCompletion", params)
        pending[number] = answer


def _settings(editor: StrictEditor, choose: random.Random, pending: Pending) -> None:
    editor.notify(
        "workspace/didChangeConfiguration", {"settings": {"infill": {"model": "m", "maxLines": _junk(choose, 1)}}}
    )


def _junk(choose: random.Random, depth: int) -> Any:
    if depth == 0 or choose.random() < 0.3:
        return choose.choice([None, True, -1, 2**70, 1.5, "", "x" * 50, "file:///project/module.py"])
    if choose.random() < 0.3:
        return [_junk(choose, depth - 1) for _ in range(choose.randrange(3))]
    keys = [
        "textDocument",
        "uri",
        "position",
        "line",
        "character",
        "context",
        "event",
        "id",
        "range",
        "text",
        "settings",
    ]
    return {key: _junk(choose, depth - 1) for key in choose.sample(keys, choose.randrange(5))}


ENCODINGS = ["utf-8", "utf-16", "utf-32"]
ACTS = [_edit, _edit, _complete, _complete, _cancel, _odd_place, _misfit, _misfit, _raw, _again, _huge, _settings]


class Outcome(NamedTuple):
    """What came of a seed: the fault, "" without one, how long the engine wrote on for nobody, and the most memory that
    the process has had so far."""

    fault: str
    idle_s: float
    mib: float


def attempt(seed: int) -> Outcome:
    fault, idle_s = "", 0.0
    try:
        idle_s = asyncio.run(trial(seed))
    except (AssertionError, TimeoutError, asyncio.CancelledError, Refused) as error:
        fault = f"{type(error).__name__}: {str(error)[:300]}"
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
    return Outcome(fault or (f"{mib:.0f} MiB" if mib > MOST_MIB else ""), idle_s, mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no other seed after these")
    arguments = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="infill-") as folder:
        os.environ |= {"INFILL_RUNTIME_DIR": f"{folder}/run", "INFILL_CACHE_DIR": f"{folder}/cache"}
        began = time.monotonic()
        # pygls writes code for each server and keeps it, so that a process has but a few of them.
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=SEEDS_EACH) as process:
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                if time.monotonic() - began > arguments.seconds:
                    break
                outcomes.append(process.submit(attempt, seed).result())
                if outcomes[-1].fault:
                    print(f"seed {seed}: {outcomes[-1].fault}", flush=True)
    faults = sum(bool(outcome.fault) for outcome in outcomes)
    idle_ms = [1000 * outcome.idle_s for outcome in outcomes]
    print(f"{len(outcomes)} seeds, {faults} faults, {time.monotonic() - began:.0f} s")
    print(f"idle {statistics.median(idle_ms):.0f} ms after nobody waited (median), {max(idle_ms):.0f} ms (most)")
    print(f"{max(outcome.mib for outcome in outcomes):.0f} MiB at the peak")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
