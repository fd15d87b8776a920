#!/usr/bin/env bash
# Speaks with published MCP servers through the daemon: installs them into a cache at the pinned versions and runs their
# story. Needs node, npm and a network that reaches the package registry; where node is missing it says so and skips.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
  echo "real_mcp: node and npm are missing; the story with real MCP servers is skipped"
  exit 0
fi
place=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/mcp
filesystem=@modelcontextprotocol/server-filesystem@2026.8.31
everything=@modelcontextprotocol/server-everything@2026.8.31
if [ "$(cat "$place/installed" 2>/dev/null)" != "$filesystem $everything" ]; then
  rm -rf "$place"
  mkdir -p "$place"
  # Nothing of a package is run but what the story starts.
  npm install --prefix "$place" --ignore-scripts --no-audit --no-fund --loglevel=error "$filesystem" "$everything"
  echo "$filesystem $everything" >"$place/installed"
fi
AXED_REAL_MCP=$place cargo test --locked --test it mcp::real_servers -- --nocapture
