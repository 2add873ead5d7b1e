--- Fills a selection or the holes of a buffer: asks, previews, and applies what is accepted as one change.
---
--- Knows neither what a hole is nor how it is filled. What was asked for a text that changed meanwhile is not applied.

local M = {}

-- State ---------------------------------------------------------------------------------------------------------------

local CONTENT_MODIFIED, CANCELLED = -32801, -32800
local BLOCK = vim.keycode("<C-v>")

local pending ---@type { client: vim.lsp.Client, id: integer? }?

-- Helpers -------------------------------------------------------------------------------------------------------------

local function say(text, level)
  vim.notify("infill: " .. text, level or vim.log.levels.INFO)
end

--- The buffer's lines with the edits made, and the first and last line that they touch (from 0, without the end).
local function filled(buf, edits, encoding)
  local scratch = vim.api.nvim_create_buf(false, true)
  local before = vim.api.nvim_buf_get_lines(buf, 0, -1, false)
  vim.api.nvim_buf_set_lines(scratch, 0, -1, false, before)
  vim.lsp.util.apply_text_edits(vim.deepcopy(edits), scratch, encoding)
  local after = vim.api.nvim_buf_get_lines(scratch, 0, -1, false)
  vim.api.nvim_buf_delete(scratch, { force = true })
  local first, last = #before, 0
  for _, edit in ipairs(edits) do
    first = math.min(first, edit.range.start.line)
    last = math.max(last, edit.range["end"].line + 1)
  end
  return after, first, last + #after - #before
end

--- A window with the outcome: `a` or <CR> accepts, `q` or <Esc> rejects.
local function preview(buf, edits, encoding, style, accept)
  local after, first, last = filled(buf, edits, encoding)
  local shown = vim.api.nvim_create_buf(false, true)
  vim.bo[shown].bufhidden = "wipe"
  local lines = style == "diff" and after or vim.list_slice(after, first + 1, last)
  vim.api.nvim_buf_set_lines(shown, 0, -1, false, lines)
  vim.bo[shown].modifiable = false
  vim.bo[shown].syntax = vim.bo[buf].filetype
  local close
  if style == "diff" then
    vim.cmd("tab split | diffthis | rightbelow vsplit")
    vim.api.nvim_win_set_buf(0, shown)
    vim.cmd("diffthis")
    local tab = vim.api.nvim_get_current_tabpage()
    close = function()
      vim.cmd("diffoff!")
      vim.cmd.tabclose(vim.api.nvim_tabpage_get_number(tab))
    end
  else
    local width = 1
    for _, line in ipairs(lines) do
      width = math.max(width, vim.fn.strdisplaywidth(line))
    end
    local window = vim.api.nvim_open_win(shown, true, {
      relative = "cursor",
      row = 1,
      col = 0,
      width = math.max(30, math.min(width, vim.o.columns - 4)),
      height = math.max(1, math.min(#lines, vim.o.lines - 6)),
      style = "minimal",
      border = "rounded",
      title = " infill: a accepts, q rejects ",
    })
    close = function()
      vim.api.nvim_win_close(window, true)
    end
  end
  for key, wanted in pairs({ a = true, ["<CR>"] = true, q = false, ["<Esc>"] = false }) do
    vim.keymap.set("n", key, function()
      close()
      if wanted then
        accept(edits)
      end
    end, { buffer = shown, nowait = true })
  end
end

-- Public functions ----------------------------------------------------------------------------------------------------

--- What a selection covers, as gaps: one, or where it is a block one a line.
---@param kind string "v", "V" or CTRL-V.
---@param from integer[] As |getpos()| has it.
---@param to integer[]
---@param encoding string
---@param exclusive? boolean Without the last character; unset: as 'selection' says.
---@return lsp.Range[]
function M.region(kind, from, to, encoding, exclusive)
  local function position(place, col)
    local line = vim.fn.getline(place[2])
    return { line = place[2] - 1, character = vim.str_utfindex(line, encoding, col) }
  end
  local gaps = vim.fn.getregionpos(from, to, { type = kind, exclusive = exclusive })
  if kind ~= BLOCK then
    gaps = { { gaps[1][1], gaps[#gaps][2] } }
  end
  local ranges = {}
  for _, gap in ipairs(gaps) do
    local start, stop = unpack(gap)
    ranges[#ranges + 1] = { start = position(start, math.max(start[3] - 1, 0)), ["end"] = position(stop, stop[3]) }
  end
  return ranges
end

--- What the range of a command covers: its lines, or where it is that of a selection exactly this.
---@param command vim.api.keyset.create_user_command.command_args
---@param encoding string
---@return lsp.Range[]
function M.lines(command, encoding)
  local from, to = vim.fn.getpos("'<"), vim.fn.getpos("'>")
  if command.range == 2 and from[2] == command.line1 and to[2] == command.line2 then
    return M.region(vim.fn.visualmode(), from, to, encoding)
  end
  return M.region("V", { 0, command.line1, 1, 0 }, { 0, command.line2, 1, 0 }, encoding)
end

--- Asks for a fill and previews it.
---@param client vim.lsp.Client
---@param buf integer
---@param mode "selection"|"holes"
---@param ranges lsp.Range[]
---@param style "float"|"diff"|"none"
function M.ask(client, buf, mode, ranges, style)
  if not vim.bo[buf].modifiable then
    say("this buffer cannot be changed", vim.log.levels.WARN)
    return
  end
  if pending and pending.id then
    pending.client:cancel_request(pending.id)
  end
  local mine = { client = client }
  pending = mine
  local tick = vim.api.nvim_buf_get_changedtick(buf)
  local function is_as_asked()
    return vim.api.nvim_buf_is_valid(buf) and vim.api.nvim_buf_get_changedtick(buf) == tick
  end
  local function accept(edits)
    if is_as_asked() then
      vim.lsp.util.apply_text_edits(edits, buf, client.offset_encoding)
    else
      say("the text changed meanwhile: ask again", vim.log.levels.WARN)
    end
  end
  say("filling …")
  local params = {
    textDocument = { uri = vim.uri_from_bufnr(buf), version = vim.lsp.util.buf_versions[buf] },
    ranges = ranges,
    mode = mode,
  }
  local _, id = client:request("infill/fill", params, function(err, result)
    if pending ~= mine then
      return
    end
    pending = nil
    if err then
      if err.code ~= CANCELLED then
        local moved = err.code == CONTENT_MODIFIED
        say(moved and "the text changed meanwhile: ask again" or err.message, vim.log.levels.WARN)
      end
    elseif #result.edits == 0 then
      return -- The server says why.
    elseif style == "none" or not is_as_asked() then
      accept(result.edits)
    elseif vim.api.nvim_get_current_buf() ~= buf or vim.api.nvim_get_mode().mode ~= "n" then
      -- A window that opens while somebody types elsewhere would take their keys.
      say("it is filled, but the cursor is elsewhere: ask again", vim.log.levels.WARN)
    else
      preview(buf, result.edits, client.offset_encoding, style, accept)
    end
  end, buf)
  mine.id = id
end

--- A server ended: what it was asked is never answered.
---@param client_id integer
function M.lost(client_id)
  if pending and pending.client.id == client_id then
    pending = nil
    say("the server ended before it was done: ask again", vim.log.levels.WARN)
  end
end

return M
