#!/bin/sh
# Install clients of other APIs for tests/clients: requirements/install-clients.sh ENVIRONMENT
#
# Every file must have a hash that clients.txt or cookbook.txt names. Only torch comes from elsewhere, as in install.sh:
# a build for a CPU, from TORCH_INDEX_URL, or from a folder that pip is told of (find-links).
set -eu
pip() {
	"$environment/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-cache-dir
}
environment=$1
pip install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch==2.13.0
pip install --no-deps --require-hashes -r "$(dirname "$0")/clients.txt" -r "$(dirname "$0")/cookbook.txt"
