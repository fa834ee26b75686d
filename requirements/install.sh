#!/bin/sh
# Install what uv.lock names for some extras: requirements/install.sh ENVIRONMENT [EXTRA...]
#
# ENVIRONMENT is a virtual environment that has uv (requirements/build.txt) in the folder that UV_BIN
# names, or in its own. Every file must have a hash that the lock names, or nothing is installed. Only
# torch may come from elsewhere: a build for this machine, from TORCH_INDEX_URL or from a folder that
# pip is told of (find-links), is taken by its version.
set -eu
bin=$1/bin
shift
uv=${UV_BIN:-$bin}/uv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for extra in "$@"; do
	set -- "$@" --extra "$extra"
	shift
done

# uv installs four times as fast as pip and reads none of pip's settings, so that it is told where pip looks.
"$bin/python" -m pip config list >"$work/settings.txt"
setting() {
	sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" "$work/settings.txt" | tail -n 1 | sed 's/\\n/ /g'
}
sources=
for url in $(setting index-url); do sources="$sources --default-index $url"; done
for url in $(setting extra-index-url); do sources="$sources --index $url"; done
for place in $(setting find-links); do sources="$sources --find-links $place"; done
certificates=$(setting cert)
[ -z "$certificates" ] || export SSL_CERT_FILE="$certificates"
install() {
	# Unquoted: each source is a word.
	"$uv" pip install --quiet --no-config --no-cache --python "$bin/python" \
		--index-strategy unsafe-best-match $sources "$@"
}

own_torch=
if [ -n "${TORCH_INDEX_URL:-}" ] || [ -n "$(setting find-links)" ]; then
	own_torch=yes
fi
"$uv" export --quiet --frozen --no-emit-project "$@" ${own_torch:+--prune torch} -o "$work/hashed.txt"
install --no-deps --require-hashes -r "$work/hashed.txt"
if [ -n "$own_torch" ]; then
	"$uv" export --quiet --frozen --no-emit-project --no-hashes "$@" -o "$work/versions.txt"
	if grep -q '^torch==' "$work/versions.txt"; then
		install ${TORCH_INDEX_URL:+--index "$TORCH_INDEX_URL"} -c "$work/versions.txt" torch
	fi
fi
