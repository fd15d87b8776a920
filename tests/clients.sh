#!/usr/bin/env bash
# Checks the client libraries in clients/ against a daemon: their types, and runs over its restarts. Installs the tools into
# a cache at the pinned versions. Needs python3 with venv and a network that reaches the package registries; node and npm
# for the TypeScript client, which is skipped without them.
#   AXED=FILE   the program to test (default: built here)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/client_tools.sh
. tests/client_tools.sh

if ! command -v python3 >/dev/null; then
  echo "clients: skipped, because there is no python3"
  exit 0
fi
python_packages="httpx==0.28.1 mypy==1.18.2 typing-extensions==4.16.0"
node_packages="typescript@5.9.3 pyright@1.1.414"
command -v npm >/dev/null || node_packages=
install_tools clients "$python_packages" "$node_packages"
find_axed
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

MYPYPATH=clients/python "$tools/python/bin/mypy" --strict --cache-dir "$work/mypy" clients/python/axed_client tests/clients/drive.py
if [ -n "$node_packages" ]; then
  cat >"$work/pyrightconfig.json" <<JSON
{"include": ["axed_client", "drive.py"], "typeCheckingMode": "standard"}
JSON
  cp -r clients/python/axed_client tests/clients/drive.py tests/clients/daemon.py "$work/"
  "$tools/node/node_modules/.bin/pyright" -p "$work" --pythonpath "$tools/python/bin/python"
fi
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=clients/python "$tools/python/bin/python" tests/clients/drive.py "$AXED"

if [ ! -x "$tools/node/node_modules/.bin/tsc" ] || ! command -v node >/dev/null; then
  echo "clients: TypeScript skipped, because there is no node or npm"
  exit 0
fi
mkdir -p "$work/node_modules/axed-client"
"$tools/node/node_modules/.bin/tsc" -p clients/typescript --outDir "$work/node_modules/axed-client/dist"
cp clients/typescript/package.json "$work/node_modules/axed-client/"
cp tests/clients/drive.ts "$work/"
echo '{"type": "module"}' >"$work/package.json"
(
  cd "$work"
  "$tools/node/node_modules/.bin/tsc" --strict --target es2022 --module nodenext --lib es2022,dom,dom.iterable,dom.asynciterable drive.ts
)
PYTHONDONTWRITEBYTECODE=1 "$tools/python/bin/python" tests/clients/daemon.py "$AXED" node "$work/drive.js"
