#!/usr/bin/env bash
# Makes a release: for each target a static binary, an archive, a Debian package, an SBOM, and the checksums of all.
#
#   deploy/release.sh [--target TRIPLE]… [--binary FILE] [--out DIR] [--allow-dirty]
#
# Without --target: x86_64-unknown-linux-musl and aarch64-unknown-linux-musl. With --binary this file is packed for the one
# --target, and nothing is built. The same commit and the same compiler give the same bytes. docs/RELEASING.md describes it.
set -euo pipefail
cd "$(dirname "$0")/.."

targets=()
binary=
out=target/release-files
is_dirty_allowed=
while [ $# -gt 0 ]; do
  case "$1" in
  --target) targets+=("$2"); shift 2 ;;
  --binary) binary=$2; shift 2 ;;
  --out) out=$2; shift 2 ;;
  --allow-dirty) is_dirty_allowed=yes; shift ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
[ ${#targets[@]} -gt 0 ] || targets=(x86_64-unknown-linux-musl aarch64-unknown-linux-musl)
if [ -n "$binary" ] && [ ${#targets[@]} != 1 ]; then
  echo "release: --binary needs one --target, which the binary was built for" >&2
  exit 2
fi
if [ -z "$is_dirty_allowed" ] && [ -n "$(git status --porcelain)" ]; then
  echo "release: there are uncommitted changes; commit them, or pass --allow-dirty for a trial" >&2
  exit 1
fi

# Of the Debian package.
maintainer=${DEB_MAINTAINER:-The axed developers <axed@localhost>}
compression=${DEB_COMPRESSION:-xz}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf '\n=== %s\n' "$*"; }

# zig is the C compiler and the linker for every target, so that no cross compiler has to be installed.
install_zigbuild() {
  tools=${XDG_CACHE_HOME:-$HOME/.cache}/axed-ci/zigbuild
  PATH=$tools/bin:$PATH
  command -v cargo-zigbuild >/dev/null && return
  python3 -m venv "$tools"
  "$tools/bin/pip" install -q --disable-pip-version-check --require-hashes -r /dev/stdin <<'REQ'
cargo-zigbuild==0.24.0 --hash=sha256:484412e39e4c6039474535ce97ee75a22bab22d58233056f8ec8a8f9034bb957
ziglang==0.17.1 --hash=sha256:ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54
REQ
}

# Prints nothing but the path of the binary on stdout.
build() {
  local target=$1 folder=${CARGO_TARGET_DIR:-target}
  rustup target add "$target" >&2
  # No path of this machine gets into the binary.
  RUSTFLAGS="--remap-path-prefix=$PWD=/axed --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo" \
    cargo zigbuild --release --locked --bin axed --target "$target" >&2
  echo "$folder/$target/release/axed"
}

# Files that are newer than the commit get its time.
normalize() {
  find "$1" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
  chmod -R u+rwX,go+rX,go-w "$1"
}

# Completions and man pages are written by the program itself. That of another architecture cannot run here: then by one that
# was built before.
write_help_files() {
  local program=$1 folder=$2
  "$program" --version >/dev/null 2>&1 || program=$runnable
  if [ -z "$program" ] || ! "$program" completions --help >/dev/null 2>&1; then
    echo "release: no binary here writes completions and man pages, so they are left out" >&2
    return
  fi
  runnable=$program
  mkdir -p "$folder/completions"
  "$program" completions bash >"$folder/completions/axed.bash"
  "$program" completions zsh >"$folder/completions/_axed"
  "$program" completions fish >"$folder/completions/axed.fish"
  "$program" man "$folder/man" >/dev/null
}

# The documents, with what they link to, in the folders that they have in the sources.
copy_documents() {
  cp -r LICENSE README.md CHANGELOG.md CONTRIBUTING.md agents config docs "$1"
  git ls-files -z clients | xargs -0 cp --parents --target-directory "$1"
  mkdir "$1/deploy"
  cp -r deploy/nginx.conf deploy/Caddyfile deploy/traefik.yml deploy/alerts.yml deploy/systemd deploy/kubernetes deploy/cluster "$1/deploy"
}

write_archive() {
  local binary=$1 target=$2 name=axed-$version-$target
  local folder=$work/$name
  mkdir -p "$folder"
  install -m 755 "$binary" "$folder/axed"
  copy_documents "$folder"
  write_help_files "$folder/axed" "$folder"
  deploy/inventory.py licenses "$target" "$folder/THIRD-PARTY-LICENSES"
  normalize "$folder"
  tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --directory "$work" "$name" |
    gzip --no-name --best >"$out/$name.tar.gz"
}

# The configuration of the package: as shipped, but with the package's directories.
package_config() {
  sed -e 's|^#dirs = \["agents"\]|dirs = ["/etc/axed/agents"]|' \
    -e 's|^#dir = "data"|dir = "/var/lib/axed/data"|' \
    -e '/^# Scripted provider: /,/^scripts = /d' \
    -e 's|docs/\([A-Za-z/-]*\.md\)|/usr/share/doc/axed/docs/\1|' config/axed.toml
}

write_package() {
  local binary=$1 target=$2 architecture
  case "$target" in
  x86_64-*) architecture=amd64 ;;
  aarch64-*) architecture=arm64 ;;
  *) echo "release: $target has no Debian architecture, so it gets no package" >&2; return ;;
  esac
  local folder=$work/deb-$architecture archive=$work/axed-$version-$target
  local docs=$folder/usr/share/doc/axed
  mkdir -p "$folder/DEBIAN" "$folder/usr/bin" "$folder/usr/lib/systemd/system" "$folder/etc/axed/agents" "$docs"
  install -m 755 "$binary" "$folder/usr/bin/axed"
  cp deploy/systemd/axed.service "$folder/usr/lib/systemd/system/"
  package_config >"$folder/etc/axed/axed.toml"
  cp deploy/debian/environment "$folder/etc/axed/environment"
  cp agents/writer.toml "$folder/etc/axed/agents/"
  copy_documents "$docs"
  cp deploy/debian/copyright "$archive/THIRD-PARTY-LICENSES" "$docs/"
  printf 'axed (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' \
    "$version" "$maintainer" "$(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")" >"$docs/changelog"
  gzip --no-name --best "$docs/THIRD-PARTY-LICENSES" "$docs/changelog"
  if [ -d "$archive/completions" ]; then
    install -D -m 644 "$archive/completions/axed.bash" "$folder/usr/share/bash-completion/completions/axed"
    install -D -m 644 "$archive/completions/_axed" "$folder/usr/share/zsh/vendor-completions/_axed"
    install -D -m 644 "$archive/completions/axed.fish" "$folder/usr/share/fish/vendor_completions.d/axed.fish"
    install -D -m 644 --target-directory "$folder/usr/share/man/man1" "$archive"/man/*.1
    gzip --no-name --best "$folder"/usr/share/man/man1/*.1
  fi
  install -m 755 deploy/debian/postinst deploy/debian/prerm deploy/debian/postrm "$folder/DEBIAN/"
  (cd "$folder" && find etc -type f | LC_ALL=C sort | sed 's|^|/|') >"$folder/DEBIAN/conffiles"
  normalize "$folder"
  (cd "$folder" && find usr etc -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum) >"$folder/DEBIAN/md5sums"
  sed -e "s|@VERSION@|$version|" -e "s|@ARCHITECTURE@|$architecture|" \
    -e "s|@MAINTAINER@|$maintainer|" \
    -e "s|@INSTALLED_SIZE@|$(du --summarize --apparent-size --block-size=1K "$folder" | cut -f1)|" \
    deploy/debian/control >"$folder/DEBIAN/control"
  normalize "$folder/DEBIAN"
  dpkg-deb --root-owner-group "-Z$compression" --build "$folder" "$out/axed_${version}_$architecture.deb" >/dev/null
}

[ -n "$binary" ] || install_zigbuild
runnable=
for target in "${targets[@]}"; do
  built=$binary
  if [ -z "$built" ]; then
    step "$target: binary"
    built=$(build "$target")
  fi
  step "$target: archive, package, SBOM"
  write_archive "$built" "$target"
  write_package "$built" "$target"
  deploy/inventory.py sbom "$target" "$out/axed-$version-$target.cdx.json"
done

cd "$out"
# Files of other versions may be in the directory.
find . -maxdepth 1 -type f \( -name "axed-$version-*" -o -name "axed_${version}_*.deb" \) -printf '%P\n' | LC_ALL=C sort | xargs sha256sum >SHA256SUMS
step "made"
ls -l "$out"
