--- What sourcing the plugin does: it offers mappings to `<Plug>(infill-...)`, and nothing else.
---
--- No server is started, no key is taken and no option is changed before `require("infill").setup()` or
--- `vim.lsp.enable("infill_lsp")` is called.

if vim.g.loaded_infill then
  return
end
vim.g.loaded_infill = true

--- Mapped to, in Insert mode: what is done, and whether it is a change of its own.
local actions = {
  { "accept", "Accept the shown infill", true },
  { "accept_word", "Accept a word of the shown infill", true },
  { "accept_line", "Accept a line of the shown infill", true },
  { "dismiss", "Dismiss the shown infill" },
  { "next", "Show the next infill" },
  { "previous", "Show the infill before" },
  { "trigger", "Ask for an infill" },
}
for _, action in ipairs(actions) do
  local name, description, changes = unpack(action)
  vim.keymap.set(
    "i",
    ("<Plug>(infill-%s)"):format((name:gsub("_", "-"))),
    ("%s<Cmd>lua require('infill').%s()<CR>"):format(changes and "<C-g>u" or "", name),
    { desc = description }
  )
end

vim.keymap.set({ "n", "x" }, "<Plug>(infill-fill)", function()
  return require("infill").fill_operator()
end, { expr = true, desc = "Fill what a motion or the selection covers" })

vim.api.nvim_create_user_command("Infill", function(command)
  require("infill").command(command)
end, {
  nargs = "*",
  bar = true,
  range = true,
  desc = "Code infilling: on, off, snooze, status, fill and more",
  complete = function(begun, line)
    return require("infill").complete(begun, line)
  end,
})
