#!/usr/bin/env bash
# Gradescope runs this script once, when it builds the image of the autograder. Replace ADDRESS with the address of your copy of
# the course, and VERSION with one of its tags. The course needs Python 3.11 or newer, which Ubuntu 24.04 has.
set -euo pipefail
root=${AUTOGRADER_ROOT:-/autograder}

apt-get update
apt-get install -y git python3 python3-venv
git clone --quiet --depth 1 --branch VERSION ADDRESS "$root/source/course"
export WORKSHOP_TORCH=cpu WORKSHOP_TORCH_INDEX=https://download.pytorch.org/whl/cpu
"$root/source/course/workshop.sh" progress # the first command creates the Python environment
