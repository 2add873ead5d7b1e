"""From a key to ghost text on the screen: `python -m bench.editors [--vscode] [--neovim] [--samples N]`.

In real editors, with the real server and engine. Each sample is one key typed where a question is asked anew, and ends
with the first frame that shows ghost text; median and 95th percentile are printed. Clients wait a fixed time after a
key before they ask: a row says that of its own, and what is left without it. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.plot import table
from bench.typing import quantiles

REPOSITORY = Path(__file__).parents[1]
#: The hands and eyes of the editors' journeys, which are no package.
sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))


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
    raise SystemExit("--vscode cannot measure yet")


def neovim(samples: int, model: str) -> list[Row]:
    raise SystemExit("--neovim cannot measure yet")


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
