--- `:checkhealth infill`: is there all that ghost text needs?
---
--- Looks from the editor's side only: the engine and its model are the business of the server's own doctor.

local infill = require("infill")
local presenter = require("infill.presenter")

local M = {}

-- Settings ------------------------------------------------------------------------------------------------------------

--- The oldest server that speaks what the plugin speaks.
local OLDEST_SERVER = "0.1.0"
local VERSION_TIMEOUT_MS = 10000
local STATUS_TIMEOUT_MS = 5000

-- Helpers -------------------------------------------------------------------------------------------------------------

local function check_neovim()
  if vim.fn.has("nvim-0.11") == 1 then
    vim.health.ok("Neovim " .. tostring(vim.version()))
  else
    vim.health.error(("Neovim %s is too old"):format(vim.version()), "Install Neovim 0.11 or newer")
  end
end

local function check_server()
  local config = vim.lsp.config[infill.server]
  local command = config and config.cmd
  if type(command) ~= "table" then
    vim.health.info("The server is not started by a command line: its executable is not checked")
    return
  end
  local executable = vim.fn.exepath(command[1])
  if executable == "" then
    vim.health.error(("`%s` is not on the PATH"):format(command[1]), {
      "Install it, from a clone into a virtual environment: see docs/editors.md",
      'Or name it: require("infill").setup({ cmd = { "/path/to/infill-lsp" } })',
    })
    return
  end
  -- A script whose Python is gone is there and executable, and yet cannot be started.
  local started, process = pcall(vim.system, { executable, "--version" }, { text = true, timeout = VERSION_TIMEOUT_MS })
  if not started then
    vim.health.error(
      ("`%s` cannot be started: the Python that it was installed with is gone"):format(executable),
      "Install infill-lsp again, with a Python that is there: see docs/editors.md"
    )
    return
  end
  local result = process:wait()
  local version = result.code == 0 and vim.version.parse(result.stdout, { strict = false })
  if result.code ~= 0 then
    local reason = vim.trim(result.stderr ~= "" and result.stderr or ("exit status " .. result.code))
    vim.health.error(("`%s --version` fails: %s"):format(executable, reason), "Install infill-lsp again")
  elseif not version or vim.version.lt(version, OLDEST_SERVER) then
    vim.health.error(
      ("`%s` is %s; the plugin needs infill-lsp %s"):format(executable, vim.trim(result.stdout), OLDEST_SERVER),
      "Install plugin and server from the same version"
    )
  else
    vim.health.ok(("%s (%s)"):format(vim.trim(result.stdout), executable))
    vim.health.info(("`%s doctor` checks the engine and the model, with a real completion"):format(executable))
  end
end

local function check_clients()
  if not vim.lsp.is_enabled(infill.server) then
    vim.health.warn("The server is not enabled", 'Call require("infill").setup() or vim.lsp.enable("infill_lsp")')
    return
  end
  local clients = vim.lsp.get_clients({ name = infill.server })
  if #clients == 0 then
    vim.health.warn(
      "No buffer is attached",
      "Open a file; if it stays so, look into :lua vim.cmd.edit(vim.lsp.log.get_filename())"
    )
    return
  end
  for _, client in ipairs(clients) do
    local buffers = vim.tbl_keys(client.attached_buffers)
    local shown = vim.iter(buffers):filter(function(bufnr)
      return presenter.is_attached(bufnr)
        or (vim.lsp.inline_completion ~= nil and vim.lsp.inline_completion.is_enabled({ bufnr = bufnr }))
    end)
    local count = #shown:totable()
    local where = ("%d of %d buffers (client %d, root %s)"):format(
      count,
      #buffers,
      client.id,
      client.root_dir or "none"
    )
    if count > 0 then
      vim.health.ok("Attached, with ghost text in " .. where)
    else
      vim.health.warn(
        "Attached, with ghost text in " .. where,
        'Call require("infill").setup(), or vim.lsp.inline_completion.enable()'
      )
    end
  end
end

--- What stands in the way in this editor, and what the server says of its engine.
local function check_silence()
  local silent = {} ---@type table<string, string[]> The names of buffers by the reason.
  for _, client in ipairs(vim.lsp.get_clients({ name = infill.server })) do
    for buf in pairs(client.attached_buffers) do
      local reason = infill.silence(buf)
      if reason then
        silent[reason] = silent[reason] or {}
        table.insert(silent[reason], vim.fn.fnamemodify(vim.api.nvim_buf_get_name(buf), ":t"))
      end
    end
  end
  for reason, names in pairs(silent) do
    vim.health.warn(
      ("Nothing is shown in %s: %s"):format(table.concat(names, ", "), reason),
      "`:Infill on` shows it again; with `buffer` or a filetype behind it, what was switched off for that"
    )
  end
  for _, client in ipairs(vim.lsp.get_clients({ name = infill.server })) do
    local answer = client:request_sync("infill/status", vim.empty_dict(), STATUS_TIMEOUT_MS)
    local status = answer and answer.result
    if not status then
      vim.health.error("The server does not answer", "`:Infill log` shows why")
    elseif status.state == "error" then
      vim.health.error("The engine does not work: " .. status.message, "`infill-lsp doctor` says more")
    elseif status.state == "off" then
      vim.health.warn("The server offers nothing: " .. status.message, "`:Infill on`, or change the setting")
    else
      vim.health.ok("The engine is " .. status.state)
    end
  end
end

local function check_accept_key()
  local key = infill.settings.accept_key
  if not key then
    vim.health.info("No accept key is wanted; map one to <Plug>(infill-accept)")
    return
  end
  local mapping = vim.fn.maparg(key, "i", false, true)
  if mapping.desc == infill.accept_desc then
    vim.health.ok(("%s accepts"):format(key))
  elseif vim.lsp.is_enabled(infill.server) then
    vim.health.warn(("%s is mapped to something else"):format(key), "Map another key to <Plug>(infill-accept)")
  end
end

-- Public functions ----------------------------------------------------------------------------------------------------

function M.check()
  vim.health.start("infill")
  check_neovim()
  check_server()
  check_clients()
  check_silence()
  check_accept_key()
end

return M
