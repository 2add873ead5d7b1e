--- Starts the server again after a crash: later each time, and no more where it keeps crashing.
---
--- Core starts a server once. Knows nothing of what the server does.

local M = {}

-- Settings ------------------------------------------------------------------------------------------------------------

local MOST, WITHIN_MS, FIRST_WAIT_MS = 4, 3 * 60 * 1000, 250
local SIGTERM = 15

-- State ---------------------------------------------------------------------------------------------------------------

local times = {} ---@type integer[] When it crashed, ms of `vim.uv.now()`.

-- Public functions ----------------------------------------------------------------------------------------------------

--- Takes in how a server ended. Runs in a callback of the event loop, where most of Neovim may not be called.
---@param server string
---@param code integer
---@param signal integer
function M.exited(server, code, signal)
  if code == 0 and (signal == 0 or signal == SIGTERM) then
    return
  end
  vim.schedule(function()
    if vim.v.exiting ~= vim.NIL or not vim.lsp.is_enabled(server) then
      return
    end
    local now = vim.uv.now()
    times = vim.tbl_filter(function(time)
      return now - time < WITHIN_MS
    end, times)
    times[#times + 1] = now
    if #times > MOST then
      vim.notify(
        ("infill: the server crashed %d times; `:Infill log` shows why, `:Infill restart` tries again"):format(#times),
        vim.log.levels.ERROR
      )
      return
    end
    vim.defer_fn(function()
      if vim.lsp.is_enabled(server) then
        vim.lsp.enable(server)
      end
    end, FIRST_WAIT_MS * 2 ^ (#times - 1))
  end)
end

--- What crashed before does not count any more.
function M.forget()
  times = {}
end

return M
