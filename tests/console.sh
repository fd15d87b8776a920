#!/usr/bin/env bash
# Uses the console in a headless Chromium: tests/console.mjs. Installs the driver and axe-core into a cache at pinned versions. Needs
# node, npm, a network that reaches the package registries, and Chromium, which it installs on Debian if it may.
#   AXED=FILE       the program to test (default: built here)
#   CHROMIUM=FILE   the browser (default: chromium in PATH)
#   SHOTS=DIR       where screenshots are written; none without it
#   STORIES=TEXT    only the stories whose names contain it
set -euo pipefail
cd "$(dirname "$0")/.."

for program in node npm; do
  if ! command -v "$program" >/dev/null; then
    echo "console: skipped, because there is no $program"
    exit 0
  fi
done
CHROMIUM=${CHROMIUM:-$(command -v chromium || true)}
if [ -z "$CHROMIUM" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
  CHROMIUM=$(command -v chromium || true)
fi
if [ -z "$CHROMIUM" ]; then
  echo "console: skipped, because there is no chromium"
  exit 0
fi

packages="playwright-core@1.65.1 axe-core@4.14.1"
tools=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/tools/console
if [ "$(cat "$tools/installed" 2>/dev/null)" != "$packages" ]; then
  rm -rf "$tools"
  mkdir -p "$tools"
  npm install --prefix "$tools" --ignore-scripts --no-audit --no-fund --loglevel=error $packages
  echo "$packages" >"$tools/installed"
fi

if [ -z "${AXED:-}" ]; then
  cargo build --locked --quiet
  AXED=${CARGO_TARGET_DIR:-target}/debug/axed
fi
# Node finds packages beside the scripts.
cp tests/console.mjs tests/console_checks.mjs tests/console_evals.mjs tests/console_navigation.mjs "$tools"
[ -z "${SHOTS:-}" ] || mkdir -p "$SHOTS"
node "$tools/console.mjs" "$(realpath "$AXED")" "$CHROMIUM" ${SHOTS:+"$(realpath "$SHOTS")"}
