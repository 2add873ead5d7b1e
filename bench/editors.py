"""From a key to ghost text on the screen: `python -m bench.editors [--vscode] [--neovim] [--samples N]`.

In real editors, with the real server and engine. Each sample is one key typed where a question is asked anew, and ends
with the first frame that shows ghost text; median and 95th percentile are printed. Clients wait a fixed time after a
key before they ask: a row says that of its own, and what is left without it. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.plot import table
from bench.typing import quantiles

REPOSITORY = Path(__file__).parents[1]
#: The hands and eyes of the editors' journeys, which are no package.
sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))

#: What VS Code waits after a key before it asks a provider that says nothing of it; to say it is no stable interface.
VSCODE_WAIT_MS = 50
#: What Neovim's `vim.lsp.inline_completion` waits; the plugin waits for nothing.
NEOVIM_WAIT_MS = 200
#: Something is to be offered at as many keys as may be.
EAGER = {"infill.aggressiveness": "eager", "editor.parameterHints.enabled": False}
#: Bodies that a model knows; the key is the space that is missing.
FUNCTION = "def {}(a, b):\n    return\n\n"
VERBS = ("add", "subtract", "multiply", "divide", "join", "compare", "equal", "larger", "smaller", "power")


@dataclass(frozen=True, slots=True)
class Row:
    """What one editor took."""

    editor: str
    #: Key event to the first frame with ghost text, ms, of each key that was answered by some.
    ms: Sequence[float]
    #: The client's fixed wait, ms, that lies in each of them.
    wait_ms: float
    #: Keys at which nothing was offered.
    quiet: int = 0

    def cells(self) -> list[str]:
        without = [ms - self.wait_ms for ms in self.ms]
        return [self.editor, quantiles(self.ms), f"{self.wait_ms:g}", quantiles(without), str(self.quiet)]


HEADER = ["editor", "key to paint, ms: p50 / p95 (n)", "of it the client's wait", "without it", "keys without an offer"]


def vscode(samples: int, model: str) -> list[Row]:
    """VS Code in a browser: the page itself takes the time, so that what drives it is not in it."""
    from vscode import real_window

    functions = [f"{VERBS[i % len(VERBS)]}_{i // len(VERBS)}" for i in range(samples)]
    content = "".join(map(FUNCTION.format, functions))
    times: list[float | None] = []
    with (
        tempfile.TemporaryDirectory(prefix="infill-") as home,
        real_window(Path(home), "operators.py", content, model, EAGER) as window,
    ):
        window.press("Control+Home", "ArrowDown", "End")
        for _ in functions:
            times.append(window.do("paint", key="Space"))
            window.press("Escape", "Backspace", "ArrowDown", "ArrowDown", "ArrowDown", "End")
    drawn = [ms for ms in times if ms is not None]
    return [Row("VS Code", drawn, VSCODE_WAIT_MS, len(times) - len(drawn))]


def neovim(samples: int, model: str) -> list[Row]:
    """Neovim 0.12, which takes the time itself: this plugin's ghost text, and core's, which waits before it asks."""
    from nvim import drawn_by_core, on_the_runtimepath, real_neovim

    functions = [f"{VERBS[i % len(VERBS)]}_{i // len(VERBS)}" for i in range(samples)]
    content = "".join(map(FUNCTION.format, functions))
    settings = {"model": model, "aggressiveness": "eager"}
    rows = []
    for editor, configuration, wait_ms in (
        ("Neovim, the plugin", on_the_runtimepath, 0),
        ("Neovim, core's own", drawn_by_core, NEOVIM_WAIT_MS),
    ):
        times: list[float | None] = []
        with (
            tempfile.TemporaryDirectory(prefix="infill-") as home,
            real_neovim(Path(home), "operators.py", content, settings, configuration) as neovim,
        ):
            neovim.keys("2G")
            for _ in functions:
                times.append(neovim.paint("A "))
                neovim.keys("<Esc>x3j")
        drawn = [ms for ms in times if ms is not None]
        rows.append(Row(editor, drawn, wait_ms, len(times) - len(drawn)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.editors", description=__doc__)
    parser.add_argument("--vscode", action="store_true", help="measure VS Code in a browser")
    parser.add_argument("--neovim", action="store_true", help="measure Neovim")
    parser.add_argument("--samples", type=int, default=60, help="keys for each row (default: %(default)s)")
    parser.add_argument("--model", default="embedded", help="as infill.model (default: %(default)s)")
    arguments = parser.parse_args()
    wanted = [each for each in (vscode, neovim) if getattr(arguments, each.__name__)]
    if not wanted:
        parser.error("say --vscode or --neovim, or both")
    rows = [row for each in wanted for row in each(arguments.samples, arguments.model)]
    print(table(HEADER, [row.cells() for row in rows]))


if __name__ == "__main__":
    main()
