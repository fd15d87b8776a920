#!/usr/bin/env bash
# Checks what is in deploy/, each file by its own tool: nginx -t, caddy validate, systemd-analyze, the schemas of Kubernetes and
# of Compose, promtool, and the Debian package by building and unpacking it. Needs a binary of axed as its argument, a Python with venv, and
# on Debian root for the tools that are missing. What has no tool here is named at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
axed=$(realpath "${1:-target/debug/axed}")
export PATH=$PATH:/usr/sbin:/sbin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skipped=()
check() { echo "deploy: $*"; }
has() { command -v "$1" >/dev/null || { skipped+=("$2 ($1 is missing)"); return 1; }; }

tools=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/deploy-tools
if ! [ -x "$tools/bin/check-jsonschema" ]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install -q --disable-pip-version-check kubernetes-validate==1.37.0 check-jsonschema==0.39.0
fi

check "Compose"
"$tools/bin/check-jsonschema" --quiet --builtin-schema vendor.compose-spec docker-compose.yml \
  deploy/cluster/docker-compose.yml

check "Kubernetes"
# The oldest and the newest version with all that the manifests use.
for version in 1.27 1.34; do
  for file in deploy/kubernetes/*.yaml deploy/cluster/kubernetes/postgres.yaml; do
    [ "${file##*/}" = kustomization.yaml ] ||
      "$tools/bin/kubernetes-validate" --quiet --strict --kubernetes-version "$version" "$file"
  done
done
if has kubectl "kubectl kustomize"; then
  # What is applied is valid too, with the patches of three nodes.
  for folder in deploy/kubernetes deploy/cluster/kubernetes; do
    kubectl kustomize "$folder" >"$work/rendered.yaml"
    "$tools/bin/kubernetes-validate" --quiet --strict --kubernetes-version 1.34 "$work/rendered.yaml"
  done
  grep -q '^  replicas: 3$' "$work/rendered.yaml"
  grep -q 'name: AXED_DATA__URL_FILE' "$work/rendered.yaml"
fi
"$tools/bin/python" tests/deploy_files.py kubernetes "$axed" "$work"

check "Traefik"
"$tools/bin/python" tests/deploy_files.py traefik
skipped+=("Traefik's own check: names and addresses only")

if has nginx "nginx -t"; then
  check "nginx"
  sed 's/axed:8080/127.0.0.1:8080/' deploy/nginx.conf >"$work/server.conf"
  sed 's/axed-[123]:8080/127.0.0.1:8080/; s/listen 80;/listen 81;/' deploy/cluster/nginx.conf >>"$work/server.conf"
  printf 'pid %s/nginx.pid; error_log stderr; events {} http { access_log off; include %s/server.conf; }\n' \
    "$work" "$work" >"$work/nginx.conf"
  nginx -q -t -c "$work/nginx.conf"
fi

if has caddy "caddy validate"; then
  check "Caddy"
  caddy fmt deploy/Caddyfile | diff - deploy/Caddyfile
  HOME=$work caddy validate --config deploy/Caddyfile --adapter caddyfile >"$work/caddy.log" 2>&1 || {
    cat "$work/caddy.log"
    exit 1
  }
fi

check "Debian package and archive"
strip -o "$work/axed" "$axed"
DEB_COMPRESSION=gzip deploy/release.sh --allow-dirty --target x86_64-unknown-linux-musl --binary "$work/axed" \
  --out "$work/out" >"$work/release.log" 2>&1 || {
  cat "$work/release.log"
  exit 1
}
(cd "$work/out" && sha256sum --quiet --check SHA256SUMS)
package=("$work"/out/*.deb)
dpkg-deb --extract "${package[0]}" "$work/installed"
dpkg-deb --control "${package[0]}" "$work/control"
(cd "$work/installed" && md5sum --quiet --check ../control/md5sums)
for file in bash-completion/completions/axed zsh/vendor-completions/_axed fish/vendor_completions.d/axed.fish \
  man/man1/axed.1.gz man/man1/axed-serve.1.gz; do
  [ -s "$work/installed/usr/share/$file" ]
done
# The documents are there to be read, their links lead somewhere, and the unit and the configuration name some of them.
"$tools/bin/python" tests/deploy_files.py documents "$work/installed"
for script in postinst prerm postrm; do
  [ -x "$work/control/$script" ]
  sh -n "$work/control/$script"
done
# As the service starts it, but for the directories.
sed -i "s|\"/etc/axed|\"$work/installed/etc/axed|; s|\"/var/lib/axed/data\"|\"$work/data\"|" "$work/installed/etc/axed/axed.toml"
"$work/installed/usr/bin/axed" openapi --config "$work/installed/etc/axed/axed.toml" >"$work/openapi.json"
"$work/installed/usr/bin/axed" agents list --config "$work/installed/etc/axed/axed.toml" | grep -q writer
# Without a flag, where nothing else is configured.
if unshare --mount --map-root-user true 2>/dev/null; then
  mkdir "$work/elsewhere"
  (cd "$work/elsewhere" && unshare --mount --map-root-user sh -c \
    "mount --bind '$work/installed/etc' /etc && exec '$work/installed/usr/bin/axed' agents list") | grep -q writer
else
  skipped+=("/etc/axed without --config (a mount namespace is not allowed)")
fi
mkdir "$work/archive"
tar --extract --gzip --file "$work"/out/*.tar.gz --directory "$work/archive" --strip-components 1
(cd "$work/archive" && ./axed demo >/dev/null)
"$tools/bin/python" tests/deploy_files.py sbom "$work"/out/*.cdx.json

if ! command -v promtool >/dev/null && ! [ -x "$tools/bin/promtool" ] && command -v apt-get >/dev/null; then
  # Of the package only the program: its service is not wanted.
  (cd "$work" && apt-get download -q prometheus >/dev/null 2>&1 &&
    dpkg-deb --fsys-tarfile prometheus_*.deb | tar --extract ./usr/bin/promtool &&
    mv usr/bin/promtool "$tools/bin/") || true
fi
PATH=$PATH:$tools/bin
if has promtool "promtool test rules"; then
  check "alerts"
  promtool check rules deploy/alerts.yml >/dev/null
  promtool test rules tests/alerts.yml >"$work/alerts.log" 2>&1 || {
    cat "$work/alerts.log"
    exit 1
  }
  "$tools/bin/python" tests/deploy_files.py alerts
fi

if has systemd-analyze "systemd-analyze verify"; then
  check "systemd"
  sed "s|/usr/bin/axed|$axed|" deploy/systemd/axed.service >"$work/axed.service"
  # Before version 254 systemd ignores this key with a warning.
  [ "$(systemd-analyze --version | awk 'NR == 1 { print $2 }')" -ge 254 ] || sed -i '/^DelegateSubgroup=/d' "$work/axed.service"
  systemd-analyze verify --man=no --recursive-errors=no "$work/axed.service"
  # 0 is best, 100 is worst; without the hardening it is above 90. Commands need namespaces and control groups: 21.
  systemd-analyze security --offline=yes --threshold=21 --no-pager "$work/axed.service" >"$work/security.log" || {
    cat "$work/security.log"
    exit 1
  }
fi

for one in "${skipped[@]}"; do echo "deploy: SKIPPED $one"; done
echo "deploy: all other checks passed"
