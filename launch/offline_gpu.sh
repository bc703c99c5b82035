#!/usr/bin/env bash
# Wheels for a machine that has a GPU but no network: docs/gpu.md, "The first
# half hour".
#
#   launch/offline_gpu.sh [FOLDER]      .whl by default
#
# They are what gspo_jax needs beside JAX for CUDA from 0.11.1 on, flax, optax,
# orbax-checkpoint, sentencepiece and transformers, on Linux x86-64 with Python
# 3.12. What the profiler xprof asks for beyond fire and gviz-api is left out:
# tokamax imports xprof, and uses none of it here.
set -euo pipefail

packages=(
  # setup.cfg asks for the first line; the others are needed by it.
  clu cloudpickle grain ml-collections tensorboardX 'tokamax==0.0.14'
  array-record portpicker
  einshape immutabledict qwix 'typeguard==2.13.3'
  xprof fire gviz-api termcolor
)
folder=${1:-.whl}
platforms=()
for glibc in 2_28 2_27 2_24 2_17; do
  platforms+=("--platform=manylinux_${glibc}_x86_64")
done
download() {
  python3 -m pip download --quiet --only-binary=:all: --dest="$folder" \
    --implementation=cp --python-version=3.12 "${platforms[@]}" "$@"
}

rm -f "$folder"/*.whl # pip installs no package in two versions
download --no-deps "${packages[@]}"
download pydantic # with its needs, of one exact version each
du -h -s "$folder"
