"""What training runs came to: `python -m bench.training LOG... [--svg FILE]`.

Each log is that of one run of `infill-engine train`; it is named by its folder. A table says what was measured on the
held-out gaps in the course of it, and the plot shows it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.plot import curves, table

#: What a table shows of a measurement, and how.
COLUMNS = {
    "known, nats": ("dense", "{:.3f}"),
    "known, right": ("dense_right", "{:.1%}"),
    "first, right": ("first_right", "{:.1%}"),
    "END, right": ("end_right", "{:.1%}"),
    "END, wrong": ("wrong_end", "{:.2%}"),
    "mask 1, nats": ("mask1", "{:.2f}"),
    "mask 1, right": ("mask1_right", "{:.1%}"),
    "mask 2, right": ("mask2_right", "{:.1%}"),
    "masks right in a row": ("run", "{:.3f}"),
}
#: What the plot shows.
DRAWN = {"known tokens": "dense", "mask 1": "mask1", "mask 2": "mask2"}


def measurements(log: Path) -> list[dict[str, Any]]:
    """The measurements of a run, in order; those of a part that was trained again after a stop are left out.

    Raises `ValueError` for a file that is no such log.
    """
    found: dict[int, dict[str, Any]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        fact = json.loads(line)
        if fact["what"] == "held":
            found = {step: one for step, one in found.items() if step < fact["step"]} | {fact["step"]: fact}
    if not found:
        raise ValueError(f"{log} holds no measurement")
    return list(found.values())


def rows(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """A header, and a line a measurement."""
    made = [["run", "minutes", "steps", "predictions", *COLUMNS]]
    for name, of_run in runs.items():
        for one in of_run:
            made.append([
                name,
                f"{one['seconds'] / 60:.0f}",
                f"{one['step']:,}",
                f"{one['predictions']:,}",
                *(form.format(one[key]) if key in one else "" for key, form in COLUMNS.values()),
            ])  # fmt: skip
    return made


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Nats over predictions learned from, as an SVG."""
    lines = {
        f"{name}: {what}" if len(runs) > 1 else what: [(one["predictions"], one[key]) for one in of_run]
        for name, of_run in runs.items()
        for what, key in DRAWN.items()
    }
    most = max((x for points in lines.values() for x, _ in points), default=0)
    nats = [y for points in lines.values() for _, y in points]
    step = 10 ** math.ceil(math.log10(max(10, most) / 10))  # as many ticks as ten at most
    return curves(
        lines,
        "predictions learned from",
        "nats a token, held out",
        [step * i for i in range(math.ceil(max(1, most) / step) + 1)],
        [i / 2 for i in range(math.floor(2 * min(nats, default=1)), math.ceil(2 * max(nats, default=4)) + 1)],
        x_label=lambda x: f"{x:,.0f}",
        y_label=lambda y: f"{y:.1f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, and writes the plot where it is asked for."""
    parser = argparse.ArgumentParser(prog="bench.training", description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    try:
        runs = {log.resolve().parent.name: measurements(log) for log in options.logs}
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{error}: give the log.jsonl of a training run")
    header, *lines = rows(runs)
    if options.markdown:
        print(table(header, lines))
    else:
        grid = Table(box=None)
        for i, name in enumerate(header):
            grid.add_column(name, justify="right" if i else "left")
        for line in lines:
            grid.add_row(*line)
        Console(width=200).print(grid)
    if options.svg:
        options.svg.write_text(plot(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
