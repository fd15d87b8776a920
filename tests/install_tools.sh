#!/bin/sh
# Installs the programs that some tests need besides the Rust toolchain: the reverse proxies nginx, Caddy and HAProxy. Where it
# cannot, it says so, and their tests are skipped. Debian and its descendants only; needs root.
set -eu

PATH=$PATH:/usr/sbin
missing=
for program in nginx caddy haproxy; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install_tools:$missing missing, and only root on Debian can install them here; their tests will be skipped"
    exit 0
fi
# The packages' own services are not wanted: the tests start programs of their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
for program in $missing; do
    package=$program
    [ "$program" != nginx ] || package=nginx-light
    install="apt-get install -y -q --no-install-recommends $package"
    if ! { $install || { apt-get update -q && $install; }; } >/dev/null; then
        echo "install_tools: $program could not be installed; its tests will be skipped"
    fi
done
