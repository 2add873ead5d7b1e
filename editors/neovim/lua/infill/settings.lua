--- The plugin's settings, defined once: name, default, what is taken, help. The help file is checked against this.
---
--- Does not know the server's own settings, which travel through `init_options` as they are.

local M = {}

-- Settings ------------------------------------------------------------------------------------------------------------

---@class infill.Settings
---@field cmd string[]
---@field init_options table<string, any>
---@field accept_key string|false
---@field debounce integer
---@field preview "float"|"diff"|"none"

---@class infill.Setting
---@field name string
---@field default any
---@field takes string What is taken, in words.
---@field fits fun(value: any): boolean
---@field help string

---@type infill.Setting[]
M.definitions = {
  {
    name = "cmd",
    default = { "infill-lsp" },
    takes = "a list of texts",
    fits = function(value)
      return vim.islist(value) and type(value[1]) == "string"
    end,
    help = "The server's command line.",
  },
  {
    name = "init_options",
    default = {},
    takes = "a table",
    fits = function(value)
      return type(value) == "table"
    end,
    help = "The server's settings.",
  },
  {
    name = "accept_key",
    default = "<Tab>",
    takes = "a key or false",
    fits = function(value)
      return value == false or (type(value) == "string" and value ~= "")
    end,
    help = "The key that accepts in Insert mode; mapped only if it is free.",
  },
  {
    name = "debounce",
    default = 0,
    takes = "milliseconds",
    fits = function(value)
      return type(value) == "number" and value >= 0 and value % 1 == 0
    end,
    help = "How long to wait for another key before the server is asked.",
  },
  {
    name = "preview",
    default = "float",
    takes = '"float", "diff" or "none"',
    fits = function(value)
      return value == "float" or value == "diff" or value == "none"
    end,
    help = "How a fill is shown before it is accepted.",
  },
}

-- Public functions ----------------------------------------------------------------------------------------------------

---@return infill.Settings
function M.defaults()
  local defaults = {}
  for _, setting in ipairs(M.definitions) do
    defaults[setting.name] = vim.deepcopy(setting.default)
  end
  return defaults
end

--- The settings over the defaults; if something does not fit, the defaults and one line that says what.
---@param opts table
---@return infill.Settings settings
---@return string? problem
function M.checked(opts)
  local defaults = M.defaults()
  local unknown = vim.tbl_extend("force", {}, opts)
  for _, setting in ipairs(M.definitions) do
    unknown[setting.name] = nil
    local value = opts[setting.name]
    if value ~= nil and not setting.fits(value) then
      return defaults, ("`%s` takes %s"):format(setting.name, setting.takes)
    end
  end
  local name = next(unknown)
  if name ~= nil then
    return defaults, ("there is no setting `%s`"):format(name)
  end
  return vim.tbl_extend("force", defaults, opts)
end

return M
