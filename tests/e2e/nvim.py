"""One Neovim: a person's hands and eyes, and how it is started. Knows no journey."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pynvim
from journeys import REPOSITORY, installed, is_running, wait_for

PLUGIN = REPOSITORY / "editors" / "neovim"

COLUMNS, ROWS = 80, 16

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


class Neovim:
    """One running editor with one file open."""

    def __init__(self, executable: str, init: Path, file: Path) -> None:
        self.file = file
        self.nvim = pynvim.attach(
            "child", argv=[executable, "--embed", "--headless", "--clean", "-u", str(init), str(file)]
        )
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


def launcher(version: str) -> str:
    """Neovim "0.12" or "0.11", installed where it is missing; INFILL_E2E_NVIM names another one instead."""
    scripts = {"0.12": "install-neovim.sh", "0.11": "install-neovim-0.11.sh"}
    return os.environ.get("INFILL_E2E_NVIM") or installed(scripts[version])
