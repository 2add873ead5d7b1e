--- What sourcing the plugin does: it offers one mapping, `<Plug>(infill-accept)`, and nothing else.
---
--- No server is started, no key is taken and no option is changed before `require("infill").setup()` or
--- `vim.lsp.enable("infill_lsp")` is called.

if vim.g.loaded_infill then
  return
end
vim.g.loaded_infill = true

vim.keymap.set("i", "<Plug>(infill-accept)", function()
  require("infill").accept()
end, { desc = "Accept the shown infill" })
