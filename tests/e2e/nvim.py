"""One Neovim: a person's hands and eyes, and how it is started. Knows no journey."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvim
from journeys import REPOSITORY, Engine, installed, is_running, wait_for

PLUGIN = REPOSITORY / "editors" / "neovim"

COLUMNS, ROWS = 80, 16

#: The text that stands as ghost text in the buffer; `first` and `lines` of it.
GHOST = """
local joined = function(line)
  return vim.iter(line or {}):map(function(chunk) return chunk[1] end):join("")
end
local first, lines = "", {}
for _, name in ipairs({ "infill", "nvim.lsp.inline_completion" }) do
  local namespace = vim.api.nvim_create_namespace(name)
  for _, mark in ipairs(vim.api.nvim_buf_get_extmarks(0, namespace, 0, -1, { details = true })) do
    first = first .. joined(mark[4].virt_text)
    vim.list_extend(lines, vim.tbl_map(joined, mark[4].virt_lines or {}))
  end
end
return table.concat({ first, unpack(lines) }, "\\n")
"""

SCREEN = """
vim.cmd.redraw()
local rows = {}
for row = 1, vim.o.lines do
  local cells = {}
  for column = 1, vim.o.columns do
    cells[column] = vim.fn.screenstring(row, column)
  end
  rows[row] = (table.concat(cells):gsub("%s+$", ""))
end
return rows
"""


#: Takes the time from the last of the keys to the end of the first redraw in which ghost text stands.
PAINT = (
    f"local ghost = function() {GHOST} end"
    + """
local namespace = vim.api.nvim_create_namespace("paint")
local key, began = ..., nil
took = nil
vim.on_key(function(typed)
  if typed == key then
    began = vim.uv.hrtime()
  end
end, namespace)
vim.api.nvim_set_decoration_provider(namespace, {
  on_end = function()
    if began and not took and ghost() ~= "" then
      took = (vim.uv.hrtime() - began) / 1e6
    end
  end,
})
"""
)


class Neovim:
    """One running editor with one file open."""

    def __init__(self, executable: str, init: Path, file: Path) -> None:
        self.file = file
        self.nvim = pynvim.attach("child", argv=[executable, "--embed", "--headless", "-u", str(init), str(file)])
        self.nvim.command(f"set columns={COLUMNS} lines={ROWS}")
        wait_for(lambda: self.lua("return #vim.lsp.get_clients({ name = 'infill_lsp' })"), "attached server")

    def lua(self, code: str, *args: object) -> Any:
        return self.nvim.exec_lua(code, *args)

    def keys(self, keys: str) -> None:
        """Types `keys` (in Neovim's notation); returns before they took effect."""
        self.nvim.input(keys)

    @property
    def lines(self) -> list[str]:
        return list(self.nvim.current.buffer)

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column in bytes, both from 0."""
        row, column = self.nvim.current.window.cursor
        return row - 1, column

    @property
    def ghost(self) -> str:
        """The ghost text that stands in the buffer now."""
        return str(self.lua(GHOST))

    @property
    def screen(self) -> str:
        """Every character that the editor shows."""
        return "\n".join(self.lua(SCREEN)) + "\n"

    @property
    def messages(self) -> str:
        """Everything that the editor has told the person so far."""
        return str(self.nvim.command_output("messages"))

    @property
    def servers(self) -> list[int]:
        """The processes that the editor has started."""
        return list(self.lua("return vim.api.nvim_get_proc_children(vim.fn.getpid())"))

    def wait_for_ghost(self, text: str) -> None:
        wait_for(lambda: self.ghost == text, f"ghost text {text!r}", seen=lambda: self.ghost)

    def paint(self, keys: str, seconds: float = 5.0) -> float | None:
        """Types, and tells the ms from the last key to the end of the first redraw with ghost text; None without one.

        A user interface has to be there: without one nothing is drawn."""
        self.lua(PAINT, keys[-1])
        self.keys(keys)
        deadline = time.monotonic() + seconds
        while (took := self.lua("return took")) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return None if took is None else float(took)

    def save(self) -> bytes:
        """Leaves insert mode and writes; the bytes on disk."""
        self.keys("<Esc>:write<CR>")
        wait_for(lambda: not self.nvim.current.buffer.options["modified"], "saved file")
        return self.file.read_bytes()

    def close(self) -> None:
        """Quits as a person does; fails if the server stays behind."""
        servers = self.servers
        with contextlib.suppress(OSError, EOFError):  # The connection ends with the editor.
            self.nvim.command("qall!")
        with contextlib.suppress(OSError, EOFError):
            self.nvim.close()
        wait_for(lambda: not any(is_running(pid) for pid in servers), "end of the server")


class Frames:
    """What a user interface is sent from now on: the first row of the screen at each frame."""

    def __init__(self, neovim: Neovim) -> None:
        self._nvim = neovim.nvim
        self._cells = [" "] * COLUMNS
        self._nvim.ui_attach(COLUMNS, ROWS, rgb=True, ext_linegrid=True)
        self._read()  # The whole screen, once.

    def until_now(self) -> list[str]:
        """The frames since the last look."""
        return self._read()

    def _read(self) -> list[str]:
        self._nvim.command(f"redraw | call rpcnotify({self._nvim.channel_id}, 'read')")
        frames = []
        while (message := self._nvim.next_message())[1] != "read":
            for name, *calls in message[2]:
                for call in calls:
                    if name == "grid_line" and call[1] == 0:
                        self._draw(call[2], call[3])
                    elif name == "flush":
                        frames.append("".join(self._cells).rstrip())
        return frames

    def _draw(self, column: int, cells: list[list[Any]]) -> None:
        for text, *rest in cells:
            repeated = rest[1] if len(rest) > 1 else 1
            self._cells[column : column + repeated] = [text] * repeated
            column += repeated


def on_the_runtimepath(options: str, plugin: Path = PLUGIN) -> str:
    """The least that a person writes: where the plugin is, and its options, here as JSON."""
    return f"vim.opt.runtimepath:prepend([[{plugin}]])\nrequire('infill').setup(vim.json.decode([[{options}]]))\n"


def drawn_by_core(options: str) -> str:
    """Core's own inline completion, without `setup`; the options as there."""
    return f"""
vim.opt.runtimepath:prepend([[{PLUGIN}]])
vim.lsp.config("infill_lsp", vim.json.decode([[{options}]]))
vim.lsp.enable("infill_lsp")
vim.lsp.inline_completion.enable()
vim.keymap.set("i", "<Tab>", function() return require("infill").accept() and "" or "<Tab>" end, {{ expr = true }})
"""


@contextlib.contextmanager
def real_neovim(
    home: Path, name: str, content: str, settings: dict[str, Any], configuration: Callable[[str], str]
) -> Iterator[Neovim]:
    """Neovim 0.12 on one file with nothing of the person's, the installed server, and a real engine of its own.

    home: an empty folder with a short path, since the engine's socket lies in it; settings: the server's."""
    os.environ["INFILL_RUNTIME_DIR"] = str(home)
    for kind in ("CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{kind}_HOME"] = str(home / kind.lower())
    engine = Engine(home / "no table")
    engine.model = str(settings["model"])
    server = Path(sys.executable).parent / "infill-lsp"
    init, file = home / "init.lua", home / "project" / name
    init.write_text(configuration(json.dumps({"cmd": [str(server)], "init_options": settings})))
    file.parent.mkdir()
    file.write_text(content)
    neovim = Neovim(launcher("0.12"), init, file)
    try:
        engine.wait_until_ready()
        neovim.nvim.ui_attach(COLUMNS, ROWS, rgb=True, ext_linegrid=True)
        yield neovim
    finally:
        neovim.close()
        engine.stop()


def launcher(version: str) -> str:
    """Neovim "0.12" or "0.11", installed where it is missing; INFILL_E2E_NVIM names another one instead."""
    scripts = {"0.12": "install-neovim.sh", "0.11": "install-neovim-0.11.sh"}
    return os.environ.get("INFILL_E2E_NVIM") or installed(scripts[version])
