"""A checkpoint in a folder, served by a real engine to an editor: from a key stroke to what is drawn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from editor import Editor, ready

pytestmark = pytest.mark.process

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from small_checkpoint import save, save_gemma  # noqa: E402 - the engine's tests make them

#: The server without the floor below which a text breaks off: of what random weights write nobody is sure.
SERVER = """
from dataclasses import replace
from infill_lsp import cli, confidence
gate = replace(confidence.fitted(), floor=0.0)
confidence.fitted = lambda: gate
raise SystemExit(cli.main())
"""


@pytest.fixture(params=["qwen2", "diffusion-gemma"])
def model(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    pytest.importorskip("transformers", minversion="5.11", reason="transformers is not installed")
    folder = home / request.param
    folder.mkdir()
    (save if request.param == "qwen2" else save_gemma)(folder)
    yield str(folder)
    command = [sys.executable, "-m", "infill_engine", "stop", "--model", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


async def test_an_editor_is_answered_by_it(editor: Editor, model: str) -> None:
    """What random weights write is senseless, so there may be nothing to draw of it; but the canvas is filled."""
    await editor.client.start_io(sys.executable, "-c", SERVER)
    await editor.initialize(options={"model": await ready(model), "deadline": {"invoked": 60_000}}, canvas=True)
    editor.open("import os\n\nx = os.path.join(\nprint(x)\n")
    offered = await editor.complete(2, 17)
    assert all(item.insert_text for item in offered or ())
    (timing,) = editor.timings
    assert timing.reason in ("end", "limit")
    assert timing.steps > 0
    text = "".join(slot.text for slot in editor.frames[-1].slots if slot.state == "committed")
    assert text
    assert not any(name in text for name in ("<pad>", "<mask>", "<eos>", "<turn|>", "<begin>", "<end>"))
