"""What a person sees and gets in VS Code: packaged extension, fresh profile, real server, real engine, a fake model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from journeys import Engine, wait_for
from vscode import MARKS, Profile, Window

pytestmark = MARKS

Open = Callable[..., Window]


@pytest.fixture
def open_window(
    code_server: Path, vsix: Path, tmp_path: Path, server_command: str, engine: Engine, artifacts: Path
) -> Iterator[Open]:
    """Starts VS Code with a file of the folder `tmp_path/project` open, and what the model answers."""
    profile, project = Profile(code_server, tmp_path / "profile"), tmp_path / "project"
    project.mkdir()
    profile.install(vsix)

    def open_window(
        content: bytes,
        answers: dict[str, str],
        name: str = "shapes.py",
        settings: dict[str, Any] | None = None,
        status: str = "ready",
    ) -> Window:
        engine.answers(answers)
        (project / name).write_bytes(content)
        profile.settings(
            {"infill.deadline.automatic": 10_000} | (settings or {}),  # The fake model writes a byte a step.
            {"infill.server.path": server_command, "infill.model": engine.model},
        )
        window = stack.enter_context(Window(code_server, artifacts))
        window.open(f"{stack.enter_context(profile.served())}/?folder={project}", name, status)
        return window

    with ExitStack() as stack:
        yield open_window


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "project" / "shapes.py"


def test_crlf_with_tabs_is_shown_accepted_and_saved(open_window: Open, file: Path, engine: Engine) -> None:
    gap = "\n\t\ta = b\n\t\tprint('the second')"
    before = b"def first(a, b):\r\n\t\r\n\treturn a\r\n\r\n\r\nprint(first(None, 2))\r\n"
    window = open_window(before, {"\tif a is None:": gap}, settings={"editor.detectIndentation": True})
    assert f"ready: {engine.model}" in window.status
    window.go(2)
    window.type("if a is None:")
    wait_for(lambda: "print('the second')" in window.ghost, "ghost text", seen=lambda: window.ghost)
    window.shoot("vscode-ghost.png")
    window.press("Tab")
    wait_for(lambda: window.cursor == "Ln 4, Col 28", "cursor at the end", seen=lambda: window.cursor)
    window.save()
    window.shoot("vscode-accepted.png")
    assert file.read_bytes() == before.replace(
        b"\t\r\n", ("\tif a is None:" + gap + "\n").replace("\n", "\r\n").encode(), 1
    )


def test_a_suggestion_is_taken_by_words_and_by_lines_typed_through_dismissed_and_shown_again(
    open_window: Open, file: Path
) -> None:
    line = "first_side * second_side + margin"
    window = open_window(
        b"def area(w, h):\n    \n", {"return ": line, "if w:": "\n        w = 1\n        h = 2\n        w = 3"}
    )
    window.go(2)
    window.type("return ")
    window.wait_for_ghost(line)

    window.press("Control+ArrowRight")
    window.wait_for_ghost(" * second_side + margin")
    assert window.cursor == "Ln 2, Col 22"

    # Typed through to its end, ghost text never goes away.
    window.do("watch")
    window.type(" * second_side + margi")
    seen = window.do("watched")
    assert seen["frames"] > 20
    assert seen["without"] == 0, seen
    window.wait_for_ghost("n")
    window.press("Tab")
    wait_for(lambda: window.cursor == "Ln 2, Col 45", "cursor at the end", seen=lambda: window.cursor)

    window.press("Enter")
    window.type("if w:")
    wait_for(lambda: "w = 3" in window.ghost, "ghost text", seen=lambda: window.ghost)
    window.press("Escape")
    window.wait_for_ghost("")
    window.command("Infill: Show the last suggestion")
    wait_for(lambda: "w = 3" in window.ghost, "the last suggestion", seen=lambda: window.ghost)
    window.press("Control+Shift+Alt+ArrowRight", "Control+Shift+Alt+ArrowRight")
    # The editor's own lines: the rest of this one, then the next with its end.
    wait_for(lambda: window.cursor == "Ln 5, Col 1", "two lines", seen=lambda: window.cursor)
    window.shoot("vscode-lines.png")
    window.save()
    assert file.read_bytes().startswith(f"def area(w, h):\n    return {line}\n    if w:\n        w = 1".encode())
    assert b"w = 3" not in file.read_bytes()


def test_off_for_a_language_for_a_file_and_for_a_while(open_window: Open) -> None:
    off = {"infill.languages": {"python": False}}
    window = open_window(b"x = 1\n", {"total = ": "price * count"}, settings=off, status="off here")
    window.press("Control+End")
    window.type("total = ")
    window.command("Infill: Switch on or off for this language")
    window.wait_for_status("ready")
    window.press("Backspace")
    window.type(" ")
    window.wait_for_ghost("price * count")
    window.shoot("vscode-on.png")

    window.command("Infill: Switch on or off for this file")
    window.wait_for_status("off here: switched off for this file")
    window.press("Backspace")
    window.type(" ")
    assert window.ghost == ""
    window.command("Infill: Switch on or off for this file")
    window.wait_for_status("ready")

    window.do("click", selector='.statusbar-item[id$="infill.status"]')
    wait_for(lambda: "Infill" in "".join(window.texts(".quick-input-widget")), "menu")
    window.shoot("vscode-menu.png")
    window.do("click", selector=".quick-input-widget .monaco-list-row", label="Snooze for 5 minutes")
    window.wait_for_status("off here: snoozed until")
    window.command("Infill: Wake up")
    window.wait_for_status("ready")


def test_a_secret_file_stays_silent(open_window: Open, tmp_path: Path) -> None:
    window = open_window(b"A=1\n", {"TOTAL=": "12"}, name=".env", status="off here")
    window.press("Control+End")
    window.type("TOTAL=")
    window.command("Infill: Why is nothing offered here?")
    window.wait_for_notice("Infill:")
    assert window.ghost == ""
    window.save()
    assert (tmp_path / "project" / ".env").read_bytes() == b"A=1\nTOTAL="


def test_a_selection_is_written_anew_after_a_look_at_it(open_window: Open, file: Path) -> None:
    window = open_window(b"def area(w, h):\n    return 0\n\n\nprint(area(2, 3))\n", {"return ": "w * h"})
    window.go(2)
    window.press("Shift+ArrowLeft")
    window.command("Infill: Write the selection anew")
    wait_for(lambda: window.do("count", selector=".monaco-diff-editor .line-insert"), "comparison")
    window.shoot("vscode-fill.png")
    window.command("Infill: Accept what Infill would write")
    wait_for(lambda: not window.do("count", selector=".monaco-diff-editor"), "end of the comparison")
    lines = ".editor-instance .view-lines"
    wait_for(lambda: "return w * h" in "".join(window.texts(lines)), "text", seen=lambda: window.texts(lines))
    window.save()
    assert file.read_bytes() == b"def area(w, h):\n    return w * h\n\n\nprint(area(2, 3))\n"


def test_the_canvas_is_shown_as_it_is_denoised(open_window: Open) -> None:
    window = open_window(b"x = 1\n", {"total = ": "price * count"})
    window.command("Infill: Watch the model write")
    window.do("click", selector=".editor-instance .view-lines")
    window.press("Control+End")
    window.type("total = ")
    window.wait_for_ghost("price * count")
    wait_for(
        lambda: "price * count" in "".join(window.do("webview", selector="#canvas")),
        "canvas",
        seen=lambda: window.do("webview", selector="#canvas"),
    )
    wait_for(lambda: "slots written" in "".join(window.do("webview", selector="#says")), "words for screen readers")
    window.shoot("vscode-denoise.png")
