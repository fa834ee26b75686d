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
pip() {
	"$bin/python" -m pip "$@"
}
own_torch=
if [ -n "${TORCH_INDEX_URL:-}" ] || pip config list | grep find-links >/dev/null; then
	own_torch=yes
fi
"$uv" export --quiet --frozen --no-emit-project "$@" ${own_torch:+--prune torch} -o "$work/hashed.txt"
pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes -r "$work/hashed.txt"
if [ -n "$own_torch" ]; then
	"$uv" export --quiet --frozen --no-emit-project --no-hashes "$@" -o "$work/versions.txt"
	if grep -q '^torch==' "$work/versions.txt"; then
		pip install --quiet --disable-pip-version-check --no-cache-dir \
			${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -c "$work/versions.txt" torch
	fi
fi
