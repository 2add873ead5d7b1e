"""From a key to ghost text on the screen: `python -m bench.editors [--vscode] [--neovim] [--samples N]`.

In real editors, with the real server and engine. Each sample is one key typed where a question is asked anew, and ends
with the first frame that shows ghost text; median and 95th percentile are printed. Places are easy ones, where a model
offers something more often than not; keys that nothing was drawn for within two seconds are counted. Clients wait a
fixed time after a key before they ask: a row says that of its own, and what is left without it. Measure on a quiet
machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
#: Bodies that a model knows. The key is a space in place of what stands behind `return`, which is put back afterwards:
#: with bare returns in their place a memory of the file learns to expect them.
FUNCTION = "def {}_{}(a, b):\n    return a {} b\n\n"
REPLACED = len(" a + b")
VERBS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
THINGS = (
    *("numbers", "integers", "floats", "values", "lengths", "weights", "heights", "prices", "counts", "scores"),
    *("points", "vectors", "angles", "areas", "ratios", "rates", "times", "hours", "seconds", "bytes"),
    *("sizes", "widths", "depths", "speeds", "masses", "forces", "costs", "totals", "amounts", "offsets"),
)
FUNCTIONS = "".join(FUNCTION.format(verb, thing, sign) for thing in THINGS for verb, sign in VERBS.items())
PLACES = len(THINGS) * len(VERBS)
#: Seconds that ghost text is waited for, several times what an answer may take.
LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one editor took."""

    editor: str
    #: Key event to the first frame with ghost text, ms, of each key that was answered by some.
    ms: Sequence[float]
    #: Keys at which nothing was offered.
    quiet: int
    #: The client's fixed wait, ms, that lies in each of them.
    wait_ms: float

    def cells(self) -> list[str]:
        without = [ms - self.wait_ms for ms in self.ms]
        return [self.editor, quantiles(self.ms), f"{self.wait_ms:g}", quantiles(without), str(self.quiet)]


HEADER = ["editor", "key to paint, ms: p50 / p95 (n)", "of it the client's wait", "without it", "keys without an offer"]


def sampled(samples: int, places: Iterable[float | None]) -> tuple[list[float], int]:
    """The times of so many places where something was drawn, or of as many as there are; and how many were quiet."""
    drawn: list[float] = []
    quiet = 0
    for ms in places:
        if ms is None:
            quiet += 1
        else:
            drawn.append(ms)
        if len(drawn) == samples:
            break
    return drawn, quiet


def vscode(samples: int, model: str) -> list[Row]:
    """VS Code in a browser: the page itself takes the time, so that what drives it is not in it."""
    from vscode import real_window

    def places() -> Iterator[float | None]:
        window.press("Control+Home", "ArrowDown", "End")
        for _ in range(PLACES):
            window.press(*["Shift+ArrowLeft"] * REPLACED)
            yield window.do("paint", key="Space", limit=1000 * LIMIT_S)
            window.press("Escape", "Control+z", "ArrowDown", "ArrowDown", "ArrowDown", "End")

    with (
        tempfile.TemporaryDirectory(prefix="infill-") as home,
        real_window(Path(home), "operators.py", FUNCTIONS, model, EAGER) as window,
    ):
        return [Row("VS Code", *sampled(samples, places()), VSCODE_WAIT_MS)]


def neovim(samples: int, model: str) -> list[Row]:
    """Neovim 0.12, which takes the time itself: this plugin's ghost text, and core's, which waits before it asks."""
    from nvim import Neovim, drawn_by_core, on_the_runtimepath, real_neovim

    def places(neovim: Neovim) -> Iterator[float | None]:
        neovim.keys("2G")
        for _ in range(PLACES):
            yield neovim.paint(f"${REPLACED - 1}hC ", LIMIT_S)
            neovim.keys("<Esc>u3j")

    settings = {"model": model, "aggressiveness": "eager"}
    rows = []
    for editor, configuration, wait_ms in (
        ("Neovim, the plugin", on_the_runtimepath, 0),
        ("Neovim, core's own", drawn_by_core, NEOVIM_WAIT_MS),
    ):
        with (
            tempfile.TemporaryDirectory(prefix="infill-") as home,
            real_neovim(Path(home), "operators.py", FUNCTIONS, settings, configuration) as neovim,
        ):
            rows.append(Row(editor, *sampled(samples, places(neovim)), wait_ms))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.editors", description=__doc__)
    parser.add_argument("--vscode", action="store_true", help="measure VS Code in a browser")
    parser.add_argument("--neovim", action="store_true", help="measure Neovim")
    parser.add_argument(
        "--samples",
        type=int,
        default=60,
        help=f"keys with ghost text for each row, of {PLACES} tried at most (default: %(default)s)",
    )
    parser.add_argument("--model", default="embedded", help="as infill.model (default: %(default)s)")
    arguments = parser.parse_args()
    wanted = [each for each in (vscode, neovim) if getattr(arguments, each.__name__)]
    if not wanted:
        parser.error("say --vscode or --neovim, or both")
    rows = [row for each in wanted for row in each(arguments.samples, arguments.model)]
    print(table(HEADER, [row.cells() for row in rows]))


if __name__ == "__main__":
    main()
