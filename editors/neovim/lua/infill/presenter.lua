--- Ghost text: asks the server, draws the answer, trims it while what is typed matches, and takes it into the buffer.
---
--- Knows nothing of settings, commands or how a completion is made. One place asks at a time: the cursor of the current
--- window, in Insert mode. An answer counts only for the text and the cursor that it was asked for.

local M = {}

-- State ---------------------------------------------------------------------------------------------------------------

local METHOD = "textDocument/inlineCompletion"
local INVOKED, AUTOMATIC = 1, 2
--- What editors' plugins put behind the cursor by themselves.
local CLOSERS = "^[%)%]}>\"'`]+$"

local namespace = vim.api.nvim_create_namespace("infill")

---@class infill.Item
---@field id string
---@field text string Line ends are "\n".

---@class infill.Shown
---@field client vim.lsp.Client
---@field buf integer
---@field items infill.Item[]
---@field index integer
---@field row integer From 0: where the text begins.
---@field col integer In bytes.
---@field head string What stood before that place in its line.
---@field tail string What stood behind it and stays.
---@field replaced string What stood between the two: the text brings it.
---@field cycled boolean

---@class infill.Pending
---@field client vim.lsp.Client
---@field buf integer
---@field tick integer
---@field cursor integer[]
---@field id? integer

---@type infill.Shown?
local shown
---@type infill.Pending?
local pending
local timer ---@type uv.uv_timer_t?
local attached = {} ---@type table<integer, integer> Client by buffer.

--- Milliseconds to wait for another key.
M.debounce = 0

--- Whether anything may be shown in a buffer.
---@type fun(buf: integer): boolean
M.allowed = function()
  return true
end

-- Helpers -------------------------------------------------------------------------------------------------------------

local function cursor()
  local row, col = unpack(vim.api.nvim_win_get_cursor(0))
  return row - 1, col
end

local function inserting()
  return vim.api.nvim_get_mode().mode:sub(1, 1) == "i"
end

local function stop_timer()
  if timer then
    timer:stop()
    timer:close()
    timer = nil
  end
end

local function cancel()
  stop_timer()
  if pending and pending.id then
    pending.client:cancel_request(pending.id)
  end
  pending = nil
end

local function hide()
  if shown and vim.api.nvim_buf_is_valid(shown.buf) then
    vim.api.nvim_buf_clear_namespace(shown.buf, namespace, 0, -1)
  end
  shown = nil
end

local function tell(method, client, params)
  if not client:is_stopped() then
    client:notify(method, params)
  end
end

--- Whether the characters of one text stand in another in their order.
local function lies_in(characters, text)
  local from = 1
  for character in characters:gmatch(".") do
    local found = text:find(character, from, true)
    if not found then
      return false
    end
    from = found + 1
  end
  return true
end

--- What of the shown text is typed already, what is left, and what behind the cursor the rest replaces. Nil where the
--- text does not belong at the cursor any more.
---@return string? typed
---@return string? rest
---@return string? replaced
local function fit()
  if not shown or shown.buf ~= vim.api.nvim_get_current_buf() then
    return
  end
  local row, col = cursor()
  if row < shown.row or (row == shown.row and col < shown.col) then
    return
  end
  local lines = vim.api.nvim_buf_get_lines(shown.buf, shown.row, row + 1, false)
  if #lines ~= row - shown.row + 1 or lines[1]:sub(1, shown.col) ~= shown.head then
    return
  end
  local behind = lines[#lines]:sub(col + 1)
  lines[#lines] = lines[#lines]:sub(1, col)
  lines[1] = lines[1]:sub(shown.col + 1)
  local typed = table.concat(lines, "\n")
  local text = shown.items[shown.index].text
  if not vim.startswith(text, typed) or not vim.endswith(behind, shown.tail) then
    return
  end
  local rest = text:sub(#typed + 1)
  local replaced = behind:sub(1, #behind - #shown.tail)
  -- A plugin for pairs may have put closers behind the cursor since; what the text brings itself is replaced.
  -- And who types a closer goes past the one that is there.
  local passed = shown.replaced:sub(1, #shown.replaced - #replaced)
  local own = replaced == shown.replaced
    or (vim.endswith(replaced, shown.replaced) and replaced:match(CLOSERS))
    or (vim.endswith(shown.replaced, replaced) and passed:match(CLOSERS))
  if not own or not lies_in(replaced, rest) then
    return
  end
  return typed, rest, replaced
end

--- The chunks of the first line that stand between the characters that are there already, from the right. Nil where
--- they do not lie in it.
---@return { [1]: integer, [2]: string }[]? chunks Offset from the cursor, text.
local function between(first, replaced)
  local chunks, stop = {}, #first
  for at = #replaced, 1, -1 do
    local character, found = replaced:sub(at, at), nil
    for place = stop, 1, -1 do
      if first:sub(place, place) == character then
        found = place
        break
      end
    end
    if not found then
      return
    end
    chunks[#chunks + 1] = { at, first:sub(found + 1, stop) }
    stop = found - 1
  end
  chunks[#chunks + 1] = { 0, first:sub(1, stop) }
  return chunks
end

--- The text with the spaces that its tabs would stand for: virtual text knows no tabs.
---@param text string
---@param column integer Where it begins, in cells.
local function without_tabs(text, column)
  local pieces = vim.split(text, "\t", { plain = true })
  for at = 1, #pieces - 1 do
    local stop = column + vim.fn.strdisplaywidth(pieces[at] .. "\t", column)
    pieces[at] = pieces[at] .. (" "):rep(stop - column - vim.fn.strdisplaywidth(pieces[at], column))
    column = stop
  end
  return table.concat(pieces)
end

local function draw(rest, replaced)
  local current = assert(shown)
  local row, col = cursor()
  vim.api.nvim_buf_clear_namespace(current.buf, namespace, 0, -1)
  local lines = vim.split(rest, "\n", { plain = true })
  local below = {} ---@type { [1]: string, [2]: string }[][]
  for at = 2, #lines do
    below[#below + 1] = { { without_tabs(lines[at], 0), "InfillGhost" } }
  end
  local hint = current.cycled and ("  (%d/%d)"):format(current.index, #current.items)
  if hint and #below > 0 then
    table.insert(below[#below], { hint, "InfillHint" })
  end
  local chunks = between(lines[1], replaced)
  if not chunks then
    local covered = lines[1] .. (" "):rep(vim.fn.strdisplaywidth(replaced) - vim.fn.strdisplaywidth(lines[1]))
    vim.api.nvim_buf_set_extmark(current.buf, namespace, row, col, {
      virt_text = { { covered, "InfillGhost" } },
      virt_text_pos = "overlay",
      hl_mode = "combine",
    })
  else
    local column = vim.fn.strdisplaywidth(vim.api.nvim_get_current_line():sub(1, col))
    for at = #chunks, 1, -1 do
      local offset, text = unpack(chunks[at])
      text = without_tabs(text, column)
      column = column + vim.fn.strdisplaywidth(text, column) + 1 -- What stands between two chunks is one character.
      if text ~= "" then
        vim.api.nvim_buf_set_extmark(current.buf, namespace, row, col + offset, {
          virt_text = { { text, "InfillGhost" } },
          virt_text_pos = "inline",
          hl_mode = "combine",
        })
      end
    end
  end
  if #below > 0 then
    vim.api.nvim_buf_set_extmark(current.buf, namespace, row, col, { virt_lines = below })
  elseif hint then
    vim.api.nvim_buf_set_extmark(current.buf, namespace, row, col, { virt_text = { { hint, "InfillHint" } } })
  end
end

--- Draws what is left of the shown text; false if nothing is, or it does not fit any more.
---@return boolean
local function redraw()
  local _, rest, replaced = fit()
  if not rest or rest == "" then
    hide()
    return false
  end
  draw(rest, replaced)
  return true
end

--- The items of an answer that begin at the cursor and end in its line.
---@param client vim.lsp.Client
---@param result any
---@return infill.Shown?
local function read(client, buf, result)
  local row, col = cursor()
  local line = vim.api.nvim_get_current_line()
  local found ---@type infill.Shown?
  for _, item in ipairs(result.items or result) do
    local text, range = item.insertText, item.range
    if type(text) == "string" and range and range.start.line == row and range["end"].line == row then
      local ok, start = pcall(vim.str_byteindex, line, client.offset_encoding, range.start.character, false)
      local also, stop = pcall(vim.str_byteindex, line, client.offset_encoding, range["end"].character, false)
      if ok and also and start == col and stop >= col then
        local tail = line:sub(stop + 1)
        found = found
          or {
            client = client,
            buf = buf,
            items = {},
            index = 1,
            row = row,
            col = col,
            head = line:sub(1, col),
            tail = tail,
            replaced = line:sub(col + 1, stop),
            cycled = false,
          }
        if tail == found.tail then
          local id = item.command and item.command.arguments and item.command.arguments[1] or ""
          table.insert(found.items, { id = id, text = (text:gsub("\r\n", "\n")) })
        end
      end
    end
  end
  return found
end

---@param kind integer
---@param done? fun(answer: infill.Shown?) What to do with the answer instead of showing it.
local function request(kind, done)
  cancel()
  local buf = vim.api.nvim_get_current_buf()
  local client = attached[buf] and vim.lsp.get_client_by_id(attached[buf])
  if not client or client:is_stopped() or not inserting() or not M.allowed(buf) then
    return
  end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  params.context = { triggerKind = kind }
  ---@type infill.Pending
  local mine = { client = client, buf = buf, tick = vim.api.nvim_buf_get_changedtick(buf), cursor = { cursor() } }
  pending = mine
  local sent, id = client:request(METHOD, params, function(err, result)
    if pending ~= mine then
      return
    end
    pending = nil
    local current = vim.api.nvim_buf_is_valid(buf)
      and vim.api.nvim_get_current_buf() == buf
      and vim.api.nvim_buf_get_changedtick(buf) == mine.tick
      and vim.deep_equal({ cursor() }, mine.cursor)
      and inserting()
      and M.allowed(buf)
    if err or not current or type(result) ~= "table" then
      return
    end
    local answer = read(client, buf, result)
    if done then
      done(answer)
      return
    end
    M.show(answer)
  end, buf)
  if not sent then
    pending = nil
  elseif pending == mine then
    mine.id = id
  end
end

--- Asks a little later: the keys that are waiting go first.
local function ask()
  cancel()
  local mine ---@type uv.uv_timer_t
  mine = vim.defer_fn(function()
    -- One that is due when it is stopped runs all the same.
    if timer == mine then
      timer = nil
      request(AUTOMATIC)
    end
  end, M.debounce)
  timer = mine
end

--- Puts text in at the cursor, in place of `replaced` behind it. It is pasted: `.` repeats that with what was typed.
local function insert(text, replaced)
  local row, col = cursor()
  if replaced ~= "" then
    vim.api.nvim_buf_set_text(0, row, col, row, col + #replaced, {})
  end
  vim.api.nvim_paste(text, false, -1)
end

--- Takes a beginning of what is left of the shown text.
---@param part fun(rest: string): string
---@return boolean
local function take(part)
  local typed, rest, replaced = fit()
  if not shown or not rest or rest == "" then
    hide()
    return false
  end
  local piece = part(rest)
  local client, id, text = shown.client, shown.items[shown.index].id, typed .. piece
  local whole = piece == rest
  cancel()
  -- What a piece brings itself goes from behind the cursor: the least that lets the rest stand before what is left.
  local brought = 0
  while not lies_in(replaced:sub(brought + 1), rest:sub(#piece + 1)) do
    brought = brought + 1
  end
  shown.replaced = replaced:sub(brought + 1)
  if whole then
    hide()
  end
  insert(piece, replaced:sub(1, brought))
  if vim.fn.foldclosed(".") > 0 then
    vim.cmd.foldopen({ bang = true }) -- New lines may begin a closed fold, with the cursor in it.
  end
  if whole then
    tell("infill/accepted", client, { id = id })
    ask()
  else
    tell("infill/partiallyAccepted", client, { id = id, length = vim.str_utfindex(text, "utf-16") })
    redraw()
  end
  return true
end

--- Shows another item, `step` further.
local function turn(step)
  local current = assert(shown)
  current.index = (current.index - 1 + step) % #current.items + 1
  current.cycled = true
  if redraw() then
    tell("infill/offered", current.client, { id = current.items[current.index].id })
  end
end

-- Public functions ----------------------------------------------------------------------------------------------------

--- Shows an answer to what is asked at the cursor; nil takes away what is shown.
---@param answer infill.Shown?
function M.show(answer)
  hide()
  shown = answer
  if shown and redraw() then
    tell("infill/offered", shown.client, { id = shown.items[shown.index].id })
  end
end

--- The text that is left to take, "" where nothing is shown.
---@return string
function M.text()
  local _, rest = fit()
  return rest or ""
end

---@return boolean
function M.accept()
  return take(function(rest)
    return rest
  end)
end

--- A word is what 'iskeyword' says, or a run of other signs, with the white space before it.
---@return boolean
function M.accept_word()
  return take(function(rest)
    local word = vim.fn.matchstr(rest, [[^\_s*\%(\k\+\|\%(\k\@!\S\)\+\)]])
    return word ~= "" and word or rest
  end)
end

--- The rest of the line, or the next line where this one is complete.
---@return boolean
function M.accept_line()
  return take(function(rest)
    return rest:match("^\n?[^\n]*")
  end)
end

--- Takes away what is shown, until something else is typed.
---@return boolean
function M.dismiss()
  local was = shown ~= nil
  cancel()
  hide()
  return was
end

--- Asks now, for several to choose from.
function M.trigger()
  request(INVOKED)
end

--- Shows the next item (or, with -1, the one before); asks for others where there is one.
---@param step integer
function M.cycle(step)
  if not shown or not redraw() then
    M.trigger()
  elseif #shown.items > 1 then
    turn(step)
  else
    local rest = M.text()
    request(INVOKED, function(answer)
      if answer then
        hide()
        shown = answer
        turn(answer.items[1].text == rest and step or 0)
      end
    end)
  end
end

--- A better answer is there for a place: asks again if the cursor is still at it.
---@param params { textDocument: { uri: string }, version: integer, position: lsp.Position }
---@param client vim.lsp.Client
function M.refresh(params, client)
  local buf = vim.api.nvim_get_current_buf()
  if attached[buf] ~= client.id or vim.uri_from_bufnr(buf) ~= params.textDocument.uri or not inserting() then
    return
  end
  local position = vim.lsp.util.make_position_params(0, client.offset_encoding).position
  if vim.deep_equal(position, params.position) and not pending and not timer then
    request(AUTOMATIC)
  end
end

---@param client vim.lsp.Client
---@param buf integer
function M.attach(client, buf)
  attached[buf] = client.id
  -- Core draws in all buffers where it was enabled for another server: the same text would stand there twice.
  if vim.lsp.inline_completion then
    vim.lsp.inline_completion.enable(false, { client_id = client.id })
  end
  local group = vim.api.nvim_create_augroup("infill.presenter." .. buf, {})
  vim.api.nvim_create_autocmd({ "InsertEnter", "TextChangedI", "TextChangedP" }, {
    group = group,
    buffer = buf,
    desc = "Ask for what could stand here, unless what is shown still fits",
    callback = function(event)
      if event.event == "InsertEnter" then
        hide()
        ask()
      elseif redraw() then
        stop_timer()
      else
        ask()
      end
    end,
  })
  vim.api.nvim_create_autocmd("CursorMovedI", {
    group = group,
    buffer = buf,
    desc = "Take away what does not fit at the cursor",
    callback = function()
      if shown then
        redraw()
      end
    end,
  })
  local function take_away()
    M.dismiss()
  end
  vim.api.nvim_create_autocmd({ "BufLeave", "BufUnload" }, {
    group = group,
    buffer = buf,
    desc = "Take away what is shown",
    callback = take_away,
  })
  -- <C-c> and the way into Replace mode leave Insert mode without InsertLeave.
  vim.api.nvim_create_autocmd("ModeChanged", {
    group = vim.api.nvim_create_augroup("infill.presenter", {}),
    pattern = "i*:[^i]*",
    desc = "Take away what is shown",
    callback = take_away,
  })
  if inserting() and vim.api.nvim_get_current_buf() == buf then
    ask()
  end
end

---@param buf integer
---@param client_id integer
function M.detach(buf, client_id)
  if attached[buf] == client_id then
    attached[buf] = nil
    pcall(vim.api.nvim_del_augroup_by_name, "infill.presenter." .. buf)
    if (shown and shown.buf == buf) or (pending and pending.buf == buf) then
      cancel()
      hide()
    end
  end
end

--- Whether this plugin, and not core, draws in a buffer.
---@param buf integer
---@return boolean
function M.is_attached(buf)
  return attached[buf] ~= nil
end

return M
