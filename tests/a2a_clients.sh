#!/usr/bin/env bash
# Calls agents of a running daemon with the official A2A SDK for JavaScript, installed into a cache at the pinned version. Needs
# node, npm and a network that reaches the package registry.
#   AXED=FILE      the program to test (default: built here)
#   A2A_TCK=DIR    also runs the official compatibility kit, a checkout of a2aproject/a2a-tck at its branch for 1.0: it is in
#                  no registry. DIR/.venv has its packages.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/client_tools.sh
. tests/client_tools.sh

for program in node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "a2a_clients: skipped, because there is no $program"
    exit 0
  fi
done

install_tools a2a-clients "" "@a2a-js/sdk@1.0.1"

find_axed

work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$work"' EXIT
cp -r tests/a2a_clients/. "$work/"
mkdir "$work/work"
ln -s "$tools/node/node_modules" "$work/node_modules"
cd "$work"

for binding in HTTP+JSON JSONRPC; do
  [ -z "$daemon" ] || { kill "$daemon"; wait "$daemon" || true; rm -r data daemon.log; }
  start_daemon
  node drive.mjs "$server" "$binding" || { tail -n 20 daemon.log; exit 1; }
done

if [ -n "${A2A_TCK:-}" ]; then
  (cd "$A2A_TCK" && .venv/bin/python run_tck.py --sut-host "$server/a2a/slow" --transport http_json --level must)
fi
