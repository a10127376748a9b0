#!/usr/bin/env bash
# What is installed in every image, once for all: the recipes for Apptainer, the Dockerfile and the tests run this, as root, in the
# image. Around it, in /opt/workshop, lie requirements.lock, pyproject.toml, README.md and the package workshop.
#   install.sh cuda      torch with the CUDA libraries that its wheels bring along, in a venv
#   install.sh rocm      everything but torch, into the Python of an image that has a torch for ROCm
#   install.sh jax       as cuda, and JAX for CUDA
set -euo pipefail
image=${1:-}
case $image in
    cuda | rocm | jax) ;;
    *) echo "install.sh: say which image: cuda, rocm or jax" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The entries of the lock but those for packages whose names fit: a line with name and version, and below it its hashes.
entries_without() { awk -v names="^($1)==" '/^[a-z]/ { keep = $0 !~ names } keep' requirements.lock; }
case $image in
    cuda) cat requirements.lock ;;
    rocm) entries_without 'torch|torchvision|triton|nvidia-.*|cuda-.*' ;;
    jax) cat requirements.lock containers/jax-cuda.lock ;;
esac >image.lock

apt-get update --quiet
apt-get install --yes --quiet --no-install-recommends g++ # DeepSpeed compiles a part of itself when it trains on CPUs
rm -rf /var/lib/apt/lists/*

if [ "$image" = rocm ]; then
    python=$(command -v python3)
    chosen=(--no-deps) # the lock is complete without pip's help, which would bring a second torch
else
    python3 -m venv venv
    python=venv/bin/python
    chosen=()
fi
"$python" -m pip install --no-cache-dir --require-hashes "${chosen[@]}" -r image.lock
"$python" -m pip install --no-cache-dir --no-deps --no-build-isolation .
