#!/usr/bin/env bash
# Drives a daemon with OpenAI's official clients for Python and Node, unmodified. Installs them into a cache at the pinned
# versions. Needs python3 with venv, node, npm and a network that reaches the package registries.
#   AXED=FILE   the program to test (default: built here)
set -euo pipefail
cd "$(dirname "$0")/.."

for program in python3 node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "openai_clients: skipped, because there is no $program"
    exit 0
  fi
done

python_package=openai==3.54.0
node_package=openai@7.57.0
tools=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/tools/openai
if [ "$(cat "$tools/installed" 2>/dev/null)" != "$python_package $node_package" ]; then
  rm -rf "$tools"
  mkdir -p "$tools/node"
  python3 -m venv "$tools/python"
  "$tools/python/bin/pip" install -q --disable-pip-version-check "$python_package"
  npm install --prefix "$tools/node" --ignore-scripts --no-audit --no-fund --silent "$node_package"
  echo "$python_package $node_package" >"$tools/installed"
fi

if [ -z "${AXED:-}" ]; then
  cargo build --locked --quiet
  AXED=${CARGO_TARGET_DIR:-target}/debug/axed
fi
AXED=$(realpath "$AXED")

work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$work"' EXIT

key=key-of-the-test
cp -r tests/openai_clients/. "$work"
digest=$(printf %s "$key" | sha256sum | cut -d' ' -f1)
sed "s/KEY/$digest/" tests/openai_clients/axed.toml >"$work/axed.toml"
(cd "$work" && exec "$AXED" serve --config axed.toml --agents agents --data data --listen 127.0.0.1:0) >"$work/log" 2>&1 &
daemon=$!
for _ in $(seq 300); do
  address=$(grep -om1 'http://127.0.0.1:[0-9]*' "$work/log") && break
  kill -0 "$daemon" || { cat "$work/log"; exit 1; }
  sleep 0.2
done
[ -n "$address" ] || { cat "$work/log"; echo "openai_clients: the daemon did not start"; exit 1; }

"$tools/python/bin/python" tests/openai_clients/check.py "$address" "$key"
# Modules are looked for beside the program.
ln -s "$tools/node/node_modules" "$work/node_modules"
node "$work/check.mjs" "$address" "$key"
echo "openai_clients: passed"
