#!/usr/bin/env bash
# The editor journeys: installs the editors where they are missing, then drives them. What they looked like lies in
# .artifacts afterwards. Further arguments go to pytest.
#
#   INFILL_E2E_TOOLS=FOLDER   keep the editors there (default: .tools beside this script)
#   INFILL_E2E_PATIENCE=4     wait four times as long for what is to come, on a machine that is slow or has much to do
#   INFILL_E2E_VSCODE=0       leave VS Code out (it takes 0.9 GB)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
"$here/install-neovim.sh"
if [ "${INFILL_E2E_VSCODE:-1}" = 0 ]; then
  echo "VS Code is left out: INFILL_E2E_VSCODE=0"
else
  "$here/install-code-server.sh"
fi
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
# Two at once: a journey waits most of its time, for an editor, a server or an engine to get on.
export INFILL_E2E_PATIENCE=${INFILL_E2E_PATIENCE:-2}
exec "$python" -m pytest -m e2e tests/e2e -n 2 --dist loadfile "$@"
