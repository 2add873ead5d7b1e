--- Code infilling as ghost text, by the language server infill-lsp.
---
--- Knows how the server is started and what a person may ask for. The parts do the work: `presenter` asks and draws,
--- `fill` fills selections and holes, `canvas` shows the steps, `status` says how things are, `crashes` starts a server
--- again. None knows how a completion is made: the server does.

local canvas = require("infill.canvas")
local crashes = require("infill.crashes")
local fill = require("infill.fill")
local presenter = require("infill.presenter")
local settings = require("infill.settings")
local status = require("infill.status")

local M = {}

-- Settings ------------------------------------------------------------------------------------------------------------

--- What was switched by hand: laid over the server's settings.
---@type { enabled?: boolean, languages?: table<string, boolean> }
local switched = {}
local snoozed_until = 0 --- ms of `vim.uv.now()`

--- What `setup` was given, over the defaults.
---@type infill.Settings
M.settings = settings.defaults()

--- The server's name in `vim.lsp.config` and `vim.lsp.enable`.
M.server = "infill_lsp"

--- How the accept mapping describes itself.
M.accept_desc = "Accept the shown infill"

-- Helpers -------------------------------------------------------------------------------------------------------------

--- What the accept key types where nothing can be taken.
---@type string
local instead = ""

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
    if presenter.text() ~= "" then
      -- What was typed before is a change of its own; a menu closes and leaves its entry.
      local close = vim.fn.pumvisible() == 1 and "<C-y>" or ""
      instead = otherwise
      return close .. "<C-g>u<Cmd>lua require('infill').accept_by_key()<CR>"
    end
    return not presenter.is_attached(vim.api.nvim_get_current_buf()) and M.accept(otherwise) and "" or otherwise
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

--- Takes what core shows, where the server is enabled without `setup`.
---@param otherwise? string
---@return boolean
local function accept_from_core(otherwise)
  if not vim.lsp.inline_completion then
    return false
  end
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

--- Why this editor shows nothing in a buffer; nil where it may.
---@param buf integer
---@return string?
local function silence(buf)
  local language = vim.bo[buf].filetype
  if switched.enabled == false then
    return "off"
  elseif vim.b[buf].infill == false then
    return "off in this buffer"
  elseif switched.languages and switched.languages[language] == false then
    return "off for " .. language
  elseif snoozed_until > vim.uv.now() then
    return "snoozed"
  elseif vim.wo.diff then
    return "off in a diff"
  elseif vim.fn.reg_recording() ~= "" then
    -- The key that accepts would be recorded, and not what it brought.
    return "off while a macro is recorded"
  end
end

---@param buf integer
---@return boolean
local function allowed(buf)
  return not silence(buf) and vim.fn.reg_executing() == ""
end

local function say(text, level)
  vim.notify(text, level or vim.log.levels.INFO)
end

---@return vim.lsp.Client?
local function client_here()
  return vim.lsp.get_clients({ name = M.server, bufnr = 0 })[1]
end

--- Does something with the server of this buffer; without one it says so.
---@param act fun(client: vim.lsp.Client)
local function with_client(act)
  local client = client_here()
  if client then
    act(client)
  else
    say("infill: no server is attached to this buffer; :checkhealth infill says why")
  end
end

--- The server's settings, with what was switched by hand.
local function in_force()
  return vim.tbl_deep_extend("force", M.settings.init_options, switched)
end

--- What a switch changed is seen at once.
local function show_silence()
  if silence(vim.api.nvim_get_current_buf()) then
    presenter.dismiss()
  end
  vim.cmd.redrawstatus()
end

--- Switches all, "buffer", or a language, and tells every server: one that is off frees its engine.
---@param enabled boolean
---@param what? string
local function switch(enabled, what)
  local before = switched
  if what == "buffer" then
    vim.b.infill = enabled
  elseif what then
    switched = vim.tbl_deep_extend("force", switched, { languages = { [what] = enabled } })
  else
    switched = vim.tbl_extend("force", switched, { enabled = enabled })
    snoozed_until = 0
  end
  if not vim.deep_equal(switched, before) then
    local section = in_force()
    -- Servers that start later ask for their settings, too.
    vim.lsp.config(M.server, { settings = { infill = section } })
    for _, client in ipairs(vim.lsp.get_clients({ name = M.server })) do
      client.settings = vim.tbl_extend("force", client.settings or {}, { infill = section })
      client:notify("workspace/didChangeConfiguration", { settings = client.settings })
    end
  end
  show_silence()
end

--- Asks the server of this buffer; what it answers, or what is wrong, is said in one line.
local function inquire(method, params, sentence)
  with_client(function(client)
    client:request(method, params(client), function(err, result)
      say(err and ("infill: " .. err.message) or sentence(result))
    end, 0)
  end)
end

--- The same, where it is not this editor that shows nothing.
local function inquire_unless_silent(method, params, sentence)
  local reason = silence(vim.api.nvim_get_current_buf())
  if reason then
    say("infill: " .. reason)
  else
    inquire(method, params, sentence)
  end
end

local function here(client)
  return vim.lsp.util.make_position_params(0, client.offset_encoding)
end

---@param mode "selection"|"holes"
---@param region fun(encoding: string): lsp.Range[]
local function ask_fill(mode, region)
  with_client(function(client)
    fill.ask(client, vim.api.nvim_get_current_buf(), mode, region(client.offset_encoding), M.settings.preview)
  end)
end

--- What `:Infill` takes.
---@type table<string, fun(command: vim.api.keyset.create_user_command.command_args, argument: string?)>
local subcommands = {
  on = function(_, what)
    switch(true, what)
  end,
  off = function(_, what)
    switch(false, what)
  end,
  toggle = function(_, what)
    if what == "buffer" then
      switch(vim.b.infill == false, what)
    elseif what then
      switch((in_force().languages or {})[what] == false, what)
    else
      switch(in_force().enabled == false)
    end
  end,
  snooze = function(_, argument)
    local minutes = tonumber(argument or 15)
    if not minutes or minutes < 0 then
      say("infill: snooze takes minutes", vim.log.levels.ERROR)
      return
    end
    snoozed_until = vim.uv.now() + 60000 * minutes
    show_silence()
  end,
  status = function()
    inquire_unless_silent("infill/status", function()
      return { textDocument = vim.lsp.util.make_text_document_params() }
    end, status.sentence)
  end,
  why = function()
    inquire_unless_silent("infill/why", here, function(result)
      return "infill: " .. result.reason
    end)
  end,
  fill = function(command)
    ask_fill("selection", function(encoding)
      return fill.lines(command, encoding)
    end)
  end,
  holes = function(command)
    ask_fill("holes", function(encoding)
      return command.range > 0 and fill.lines(command, encoding) or {}
    end)
  end,
  canvas = function()
    canvas.toggle(function(is_open)
      for _, client in ipairs(vim.lsp.get_clients({ name = M.server })) do
        client:notify("infill/watch", { canvas = is_open })
      end
    end)
  end,
  log = function()
    local log = vim.lsp.log
    vim.cmd.tabedit(vim.fn.fnameescape(log.get_filename and log.get_filename() or vim.lsp.get_log_path()))
  end,
  restart = function()
    if not client_here() then
      crashes.forget()
      vim.lsp.enable(M.server)
      return
    end
    inquire("workspace/executeCommand", function()
      return { command = "infill.server.restartEngine", arguments = {} }
    end, function()
      return "infill: the engine starts anew"
    end)
  end,
  stats = function()
    inquire("workspace/executeCommand", function()
      return { command = "infill.server.stats", arguments = {} }
    end, tostring)
  end,
}

--- What the server is told of us beyond what Neovim says itself.
local function capabilities()
  return {
    textDocument = { inlineCompletion = { dynamicRegistration = false } },
    experimental = { infill = { status = true, refresh = true } },
  }
end

-- Public functions ----------------------------------------------------------------------------------------------------

--- Starts infill-lsp in every ordinary buffer and shows its completions as ghost text.
---@param opts? infill.Settings Any subset of the settings.
function M.setup(opts)
  local problem
  M.settings, problem = settings.checked(opts or {})
  if problem then
    vim.notify(("infill: %s; the defaults are used (see :help infill-settings)"):format(problem), vim.log.levels.ERROR)
  end
  presenter.debounce = M.settings.debounce
  presenter.allowed = allowed
  -- Core's own groups where it has them, from 0.12 on.
  local has_groups = vim.fn.hlexists("ComplHint") == 1
  vim.api.nvim_set_hl(0, "InfillGhost", { default = true, link = has_groups and "ComplHint" or "NonText" })
  vim.api.nvim_set_hl(0, "InfillHint", { default = true, link = has_groups and "ComplHintMore" or "MoreMsg" })
  vim.lsp.config(M.server, {
    cmd = M.settings.cmd,
    capabilities = capabilities(),
    -- An empty Lua table would travel as a JSON list.
    init_options = next(M.settings.init_options) and M.settings.init_options,
    -- In a callback of the event loop, where most of Neovim may not be called; the client is gone after it.
    on_exit = function(code, signal, client_id)
      local client = vim.lsp.get_client_by_id(client_id)
      vim.schedule(function()
        if vim.v.exiting == vim.NIL then
          fill.lost(client_id)
          crashes.exited(M.server, client and client.root_dir, code, signal)
        end
      end)
    end,
    handlers = {
      ["infill/canvas"] = function(_, params)
        canvas.show(params)
      end,
      ["infill/refresh"] = function(_, params, ctx)
        presenter.refresh(params, assert(vim.lsp.get_client_by_id(ctx.client_id)))
      end,
      ["infill/status"] = function(_, params, ctx)
        status.set(ctx.client_id, params)
      end,
    },
  })
  local group = vim.api.nvim_create_augroup("infill", {})
  vim.api.nvim_create_autocmd("LspAttach", {
    group = group,
    desc = "Show what infill-lsp completes",
    callback = function(event)
      local client = vim.lsp.get_client_by_id(event.data.client_id)
      if client and client.name == M.server then
        presenter.attach(client, event.buf)
        if canvas.is_open() then
          client:notify("infill/watch", { canvas = true })
        end
      end
    end,
  })
  vim.api.nvim_create_autocmd("LspDetach", {
    group = group,
    desc = "Take away what infill-lsp completes",
    callback = function(event)
      presenter.detach(event.buf, event.data.client_id)
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
  if not presenter.is_attached(vim.api.nvim_get_current_buf()) then
    return accept_from_core(otherwise)
  end
  local accepted = presenter.accept()
  if not accepted and otherwise then
    vim.api.nvim_feedkeys(vim.keycode(otherwise), "ni", false)
  end
  return accepted
end

--- What the accept key does where something is shown. Neovim looks for mappings ahead: what was typed right before it
--- may come into the buffer only then, and not fit. The key is typed in that case.
function M.accept_by_key()
  M.accept(instead)
end

--- What is left of the shown text to take, "" where nothing is shown: for mappings that decide by it.
M.text = presenter.text
M.accept_word = presenter.accept_word
M.accept_line = presenter.accept_line
M.dismiss = presenter.dismiss
M.trigger = presenter.trigger

--- Shows the next of several completions.
function M.next()
  presenter.cycle(1)
end

--- Shows the one before.
function M.previous()
  presenter.cycle(-1)
end

--- Why this editor shows nothing in a buffer; nil where it may.
M.silence = silence

--- An operator: fills what a motion or a selection covers; `.` fills as much where the cursor is then.
---@param kind? "char"|"line"|"block" What was covered, once that is known.
---@return string keys
function M.fill_operator(kind)
  if not kind then
    vim.go.operatorfunc = "v:lua.require'infill'.fill_operator"
    return "g@"
  end
  ask_fill("selection", function(encoding)
    local covered = ({ char = "v", line = "V", block = vim.keycode("<C-v>") })[kind]
    return fill.region(covered, vim.fn.getpos("'["), vim.fn.getpos("']"), encoding, false)
  end)
  return ""
end

--- How things are in this buffer, for the statusline.
---@return string
function M.statusline()
  return status.text(client_here(), silence(0))
end

--- What `:Infill` does.
---@param command vim.api.keyset.create_user_command.command_args
function M.command(command)
  local name, argument = unpack(command.fargs)
  local subcommand = subcommands[name]
  if subcommand then
    subcommand(command, argument)
  else
    say("infill: takes " .. table.concat(M.complete("", "Infill "), ", "), vim.log.levels.ERROR)
  end
end

--- What may come next on the command line of `:Infill`.
---@param begun string The word that is begun.
---@param line string The whole line.
---@return string[]
function M.complete(begun, line)
  local subcommand = line:match("%f[%a]I%l+%s+(%S+)%s") -- `:Inf` is enough of the command's name.
  local choices = {} ---@type string[]
  if not subcommand then
    choices = vim.tbl_keys(subcommands)
    table.sort(choices)
  elseif subcommand == "snooze" then
    choices = { "5", "15", "60" }
  elseif subcommand == "on" or subcommand == "off" or subcommand == "toggle" then
    choices = vim.list_extend({ "buffer" }, vim.fn.getcompletion(begun, "filetype"))
  end
  return vim.tbl_filter(function(choice)
    return vim.startswith(choice, begun)
  end, choices)
end

return M
