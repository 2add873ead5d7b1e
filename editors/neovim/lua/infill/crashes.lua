--- Starts a server again after a crash: later each time, and no more where it keeps crashing.
---
--- Core starts a server once. Each root has one of its own, and crashes count for each. Knows nothing of what the
--- server does.

local M = {}

-- Settings ------------------------------------------------------------------------------------------------------------

local MOST, WITHIN_MS, FIRST_WAIT_MS = 4, 3 * 60 * 1000, 250
local SIGTERM = 15

-- State ---------------------------------------------------------------------------------------------------------------

local times = {} ---@type table<string, integer[]> When they crashed by root, ms of `vim.uv.now()`.

-- Public functions ----------------------------------------------------------------------------------------------------

--- Takes in how a server ended.
---@param server string
---@param root? string Nil where its files have none.
---@param code integer
---@param signal integer
function M.exited(server, root, code, signal)
  if (code == 0 and (signal == 0 or signal == SIGTERM)) or not vim.lsp.is_enabled(server) then
    return
  end
  local now = vim.uv.now()
  local crashes = vim.tbl_filter(function(time)
    return now - time < WITHIN_MS
  end, times[root or ""] or {})
  crashes[#crashes + 1] = now
  times[root or ""] = crashes
  if #crashes > MOST then
    vim.notify(
      ("infill: the server crashed %d times; `:Infill log` shows why, `:Infill restart` tries again"):format(#crashes),
      vim.log.levels.ERROR
    )
    return
  end
  vim.defer_fn(function()
    if vim.lsp.is_enabled(server) then
      vim.lsp.enable(server)
    end
  end, FIRST_WAIT_MS * 2 ^ (#crashes - 1))
end

--- What crashed before does not count any more.
function M.forget()
  times = {}
end

return M
