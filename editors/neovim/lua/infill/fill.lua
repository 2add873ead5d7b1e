--- Fills a selection or the holes of a buffer: asks, previews, and applies what is accepted as one change.
---
--- Knows neither what a hole is nor how it is filled. What was asked for a text that changed meanwhile is not applied.

local M = {}

-- State ---------------------------------------------------------------------------------------------------------------

local CONTENT_MODIFIED, CANCELLED = -32801, -32800

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
        accept()
      end
    end, { buffer = shown, nowait = true })
  end
end

-- Public functions ----------------------------------------------------------------------------------------------------

--- A region as a gap: whole lines, or from one character to another, both included.
---@param buf integer
---@param linewise boolean
---@param from [integer, integer] Line and column in bytes, from 1.
---@param to [integer, integer]
---@param encoding string
---@return lsp.Range[]
function M.region(buf, linewise, from, to, encoding)
  local last = vim.fn.getbufoneline(buf, to[1])
  local start, stop = { from[1] - 1, from[2] - 1 }, { to[1] - 1, #last }
  if linewise then
    start[2] = 0
  elseif to[2] <= #last then
    stop[2] = to[2] - 1 + #vim.fn.strpart(last, to[2] - 1, 1, true)
  end
  local function position(place)
    local line = vim.fn.getbufoneline(buf, place[1] + 1)
    return { line = place[1], character = vim.str_utfindex(line, encoding, math.min(place[2], #line)) }
  end
  return { { start = position(start), ["end"] = position(stop) } }
end

--- The lines of a range as a gap, or, where they are the last selection by characters, exactly that.
---@param buf integer
---@param first integer From 1.
---@param last integer
---@param encoding string
---@return lsp.Range[]
function M.lines(buf, first, last, encoding)
  local from, to = vim.fn.getpos("'<"), vim.fn.getpos("'>")
  local by_character = vim.fn.visualmode() == "v" and from[2] == first and to[2] == last
  return M.region(buf, not by_character, { first, from[3] }, { last, to[3] }, encoding)
end

--- Asks for a fill and previews it.
---@param client vim.lsp.Client
---@param buf integer
---@param mode "selection"|"holes"
---@param ranges lsp.Range[]
---@param style "float"|"diff"|"none"
function M.ask(client, buf, mode, ranges, style)
  if pending and pending.id then
    pending.client:cancel_request(pending.id)
  end
  local mine = { client = client }
  pending = mine
  local tick = vim.api.nvim_buf_get_changedtick(buf)
  local params = {
    textDocument = { uri = vim.uri_from_bufnr(buf), version = vim.lsp.util.buf_versions[buf] },
    ranges = ranges,
    mode = mode,
  }
  local function same()
    return vim.api.nvim_buf_is_valid(buf) and vim.api.nvim_buf_get_changedtick(buf) == tick
  end
  say("filling …")
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
    elseif not same() then
      say("the text changed meanwhile: ask again", vim.log.levels.WARN)
    elseif #result.edits == 0 then
      say("there is nothing to fill in")
    else
      local function accept()
        if same() then
          vim.lsp.util.apply_text_edits(result.edits, buf, client.offset_encoding)
        else
          say("the text changed meanwhile: ask again", vim.log.levels.WARN)
        end
      end
      if style == "none" then
        accept()
      else
        preview(buf, result.edits, client.offset_encoding, style, accept)
      end
    end
  end, buf)
  mine.id = id
end

return M
