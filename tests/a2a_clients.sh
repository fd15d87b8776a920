#!/usr/bin/env bash
# Calls agents of a running daemon with the official A2A SDK for JavaScript, installed into a cache at the pinned version. Needs
# node, npm and a network that reaches the package registry.
#   AXED=FILE      the program to test (default: built here)
#   A2A_TCK=DIR    also runs the official compatibility kit, a checkout of a2aproject/a2a-tck at its branch for 1.0: it is in
#                  no registry. DIR/.venv has its packages.
set -euo pipefail
cd "$(dirname "$0")/.."

for program in node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "a2a_clients: skipped, because there is no $program"
    exit 0
  fi
done

packages="@a2a-js/sdk@1.0.1"
tools=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/tools/a2a-clients
if [ "$(cat "$tools/installed" 2>/dev/null)" != "$packages" ]; then
  rm -rf "$tools"
  mkdir -p "$tools"
  # shellcheck disable=SC2086
  npm install --prefix "$tools" --ignore-scripts --no-audit --no-fund --silent $packages
  echo "$packages" >"$tools/installed"
fi

if [ -z "${AXED:-}" ]; then
  cargo build --locked --quiet
  AXED=$PWD/${CARGO_TARGET_DIR:-target}/debug/axed
  case ${CARGO_TARGET_DIR:-} in /*) AXED=$CARGO_TARGET_DIR/debug/axed ;; esac
fi

work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$work"' EXIT
cp -r tests/a2a_clients/. "$work/"
mkdir "$work/work"
ln -s "$tools/node_modules" "$work/node_modules"
cd "$work"

"$AXED" serve --config axed.toml --agents agents --data data --listen 127.0.0.1:0 >daemon.log 2>&1 &
daemon=$!
for _ in $(seq 300); do
  server=$(grep -om1 'http://127.0.0.1:[0-9]*' daemon.log 2>/dev/null) && break
  kill -0 "$daemon" || { cat daemon.log; exit 1; }
  sleep 0.2
done
[ -n "$server" ] || { cat daemon.log; echo "a2a_clients: the daemon did not start"; exit 1; }

node drive.mjs "$server" || { tail -n 20 daemon.log; exit 1; }

if [ -n "${A2A_TCK:-}" ]; then
  (cd "$A2A_TCK" && .venv/bin/python run_tck.py --sut-host "$server/a2a/slow" --transport http_json --level must)
fi
