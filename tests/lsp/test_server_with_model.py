"""The server with the engine that people have, the embedded model on the CPU: what no script of a test can show."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from editor import Editor, engine_status, ready
from infill_engine import process
from lsprotocol import types
from pygls.exceptions import JsonRpcRequestCancelled

pytestmark = [pytest.mark.process, pytest.mark.model]

MODEL = "embedded"
CODE = '''\
import json
from pathlib import Path


def load(path):
    """Reads settings from a file."""
    text = Path(path).read_text()
    return '''

#: Seconds after which an engine that goes on with what was taken back is at fault: a pass takes some 10 ms.
IDLE_S = 5.0


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Engines of our own, with the weights that this machine has."""
    folder = Path(tempfile.mkdtemp(prefix="infill-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFILL_RUNTIME_DIR", str(folder))
        patch.setenv("INFILL_CONFIG_DIR", str(folder))
        asyncio.run(ready(MODEL))
        yield
        process.stop(MODEL)
    shutil.rmtree(folder)


async def test_several_suggestions_are_other_texts_and_not_other_spaces(editor: Editor, running: None) -> None:
    patient = {"model": MODEL, "statistics": False, "deadline": {"invoked": 60_000}}
    await editor.start(options=patient, encodings=["utf-8"])
    editor.open(CODE + "\n")
    items = await editor.complete(7, 11)
    assert items is not None
    texts = ["".join(str(item.insert_text).split()) for item in items]
    assert 2 <= len(texts) <= 3, texts
    assert all(texts)
    for one, other in combinations(texts, 2):
        assert not one.startswith(other), texts
        assert not other.startswith(one), texts
    assert [item.range for item in items] == [items[0].range] * len(items)


async def test_what_is_taken_back_is_not_computed_on(editor: Editor, running: None) -> None:
    await editor.start(options={"model": MODEL, "statistics": False, "deadline": {"invoked": 60_000}})
    for number in range(4):
        editor.open(f"# {number}\n{CODE.rpartition('text')[0]}\n", uri=f"file:///project/m{number}.py")
        asked = asyncio.ensure_future(editor.complete(7, 4, msg_id=f"asked-{number}"))
        await _live(1)
        editor.client.cancel_request(types.CancelParams(f"asked-{number}"))
        began = time.perf_counter()
        async with asyncio.timeout(IDLE_S):
            await _live(0)
        print(f"idle {1000 * (time.perf_counter() - began):.0f} ms after it was taken back")
        with pytest.raises(JsonRpcRequestCancelled):
            await asked


async def _live(count: int) -> None:
    """Waits until the engine writes for so many."""
    while (status := await engine_status(MODEL)) is None or status.live != count:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
