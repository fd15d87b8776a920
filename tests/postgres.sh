#!/usr/bin/env bash
# Runs the stories of tests/it on PostgreSQL: a server of its own on a unix socket, in a temporary directory, without syncs
# (AXED_TEST_POSTGRES_SYNC=on); also with TLS on localhost, with a certificate of an authority of its own.
# Installs Debian's PostgreSQL if it is missing (root only). The arguments are those of the test binary: filters, --exact …;
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

programs=$(find_programs)
if [ -z "$programs" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    # Without the cluster that the package would make and start.
    mkdir -p /etc/postgresql-common/createcluster.d
    echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.d/axed.conf
    install="apt-get install -y -q --no-install-recommends postgresql"
    { $install || { apt-get update -q && $install; }; } >/dev/null
    programs=$(find_programs)
fi
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
    kill -INT "$server" 2>/dev/null && wait "$server" || true
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
port=$(python3 -c 'import socket; it = socket.create_server(("127.0.0.1", 0)); print(it.getsockname()[1])')
"${as_owner[@]}" "$programs/postgres" -D "$place/data" -k "$place" -c listen_addresses=127.0.0.1 -p "$port" -c fsync="$sync" \
    -c ssl=on -c ssl_cert_file="$place/server.pem" -c ssl_key_file="$place/server.key" \
    -c full_page_writes="$sync" -c synchronous_commit="$sync" -c max_connections=500 -c max_wal_size=4GB >"$place/log" 2>&1 &
server=$!
trap stop EXIT
cd "$OLDPWD"
until "$programs/pg_isready" -q -h "$place" -p "$port" -d postgres -U axed; do
    kill -0 "$server" || { cat "$place/log"; exit 1; }
    sleep 0.1
done
export AXED_TEST_POSTGRES="postgres://axed@/postgres?host=$place&port=$port"
export AXED_TEST_POSTGRES_TLS="postgres://axed@localhost:$port/?sslrootcert=$place/ca.pem"

if [ "${1-}" = --server ]; then
    shift
    "$@"
else
    cargo test --locked --test it -- "$@"
fi
