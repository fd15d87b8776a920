#!/usr/bin/env bash
# Puts the daemon behind nginx, Caddy and HAProxy, each with a path prefix that it removes, and checks what a client gets.
# A proxy that is missing and cannot be installed is skipped. Needs python3 and curl. AXED=<binary> is used instead of one that is built.
set -euo pipefail
cd "$(dirname "$0")/.."

tests/install_tools.sh
[ -n "${AXED:-}" ] || cargo build --locked --quiet --bin axed
exec python3 tests/proxies.py "${AXED:-${CARGO_TARGET_DIR:-target}/debug/axed}"
