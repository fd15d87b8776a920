#!/usr/bin/env bash
# Runs the programs of docs/guide/recipes.md in every language: installs the TypeScript compiler into a cache at the pinned
# version, and Go from Debian if it is missing. Needs node, npm and a network that reaches the package registry; a language
# that cannot be installed is skipped, with a line that names it. AXED=<binary> is used instead of one that is built.
set -euo pipefail
cd "$(dirname "$0")/.."

place=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/guide
packages="typescript@7.0.2 @types/node@26.6.6"
if command -v npm >/dev/null && [ "$(cat "$place/installed" 2>/dev/null)" != "$packages" ]; then
  rm -rf "$place"
  mkdir -p "$place"
  # shellcheck disable=SC2086
  npm install --prefix "$place" --ignore-scripts --no-audit --no-fund --loglevel=error $packages
  echo "$packages" >"$place/installed"
fi
if ! command -v go >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends golang-go >/dev/null || true
fi
[ -n "${AXED:-}" ] || cargo build --locked --quiet
AXED_GUIDE_TOOLS=$place tests/guide.py --axed "${AXED:-${CARGO_TARGET_DIR:-target}/debug/axed}" recipes
