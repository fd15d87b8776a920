#!/usr/bin/env bash
# Runs the stories of tests/it on PostgreSQL: a server of its own on a unix socket, in a temporary directory, without syncs
# (AXED_TEST_POSTGRES_SYNC=on); also with TLS on localhost, with a certificate of an authority of its own.
# Two PgBouncers are before it, in transaction mode: AXED_TEST_POOLER keeps prepared statements, AXED_TEST_LOSSY_POOLER does not. One
# older than 1.21 can only keep them in session mode.
# Installs Debian's PostgreSQL and PgBouncer if they are missing (root only). Without PgBouncer its stories fail with CI=true, and
# are skipped else. The arguments are those of the test binary: filters, --exact …;
# without any, all stories run. `tests/postgres.sh --server COMMAND …` runs a command with AXED_TEST_POSTGRES instead.
set -euo pipefail
cd "$(dirname "$0")/.."

find_programs() {
    for dir in $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -Vr) $(dirname "$(command -v initdb || echo /)"); do
        if [ -x "$dir/initdb" ] && [ -x "$dir/postgres" ]; then
            echo "$dir"
            return
        fi
    done
}

install_package() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    # Without the cluster that the package would make and start.
    mkdir -p /etc/postgresql-common/createcluster.d
    echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.d/axed.conf
    local install="apt-get install -y -q --no-install-recommends $1"
    { $install || { apt-get update -q && $install; }; } >/dev/null
}

PATH=$PATH:/usr/sbin
[ -n "$(find_programs)" ] || install_package postgresql || true
command -v pgbouncer >/dev/null || install_package pgbouncer || true
programs=$(find_programs)
[ -n "$programs" ] || { echo "postgres.sh: initdb and postgres are missing; install PostgreSQL 14 or newer"; exit 1; }

place=$(mktemp -d)
# The server refuses to run as root.
as_owner=()
if [ "$(id -u)" = 0 ]; then
    chown postgres "$place"
    as_owner=(setpriv --reuid=postgres --regid=postgres --clear-groups)
fi
chmod 755 "$place"
stop() {
    for process in "${poolers[@]}" "$server"; do
        kill -INT "$process" 2>/dev/null && wait "$process" || true
    done
    rm -rf "$place"
}
(cd "$place" && "${as_owner[@]}" "$programs/initdb" -D "$place/data" -U axed -A trust -E UTF8 --locale=C.UTF-8 -N >/dev/null)
cd "$place"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem 2>/dev/null
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
    -addext basicConstraints=critical,CA:FALSE -CA ca.pem -CAkey ca.key -keyout server.key -out server.pem 2>/dev/null
chmod 644 ca.pem server.pem
[ ${#as_owner[@]} = 0 ] || chown postgres server.key
sync=${AXED_TEST_POSTGRES_SYNC:-off}
free_port() { python3 -c 'import socket; it = socket.create_server(("127.0.0.1", 0)); print(it.getsockname()[1])'; }
port=$(free_port)
"${as_owner[@]}" "$programs/postgres" -D "$place/data" -k "$place" -c listen_addresses=127.0.0.1 -p "$port" -c fsync="$sync" \
    -c ssl=on -c ssl_cert_file="$place/server.pem" -c ssl_key_file="$place/server.key" \
    -c full_page_writes="$sync" -c synchronous_commit="$sync" -c max_connections=500 -c max_wal_size=4GB >"$place/log" 2>&1 &
server=$!
poolers=()
trap stop EXIT
cd "$OLDPWD"
until "$programs/pg_isready" -q -h "$place" -p "$port" -d postgres -U axed; do
    kill -0 "$server" || { cat "$place/log"; exit 1; }
    sleep 0.1
done
export AXED_TEST_POSTGRES="postgres://axed@/postgres?host=$place&port=$port"
export AXED_TEST_POSTGRES_TLS="postgres://axed@localhost:$port/?sslrootcert=$place/ca.pem"

# Starts a pooler with these settings; its port is in `pooler_port`.
start_pooler() {
    pooler_port=$(free_port)
    local config="$place/pooler-$pooler_port.ini"
    cat >"$config" <<INI
[databases]
* = host=$place port=$port user=axed
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $pooler_port
unix_socket_dir =
auth_type = any
ignore_startup_parameters = options
max_client_conn = 1000
default_pool_size = 50
$1
INI
    "${as_owner[@]}" pgbouncer -q "$config" >"$config.log" 2>&1 &
    poolers+=($!)
    until python3 -c "import socket; socket.create_connection(('127.0.0.1', $pooler_port))" 2>/dev/null; do
        kill -0 "${poolers[-1]}" || { cat "$config.log"; exit 1; }
        sleep 0.1
    done
}

if command -v pgbouncer >/dev/null; then
    version=$(pgbouncer --version | sed -n 's/^PgBouncer //p')
    keeping='pool_mode = session' lossy='pool_mode = transaction'
    if [ "$(printf '%s\n' 1.21 "$version" | sort -V | head -1)" = 1.21 ]; then
        keeping='pool_mode = transaction
max_prepared_statements = 500' lossy="$lossy
max_prepared_statements = 0"
    fi
    start_pooler "$keeping"
    export AXED_TEST_POOLER="postgres://axed@127.0.0.1:$pooler_port"
    start_pooler "$lossy"
    export AXED_TEST_LOSSY_POOLER="postgres://axed@127.0.0.1:$pooler_port"
elif [ "${CI-}" = true ]; then
    echo "postgres.sh: pgbouncer is missing; install PgBouncer"
    exit 1
else
    echo "postgres.sh: pgbouncer is missing; the stories of poolers are skipped"
fi

if [ "${1-}" = --server ]; then
    shift
    "$@"
else
    cargo test --locked --test it -- "$@"
fi
