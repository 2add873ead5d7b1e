--- Ghost text from infill-lsp, through Neovim's own LSP client.
---
--- Knows how the server is started and how what is shown goes into the buffer. It does not draw, debounce or request
--- anything: that is core's `vim.lsp.inline_completion`. It does not know how a completion is made: the server does.

local M = {}

-- Settings ------------------------------------------------------------------------------------------------------------

---@class infill.Settings
---@field cmd string[] The server's command line.
---@field init_options table<string, any> The server's settings, such as `{ enabled = true, maxLines = 8 }`.
---@field accept_key string|false Insert-mode key that accepts; taken only if it is free. `false`: no key.

---@type infill.Settings
M.defaults = {
  cmd = { "infill-lsp" },
  init_options = {},
  accept_key = "<Tab>",
}

--- What `setup` was given, over the defaults.
---@type infill.Settings
M.settings = vim.deepcopy(M.defaults)

--- The server's name in `vim.lsp.config` and `vim.lsp.enable`.
M.server = "infill_lsp"

--- How the accept mapping describes itself.
M.accept_desc = "Accept the shown infill"

-- Helpers -------------------------------------------------------------------------------------------------------------

--- The settings if every value has the right type; otherwise the defaults, and one line that says what is wrong.
---@param opts table
---@return infill.Settings
local function checked(opts)
  local is_key = function(key)
    return key == false or (type(key) == "string" and key ~= "")
  end
  local ok, problem = pcall(function()
    for name in pairs(opts) do
      assert(M.defaults[name] ~= nil, ("there is no setting `%s`"):format(name))
    end
    vim.validate("cmd", opts.cmd, vim.islist, true, "list of strings")
    vim.validate("init_options", opts.init_options, "table", true)
    vim.validate("accept_key", opts.accept_key, is_key, true, "key or false")
  end)
  if ok then
    return vim.tbl_extend("force", M.defaults, opts)
  end
  local reason = tostring(problem):gsub("^.-:%d+: ", ""):gsub("\n.*", "")
  vim.notify(("infill: %s; the defaults are used (see :help infill-settings)"):format(reason), vim.log.levels.ERROR)
  return vim.deepcopy(M.defaults)
end

--- Maps the accept key unless somebody else has it. Neovim's own `<Tab>` (jump in a snippet) counts as free: it is
--- what the key goes on doing where nothing is shown.
---@param key string
local function map_accept_key(key)
  local before = vim.fn.maparg(key, "i", false, true)
  local is_free = vim.tbl_isempty(before) or vim.startswith(before.desc or "", "vim.snippet.jump if active")
  if not is_free then
    return
  end
  vim.keymap.set("i", key, function()
    local otherwise = before.callback and before.callback() or key
    return M.accept(otherwise) and "" or otherwise
  end, { expr = true, silent = true, desc = M.accept_desc })
end

--- The item moved over what was typed since it was requested, or nil if it does not belong at the cursor any more.
---
--- Core applies an item to the range it was made for; between a key stroke and the next answer that range is out of
--- date, and the characters typed meanwhile would stand there twice. infill-lsp's ranges begin at the cursor.
---@param item vim.lsp.inline_completion.Item
---@return vim.lsp.inline_completion.Item?
local function moved_to_cursor(item)
  local client = vim.lsp.get_client_by_id(item.client_id)
  if not (client and client.name == M.server and item.range) then
    return item
  end
  local start_row, start_col, end_row, end_col = item.range:to_extmark()
  local row, col = unpack(vim.api.nvim_win_get_cursor(0))
  local typed = vim.api.nvim_get_current_line():sub(start_col + 1, col)
  if row - 1 ~= start_row or col < start_col or not vim.startswith(item.insert_text, typed) then
    return nil
  end
  item.range = vim.range.extmark(item.range.buf, start_row, start_col, end_row, end_col + #typed)
  return item
end

-- Public functions ----------------------------------------------------------------------------------------------------

--- Starts infill-lsp in every ordinary buffer and shows its completions as ghost text.
---@param opts? infill.Settings Any subset of the settings.
function M.setup(opts)
  M.settings = checked(opts or {})
  vim.lsp.config(M.server, {
    cmd = M.settings.cmd,
    -- An empty Lua table would travel as a JSON list.
    init_options = next(M.settings.init_options) and M.settings.init_options,
  })
  vim.api.nvim_create_autocmd("LspAttach", {
    group = vim.api.nvim_create_augroup("infill", {}),
    desc = "Show what infill-lsp completes",
    callback = function(event)
      local client = vim.lsp.get_client_by_id(event.data.client_id)
      if client and client.name == M.server and client:supports_method("textDocument/inlineCompletion", event.buf) then
        vim.lsp.inline_completion.enable(true, { bufnr = event.buf })
      end
    end,
  })
  if M.settings.accept_key then
    map_accept_key(M.settings.accept_key)
  end
  vim.lsp.enable(M.server)
end

--- Puts the shown completion into the buffer, the cursor behind it.
---@param otherwise? string Keys to feed if what is shown turns out to be out of date.
---@return boolean accepted false if nothing is shown.
function M.accept(otherwise)
  return vim.lsp.inline_completion.get({
    on_accept = function(item)
      local current = moved_to_cursor(item)
      if not current and otherwise then
        vim.api.nvim_feedkeys(vim.keycode(otherwise), "ni", false)
      end
      return current
    end,
  })
end

return M
