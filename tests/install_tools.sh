#!/bin/sh
# Installs the programs that some stories of the tests need besides the Rust toolchain: nginx. Where it cannot, it says
# so, and those stories are skipped. Debian and its descendants only; needs root.
set -eu

PATH=$PATH:/usr/sbin
if command -v nginx >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install_tools: nginx is missing and only root on Debian can install it here; its stories will be skipped"
    exit 0
fi
install="apt-get install -y -q --no-install-recommends nginx-light"
# The package's own service is not wanted: the stories start an nginx of their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
if ! { $install || { apt-get update -q && $install; }; } >/dev/null; then
    echo "install_tools: nginx could not be installed; its stories will be skipped"
fi
