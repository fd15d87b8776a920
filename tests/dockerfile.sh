#!/usr/bin/env bash
# Performs the steps of the Dockerfile without a container engine, and runs the images: tests/dockerfile.py describes how, and what
# it does not test.
#
#   tests/dockerfile.sh [--profile release|dev] [--full]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

skip() { echo "dockerfile: SKIPPED: $1"; exit 0; }
[ "$(id -u)" = 0 ] || skip "only root can mount"
grep -q '^VERSION_CODENAME=bookworm' /etc/os-release 2>/dev/null || skip "the images are Debian 12, and this machine is not"
probe=$(mktemp -d)
unshare --mount sh -c "mount -t tmpfs tmpfs '$probe' && mkdir '$probe/u' '$probe/w' '$probe/m' &&
  mount -t overlay overlay -o 'lowerdir=/,upperdir=$probe/u,workdir=$probe/w' '$probe/m'" 2>/dev/null || {
  rmdir "$probe"
  skip "this machine does not let root mount an overlay"
}
rmdir "$probe"
exec python3 tests/dockerfile.py "$@"
