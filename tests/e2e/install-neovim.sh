#!/usr/bin/env bash
# Puts a Neovim >= 0.12 into FOLDER/neovim without touching the system: Debian sid's packages, unpacked and started
# with their own loader and C library. Needs a Debian-like machine with an apt mirror; root is not needed.
#
#   install-neovim.sh [FOLDER]      default: $INFILL_E2E_TOOLS, else .tools beside this script
#
# Prints the path of the launcher. Does nothing if a good one is there already.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=${1:-${INFILL_E2E_TOOLS:-$here/.tools}}
mkdir -p "$tools"
target=$(cd "$tools" && pwd)/neovim
launcher=$target/nvim

# Succeeds if the launcher starts and is new enough: vim.lsp.inline_completion came with 0.12.
is_good() {
  local version
  [ -x "$launcher" ] || return 1
  version=$("$launcher" --version 2>/dev/null | sed -n '1s/^NVIM v//p')
  [ -n "$version" ] && [ "$(printf '%s\n' 0.12 "$version" | sort -V | head -n 1)" = 0.12 ]
}

if is_good; then
  echo "$launcher"
  exit 0
fi

mirror=$(apt-get indextargets --format '$(SITE)' | grep -v security | head -n 1)
[ -n "$mirror" ] || { echo "no apt mirror is configured on this machine: install Neovim >= 0.12 by hand" >&2; exit 1; }

scratch=$(mktemp -d "$tools/neovim.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch"/{lists/partial,cache/archives/partial,debs,root}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$scratch/sources.list"

# An apt of our own, with an empty idea of what is installed: so every dependency is downloaded, libc included.
apt_options=(
  -qq
  -o "Dir::Etc::sourcelist=$scratch/sources.list"
  -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::status=/dev/null
  -o "Dir::State::lists=$scratch/lists"
  -o "Dir::Cache=$scratch/cache"
  -o APT::Sandbox::User=
)
apt-get "${apt_options[@]}" update
mapfile -t packages < <(
  apt-cache "${apt_options[@]}" depends neovim --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances | grep -E '^[a-z0-9]' | grep -vE '^(libc-gconv|gcc-.*-base)' | sort -u
)
(cd "$scratch/debs" && apt-get "${apt_options[@]}" download "${packages[@]}")
for deb in "$scratch"/debs/*.deb; do dpkg-deb -x "$deb" "$scratch/root"; done

rm -rf "$target"
mkdir -p "$target"
mv "$scratch/root" "$target/root"
libraries=$(dirname "$(find "$target/root/usr/lib" -name 'ld-linux*.so*' | head -n 1)")
loader=$(find "$libraries" -maxdepth 1 -name 'ld-linux*.so*' | head -n 1)
cat > "$launcher" <<LAUNCHER
#!/bin/sh
export VIMRUNTIME='$target/root/usr/share/nvim/runtime'
exec '$loader' --library-path '$libraries' '$target/root/usr/bin/nvim' --cmd 'set runtimepath+=$target/root/usr/lib/nvim' "\$@"
LAUNCHER
chmod +x "$launcher"

is_good || { echo "the Neovim in $target does not start, or is older than 0.12:" >&2; "$launcher" --version >&2; exit 1; }
echo "$launcher"
