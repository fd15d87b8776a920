# Functions of the scripts that check a daemon with other people's clients; they are sourced from the repository's root.

# Installs packages of Python and of npm at the pinned versions into a cache, and sets `tools`: programs of Python are in
# $tools/python/bin, modules of node in $tools/node/node_modules. Either list may be empty.
install_tools() { # NAME PYTHON_PACKAGES NODE_PACKAGES
  tools=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/tools/$1
  [ "$(cat "$tools/installed" 2>/dev/null)" != "$2 $3" ] || return 0
  rm -rf "$tools"
  mkdir -p "$tools/node"
  if [ -n "$2" ]; then
    python3 -m venv "$tools/python"
    # shellcheck disable=SC2086
    "$tools/python/bin/pip" install -q --disable-pip-version-check $2
  fi
  if [ -n "$3" ]; then
    # shellcheck disable=SC2086
    npm install --prefix "$tools/node" --ignore-scripts --no-audit --no-fund --loglevel=error $3
  fi
  echo "$2 $3" >"$tools/installed"
}

# Makes AXED the absolute path of the program to test: the given one, or one that is built here.
find_axed() {
  if [ -z "${AXED:-}" ]; then
    cargo build --locked --quiet
    AXED=${CARGO_TARGET_DIR:-target}/debug/axed
  fi
  AXED=$(realpath "$AXED")
}

# Starts a daemon in this directory, which has its configuration and agents, and sets `daemon` and `server`, its address.
start_daemon() {
  "$AXED" serve --config axed.toml --agents agents --data data --listen 127.0.0.1:0 >daemon.log 2>&1 &
  daemon=$!
  for _ in $(seq 300); do
    server=$(grep -om1 'http://127.0.0.1:[0-9]*' daemon.log 2>/dev/null) && return 0
    kill -0 "$daemon" || break
    sleep 0.2
  done
  cat daemon.log
  echo "the daemon did not start"
  return 1
}
