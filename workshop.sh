#!/usr/bin/env bash
# The way into the workshop. On first use it makes an environment in .venv (with uv where present, else venv and pip), from
# requirements.lock, or in a folder of "workshop pack" from the wheels there, without network; then it hands over to the
# command "workshop".
#
#   ./workshop.sh                    what there is
#   ./workshop.sh tour               train every stage on this machine and compare
#   WORKSHOP_PYTHON=/path/to/python ./workshop.sh tour      use an environment that exists: a module, conda, a container
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
venv=$root/.venv

say() { echo "workshop.sh: $*" >&2; }
die() { say "$*"; exit 2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

use_existing() {
    command -v "$WORKSHOP_PYTHON" >/dev/null || die "WORKSHOP_PYTHON=$WORKSHOP_PYTHON: there is no such program"
    is_new_enough "$WORKSHOP_PYTHON" || die "WORKSHOP_PYTHON=$WORKSHOP_PYTHON: Python 3.11 or newer is needed"
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    local missing
    missing=$("$WORKSHOP_PYTHON" -c '
from importlib.util import find_spec
names = "torch torchvision numpy PIL sklearn tqdm click rich matplotlib psutil requests"
print(*[name for name in names.split() if find_spec(name) is None])')
    [ -z "$missing" ] || die "WORKSHOP_PYTHON=$WORKSHOP_PYTHON lacks: $missing (add them: $WORKSHOP_PYTHON -m pip install -e $root)"
    exec "$WORKSHOP_PYTHON" -P -m workshop "$@"
}

find_python() {
    local name
    for name in python3.13 python3.12 python3.14 python3.11 python3 python; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "Python 3.11 or newer is needed and not on PATH: install it (Debian, Ubuntu: apt install python3 python3-venv;" \
        "Fedora: dnf install python3; macOS: brew install python; a cluster: module load python), or set WORKSHOP_PYTHON"
}

# What the finished environment has to match: the lock, and the place (a venv cannot be moved).
wanted() {
    echo "$root"
    cksum <"$root/requirements.lock"
}

is_complete() { [ -x "$venv/bin/python" ] && [ "$(wanted)" = "$(cat "$venv/complete" 2>/dev/null)" ]; }

make_environment() {
    # Anew each time: what an interrupted install or an older lock left behind cannot be trusted.
    rm -rf "$venv"
    if [ -f "$root/pack.json" ] || [ -d "$root/wheels" ]; then
        "$python" -I "$root/workshop/ship/unpack.py" "$root" || exit # it has said why
    elif command -v uv >/dev/null; then
        say "making the environment in .venv with uv (once; about 6 GB)"
        uv venv --quiet --no-project --python "$python" "$venv" &&
            uv pip install --quiet --python "$venv/bin/python" --compile-bytecode --require-hashes -r "$root/requirements.lock" &&
            uv pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e "$root"
    else
        say "making the environment in .venv with pip (once; about 6 GB, several minutes)"
        "$python" -m venv "$venv" || die "$python cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$root/requirements.lock" &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e "$root"
    fi && wanted >"$venv/complete"
}

# A copy that an Open OnDemand session made of a shared workshop uses the shared environment.
if [ -z "${WORKSHOP_PYTHON:-}" ] && [ -r "$root/.workshop_origin" ]; then
    read -r WORKSHOP_PYTHON <"$root/.workshop_origin"
    export WORKSHOP_PYTHON
fi
[ -z "${WORKSHOP_PYTHON:-}" ] || use_existing "$@"

unset PYTHONPATH PYTHONHOME # a site's modules set these, and would put other versions before those of .venv
if ! is_complete; then
    python=$(find_python)
    [ -w "$root" ] || die "cannot write to $root, where the environment .venv has to be made"
    # One at a time, also from two machines that share this folder. The lock is the open file's: it goes when its holder dies,
    # and outlives this script only in an installer that still runs. (flock(1) is not everywhere; Python is.)
    exec 9>"$root/.venv.lock"
    if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "somebody else is making the environment; waiting for them"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null ||
            say "this file system has no file locks: do not start two at once before the first is ready"
    fi
    if ! is_complete; then
        make_environment || die "the environment could not be made, the reason is above; started again, it is made anew"
    fi
    exec 9>&-
fi
# -P: a folder "workshop" or a file "torch.py" where the learner stands must not be taken for ours.
exec "$venv/bin/python" -P -m workshop "$@"
