--- How Neovim starts infill-lsp: `vim.lsp.enable("infill_lsp")` reads this table.
---
--- There are no `filetypes`: every ordinary buffer gets the server, and the server decides where it stays silent.

---@type vim.lsp.Config
return {
  cmd = { "infill-lsp" },
  root_markers = {
    ".git",
    ".hg",
    "pyproject.toml",
    "setup.py",
    "package.json",
    "Cargo.toml",
    "go.mod",
    "compile_commands.json",
    "Makefile",
  },
}
