--- How things are: what the server says of itself, for the statusline and for who asks.
---
--- Keeps the newest status of each client. Does not ask by itself.

local M = {}

-- State ---------------------------------------------------------------------------------------------------------------

---@class infill.Status
---@field state "off"|"stopped"|"starting"|"fetching"|"ready"|"busy"|"error"
---@field progress number|vim.NIL|nil
---@field message string
---@field model string
---@field device string

local latest = {} ---@type table<integer, infill.Status> By client.

-- Public functions ----------------------------------------------------------------------------------------------------

--- Takes in what a server says; `User InfillStatus` is for who draws it.
---@param client_id integer
---@param status infill.Status
function M.set(client_id, status)
  latest[client_id] = status
  vim.api.nvim_exec_autocmds("User", { pattern = "InfillStatus", data = status, modeline = false })
  vim.cmd.redrawstatus()
end

--- One word or two for the statusline; "" in a buffer without a server.
---@param client? vim.lsp.Client
---@param off? string Why this editor shows nothing.
---@return string
function M.text(client, off)
  local status = client and latest[client.id]
  if not client then
    return ""
  elseif off then
    return "infill " .. off
  elseif not status then
    return "infill"
  elseif status.state == "fetching" and type(status.progress) == "number" then
    return ("infill %d%%%%"):format(math.floor(100 * status.progress))
  end
  return "infill " .. status.state
end

--- The status in a sentence.
---@param status infill.Status
---@return string
function M.sentence(status)
  local parts = { "infill: " .. status.state }
  for _, part in ipairs({ status.message, status.model, status.device }) do
    if type(part) == "string" and part ~= "" then
      parts[#parts + 1] = part
    end
  end
  return table.concat(parts, ", ")
end

return M
