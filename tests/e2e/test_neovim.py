"""What a person sees and gets in Neovim: real editor, real server, real engine process, a fake model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvim
import pytest
from journeys import REPOSITORY, Engine, program, wait_for
from nvim import PLUGIN, Frames, Neovim, drawn_by_core, launcher, on_the_runtimepath

from infill_lsp import statistics

pytestmark = pytest.mark.e2e

#: For journeys that hang on what the two versions do differently.
both_versions = pytest.mark.parametrize("executable", ["0.12", "0.11"], indirect=True)

ATTACHED = "return require('infill.presenter').is_attached(vim.api.nvim_get_current_buf())"

OpenFile = Callable[..., Neovim]


@pytest.fixture(scope="session")
def executable(request: pytest.FixtureRequest) -> str:
    return launcher(getattr(request, "param", "0.12"))


class Engines:
    """Resident engines, one for the journeys that ask for the same: most of a journey's time is an engine's start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_table: dict[str, Engine] = {}

    def that_answers(self, table: dict[str, str]) -> Engine:
        key = json.dumps(table)
        if key not in self._by_table:
            self._by_table[key] = Engine(self._folder / f"{len(self._by_table)}.json")
            self._by_table[key].answers(table)
        return self._by_table[key]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    # A Unix socket's path is short: pytest's own temporary folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="infill-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFILL_RUNTIME_DIR", str(folder))
        patch.setenv("INFILL_CACHE_DIR", str(folder / "cache"))
        patch.setenv("INFILL_CONFIG_DIR", str(folder / "config"))
        yield Engines(folder)
        Engine(folder).stop()  # And each other one of this folder.
    shutil.rmtree(folder)


@pytest.fixture
def open_file(
    executable: str, engines: Engines, server_command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenFile]:
    """Opens a file with the given bytes, with the configuration that a person would write."""
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    opened: list[Neovim] = []

    def open_file(
        content: bytes,
        answers: dict[str, str],
        name: str = "shapes.py",
        configuration: Callable[[str], str] = on_the_runtimepath,
        **more: object,
    ) -> Neovim:
        engine = engines.that_answers(answers)
        # The fake model writes a byte a step: slow, and speed is not what these journeys are about.
        settings = {"model": engine.model, "deadline": {"automatic": 10_000}}
        init = tmp_path / "init.lua"
        init.write_text(configuration(json.dumps({"cmd": [server_command], "init_options": settings, **more})))
        file = tmp_path / "project" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        opened.append(Neovim(executable, init, file))
        engine.wait_until_ready()
        return opened[-1]

    yield open_file
    for neovim in opened:
        neovim.close()


@both_versions
def test_a_line_is_shown_accepted_and_saved(open_file: OpenFile) -> None:
    neovim = open_file(b"def area(w, h):\n    \n", {"return": " w * h"})
    neovim.keys("jAreturn")
    neovim.wait_for_ghost(" w * h")
    assert neovim.lines == ["def area(w, h):", "    return"], "ghost text must not be in the buffer"

    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines[1] != "    return", "accepted text")
    assert neovim.lines == ["def area(w, h):", "    return w * h"]
    assert neovim.cursor == (1, len("    return w * h"))
    assert neovim.save() == b"def area(w, h):\n    return w * h\n"


@both_versions
def test_several_lines_are_drawn_and_accepted(open_file: OpenFile, artifacts: Path) -> None:
    body = "\n    if w < 0 or h < 0:\n        raise ValueError('negative side')\n    return w * h"
    before = 'def area(w, h):\n    """The area of a rectangle."""\n\n\nprint(area(2, 3))\n'
    neovim = open_file(before.encode(), {'rectangle."""': body})
    neovim.keys("jA")
    neovim.wait_for_ghost(body)
    screen = neovim.screen
    (artifacts / "neovim.txt").write_text(screen)
    rows = screen.splitlines()
    shown = rows.index("        raise ValueError('negative side')")
    assert rows[shown - 1 : shown + 2] == ["    if w < 0 or h < 0:", rows[shown], "    return w * h"]
    assert "print(area(2, 3))" in rows[shown + 2 :], "the code below moves down"

    neovim.keys("<Tab>")
    wait_for(lambda: len(neovim.lines) == 8, "accepted text")
    assert neovim.cursor == (4, len("    return w * h"))
    assert neovim.save().decode() == before.replace('rectangle."""', 'rectangle."""' + body)


def test_typing_on_keeps_what_matches_and_clears_what_does_not(open_file: OpenFile) -> None:
    neovim = open_file(b"x = 1\n", {"total = ": "price * count"})
    neovim.keys("ototal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("pri")
    neovim.wait_for_ghost("ce * count")
    neovim.keys("<BS>nt")
    neovim.wait_for_ghost("")
    assert neovim.cursor == (1, len("total = prnt"))
    assert neovim.save() == b"x = 1\ntotal = prnt\n"


@both_versions
def test_typing_on_and_accepting_at_once_doubles_nothing(open_file: OpenFile) -> None:
    neovim = open_file(b"x = 1\n", {"total = ": "price * count"})
    neovim.keys("ototal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("pr<Tab>")  # Faster than any answer to `p` and `r`.
    wait_for(lambda: "count" in neovim.lines[1], "accepted text")
    assert neovim.lines[1] == "total = price * count"
    assert neovim.cursor == (1, len("total = price * count"))
    assert neovim.save() == b"x = 1\ntotal = price * count\n"


def test_accepting_what_no_longer_fits_types_the_key(open_file: OpenFile) -> None:
    neovim = open_file(b"x = 1\n", {"total = ": "price * count"}, name="notes.txt")
    neovim.keys("ototal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("q<Tab>")  # Faster than any answer to `q`.
    wait_for(lambda: neovim.lines[1] == "total = q\t", "typed tab", seen=lambda: neovim.lines)


def test_accept_key_without_ghost_text_is_an_ordinary_tab(open_file: OpenFile) -> None:
    neovim = open_file(b"\n", {}, name="notes.txt")
    neovim.keys("i<Tab>x")
    wait_for(lambda: neovim.lines == ["\tx"], "typed tab", seen=lambda: neovim.lines)


def test_escape_dismisses(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Esc>")
    neovim.wait_for_ghost("")
    assert neovim.cursor == (0, len("total =")), "as after every way into Normal mode"
    assert neovim.save() == b"total = \n"


@both_versions
def test_a_crlf_file_with_tabs_keeps_both(open_file: OpenFile) -> None:
    neovim = open_file(b"def f(a):\r\n\t\r\nf(1)\r\n", {"if a:": "\n\t\ta = -a\n\t\tprint(a)"})
    neovim.nvim.command("set noexpandtab")  # A colon that is typed has Neovim indent the line anew.
    neovim.keys("jAif a:")
    neovim.wait_for_ghost("\n        a = -a\n        print(a)")  # Tabs as wide as 4, as for Python.
    neovim.keys("<Tab>")
    wait_for(lambda: len(neovim.lines) == 5, "accepted text")
    assert neovim.cursor == (3, len("\t\tprint(a)"))
    assert neovim.save() == b"def f(a):\r\n\tif a:\r\n\t\ta = -a\r\n\t\tprint(a)\r\nf(1)\r\n"


@both_versions
def test_emoji_before_the_cursor(open_file: OpenFile) -> None:
    neovim = open_file("mood = '👩‍🚀🙂'; \n".encode(), {"print(": "mood, '🙂 ok')"})
    neovim.keys("Aprint(")
    neovim.wait_for_ghost("mood, '🙂 ok')")
    neovim.keys("<Tab>")
    wait_for(lambda: "ok" in neovim.lines[0], "accepted text")
    assert neovim.cursor == (0, len("mood = '👩‍🚀🙂'; print(mood, '🙂 ok')".encode()))
    assert neovim.save().decode() == "mood = '👩‍🚀🙂'; print(mood, '🙂 ok')\n"


@both_versions
def test_a_killed_engine_costs_no_key_stroke(open_file: OpenFile, engines: Engines) -> None:
    answers = {"total = ": "price * count", "mean = ": "total / n"}
    neovim = open_file(b"", answers)
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text")
    neovim.keys("<CR>me")
    engines.that_answers(answers).kill()
    neovim.keys("an = ")
    wait_for(lambda: neovim.lines[-1] == "mean = ", "every typed character")

    def completed() -> bool:
        neovim.keys("<BS> ")  # The person types on; an answer is owed to the newest key stroke only.
        try:
            wait_for(lambda: neovim.ghost == "total / n", "ghost text", seconds=2)
        except pytest.fail.Exception:
            return False
        return True

    wait_for(completed, "completion by a new engine")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines[-1] == "mean = total / n", "accepted text")
    assert neovim.cursor == (1, len("mean = total / n"))
    assert "Traceback" not in neovim.messages
    assert "Error" not in neovim.messages
    assert neovim.save() == b"total = price * count\nmean = total / n\n"


def test_checkhealth_finds_everything(open_file: OpenFile) -> None:
    neovim = open_file(b"", {})
    neovim.nvim.command("checkhealth infill")
    report = "\n".join(neovim.lines)
    assert "ERROR" not in report
    assert "WARNING" not in report
    for found in ("Neovim 0.", "infill-lsp ", "with ghost text in 1 of 1 buffers", "<Tab> accepts"):
        assert found in report


@pytest.fixture
def bare(executable: str) -> Iterator[pynvim.Nvim]:
    """An editor with the plugin on its runtimepath, no configuration, and no server to be found."""
    nvim = pynvim.attach("child", argv=[executable, "--embed", "--headless", "--clean"])
    nvim.exec_lua("vim.env.PATH = ''")
    nvim.command(f"set runtimepath^={PLUGIN}")
    yield nvim
    nvim.close()


def test_a_wrong_setting_is_said_in_one_line_and_the_defaults_hold(bare: pynvim.Nvim) -> None:
    bare.exec_lua("vim.notify = function(text) vim.g.said = text end")
    bare.exec_lua("require('infill').setup({ acept_key = '<C-l>' })")
    assert "acept_key" in bare.vars["said"]
    assert "\n" not in bare.vars["said"]
    assert bare.exec_lua("return require('infill').settings.accept_key") == "<Tab>"


def test_a_key_that_somebody_has_is_left_alone(bare: pynvim.Nvim) -> None:
    bare.command("inoremap <Tab> mine")
    bare.exec_lua("require('infill').setup()")
    assert bare.funcs.maparg("<Tab>", "i") == "mine"


def test_sourcing_the_plugin_starts_nothing_and_takes_no_key(bare: pynvim.Nvim) -> None:
    before = bare.exec_lua("return #vim.api.nvim_get_keymap('i')")
    bare.command("runtime plugin/infill.lua")
    assert bare.exec_lua("return vim.lsp.is_enabled('infill_lsp')") is False
    new = bare.exec_lua("return vim.iter(vim.api.nvim_get_keymap('i')):map(function(map) return map.lhs end):totable()")
    assert len([lhs for lhs in new if not lhs.startswith("<Plug>(infill-")]) == before
    assert bare.funcs.hasmapto("<Plug>(infill-accept)", "i") == 0


def report(nvim: pynvim.Nvim) -> str:
    """What `:checkhealth infill` says."""
    nvim.command("silent! checkhealth infill")  # What a server says meanwhile would be the command's error.
    text = "\n".join(nvim.current.buffer)
    nvim.command("bwipe!")
    return text


def test_checkhealth_says_what_to_do_without_a_server(bare: pynvim.Nvim) -> None:
    assert "The server is not enabled" in report(bare)
    bare.exec_lua("require('infill').setup()")
    found = report(bare)
    assert "`infill-lsp` is not on the PATH" in found
    assert "see docs/editors.md" in found
    assert "No buffer is attached" in found


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/no/such/python\n", "the Python that it was installed with is gone"),
        ("#!/bin/sh\necho infill-lsp 0.0.9\n", "is infill-lsp 0.0.9; the plugin needs infill-lsp 0.1.0"),
        ("#!/bin/sh\necho 'no module pygls' >&2; exit 1\n", "--version` fails: no module pygls"),
    ],
)
def test_checkhealth_says_what_is_wrong_with_the_server(
    bare: pynvim.Nvim, tmp_path: Path, script: str, said: str
) -> None:
    command = tmp_path / "infill-lsp"
    command.write_text(script)
    command.chmod(0o755)
    bare.exec_lua("vim.notify = function() end")
    bare.exec_lua("require('infill').setup({ cmd = { ... } })", str(command))
    assert said in report(bare)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": {"python": "PYTHON"}}, "torch"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"engine": {"address": "http://127.0.0.1:9"}}, "127.0.0.1:9"),
    ],
    ids=["no torch", "no model", "socket refused"],
)
def test_checkhealth_says_what_is_wrong_with_the_engine(
    executable: str,
    engine: Engine,
    server_command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    said: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    python = tmp_path / "python-without-torch"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    options = json.dumps({"cmd": [server_command], "init_options": settings}).replace("PYTHON", str(python))
    init = tmp_path / "init.lua"
    init.write_text(on_the_runtimepath(options))
    neovim = Neovim(executable, init, tmp_path / "shapes.py")
    found = wait_for(lambda: "The engine does not work" in report(neovim.nvim) and report(neovim.nvim), "an error")
    (line,) = (line for line in found.splitlines() if "The engine does not work" in line)
    assert said in line
    assert "doctor` says more" in found
    neovim.close()


@both_versions
def test_word_by_word_and_line_by_line(open_file: OpenFile) -> None:
    body = "\n    if w < 0 or h < 0:\n        raise ValueError('negative side')\n    return w * h"
    before = 'def area(w, h):\n    """The area of a rectangle."""\n\n\nprint(area(2, 3))\n'
    neovim = open_file(before.encode(), {'rectangle."""': body})
    neovim.nvim.command("imap <C-w> <Plug>(infill-accept-word)")
    neovim.nvim.command("imap <C-l> <Plug>(infill-accept-line)")
    neovim.keys("jA")
    neovim.wait_for_ghost(body)
    for keys, taken in (("<C-w>", "\n    if"), ("<C-w>", " w"), ("<C-l>", " < 0 or h < 0:")):
        neovim.keys(keys)
        body = body.removeprefix(taken)
        neovim.wait_for_ghost(body)
    assert neovim.lines[2] == "    if w < 0 or h < 0:"
    neovim.keys("<C-l>")
    neovim.wait_for_ghost("\n    return w * h")
    neovim.keys("<C-l>")
    wait_for(lambda: neovim.lines[4] == "    return w * h", "accepted line", seen=lambda: neovim.lines)
    assert neovim.cursor == (4, len("    return w * h"))
    neovim.wait_for_ghost("")
    assert neovim.save().decode() == "\n".join(neovim.lines) + "\n"


@both_versions
def test_a_closer_that_is_there_is_taken_or_typed_past_and_not_doubled(open_file: OpenFile) -> None:
    """As a plugin for pairs leaves it: the text goes on behind the closer that stands behind the cursor."""
    neovim = open_file(b"def f():\n    pass\n", {"def f(": "self, x) -> int:"})
    neovim.nvim.command("imap <C-w> <Plug>(infill-accept-word)")
    neovim.keys("0f(a")
    shown = lambda: neovim.lua("return require('infill.presenter').text()")
    wait_for(lambda: shown() == "self, x) -> int:", "whole suggestion", seen=shown)
    for rest, line in (
        (", x) -> int:", "def f(self):"),
        (" x) -> int:", "def f(self,):"),
        (") -> int:", "def f(self, x):"),
        (" -> int:", "def f(self, x):"),
    ):
        neovim.keys("<C-w>")
        wait_for(lambda rest=rest: shown() == rest, "rest of it", seen=shown)
        assert neovim.lines[0] == line
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines[0] == "def f(self, x) -> int:", "whole line", seen=lambda: neovim.lines)
    neovim.keys("<Esc>")
    neovim.nvim.current.buffer[0] = "def f():"
    neovim.keys("0f(a")
    wait_for(lambda: shown() == "self, x) -> int:", "suggestion once more", seen=shown)
    neovim.keys("self, x<Right>")
    wait_for(lambda: shown() == " -> int:", "rest behind the closer", seen=shown)


@both_versions
def test_ghost_text_stays_while_it_is_typed(open_file: OpenFile) -> None:
    """While the person types what is shown, no frame that a user interface is sent lacks any of it."""
    text = "price_of_one_piece * count_of_all_pieces + 1"
    neovim = open_file(b"", {"total = ": text})
    neovim.keys("itotal = ")
    neovim.wait_for_ghost(text)
    frames = Frames(neovim)
    for typed, character in enumerate(text, start=1):
        neovim.keys(character)
        wait_for(lambda n=typed: neovim.cursor[1] == len("total = ") + n, "typed character")
        assert neovim.ghost == text[typed:]
    rows = frames.until_now()
    assert len(rows) >= len(text), "each key is a frame of its own"
    assert set(rows) == {"total = " + text}
    assert neovim.save() == f"total = {text}\n".encode()


@both_versions
def test_accepting_is_one_change_that_undo_takes_back_and_dot_repeats(open_file: OpenFile) -> None:
    neovim = open_file(b"a\nb\n", {"total = ": "price * count"})
    neovim.keys("A; total = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab><Esc>j.")
    wait_for(
        lambda: neovim.lines == ["a; total = price * count", "b; total = price * count"],
        "dot",
        seen=lambda: neovim.lines,
    )
    neovim.keys("u")
    wait_for(lambda: neovim.lines[1] == "b", "undone repetition", seen=lambda: neovim.lines)
    neovim.keys("u")
    wait_for(lambda: neovim.lines[0] == "a; total = ", "undone acceptance", seen=lambda: neovim.lines)
    assert neovim.save() == b"a; total = \nb\n"
    neovim.keys("2<C-r>")
    wait_for(lambda: neovim.lines[1] != "b", "both once more", seen=lambda: neovim.lines)
    assert neovim.save() == b"a; total = price * count\nb; total = price * count\n"


def test_an_open_menu_goes_when_ghost_text_is_accepted(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count", "total = pr": "ice * count"})
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.nvim.command("set completeopt=menuone,noinsert,noselect")
    neovim.lua("vim.fn.complete(9, { 'print', 'prod' })")
    wait_for(lambda: neovim.nvim.funcs.pumvisible(), "menu")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    assert not neovim.nvim.funcs.pumvisible()
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"


#: Does something as soon as the next completion is requested, before its answer is read.
IN_MID_REQUEST = """
local command = ...
asked = false
vim.api.nvim_create_autocmd("LspRequest", {
  callback = function(event)
    if event.data.request.method == "textDocument/inlineCompletion" then
      vim.schedule(function()
        vim.cmd(command)
        asked = true
      end)
      return true
    end
  end,
})
"""


def test_a_buffer_that_goes_or_is_written_in_mid_request_is_no_error(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    for command in ("silent write", "edit!", "bwipe!"):
        neovim.lua(IN_MID_REQUEST, command)
        neovim.keys("cctotal = ")
        wait_for(lambda: neovim.lua("return asked"), command)
        if command == "bwipe!":
            neovim.lua("vim.wait(300) return true")
            assert neovim.ghost == ""
        else:
            neovim.wait_for_ghost("price * count")
        assert "Error" not in neovim.messages
        assert "E5" not in neovim.messages
        neovim.keys("<Esc>")


@both_versions
def test_no_way_out_of_insert_mode_leaves_ghost_text(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.nvim.command("set hidden")
    for keys, mode in (
        ("<Esc>", "n"),
        ("<C-c>", "n"),
        ("<C-Bslash><C-n>", "n"),
        ("<Insert>", "R"),
        ("<C-o>v", "v"),
        ("<C-o>:", "c"),
        ("<Cmd>new<CR>", "i"),
        ("<Cmd>terminal true<CR>", "t"),
    ):
        neovim.keys("ggcctotal = ")
        neovim.wait_for_ghost("price * count")
        buffer = neovim.nvim.current.buffer
        neovim.keys(keys)
        wait_for(lambda m=mode: neovim.nvim.api.get_mode()["mode"] == m, f"mode {mode} by {keys}")
        assert neovim.lua("return #vim.api.nvim_buf_get_extmarks(..., -1, 0, -1, {})", buffer.number) == 0, keys
        assert buffer[:] == ["total = "]
        neovim.keys("<C-Bslash><C-n><C-Bslash><C-n>")  # After a command line of <C-o> comes Insert mode again.
        wait_for(lambda: neovim.nvim.api.get_mode()["mode"][0] == "n", "Normal mode")
        neovim.nvim.command(f"silent only | buffer {buffer.number}")
    assert "Error" not in neovim.messages


def test_nothing_is_shown_while_a_macro_is_recorded_so_that_it_replays(open_file: OpenFile) -> None:
    neovim = open_file(b"\n", {"total = ": "price * count"}, name="notes.txt")
    neovim.keys("qqcctotal = ")
    neovim.lua("vim.wait(300) return true")
    assert neovim.ghost == ""
    assert neovim.lua("return require('infill').statusline()") == "infill off while a macro is recorded"
    neovim.keys("<Tab>1<Esc>qo<Esc>@q")
    wait_for(lambda: neovim.lines == ["total = \t1"] * 2, "replayed macro", seen=lambda: neovim.lines)
    neovim.keys("A total = ")
    neovim.wait_for_ghost("price * count")


#: What is typed, and the text that is shown then: with tabs in the cursor's line, and below it.
TABS_HERE, TABS_BELOW = ("z" * 90 + " = ", "price\t* count"), ("go {", "\n\t\ta\t= 1\n\t\treturn a")

#: Settings of windows and buffers in which text looks different from what it is.
LOOKS = {
    "wrap": TABS_HERE,
    "nowrap signcolumn=yes": TABS_BELOW,
    "rightleft": TABS_BELOW,
    "tabstop=3": TABS_HERE,
    "vartabstop=5,2": TABS_BELOW,
    "virtualedit=all textwidth=20": TABS_HERE,
}


@both_versions
def test_ghost_text_looks_as_it_will_when_it_is_accepted(open_file: OpenFile) -> None:
    neovim = open_file(b"", dict([TABS_HERE, TABS_BELOW]), name="shapes.go")
    for look, (begun, text) in LOOKS.items():
        file = neovim.file.with_name(f"{look.split('=')[0]}.go")
        file.write_bytes(b"func f() {\n\t\n\tnext\n")
        neovim.nvim.command(f"edit {file} | setlocal {look}")
        wait_for(lambda: neovim.lua(ATTACHED), "attached server")
        neovim.keys(f"<Esc>2GA{begun}")
        wait_for(lambda: neovim.ghost, f"ghost text with {look}")
        before = neovim.screen
        neovim.keys("<Tab>")
        wait_for(lambda b=begun, t=text: b + t in "\n".join(neovim.lines), "accepted text", seen=lambda: neovim.lines)
        # The last two lines are the editor's own: they hold the cursor's place.
        assert neovim.screen.splitlines()[:-2] == before.splitlines()[:-2], look
        assert "\t" not in before, look
        neovim.keys("<Esc>:silent write<CR>")
        wait_for(lambda: not neovim.nvim.current.buffer.options["modified"], "saved file")
        assert file.read_text() == f"func f() {{\n\t{begun}{text}\n\tnext\n"
    assert "Error" not in neovim.messages


@both_versions
def test_cycling_and_dismissing(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count", "= ": "sum(prices)"})
    neovim.nvim.command("imap <C-n> <Plug>(infill-next)")
    neovim.nvim.command("imap <C-p> <Plug>(infill-previous)")
    neovim.nvim.command("imap <C-e> <Plug>(infill-dismiss)")
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    for keys, shown in (("<C-n>", "sum(prices)  (2/2)"), ("<C-n>", "price * count  (1/2)")):
        neovim.keys(keys)
        neovim.wait_for_ghost(shown)
    neovim.keys("<C-e>")
    neovim.wait_for_ghost("")
    assert neovim.cursor == (0, len("total = "))
    neovim.keys("<BS> ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<C-p>")
    neovim.wait_for_ghost("sum(prices)  (2/2)")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = sum(prices)"], "accepted text", seen=lambda: neovim.lines)
    assert neovim.cursor == (0, len("total = sum(prices)"))
    assert neovim.save() == b"total = sum(prices)\n"


@both_versions
def test_a_selection_is_filled_previewed_and_undone_as_one_change(open_file: OpenFile) -> None:
    neovim = open_file(b"total = nothing\n", {"total = ": "price * count"})
    neovim.keys("wwve:Infill fill<CR>")
    wait_for(lambda: "accepts" in neovim.screen, "preview", seen=lambda: neovim.screen)
    assert "total = price * count" in neovim.screen
    neovim.keys("a")
    wait_for(lambda: neovim.lines == ["total = price * count"], "filled selection", seen=lambda: neovim.lines)
    assert neovim.cursor[0] == 0
    assert neovim.save() == b"total = price * count\n"
    neovim.keys("u")
    wait_for(lambda: neovim.lines == ["total = nothing"], "undone fill", seen=lambda: neovim.lines)


@both_versions
def test_what_is_filled_is_what_was_selected(open_file: OpenFile) -> None:
    filled = "price * count"
    neovim = open_file(b"", {"é🙂 = ": filled}, name="notes.txt", preview="none")
    neovim.nvim.command("xmap gs <Plug>(infill-fill)")
    for keys, before, after in (
        ("wwwve:Infill fill<CR>", "é🙂 = no;\n", f"é🙂 = {filled};\n"),
        ("wwwv$:Infill fill<CR>", "é🙂 = no;\n", f"é🙂 = {filled}\n"),
        (":set selection=exclusive<CR>wwwve:Infill fill<CR>", "é🙂 = no;\n", f"é🙂 = {filled};\n"),
        (":set selection=exclusive<CR>wwwvegs", "é🙂 = 🙂é;\n", f"é🙂 = {filled};\n"),
        ("www<C-v>jl:Infill fill<CR>", "é🙂 = no;\né🙂 = on;\n", f"é🙂 = {filled};\né🙂 = {filled};\n"),
        ("www<C-v>jlgs", "é🙂 = no;\né🙂 = on;\n", f"é🙂 = {filled};\né🙂 = {filled};\n"),
        # The selection before is none of the command's business.
        ("wwwve<Esc>:Infill fill<CR>", "é🙂 = no;\n", "é🙂 = no;\n"),
    ):
        neovim.nvim.current.buffer[:] = before.splitlines()
        neovim.nvim.command("set selection=inclusive | messages clear")
        neovim.keys(f"gg0{keys}")
        done = "nothing to write" if before == after else "filling"
        wait_for(lambda d=done: d in neovim.messages, "word of the fill")
        wait_for(lambda a=after: neovim.lines == a.splitlines(), f"fill by {keys}", seen=lambda: neovim.lines)
    assert neovim.save().decode() == after


@both_versions
def test_a_preview_takes_no_key_of_who_types_elsewhere(open_file: OpenFile) -> None:
    neovim = open_file(b"total = no\n", {"total = ": "price * count"})
    neovim.keys("wwve:Infill fill<CR>i")
    wait_for(lambda: "the cursor is elsewhere" in neovim.messages, "word of it", seen=lambda: neovim.messages)
    neovim.keys("a")
    wait_for(lambda: neovim.lines == ["total = ano"], "typed character", seen=lambda: neovim.lines)
    neovim.keys("<Esc>")
    neovim.nvim.command("setlocal nomodifiable | Infill fill")
    assert "this buffer cannot be changed" in neovim.messages
    assert "Error" not in neovim.messages


#: What the server is told from now on, beside documents and requests.
TOLD = """
local client = vim.lsp.get_clients({ name = "infill_lsp" })[1]
local notify = client.notify
told = {}
client.notify = function(self, method, params)
  if not method:find("^textDocument") then
    table.insert(told, { method, params })
  end
  return notify(self, method, params)
end
"""


def test_a_switch_tells_the_server_what_changed_and_no_more(open_file: OpenFile) -> None:
    neovim = open_file(b"total = \n", {"total = ": "price * count"})
    neovim.lua(TOLD)
    for command, enabled in (
        ("off buffer", None),
        ("on buffer", None),
        ("off", False),
        ("off", None),
        ("off buffer", None),
        ("toggle buffer", None),
        ("snooze", None),
        ("toggle", True),
        ("on", None),
    ):
        neovim.nvim.command(f"Infill {command}")
        told = neovim.lua("local all = told told = {} return all")
        sent = [params["settings"]["infill"]["enabled"] for _, params in told]
        assert sent == ([] if enabled is None else [enabled]), command
    neovim.keys("A")
    neovim.wait_for_ghost("price * count")
    wait_for(lambda: neovim.lua("return require('infill').statusline()") == "infill ready", "status")
    for wrong in ("soon", "-1"):
        with pytest.raises(pynvim.NvimError, match="snooze takes minutes"):
            neovim.nvim.command(f"Infill snooze {wrong}")
    assert neovim.ghost == "price * count"
    neovim.nvim.command("Infill snooze 5 | Infill why")
    assert "infill: snoozed" in neovim.messages
    assert neovim.ghost == ""


def test_whoever_closes_the_canvas_the_server_hears_of_it(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.lua(TOLD)
    for close in ("Infill canvas", "fclose!", "tabnew | Infill canvas | Infill canvas | tabclose"):
        neovim.nvim.command("Infill canvas")
        neovim.nvim.command(close)
        told = neovim.lua("local all = told told = {} return all")
        assert told[0] == ["infill/watch", {"canvas": True}]
        assert told[-1] == ["infill/watch", {"canvas": False}], close
        neovim.nvim.command("silent! fclose!")
        neovim.lua("told = {}")


def test_core_draws_nothing_beside_the_plugin(open_file: OpenFile) -> None:
    def configuration(options: str) -> str:
        return f"vim.lsp.inline_completion.enable()\n{on_the_runtimepath(options)}"  # For another server.

    neovim = open_file(b"", {"total = ": "price * count"}, configuration=configuration)
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.lua("vim.wait(600) return true")  # Core waits 200 ms before it asks.
    assert neovim.ghost == "price * count"
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"


def test_snoozed_or_off_it_is_silent_and_says_so(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    for command, word in (("snooze 5", "snoozed"), ("off", "off")):
        neovim.nvim.command(f"Infill {command}")
        assert neovim.lua("return require('infill').statusline()") == f"infill {word}"
    neovim.keys("itotal = ")
    neovim.lua("vim.wait(300) return true")
    assert neovim.ghost == ""
    neovim.nvim.command("Infill on")

    def shown() -> bool:
        neovim.keys("<BS> ")
        neovim.lua("vim.wait(500) return true")
        return neovim.ghost == "price * count"

    wait_for(shown, "ghost text", seen=lambda: neovim.messages)
    neovim.nvim.command("Infill status")
    wait_for(lambda: "infill: " in neovim.messages, "status")
    neovim.nvim.command("Infill why")
    assert neovim.nvim.funcs.getcompletion("Infill s", "cmdline") == ["snooze", "stats", "status"]
    assert neovim.nvim.funcs.getcompletion("Inf snooze ", "cmdline") == ["5", "15", "60"]
    assert "Error" not in neovim.messages
    assert neovim.cursor == (0, len("total = "))
    assert neovim.save() == b"total = \n"


def test_after_a_snooze_it_is_on_again(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    minutes = 0.02
    neovim.nvim.command(f"Infill snooze {minutes}")
    assert neovim.lua("return require('infill').statusline()") == "infill snoozed"
    neovim.keys("itotal = ")
    neovim.lua("vim.wait(300) return true")
    assert neovim.ghost == ""
    wait_for(lambda: neovim.lua("return require('infill').statusline()") == "infill ready", "end of the snooze")
    neovim.keys("<BS> ")
    neovim.wait_for_ghost("price * count")
    neovim.nvim.command("Infill snooze")
    assert neovim.ghost == ""
    neovim.nvim.command("Infill snooze 0")
    neovim.keys("<BS> ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"


@both_versions
def test_the_log_is_opened_in_a_tab_of_its_own(open_file: OpenFile, tmp_path: Path) -> None:
    neovim = open_file(b"total = \n", {})
    neovim.lua("vim.lsp.log.error('why it crashed')")
    neovim.nvim.command("Infill log")
    assert len(neovim.nvim.tabpages) == 2
    assert Path(neovim.nvim.current.buffer.name) == tmp_path / "state" / "nvim" / "lsp.log"
    assert "why it crashed" in "\n".join(neovim.lines)
    neovim.nvim.command("tabclose")
    assert neovim.lines == ["total = "]


@both_versions
def test_a_restart_puts_another_engine_in_place(open_file: OpenFile, engines: Engines) -> None:
    answers = {"total = ": "price * count"}
    neovim = open_file(b"", answers)
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    engine, servers = engines.that_answers(answers), neovim.servers
    before = engine.wait_until_ready().pid
    neovim.nvim.command("Infill restart")
    wait_for(lambda: "infill: the engine starts anew" in neovim.messages, "word of it", seen=lambda: neovim.messages)
    assert engine.wait_until_ready().pid != before
    assert neovim.servers == servers, "the server stays"
    neovim.keys("<Esc>ototal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines[1] == "total = price * count", "accepted text", seen=lambda: neovim.lines)
    assert neovim.cursor == (1, len("total = price * count"))
    assert neovim.save() == b"total = \ntotal = price * count\n"


def test_what_is_drawn_and_taken_is_counted_by_the_server(
    open_file: OpenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFILL_CACHE_DIR", str(tmp_path / "counted"))
    neovim = open_file(b"", {"total = ": "price * count", "mean = ": "total / n", "l = ": "sum(prices)"})
    for key, action in (("<C-w>", "accept-word"), ("<C-n>", "next"), ("<C-e>", "dismiss")):
        neovim.nvim.command(f"imap {key} <Plug>(infill-{action})")

    def counted() -> dict[str, int]:
        neovim.nvim.command("messages clear | Infill stats")
        wait_for(lambda: "counted on this machine alone" in neovim.messages, "table", seen=lambda: neovim.messages)
        assert re.search("shown +taken +in part", neovim.messages)
        (counts,) = statistics.read(statistics.database()).values()
        return {name: counts[name] for name in ("offered", "partly", "accepted", "characters")}

    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    assert counted() == {"offered": 1, "partly": 0, "accepted": 0, "characters": 0}
    neovim.keys("<C-n>")
    neovim.wait_for_ghost("sum(prices)  (2/2)")
    assert counted() == {"offered": 2, "partly": 0, "accepted": 0, "characters": 0}
    neovim.keys("<C-e><CR>mean = ")
    neovim.wait_for_ghost("total / n")
    neovim.keys("<C-w>")
    neovim.wait_for_ghost(" / n")
    assert counted() == {"offered": 3, "partly": 1, "accepted": 0, "characters": len("total")}
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines[-1] == "mean = total / n", "accepted text", seen=lambda: neovim.lines)
    assert counted() == {"offered": 3, "partly": 1, "accepted": 1, "characters": len("total / n")}
    assert neovim.cursor == (1, len("mean = total / n"))
    assert neovim.save() == b"total = \nmean = total / n\n"


#: Keeps what is due later instead of doing it, and counts the requests.
KEPT_BACK = """
asked, due, defer = 0, {}, vim.defer_fn
vim.defer_fn = function(act)
  table.insert(due, act)
  return vim.uv.new_timer()
end
vim.api.nvim_create_autocmd("LspRequest", {
  callback = function(event)
    local request = event.data.request
    if request.type == "pending" and request.method == "textDocument/inlineCompletion" then
      asked = asked + 1
    end
  end,
})
function catch_up()
  vim.iter(due):each(function(act) act() end)
  return asked
end
"""


@both_versions
def test_what_is_dismissed_as_it_is_about_to_be_asked_for_is_not_asked_for(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.lua(KEPT_BACK)

    def press(*keys: str) -> None:
        for key in keys:
            count = neovim.lua("return #due")
            neovim.keys(key)
            wait_for(lambda n=count: neovim.lua("return #due") == n + 1, "a question for later")

    press(*"itotal = ")
    neovim.lua("require('infill').dismiss()")
    assert neovim.lua("return catch_up()") == 0
    press("<BS>", " ")
    assert neovim.lua("return catch_up()") == 1, "only the newest"
    neovim.lua("vim.defer_fn = defer")
    neovim.wait_for_ghost("price * count")
    assert neovim.cursor == (0, len("total = "))
    assert neovim.save() == b"total = \n"


def test_the_help_names_every_setting_with_its_default(bare: pynvim.Nvim) -> None:
    text = (PLUGIN / "doc" / "infill.txt").read_text()
    code = text.partition("setup({\n")[2].partition("})")[0]
    documented = bare.exec_lua(f"return {{ {code} }}")
    assert documented == bare.exec_lua("return require('infill.settings').defaults()")


def test_the_help_names_every_command_function_and_mapping(bare: pynvim.Nvim, tmp_path: Path) -> None:
    text = (PLUGIN / "doc" / "infill.txt").read_text()
    for name in bare.exec_lua("return require('infill').complete('', 'Infill ')"):
        assert re.search(rf"^:(\[range\])?Infill [^A-Z\n]*\b{name}\b", text, re.MULTILINE), name
    inside = {"accept_by_key", "command", "complete", "setup"}
    functions = bare.exec_lua(
        "return vim.iter(require('infill')):filter(function(_, value) return type(value) == 'function' end)"
        ":map(function(name) return name end):totable()"
    )
    for name in set(functions) - inside:
        assert re.search(rf"^[^\n]*\b{name}\(", text, re.MULTILINE), name
    bare.command("runtime plugin/infill.lua")
    mappings = bare.exec_lua(
        "return vim.iter({ 'i', 'n' }):map(vim.api.nvim_get_keymap):flatten()"
        ":map(function(map) return map.lhs:match('^<Plug>%(infill(.*)%)$') end):totable()"
    )
    assert len(mappings) >= 8
    for name in mappings:
        assert f"`{name}`" in text or f"`<Plug>(infill{name})`" in text, name
    shutil.copytree(PLUGIN / "doc", tmp_path / "doc")
    bare.command(f"helptags {tmp_path / 'doc'}")  # Fails where a tag is there twice.
    assert "infill.accept()" in (tmp_path / "doc" / "tags").read_text()


def test_core_draws_where_the_server_is_enabled_without_setup(
    executable: str, engine: Engine, server_command: str, tmp_path: Path
) -> None:
    engine.answers({"total = ": "price * count"})
    settings = {"model": engine.model, "deadline": {"automatic": 10_000}}
    init = tmp_path / "init.lua"
    init.write_text(drawn_by_core(json.dumps({"cmd": [server_command], "init_options": settings})))
    file = tmp_path / "shapes.py"
    file.touch()
    neovim = Neovim(executable, init, file)
    if not neovim.lua("return vim.lsp.inline_completion ~= nil"):
        neovim.close()
        pytest.skip("this Neovim's core has no inline completion")
    engine.wait_until_ready()
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"
    neovim.close()


def test_a_file_of_secrets_stays_silent(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"}, name=".env")
    neovim.keys("itotal = ")
    neovim.lua("vim.wait(1000) return true")
    assert neovim.ghost == ""
    assert neovim.cursor == (0, len("total = "))
    assert neovim.save() == b"total = \n"


def test_checkhealth_names_what_is_switched_off_or_taken(open_file: OpenFile) -> None:
    neovim = open_file(b"", {})
    neovim.nvim.command("Infill snooze")
    assert "Nothing is shown in shapes.py: snoozed" in report(neovim.nvim)
    neovim.nvim.command("Infill on | Infill off python")
    assert "Nothing is shown in shapes.py: off for python" in report(neovim.nvim)
    neovim.nvim.command("Infill off")
    wait_for(lambda: "The server offers nothing" in report(neovim.nvim), "server that is off")
    assert "Nothing is shown in shapes.py: off\n" in report(neovim.nvim)
    neovim.nvim.command("inoremap <Tab> mine")
    assert "<Tab> is mapped to something else" in report(neovim.nvim)


@both_versions
def test_three_holes_are_filled_and_undone_as_one_change(open_file: OpenFile) -> None:
    before = "".join(f"def {name}(w, h):\n    ...\n\n\n" for name in ("area", "edge", "ratio"))
    bodies = {"area": "return w * h", "edge": "return 2 * (w + h)", "ratio": "return w / h"}
    after = before
    for body in bodies.values():
        after = after.replace("...", body, 1)
    neovim = open_file(before.encode(), {f"def {name}(w, h):\n    ": body for name, body in bodies.items()})
    neovim.keys("4j")
    neovim.nvim.command("Infill holes")
    wait_for(lambda: "accepts" in neovim.screen, "preview", seen=lambda: neovim.screen)
    assert all(body in neovim.screen for body in bodies.values())
    neovim.keys("a")
    wait_for(lambda: neovim.lines == after.splitlines(), "filled holes", seen=lambda: neovim.lines)
    assert neovim.cursor[0] == 4
    assert neovim.save().decode() == after
    neovim.keys("u")
    wait_for(lambda: "..." in neovim.lines[1], "undone fill", seen=lambda: neovim.lines)
    assert neovim.save().decode() == before


@both_versions
@pytest.mark.parametrize(("key", "after"), [("a", b"total = price * count\n"), ("q", b"total = nothing\n")])
def test_a_fill_is_previewed_as_a_diff(open_file: OpenFile, key: str, after: bytes) -> None:
    neovim = open_file(b"total = nothing\n", {"total = ": "price * count"}, preview="diff")
    neovim.keys("wwve:Infill fill<CR>")
    wait_for(lambda: len(neovim.nvim.tabpages) == 2, "tab with the diff", seen=lambda: neovim.screen)
    assert [window.options["diff"] for window in neovim.nvim.current.tabpage.windows] == [True, True]
    assert "total = nothing" in neovim.screen
    assert "total = price * count" in neovim.screen
    neovim.keys(key)
    wait_for(lambda: len(neovim.nvim.tabpages) == 1, "end of the preview")
    assert not neovim.nvim.current.window.options["diff"]
    neovim.wait_for_ghost("")
    assert neovim.nvim.current.buffer.name == str(neovim.file)
    neovim.nvim.command("write")
    assert neovim.file.read_bytes() == after


def test_off_for_a_language_leaves_the_others(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    assert "python" in neovim.nvim.funcs.getcompletion("Infill off py", "cmdline")
    neovim.nvim.command("Infill off python")
    assert neovim.lua("return require('infill').statusline()") == "infill off for python"
    neovim.keys("itotal = ")
    neovim.lua("vim.wait(300) return true")
    assert neovim.ghost == ""
    assert neovim.save() == b"total = \n"

    notes = neovim.file.with_name("shapes.lua")
    neovim.nvim.command(f"edit {notes}")
    wait_for(lambda: neovim.lua("return #vim.lsp.get_clients({ bufnr = 0 })"), "attached server")
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab><Esc>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    neovim.nvim.command("write | buffer shapes.py | Infill on python")
    assert notes.read_bytes() == b"total = price * count\n"
    neovim.keys("A")
    neovim.wait_for_ghost("price * count")
    assert neovim.cursor == (0, len("total = "))


def test_off_in_a_buffer_is_that_buffer_alone(open_file: OpenFile) -> None:
    neovim = open_file(b"total = \n", {"total = ": "price * count"})
    neovim.nvim.command("Infill off buffer")
    assert neovim.lua("return require('infill').statusline()") == "infill off in this buffer"
    neovim.keys("A")
    neovim.lua("vim.wait(300) return true")
    assert neovim.ghost == ""
    neovim.keys("<Esc>")
    neovim.nvim.command("Infill toggle buffer")
    neovim.keys("A")
    neovim.wait_for_ghost("price * count")
    assert neovim.cursor == (0, len("total = "))
    assert neovim.save() == b"total = \n"


@both_versions
def test_two_folders_each_by_their_own_rules(open_file: OpenFile) -> None:
    neovim = open_file(b"total = \n", {"total = ": "price * count"})
    other = neovim.file.parent.with_name("other")
    for folder in (neovim.file.parent, other):
        (folder / ".git").mkdir(parents=True)
    (other / "shapes.py").write_text("total = \n")
    quiet = other.with_name("quiet")
    (quiet / ".git").mkdir(parents=True)
    (quiet / ".infill.toml").write_text("enabled = false\n")
    (quiet / "shapes.py").write_text("total = \n")

    for folder in (other, quiet):
        neovim.nvim.command(f"edit {folder / 'shapes.py'}")
        wait_for(lambda: neovim.lua("return #vim.lsp.get_clients({ bufnr = 0 })"), "attached server")
        neovim.keys("A")
        if folder == quiet:
            neovim.lua("vim.wait(1000) return true")
            assert neovim.ghost == ""
            assert neovim.cursor == (0, len("total = "))
            neovim.keys("<Esc>")
        else:
            neovim.wait_for_ghost("price * count")
            neovim.keys("<Tab><Esc>:write<CR>")
            wait_for(lambda: "count" in (other / "shapes.py").read_text(), "saved file")
    neovim.nvim.command("buffer project/shapes.py")
    neovim.keys("A")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: "count" in neovim.lines[0], "accepted text")
    assert neovim.save() == (other / "shapes.py").read_bytes() == b"total = price * count\n"
    assert (quiet / "shapes.py").read_bytes() == b"total = \n"


@both_versions
def test_a_server_that_crashes_is_started_again(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    (crashed,) = neovim.servers
    os.kill(crashed, signal.SIGKILL)
    neovim.wait_for_ghost("")
    wait_for(lambda: neovim.servers not in ([], [crashed]), "another server", seen=lambda: neovim.messages)
    wait_for(lambda: neovim.lua(ATTACHED), "attached server")
    neovim.keys("<BS> ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: "count" in neovim.lines[0], "accepted text")
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"


@both_versions
def test_a_restart_starts_the_server_of_this_buffer_where_it_is_gone(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    (mine,) = neovim.servers
    other = neovim.file.parent.with_name("other")
    (other / ".git").mkdir(parents=True)
    neovim.nvim.command(f"edit {other / 'shapes.py'}")
    wait_for(lambda: len(neovim.servers) == 2 and neovim.lua(ATTACHED), "server of the other project")
    neovim.nvim.command("buffer project/shapes.py")
    neovim.lua("local defer = vim.defer_fn vim.defer_fn = function() vim.defer_fn = defer end")  # Given up.
    os.kill(mine, signal.SIGKILL)
    wait_for(lambda: not neovim.lua("return #vim.lsp.get_clients({ bufnr = 0 })"), "end of the server")
    neovim.nvim.command("Infill restart")
    wait_for(lambda: neovim.lua(ATTACHED), "attached server", seen=lambda: neovim.messages)
    assert len(neovim.servers) == 2
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: "count" in neovim.lines[0], "accepted text")
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"


@both_versions
def test_a_fill_whose_server_ends_is_not_waited_for(open_file: OpenFile) -> None:
    neovim = open_file(b"total = nothing\n", {"total = ": "price * count"})
    (server,) = neovim.servers
    os.kill(server, signal.SIGSTOP)
    neovim.keys("wwve:Infill fill<CR>")
    wait_for(lambda: "infill: filling" in neovim.messages, "word of the fill", seen=lambda: neovim.messages)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: "infill: the server ended" in neovim.messages, "word of its end", seen=lambda: neovim.messages)
    assert neovim.cursor[0] == 0
    assert neovim.lines == ["total = nothing"]
    wait_for(lambda: neovim.servers not in ([], [server]) and neovim.lua(ATTACHED), "another server")
    neovim.keys("0wwve:Infill fill<CR>")
    wait_for(lambda: "accepts" in neovim.screen, "preview", seen=lambda: neovim.screen)
    neovim.keys("a")
    wait_for(lambda: neovim.lines == ["total = price * count"], "filled selection", seen=lambda: neovim.lines)
    assert neovim.messages.count("the server ended") == 1
    assert neovim.save() == b"total = price * count\n"


@both_versions
def test_crashes_count_for_each_project(bare: pynvim.Nvim, tmp_path: Path) -> None:
    bare.exec_lua("said = '' vim.notify = function(text) said = said .. text .. '\\n' end")
    bare.exec_lua(
        "require('infill').setup({ cmd = { ... } })", str(program(tmp_path / "server", "exec /bin/cat > /dev/null"))
    )
    servers = lambda: bare.exec_lua("return vim.api.nvim_get_proc_children(vim.fn.getpid())")
    for name in "abcdef":
        (tmp_path / name / ".git").mkdir(parents=True)
        count = len(servers())
        bare.command(f"edit {tmp_path / name / 'shapes.py'}")
        wait_for(lambda n=count: len(servers()) > n, "server of the project")
    killed = servers()
    for server in killed:
        os.kill(server, signal.SIGKILL)
    wait_for(lambda: len(set(servers()) - set(killed)) >= 6, "all of them anew", seen=servers)
    said = bare.exec_lua("return said")
    assert said.count("quit with exit code") == len(killed)
    assert "crashed" not in said


def test_a_server_that_keeps_crashing_is_given_up_with_a_word(bare: pynvim.Nvim) -> None:
    bare.exec_lua("vim.notify = function(text) vim.g.said = text end")
    bare.exec_lua("vim.lsp.enable = function() vim.g.starts = (vim.g.starts or 0) + 1 end")
    bare.exec_lua("vim.lsp.is_enabled = function() return true end")
    bare.exec_lua("vim.defer_fn = function(act, wait) vim.g.wait = wait; act() end")
    for crash in range(4):
        bare.exec_lua("require('infill.crashes').exited('infill_lsp', '/project', 0, 9)")
        assert bare.vars["starts"] == crash + 1
        assert bare.vars["wait"] == 250 * 2**crash
    bare.exec_lua("require('infill.crashes').exited('infill_lsp', '/project', 1, 0)")
    assert "crashed 5 times" in bare.vars["said"]
    assert ":Infill log" in bare.vars["said"]
    assert bare.vars["starts"] == 4


@pytest.fixture
def branch(tmp_path: Path) -> str:
    """The URL of a repository with the branch that plugin managers clone, made of the plugin as it is here."""
    repository = tmp_path / "infill-lsp"
    shutil.copytree(PLUGIN, repository / "editors" / "neovim")
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(REPOSITORY / name, repository)
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "The plugin"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    if subprocess.run(["git", "subtree", "--help"], capture_output=True, check=False).returncode:
        pytest.skip("this git has no `subtree`")
    subprocess.run(["make", "-s", "neovim-branch"], cwd=repository, check=True)
    return f"file://{repository}"


def completes_from(neovim: Neovim, folder: Path) -> None:
    """The plugin that is loaded is the one in `folder`, and it works: commands, help, ghost text, bytes."""
    (loaded,) = neovim.lua("return vim.api.nvim_get_runtime_file('lua/infill/init.lua', true)")
    assert Path(loaded).resolve().is_relative_to(folder.resolve())
    assert neovim.nvim.funcs.exists(":Infill") == 2
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("<Tab>")
    wait_for(lambda: "count" in neovim.lines[0], "accepted text")
    assert neovim.cursor == (0, len("total = price * count"))
    assert neovim.save() == b"total = price * count\n"


@both_versions
def test_installed_by_a_clone_on_the_runtimepath(open_file: OpenFile, branch: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "-b", "neovim", branch, clone], check=True)
    assert {"doc", "lsp", "lua", "plugin"} <= {path.name for path in clone.iterdir()}
    assert (clone / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
    neovim = open_file(
        b"", {"total = ": "price * count"}, configuration=lambda options: on_the_runtimepath(options, clone)
    )
    completes_from(neovim, clone)


def test_installed_by_vim_pack(open_file: OpenFile, branch: str, tmp_path: Path) -> None:
    def configuration(options: str) -> str:
        spec = f"{{ src = [[{branch}]], name = 'infill', version = 'neovim' }}"
        return (
            f"vim.pack.add({{ {spec} }}, {{ confirm = false }})\n"
            f"require('infill').setup(vim.json.decode([[{options}]]))\n"
        )

    neovim = open_file(b"", {"total = ": "price * count"}, configuration=configuration)
    completes_from(neovim, tmp_path / "data" / "nvim" / "site" / "pack")


@pytest.fixture(scope="session")
def other_plugins() -> Path:
    """Checkouts of others' plugins, each in a folder of its name."""
    if not (folder := os.environ.get("INFILL_E2E_PLUGINS")):
        pytest.skip("set INFILL_E2E_PLUGINS to a folder that holds clones named lazy.nvim, nvim-cmp and blink.cmp")
    return Path(folder)


def test_installed_by_lazy_nvim(open_file: OpenFile, branch: str, other_plugins: Path, tmp_path: Path) -> None:
    def configuration(options: str) -> str:
        spec = f"url = [[{branch}]], branch = 'neovim', name = 'infill', main = 'infill', event = 'VeryLazy'"
        return (
            f"vim.opt.runtimepath:prepend([[{other_plugins / 'lazy.nvim'}]])\n"
            # Here is no user interface whose coming lazy.nvim could wait for.
            "local come = function() vim.api.nvim_exec_autocmds('UIEnter', {}) end\n"
            "vim.api.nvim_create_autocmd('VimEnter', { callback = vim.schedule_wrap(come) })\n"
            f"require('lazy').setup({{ {{ {spec}, opts = vim.json.decode([[{options}]]) }} }})\n"
        )

    neovim = open_file(b"", {"total = ": "price * count"}, configuration=configuration)
    completes_from(neovim, tmp_path / "data" / "nvim" / "lazy" / "infill")


@both_versions
def test_accepting_several_lines_is_one_change_that_dot_repeats(open_file: OpenFile) -> None:
    body = "\n    if w < h:\n        w = h\n    return w"
    neovim = open_file(b"def area(w, h)\n\n\ndef edge(w, h)\n", {"h):": body})
    neovim.nvim.command("setlocal foldmethod=indent foldlevel=0")
    neovim.keys("A:")
    neovim.wait_for_ghost(body)
    neovim.keys("<Tab>")
    wait_for(lambda: len(neovim.lines) == 7, "accepted text", seen=lambda: neovim.lines)
    assert neovim.cursor == (3, len("    return w"))
    assert neovim.nvim.funcs.foldclosed(".") == -1, "what was accepted is seen"
    neovim.keys("<Esc>G.")
    wait_for(lambda: len(neovim.lines) == 10, "repeated text", seen=lambda: neovim.lines)
    both = f"def area(w, h):{body}\n\n\ndef edge(w, h):{body}\n"
    assert neovim.lines == both.splitlines()
    neovim.keys("u")
    wait_for(lambda: len(neovim.lines) == 7, "undone repetition")
    neovim.keys("u")
    wait_for(lambda: neovim.lines[:2] == ["def area(w, h):", ""], "undone acceptance", seen=lambda: neovim.lines)
    neovim.keys("2<C-r>")
    assert neovim.save().decode() == both


@both_versions
def test_a_fill_is_an_operator_that_dot_repeats(open_file: OpenFile) -> None:
    before = b"total = nothing\nshare = nothing\n"
    neovim = open_file(before, {"total = ": "price * count", "share = ": "total / n"})
    neovim.nvim.command("nmap gs <Plug>(infill-fill)")
    neovim.keys("wwgse")
    wait_for(lambda: "total = price * count" in neovim.screen, "preview", seen=lambda: neovim.screen)
    neovim.keys("a")
    wait_for(lambda: neovim.lines[0] == "total = price * count", "filled motion", seen=lambda: neovim.lines)
    neovim.keys("2G0ww.")
    wait_for(lambda: "share = total / n" in neovim.screen, "preview", seen=lambda: neovim.screen)
    neovim.keys("a")
    wait_for(lambda: neovim.lines[1] == "share = total / n", "repeated fill", seen=lambda: neovim.lines)
    assert neovim.cursor[0] == 1
    assert neovim.save() == b"total = price * count\nshare = total / n\n"
    neovim.keys("u")
    wait_for(lambda: neovim.lines[1] == "share = nothing", "undone fill", seen=lambda: neovim.lines)


@both_versions
def test_the_canvas_is_shown_while_it_is_denoised(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.nvim.command("Infill canvas")
    windows = neovim.nvim.current.tabpage.windows
    (canvas,) = [window for window in windows if window.api.get_config()["relative"]]
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    wait_for(
        lambda: "price * count" in "\n".join(canvas.buffer), "last step of the canvas", seen=lambda: canvas.buffer[:]
    )
    assert "step" in canvas.api.get_config()["title"][0][0]
    assert neovim.nvim.current.window != canvas
    assert neovim.cursor == (0, len("total = "))
    neovim.nvim.command("Infill canvas")
    assert len(neovim.nvim.current.tabpage.windows) == 1


def test_a_menu_entry_that_ghost_text_begins_with_leaves_the_rest_of_it(open_file: OpenFile) -> None:
    neovim = open_file(b"", {"total = ": "price * count"})
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.nvim.command("set completeopt=menuone,noselect")
    neovim.lua("vim.fn.complete(9, { 'price', 'prod' })")
    wait_for(lambda: neovim.nvim.funcs.pumvisible(), "menu")
    neovim.keys("<C-n>")
    neovim.wait_for_ghost(" * count")
    neovim.keys("<C-n>")
    wait_for(lambda: neovim.lines == ["total = prod"], "the other entry", seen=lambda: neovim.lines)
    neovim.wait_for_ghost("")
    neovim.keys("<C-p><C-y>")
    wait_for(lambda: neovim.lines == ["total = price"] and not neovim.nvim.funcs.pumvisible(), "chosen entry")
    neovim.wait_for_ghost(" * count")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    assert neovim.save() == b"total = price * count\n"


MENUS = {
    "nvim-cmp": """
local cmp = require("cmp")
cmp.register_source("words", {
  complete = function(_, _, callback) callback({ { label = "price_list" }, { label = "prod" } }) end,
})
cmp.setup({
  sources = { { name = "words" } },
  mapping = {
    ["<Tab>"] = function(fallback)
      if not require("infill").accept() then fallback() end
    end,
  },
})
visible = cmp.visible
""",
    "blink.cmp": """
package.preload["words"] = function()
  return {
    new = function() return setmetatable({}, { __index = {
      get_completions = function(_, _, callback)
        callback({ items = { { label = "price_list" }, { label = "prod" } } })
      end,
    } }) end,
  }
end
require("blink.cmp").setup({
  fuzzy = { implementation = "lua" },
  sources = { default = { "words" }, providers = { words = { name = "words", module = "words" } } },
  keymap = {
    preset = "default",
    ["<Tab>"] = {
      function(menu)
        if require("infill").text() ~= "" then
          menu.hide()
          vim.schedule(require("infill").accept)
          return true
        end
      end,
      "fallback",
    },
  },
})
visible = require("blink.cmp").is_visible
""",
}


@pytest.mark.parametrize("menu", MENUS)
def test_ghost_text_beside_the_menu_of(menu: str, open_file: OpenFile, other_plugins: Path) -> None:
    def configuration(options: str) -> str:
        return f"vim.opt.runtimepath:prepend([[{other_plugins / menu}]])\n{MENUS[menu]}\n{on_the_runtimepath(options)}"

    neovim = open_file(b"", {"total = ": "price * count"}, configuration=configuration)
    neovim.keys("itotal = ")
    neovim.wait_for_ghost("price * count")
    neovim.keys("pri")
    wait_for(lambda: neovim.lua("return visible()"), "menu", seen=lambda: neovim.messages)
    neovim.wait_for_ghost("ce * count")
    neovim.keys("<Tab>")
    wait_for(lambda: neovim.lines == ["total = price * count"], "accepted text", seen=lambda: neovim.lines)
    wait_for(lambda: not neovim.lua("return visible()"), "end of the menu")
    assert neovim.cursor == (0, len("total = price * count"))
    assert "Error" not in neovim.messages
    assert neovim.save() == b"total = price * count\n"
