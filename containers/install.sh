#!/usr/bin/env bash
# Install the packages of an image. The recipes for Apptainer, the Dockerfile and the tests run this script as root in the image,
# where /opt/workshop contains requirements.lock, pyproject.toml, README.md and the package workshop.
#   install.sh cuda      torch, with the CUDA libraries from its wheels, in a venv
#   install.sh rocm      everything except torch, into the Python of an image that has torch for ROCm
#   install.sh jax       like cuda, and JAX for CUDA
set -euo pipefail
image=${1:-}
case $image in
    cuda | rocm | jax) ;;
    *) echo "install.sh: name an image: cuda, rocm or jax" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Print the lock without the packages whose names match. An entry is a line with name and version, followed by its hashes.
entries_without() { awk -v names="^($1)==" '/^[a-z]/ { keep = $0 !~ names } keep' requirements.lock; }
case $image in
    cuda) cat requirements.lock ;;
    rocm) entries_without 'torch|torchvision|triton|nvidia-.*|cuda-.*' ;;
    jax) cat requirements.lock containers/jax-cuda.lock ;;
esac >image.lock

apt-get update --quiet
apt-get install --yes --quiet --no-install-recommends g++ # DeepSpeed compiles an extension when it trains on CPUs
rm -rf /var/lib/apt/lists/*

if [ "$image" = rocm ]; then
    python=$(command -v python3)
    chosen=(--no-deps) # pip would install a second torch as a dependency; the lock lists all other packages
else
    python3 -m venv venv
    python=venv/bin/python
    chosen=()
fi
"$python" -m pip install --no-cache-dir --require-hashes "${chosen[@]}" -r image.lock
"$python" -m pip install --no-cache-dir --no-deps --no-build-isolation .
