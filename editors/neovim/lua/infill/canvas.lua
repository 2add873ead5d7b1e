--- The canvas while it is denoised, in a small window: each step as the server sends it, and none of its own.
---
--- Knows nothing of who asked for the text. Takes no focus and no key.

local M = {}

-- State ---------------------------------------------------------------------------------------------------------------

local WIDTH, HEIGHT = 44, 12
--- How each state of a slot is drawn; what is committed is drawn as it would stand there.
local HIGHLIGHTS = { head = "Comment", committed = "Normal", proposed = "DiagnosticHint", mask = "NonText" }
local MASK = "·"

local namespace = vim.api.nvim_create_namespace("infill.canvas")
local win ---@type integer?

---@class infill.Slot
---@field text string
---@field prob number
---@field state "head"|"committed"|"proposed"|"mask"

---@class infill.Frame
---@field step integer
---@field ms number
---@field slots infill.Slot[]

-- Helpers -------------------------------------------------------------------------------------------------------------

--- The lines of a frame, and where each slot lies in them.
---@param frame infill.Frame
local function drawn(frame)
  local lines, marks = { "" }, {}
  for _, slot in ipairs(frame.slots) do
    local text = slot.state == "mask" and MASK or slot.text
    for at, piece in ipairs(vim.split(text, "\n", { plain = true })) do
      if at > 1 then
        lines[#lines + 1] = ""
      end
      local from = #lines[#lines]
      lines[#lines] = lines[#lines] .. piece
      marks[#marks + 1] = { #lines - 1, from, #lines[#lines], HIGHLIGHTS[slot.state] }
    end
  end
  return lines, marks
end

-- Public functions ----------------------------------------------------------------------------------------------------

--- Whether somebody looks.
---@return boolean
function M.is_open()
  return win ~= nil and vim.api.nvim_win_is_valid(win)
end

--- Opens the window in the upper right corner, or closes it.
---@param watch fun(is_open: boolean) Told when it opens, and when it is closed by whatever means.
function M.toggle(watch)
  if M.is_open() then
    vim.api.nvim_win_close(assert(win), true)
    return
  end
  local buf = vim.api.nvim_create_buf(false, true)
  vim.bo[buf].bufhidden = "wipe"
  win = vim.api.nvim_open_win(buf, false, {
    relative = "editor",
    anchor = "NE",
    row = 1,
    col = vim.o.columns,
    width = math.min(WIDTH, vim.o.columns - 2),
    height = math.min(HEIGHT, vim.o.lines - 4),
    style = "minimal",
    border = "rounded",
    title = " infill: canvas ",
    focusable = false,
    noautocmd = true,
  })
  vim.api.nvim_create_autocmd("WinClosed", {
    pattern = tostring(win),
    once = true,
    desc = "Nobody looks at the canvas any more",
    callback = function()
      win = nil
      watch(false)
    end,
  })
  watch(true)
end

--- Draws a step, if anybody looks.
---@param frame infill.Frame
function M.show(frame)
  if not M.is_open() then
    return
  end
  local buf, lines, marks = vim.api.nvim_win_get_buf(assert(win)), drawn(frame)
  vim.api.nvim_buf_set_lines(buf, 0, -1, false, lines)
  for _, mark in ipairs(marks) do
    local row, from, to, highlight = unpack(mark)
    vim.api.nvim_buf_set_extmark(buf, namespace, row, from, { end_col = to, hl_group = highlight })
  end
  vim.api.nvim_win_set_config(assert(win), { title = (" infill: step %d, %d ms "):format(frame.step, frame.ms) })
end

return M
