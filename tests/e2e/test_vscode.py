"""What a person sees and gets in VS Code: packaged extension, fresh profile, real server, real engine, a fake model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journeys import Engine, program, wait_for
from vscode import MARKS, Open

from infill_lsp import statistics

pytestmark = MARKS


@pytest.fixture
def file(project: Path) -> Path:
    return project / "shapes.py"


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
    window.wait_for_cursor("Ln 4, Col 28")
    window.save()
    window.shoot("vscode-accepted.png")
    assert file.read_bytes() == before.replace(
        b"\t\r\n", ("\tif a is None:" + gap + "\n").replace("\n", "\r\n").encode(), 1
    )


def test_a_suggestion_is_taken_by_words_and_by_lines_typed_through_dismissed_and_shown_again(
    open_window: Open, file: Path
) -> None:
    line = "first_side * second_side + margin_of_boths"
    window = open_window(
        b"def area(w, h):\n    \n", {"return ": line, "if w:": "\n        w = 1\n        h = 2\n        w = 3"}
    )
    window.go(2)
    window.type("return ")
    window.wait_for_ghost(line)

    window.press("Control+ArrowRight")
    window.wait_for_ghost(" * second_side + margin_of_boths")
    window.wait_for_cursor("Ln 2, Col 22")

    # Typed through to its last character, ghost text never goes away: not at any change, not in any frame.
    typed = " * second_side + margin_of_both"
    assert len(typed) > 30
    window.do("watch")
    window.type(typed)
    seen = window.do("watched")
    assert min(seen["frames"], seen["changes"]) > 30
    assert seen["without"] == 0, seen
    window.wait_for_ghost("s")
    window.press("Tab")
    window.wait_for_cursor("Ln 2, Col 54")

    window.press("Enter")
    window.type("if w:")
    wait_for(lambda: "w = 3" in window.ghost, "ghost text", seen=lambda: window.ghost)
    window.press("Escape")
    window.wait_for_ghost("")
    window.command("Infill: Show the last suggestion")
    wait_for(lambda: "w = 3" in window.ghost, "the last suggestion", seen=lambda: window.ghost)
    window.press("Control+Shift+Alt+ArrowRight", "Control+Shift+Alt+ArrowRight")
    # The editor's own lines: the rest of this one, then the next with its end.
    window.wait_for_cursor("Ln 5, Col 1")
    window.shoot("vscode-lines.png")
    window.save()
    assert file.read_bytes().startswith(f"def area(w, h):\n    return {line}\n    if w:\n        w = 1".encode())
    assert b"w = 3" not in file.read_bytes()

    # Where the text around it has changed since, it is not put back, but shown in the text as it was.
    before = file.read_bytes()
    window.go(3)
    window.press("Backspace")
    window.command("Infill: Show the last suggestion")
    wait_for(lambda: window.do("count", selector=".monaco-diff-editor .line-insert"), "comparison")
    window.wait_for_text("w = 3", ".monaco-diff-editor .editor.modified .view-lines")
    assert "The last suggestion in shapes.py, as the text was" in "".join(window.texts(".tab.active"))
    window.shoot("vscode-last-suggestion.png")
    window.press("Control+w")
    window.click(".editor-instance .view-lines")
    window.save()
    assert file.read_bytes() == before.replace(b"if w:", b"if w")

    # What was drawn and taken has reached the server, which writes it down before it shows it.
    window.command("Infill: Show statistics")
    wait_for(lambda: statistics.database().exists(), "statistics")
    (counts,) = statistics.read(statistics.database()).values()
    assert counts["offered"] >= 2, counts
    assert (counts["partly"], counts["accepted"]) == (2, 1), counts


def test_off_for_a_language_for_a_file_and_for_a_while(
    open_window: Open, file: Path, tmp_path: Path, server: Path
) -> None:
    heard = tmp_path / "heard"
    overheard = {"infill.server.path": str(program(tmp_path / "server", f'tee {heard} | {server} "$@"'))}

    def changes() -> int:
        """How often the server was told that settings changed."""
        return heard.read_bytes().count(b'"workspace/didChangeConfiguration"')

    silent = {"infill.languages": {"python": False}}
    window = open_window(
        b"x = 1\n", {"total = ": "price * count"}, settings=silent, machine=overheard, status="off here"
    )
    window.press("Control+End")
    window.type("total = ")
    before = changes()
    window.command("Infill: Switch on or off for this language")
    window.wait_for_status("ready")
    assert changes() == before + 1
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

    window.click('.statusbar-item[id$="infill.status"]')
    wait_for(lambda: "Infill" in "".join(window.texts(".quick-input-widget")), "menu")
    window.shoot("vscode-menu.png")
    window.click(".quick-input-widget .monaco-list-row", "Snooze for 5 minutes")
    window.wait_for_status("off here: snoozed until")
    window.click(".editor-instance .view-lines")
    window.press("Control+End", "Backspace")
    window.type(" ")
    window.command("Infill: Suggest here")
    assert window.ghost == ""
    window.command("Infill: Wake up")
    window.wait_for_status("ready")
    window.press("Backspace")
    window.type(" ")
    window.wait_for_ghost("price * count")
    window.press("Tab")
    window.wait_for_cursor("Ln 2, Col 22")
    window.save()
    assert file.read_bytes() == b"x = 1\ntotal = price * count"

    # A switch is turned where it stands: one of the person would not count beside the folder's.
    settings = file.parent / ".vscode" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps({"infill.enabled": False}))
    off = "off here: completions are switched off"
    window.wait_for_status(off)
    for turned, entry, status in (True, "Switch on", "ready"), (False, "the engine is let go", off):
        window.click('.statusbar-item[id$="infill.status"]')
        window.click(".quick-input-widget .monaco-list-row", entry)
        window.wait_for_status(status)
        written = {"infill.enabled": turned}
        wait_for(lambda: json.loads(settings.read_text()) == written, f"{written}", seen=settings.read_text)  # noqa: B023


def test_a_secret_file_stays_silent(open_window: Open, project: Path) -> None:
    window = open_window(b"A=1\n", {"TOTAL=": "12"}, name=".env", status="off here")
    window.press("Control+End")
    window.type("TOTAL=")
    window.command("Infill: Why is nothing offered here?")
    window.wait_for_notice("Infill:")
    assert window.ghost == ""
    window.save()
    assert (project / ".env").read_bytes() == b"A=1\nTOTAL="


def test_a_selection_is_written_anew_after_a_look_at_it(open_window: Open, file: Path) -> None:
    before = b"def area(w, h):\n    return 0\n\n\nprint(area(2, 3))\n"
    window = open_window(before, {"return ": "w * h"})

    def answer(button: str) -> None:
        """By a button in the title of the comparison, once there is one."""
        wait_for(lambda: window.do("count", selector=".monaco-diff-editor .line-insert"), "comparison")
        window.shoot("vscode-fill.png")
        window.click(f".editor-actions [aria-label^='{button} what Infill would write']")
        wait_for(lambda: not window.do("count", selector=".monaco-diff-editor"), "end of the comparison")

    window.go(2)
    window.press("Shift+ArrowLeft")
    window.click(".lightBulbWidget")
    wait_for(lambda: window.texts(".action-widget .monaco-list-row"), "menu of the lightbulb")
    window.shoot("vscode-lightbulb.png")
    window.click(".action-widget .monaco-list-row", "write the selection anew")
    answer("Reject")
    window.click(".editor-instance .view-lines")
    window.save()
    assert file.read_bytes() == before

    window.go(2)
    window.press("Shift+ArrowLeft")
    window.command("Infill: Write the selection anew")
    answer("Accept")
    window.wait_for_text("return w * h")
    window.wait_for_cursor("Ln 2, Col 17")
    window.save()
    assert file.read_bytes() == before.replace(b"0", b"w * h")


def test_several_suggestions_are_gone_through_one_by_one(open_window: Open, file: Path) -> None:
    keys = [
        {"key": "ctrl+alt+t", "command": "infill.trigger"},
        {"key": "ctrl+alt+n", "command": "infill.next"},
        {"key": "ctrl+alt+p", "command": "infill.previous"},
    ]
    window = open_window(
        b"price, count, prices = 1, 2, [3]\n",
        {"total = ": "price * count", "al = ": "sum(prices)"},
        settings={"infill.trigger": "manual"},
        keys=keys,
    )
    window.press("Control+End")
    window.type("total = ")
    assert window.ghost == ""
    window.press("Control+Alt+t")
    window.wait_for_ghost("price * count")
    window.press("Control+Alt+n")
    window.wait_for_ghost("sum(prices)")
    window.shoot("vscode-cycle.png")
    window.press("Control+Alt+p")
    window.wait_for_ghost("price * count")
    window.press("Control+Alt+n")
    window.wait_for_ghost("sum(prices)")
    window.press("Tab")
    window.wait_for_cursor("Ln 2, Col 20")
    window.save()
    assert file.read_bytes().endswith(b"total = sum(prices)")


def test_beside_the_open_menu_the_suggestion_goes_on_from_the_entry(open_window: Open, file: Path) -> None:
    window = open_window(
        b"price_of_all = [1, 2]\n",
        {"total = price_of_all": "[0] + 1"},
        settings={"editor.quickSuggestionsDelay": 0, "infill.trigger": "auto"},
    )
    window.press("Control+End")
    window.type("total = pri")
    wait_for(lambda: window.do("count", selector=".suggest-widget.visible .monaco-list-row.focused"), "menu")
    window.wait_for_ghost("ce_of_all[0] + 1")
    window.shoot("vscode-suggest.png")
    window.press("Tab")  # The entry, by the editor; the suggestion's rest stays.
    window.wait_for_cursor("Ln 2, Col 21")
    window.wait_for_ghost("[0] + 1")
    window.press("Tab")
    window.wait_for_cursor("Ln 2, Col 28")
    window.save()
    assert file.read_bytes() == b"price_of_all = [1, 2]\ntotal = price_of_all[0] + 1"


def test_three_holes_are_filled_as_chosen_and_all_cursors_at_once_and_one_undo_takes_either_back(
    open_window: Open, file: Path
) -> None:
    before = b"first = ???\nsecond = ???\nthird = ???\n"
    window = open_window(before, {"first = ": "11", "second = ": "22", "third = ": "33"})

    def ask_for_holes() -> None:
        window.click(".editor-instance .view-lines")
        window.command("Infill: Fill holes")
        rows = ".monaco-list-row:has-text('third')"
        wait_for(lambda: window.texts(rows), "edits to choose from")

    ask_for_holes()
    window.shoot("vscode-holes.png")
    window.do("confirm", label="shapes.py")
    window.click(".monaco-button", "Apply")
    window.wait_for_text("third = 33")
    window.save()
    assert file.read_bytes() == before.replace(b"???", b"%d") % (11, 22, 33)
    window.click(".editor-instance .view-lines")
    window.press("Control+z")
    window.wait_for_text("first = ???")
    window.save()
    assert file.read_bytes() == before

    # One that is not wanted is left out.
    ask_for_holes()
    window.do("confirm", label="first = ")
    window.do("confirm", label="third = ")
    window.click(".monaco-button", "Apply")
    window.wait_for_text("third = 33")
    window.save()
    assert file.read_bytes() == b"first = 11\nsecond = ???\nthird = 33\n"
    window.click(".editor-instance .view-lines")
    window.press("Control+z")
    window.wait_for_text("first = ???")

    # A cursor at the end of each line, and a hole nowhere.
    window.press("Control+Home", *["End", "Backspace", "Backspace", "Backspace", "ArrowDown"] * 3)
    window.press("Control+Home", "Shift+ArrowDown", "Shift+ArrowDown", "Shift+End", "Shift+Alt+i")
    window.command("Infill: Fill at all cursors")
    window.wait_for_text("third = 33")
    window.shoot("vscode-cursors.png")
    wait_for(lambda: window.cursor.startswith("3 selections"), "three cursors", seen=lambda: window.cursor)
    window.save()
    assert file.read_bytes() == before.replace(b"???", b"%d") % (11, 22, 33)
    window.press("Control+z")
    window.save()
    assert file.read_bytes() == before.replace(b"???", b"")


def test_a_line_with_emoji(open_window: Open, file: Path) -> None:
    window = open_window("party = '🎉👩‍💻'\n".encode(), {" + ": "'🎂' + who"})
    window.go(1)
    window.type(" + ")
    window.wait_for_ghost("'🎂' + who")
    window.shoot("vscode-emoji.png")
    window.press("Control+ArrowRight", "Tab")
    written = "party = '🎉👩‍💻' + '🎂' + who"
    window.wait_for_text("+ who")
    window.wait_for_cursor(f"Ln 1, Col {len(written) + 1}")  # VS Code says columns in code points there.
    window.save()
    assert file.read_bytes() == f"{written}\n".encode()


def test_a_cell_of_a_notebook_knows_the_cells_above(open_window: Open, project: Path) -> None:
    def cell(source: str) -> dict[str, object]:
        return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": [source]}

    language = {"language_info": {"name": "python"}}
    notebook = {"cells": [cell("price = 3"), cell("x = 1")], "metadata": language, "nbformat": 4, "nbformat_minor": 5}
    # Its key ends in the cell above: without that it would not fit.
    answers = {"price = 3\n\nx = 1\ntotal = ": "price * 2"}
    window = open_window(json.dumps(notebook).encode(), answers, name="shop.ipynb", status="")
    window.wait_for_text("x = 1", ".notebookOverlay")
    window.click(".notebookOverlay .monaco-list-row", "x = 1")
    window.press("Escape", "Enter", "Control+End", "Enter")  # Out of the cell's text, and into it.
    window.type("total = ")
    window.wait_for_ghost("price * 2")
    window.shoot("vscode-notebook.png")
    window.press("Tab")
    window.wait_for_text("total = price * 2", ".notebookOverlay .view-lines")
    window.type("!")  # A cell's cursor is said nowhere: what is typed next stands at it.
    window.save()
    cells = json.loads((project / "shop.ipynb").read_text())["cells"]
    assert ["".join(cell["source"]) for cell in cells] == ["price = 3", "x = 1\ntotal = price * 2!"]


def test_each_of_two_folders_has_its_say(open_window: Open, project: Path, tmp_path: Path) -> None:
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / "silent.py").write_bytes(b"")
    (quiet / ".infill.toml").write_text("enabled = false\n")
    workspace = tmp_path / "both.code-workspace"
    workspace.write_text(json.dumps({"folders": [{"path": str(project)}, {"path": str(quiet)}]}))
    window = open_window(b"", {"total = ": "price * count"}, where=f"workspace={workspace}")
    window.type("total = ")
    window.wait_for_ghost("price * count")
    window.quick_open(quiet / "silent.py", "off here")
    window.type("total = ")
    window.shoot("vscode-two-folders.png")
    assert window.ghost == ""
    window.save()
    window.quick_open(project / "shapes.py", "ready")
    window.press("Backspace")
    window.type(" ")
    window.wait_for_ghost("price * count")
    window.press("Tab")
    window.wait_for_cursor("Ln 1, Col 22")
    window.save()
    assert (quiet / "silent.py").read_bytes() == b"total = "
    assert (project / "shapes.py").read_bytes() == b"total = price * count"


def test_an_engine_that_is_killed_costs_no_key_and_comes_again_and_off_lets_it_go(
    open_window: Open, file: Path, engine: Engine
) -> None:
    window = open_window(b"", {"total = ": "price * count", "sum = ": "price + count"})
    window.type("total = ")
    window.wait_for_ghost("price * count")
    killed = engine.wait_until_ready().pid
    window.type("pri")
    engine.kill()
    window.type("ce * count")
    window.press("Enter")
    window.type("sum =")
    window.shoot("vscode-killed.png")
    wait_for(lambda: (now := engine.status) is not None and now.pid != killed, "another engine", seconds=60)
    engine.wait_until_ready()
    window.wait_for_status("ready")
    window.type(" ")
    window.wait_for_ghost("price + count")
    assert window.texts(".notification-toast .notification-list-item-message") == []
    window.press("Tab")
    window.wait_for_cursor("Ln 2, Col 20")
    window.save()
    assert file.read_bytes() == b"total = price * count\nsum = price + count"

    window.command("Infill: Switch on or off")
    window.wait_for_status("off here")
    wait_for(lambda: (now := engine.status) is None or "not in memory" in now.message, "engine let go", seconds=10)
    window.shoot("vscode-off.png")
