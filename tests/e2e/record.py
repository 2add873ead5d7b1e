"""Records the picture of the extension's README: a session in a real VS Code, with the real server and model.

    python tests/e2e/record.py [PICTURE]      default: editors/vscode/media/session.png

An animated PNG of what the window showed, as long as it showed it; only what stands still for long is shortened.
"""

from __future__ import annotations

import base64
import itertools
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from journeys import wait_for
from vscode import EXTENSION, Window, real_window

PICTURE = EXTENSION / "media" / "session.png"
#: The part of the window that is shown, how long a picture stands at most, and how long the last one does.
CLIP = {"x": 0, "y": 0, "width": 700, "height": 340}
LONGEST_MS, LAST_MS = 1_200, 2_500
#: Parts of a line that are taken one after the other, at most.
MOST_TABS = 3
SETTINGS = {
    "workbench.activityBar.location": "hidden",
    "workbench.sideBar.location": "right",
    "workbench.layoutControl.enabled": False,
    "window.commandCenter": False,
    "editor.minimap.enabled": False,
    "editor.fontSize": 15,
    "breadcrumbs.enabled": False,
    "editor.stickyScroll.enabled": False,
    "editor.cursorBlinking": "solid",
    "editor.quickSuggestions": {"other": "off"},
    "editor.parameterHints.enabled": False,
    "infill.aggressiveness": "eager",
    "infill.deadline.automatic": 10_000,  # How long it took is in the picture.
}
BEFORE = '''"""Ranges of numbers."""


def overlap(first, second):
    """Whether two ranges have a number in common."""
    start = max(first[0], second[0])


def middle(numbers):
    """The number in the middle."""
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
'''

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def main() -> None:
    picture = Path(sys.argv[1]) if sys.argv[1:] else PICTURE
    with (
        tempfile.TemporaryDirectory(prefix="infill-") as home,
        real_window(Path(home), "ranges.py", BEFORE, "embedded", SETTINGS) as window,
    ):
        window.go(6)
        window.do("record", clip=CLIP)
        session(window)
        parts = window.do("recorded")
    for part in parts:
        part["ms"] = min(part["ms"], LONGEST_MS)
    parts[-1]["ms"] = LAST_MS
    picture.write_bytes(animated(parts))
    print(f"{picture}: {len(parts)} pictures, {picture.stat().st_size / 1024:.0f} KiB")


def session(window: Window) -> None:
    """What a person does: looks at ghost text, takes a word of it, and the rest, as far as it is sure at a time."""
    for line in ("end = ", "return "):
        window.press("Enter")
        window.type(line)
        wait_for(lambda: window.ghost, "ghost text")
        window.do("pause", ms=900)
        if line == "return ":
            window.press("Control+ArrowRight")
            window.do("pause", ms=700)
        for _ in range(MOST_TABS):
            if window.ghost:
                window.press("Tab")
            window.do("pause", ms=800)


def animated(parts: Sequence[Mapping[str, Any]]) -> bytes:
    """One PNG that draws the parts one after the other, over one another, again and again (PNG, third edition, 11.3.6).

    parts: x, y, width, height in pixels, ms, and png in base64; the first is as large as all, all are of one kind."""
    images = [list(_chunks(base64.b64decode(part["png"]))) for part in parts]
    header = next(data for kind, data in images[0] if kind == b"IHDR")
    chunks = [_chunk(b"IHDR", header), _chunk(b"acTL", struct.pack(">II", len(parts), 0))]
    numbers = itertools.count()
    for part, image in zip(parts, images, strict=True):
        place = struct.pack(">IIII", part["width"], part["height"], part["x"], part["y"])
        stands = struct.pack(">HHBB", max(1, round(part["ms"])), 1000, 0, 0)
        chunks.append(_chunk(b"fcTL", struct.pack(">I", next(numbers)) + place + stands))
        for data in (data for kind, data in image if kind == b"IDAT"):
            is_first = image is images[0]
            number = b"" if is_first else struct.pack(">I", next(numbers))
            chunks.append(_chunk(b"IDAT" if is_first else b"fdAT", number + data))
    return b"".join([_SIGNATURE, *chunks, _chunk(b"IEND", b"")])


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += 12 + length


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    main()
