"""Curves as an SVG that reads on light and dark pages, and tables as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 64, 52, 16, 16
#: The names of the curves stand below them, each in a row of so many pixels.
ROW = 18
COLOURS = ("#3b7ddd", "#d9822b", "#2e9e5b", "#b04fc4", "#888888", "#d1495b", "#8c6d1f", "#12a5a5")
TEXT = "#808080"


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_title: str,
    y_title: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    mark: float | None = None,
    x_label: Callable[[float], str] = "{:.0%}".format,
    y_label: Callable[[float], str] = "{:.0%}".format,
) -> str:
    """The points of each named curve joined in order; shares on both axes unless they are labelled otherwise, from the
    first tick to the last. `mark` draws a line upwards at an x."""
    (x0, x1), (y0, y1) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def x_at(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(value, x0), x1) - x0) / (x1 - x0)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (min(max(value, y0), y1) - y0) / (y1 - y0)

    height = HEIGHT + ROW * len(lines) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT}">'
    ]
    for tick in x_ticks:
        anchor = "end" if tick == x1 else "middle"  # the last label would be cut off
        parts.append(_text(x_at(tick), HEIGHT - BOTTOM + 18, x_label(tick), anchor))
    for tick in y_ticks:
        parts.append(_line(LEFT, y_at(tick), WIDTH - RIGHT, y_at(tick), 0.3))
        parts.append(_text(LEFT - 8, y_at(tick) + 4, y_label(tick), "end"))
    if mark is not None:
        parts.append(_line(x_at(mark), TOP, x_at(mark), HEIGHT - BOTTOM, 0.8))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_title, "middle"))
    parts.append(
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>'
    )
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = HEIGHT + 8 + ROW * i
        parts.append(f'<rect x="{LEFT}" y="{y - 6}" width="14" height="3" fill="{colour}"/>')
        parts.append(_text(LEFT + 20, y, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{TEXT}" stroke-opacity="{opacity}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown without a line end behind its last row."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
