#!/usr/bin/env bash
# The command of the workshop. On first use it creates the Python environment .venv: from requirements.lock with uv, or, in a
# folder of "workshop pack", from the wheels in that folder and without a network. Then it starts the command "workshop".
#
#   ./workshop.sh                    list the commands
#   ./workshop.sh tour               train stages 01 to 04 and all strategies on this machine, and compare
#   ./workshop.sh test               run the tests on this machine
#
#   WORKSHOP_TORCH=cpu ./workshop.sh tour       create the environment without CUDA, for a machine without an NVIDIA GPU
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
    missing=$("$WORKSHOP_PYTHON" - "$root/pyproject.toml" "${1:-}" <<'PY'
import re
import sys
import tomllib
from importlib.util import find_spec

modules = {"pillow": "PIL", "scikit-learn": "sklearn"}  # packages whose module has a different name
with open(sys.argv[1], "rb") as file:
    lines = tomllib.load(file)["project"]["dependencies"]
names = [re.match(r"[\w-]+", line)[0] for line in lines if not line.startswith("py-spy")]  # a program without a module
if sys.argv[2] == "gpu-day":  # it reports what the other packages prevent
    names = ["torch", "torchvision", "numpy", "pillow", "scikit-learn", "tqdm", "click", "rich", "psutil"]
print(*[name for name in names if find_spec(modules.get(name, name)) is None])
PY
    )
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

is_pack() { [ -f "$root/pack.json" ] || [ -d "$root/wheels" ]; }

# Choose the torch of the environment: "cpu" has no CUDA, "cuda" is the one in requirements.lock. The choice is stored in
# .venv.lock, so you make it only once.
choose_torch() {
    torch=${WORKSHOP_TORCH:-$(cat "$root/.venv.lock" 2>/dev/null || true)}
    case ${torch:=cuda} in
        cpu | cuda) ;;
        *) die "WORKSHOP_TORCH=$torch: choose cpu or cuda" ;;
    esac
    # A pack holds one kind of torch. The lock has CUDA for Linux only.
    if is_pack || [[ $OSTYPE != linux* ]]; then torch=cuda; fi
}

# What the complete environment must match: its path (a venv cannot be moved), the kind of torch, and the locks.
wanted() {
    echo "$root"
    echo "torch: $torch"
    cksum <"$root/requirements.lock"
    if [ "$torch" = cpu ]; then cksum <"$root/requirements-cpu.lock"; fi
}

is_complete() { [ -x "$venv/bin/python" ] && [ "$(wanted)" = "$(cat "$venv/complete" 2>/dev/null)" ]; }

# The entries of requirements.lock whose names match the pattern, with their hashes; with "!" before it, all others.
entries() {
    awk -v names="^(${1#!})==" -v others="${1%%[^!]*}" \
        '/^[a-z]/ { keep = ($0 ~ names) != (others == "!") } /^#/ { next } keep' "$root/requirements.lock"
}

# draw_bar WHAT BYTES: draw a bar while the installer, the other child of this shell, runs. Linux counts the bytes that a process
# writes; BYTES is what the installer and its own children usually write in all.
draw_bar() {
    local start=$SECONDS family child key value written percent filled
    while kill -0 $$ 2>/dev/null; do
        written=0
        family=$(cat /proc/$$/task/$$/children 2>/dev/null || true)
        for child in $family; do family+=" $(cat "/proc/$child/task/$child/children" 2>/dev/null || true)"; done
        for child in $family; do
            while read -r key value; do
                if [ "$key" = wchar: ]; then written=$((written + value)); fi
            done 2>/dev/null <"/proc/$child/io" || true
        done
        percent=$((written * 100 / $2))
        if ((percent > 99)); then percent=99; fi
        printf -v filled '%*s' $((percent * 40 / 100)) ''
        printf '\r[%-40s] %2d %%  %s, %d s ' "${filled// /#}" "$percent" "$1" $((SECONDS - start)) >&2
        sleep 0.3
    done
}

# quietly WHAT BYTES COMMAND...: run an installer, and print its output only if it fails. A terminal shows a bar.
quietly() {
    local what=$1 bytes=$2 output status=0 bar=
    shift 2
    if [ -t 2 ]; then
        draw_bar "$what" "$bytes" 9>&- &
        bar=$!
        trap 'kill "$bar" 2>/dev/null; echo >&2; exit 130' INT # Ctrl-C does not reach background processes
    fi
    output=$(exec "$@" 2>&1) || status=$?
    if [ -n "$bar" ]; then
        kill "$bar" 2>/dev/null || true
        wait "$bar" 2>/dev/null || true
        trap - INT
        printf '\r\033[K' >&2
    fi
    [ "$status" = 0 ] || echo "$output" >&2
    return "$status"
}

# uv does not read pip's settings. They may name the only index that this machine can reach: a mirror, a folder of wheels.
give_uv_the_settings_of_pip() {
    local name value
    while IFS='=' read -r name value; do
        if [ -n "$name" ] && [ -z "${!name:-}" ]; then export "$name=$value"; fi
    done < <("$venv/bin/python" - <<'PY'
import ast
import subprocess
import sys

NAMES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
pairs = [line.split("=", 1) for line in listed.splitlines() if "=" in line]
sections = ["global.", "install.", ":env:."]  # later ones override earlier ones
for section in sections:
    for key, value in pairs:
        if key.startswith(section) and (name := NAMES.get(key.removeprefix(section))):
            words = ast.literal_eval(value).split()
            print(f"{name}={(',' if name == 'UV_FIND_LINKS' else ' ').join(words)}")
PY
    )
    # pip takes the best version from all indexes. uv by default takes versions only from the first index that has the package.
    if [ -n "${UV_INDEX:-}" ] && [ -z "${UV_INDEX_STRATEGY:-}" ]; then export UV_INDEX_STRATEGY=unsafe-best-match; fi
}

# install BYTES ARGUMENTS...: "pip install" with uv if available, else with pip, which writes each wheel before it unpacks it.
install() {
    local bytes=$1
    shift
    if [ -n "$uv" ]; then
        quietly packages "$bytes" "$uv" pip install --quiet --python "$venv/bin/python" "$@"
    else
        quietly packages $((bytes * 3 / 2)) "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
    fi
}

install_everything() {
    local source=() index=${WORKSHOP_TORCH_INDEX:-}
    if [ "$torch" = cpu ]; then
        if [ -d "$index" ]; then
            source=(--no-index --find-links "$index")
        elif [ -n "$index" ]; then
            source=(--index-url "$index")
        fi
        install 700000000 --no-deps "${source[@]+"${source[@]}"}" -r "$root/requirements-cpu.lock" || {
            say "WORKSHOP_TORCH=cpu: the wheels of requirements-cpu.lock are not available. Set WORKSHOP_TORCH_INDEX to" \
                "an index or a folder that has them, or use the wheels with CUDA: WORKSHOP_TORCH=cuda ./workshop.sh"
            return 1
        }
        # The lock is complete, so nothing must be resolved; resolving would install the torch with CUDA.
        entries '!torch|torchvision|triton|nvidia-.*|cuda-.*' >"$venv/requirements.txt"
        install 1300000000 --no-deps --require-hashes -r "$venv/requirements.txt" || return
    else
        install 6800000000 --require-hashes -r "$root/requirements.lock" || return
    fi
    install 1000000 --no-deps --no-build-isolation -e "$root" || return
    # pip compiles what it installs, uv does not. The folders left out here are seldom imported; Python compiles them then.
    [ -z "$uv" ] || quietly bytecode 270000000 "$venv/bin/python" -m compileall -q -j 0 \
        -x '/(tests?|testing|transformers/models)/' "$venv/lib" || true # a package may contain a file for a different Python
}

# The help needs click only, so nobody has to install the environment to read it.
asks_for_help() { [ $# = 0 ] || [[ ${*: -1} =~ ^(-h|--help)$ && " $* " != *" -- "* ]]; }

show_help() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    entries click >"$scratch/click.txt"
    if "$python" -m venv "$scratch/venv" && "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-input --require-hashes -r "$scratch/click.txt"; then
        PYTHONPATH=$root PYTHONDONTWRITEBYTECODE=1 "$scratch/venv/bin/python" -P -m workshop "$@" >&3
    else
        sed -n '2,/^set /{s/^# \{0,1\}//p;}' "$root/workshop.sh" >&3
        echo "When the environment exists, --help lists all commands. README.md describes them." >&3
    fi
} 3>&1 >/dev/null 2>&1

make_environment() {
    local began=$SECONDS size="7 GB of disk" uv
    # Begin with an empty folder, because the remains of an interrupted install or of an older lock may be broken.
    rm -rf "$venv"
    if is_pack; then
        "$python" -I "$root/workshop/ship/unpack.py" "$root" || exit # it has printed the reason
        wanted >"$venv/complete"
        return
    fi
    if [ "$torch" = cpu ]; then size="2 GB of disk, without CUDA"; fi
    say "creating the environment in .venv (once; $size)"
    uv=$(command -v uv || true)
    if [ -n "$uv" ]; then
        quietly environment 1000000 "$uv" venv --quiet --no-project --python "$python" "$venv" && install_everything || return
    else
        "$python" -m venv "$venv" >/dev/null 2>&1 ||
            die "$python cannot create a virtual environment (Debian, Ubuntu: apt install python3-venv)"
        # uv installs several times faster than pip, and it is on the index.
        entries uv >"$venv/uv.txt"
        if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --require-hashes \
            -r "$venv/uv.txt" >/dev/null 2>&1 && [ -x "$venv/bin/uv" ]; then
            uv=$venv/bin/uv
            give_uv_the_settings_of_pip
            install_everything || {
                say "the installation with uv failed; trying pip, which takes several minutes"
                uv='' && install_everything || return
            }
        else
            say "uv is not available here; pip takes several minutes"
            install_everything || return
        fi
    fi
    wanted >"$venv/complete"
    say "the environment is ready after $((SECONDS - began)) s"
}

# A copy that an Open OnDemand session made of a shared workshop uses the shared environment.
if [ -z "${WORKSHOP_PYTHON:-}" ] && [ -r "$root/.workshop_origin" ]; then
    read -r WORKSHOP_PYTHON <"$root/.workshop_origin"
    export WORKSHOP_PYTHON
fi
[ -z "${WORKSHOP_PYTHON:-}" ] || use_existing "$@"

unset PYTHONPATH PYTHONHOME # environment modules set these, and their versions would come before those of .venv
choose_torch
if ! is_complete; then
    python=$(find_python)
    if asks_for_help "$@" && ! is_pack; then
        show_help "$@"
        exit
    fi
    [ -w "$root" ] || die "cannot write to $root, where the environment .venv must be created"
    # Only one at a time, also on two machines that share this folder. The lock belongs to the open file: it ends with this
    # script, or with an installer that still runs. (Not every system has flock(1), but each has Python.)
    exec 9>>"$root/.venv.lock"
    if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "another process is creating the environment; waiting for it"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null ||
            say "this file system has no file locks: do not start workshop.sh twice until the environment is ready"
    fi
    choose_torch # the process that we waited for may have chosen
    if ! is_complete; then
        echo "$torch" >"$root/.venv.lock"
        make_environment || die "the environment could not be created, for the reason above; start workshop.sh again to retry"
    fi
    exec 9>&-
fi
# -P: Python must not import a folder "workshop" or a file "torch.py" from the current folder of the learner.
exec "$venv/bin/python" -P -m workshop "$@"
