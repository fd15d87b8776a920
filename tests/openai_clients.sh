#!/usr/bin/env bash
# Drives a daemon with OpenAI's official clients for Python and Node, unmodified, and with the suite of Open Responses. Installs
# them into a cache at the pinned versions. Needs python3 with venv, node, npm and a network that reaches the package registries.
#   AXED=FILE         the program to test (default: built here)
#   OPENRESPONSES=DIR a checkout of the suite (default: cloned at the pinned commit; without it, the suite is skipped)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/client_tools.sh
. tests/client_tools.sh

for program in python3 node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "openai_clients: skipped, because there is no $program"
    exit 0
  fi
done

python_package=openai==3.54.0
node_package=openai@7.57.0
install_tools openai "$python_package" "$node_package"

find_axed

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

suite_commit=92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c
suite_packages="esbuild@0.25.0 zod@3.25.76"
suite=$tools/suite
if [ -z "${OPENRESPONSES:-}" ]; then
  OPENRESPONSES=$suite/source
  if [ "$(git -C "$OPENRESPONSES" rev-parse HEAD 2>/dev/null)" != "$suite_commit" ]; then
    rm -rf "$OPENRESPONSES"
    if ! { git clone -q https://github.com/openresponses/openresponses "$OPENRESPONSES" &&
      git -C "$OPENRESPONSES" checkout -q "$suite_commit"; }; then
      rm -rf "$OPENRESPONSES"
      echo "openai_clients: passed; the suite of Open Responses is skipped, because it cannot be cloned"
      exit 0
    fi
  fi
fi
if [ "$(cat "$suite/installed" 2>/dev/null)" != "$suite_packages" ]; then
  mkdir -p "$suite"
  # shellcheck disable=SC2086
  npm install --prefix "$suite" --ignore-scripts --no-audit --no-fund --loglevel=error $suite_packages
  echo "$suite_packages" >"$suite/installed"
fi
NODE_PATH=$suite/node_modules "$suite/node_modules/.bin/esbuild" "$OPENRESPONSES/bin/compliance-test.ts" --bundle \
  --platform=node --format=esm --log-level=error --outfile="$work/suite.mjs"
# It fails because of tests that are not expected to pass.
node "$work/suite.mjs" --base-url "$address/v1" --api-key "$key" --model suite --json >"$work/suite.json" || true
python3 tests/openai_clients/suite.py "$work/suite.json"
echo "openai_clients: passed"
