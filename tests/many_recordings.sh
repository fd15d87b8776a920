#!/usr/bin/env bash
# Prints how long `axed test` takes for 100 trees of six runs: tests/many_recordings.sh [BINARY]
set -euo pipefail
cd "$(dirname "$0")/.."
axed=${1:-target/release/axed}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
for number in $(seq 100); do cp tests/agents/planner-scripted.toml "$folder/$number.toml"; done
"$axed" test "$folder" > /dev/null
