# shellcheck shell=bash
# Sourced by the runners (exerciseK_run_*.sh): finds the workshop's Python, as $PYTHON.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${WORKSHOP_PYTHON:-}" ] && [ -e "$root/.venv/complete" ]; then
    PYTHON=$root/.venv/bin/python                         # the environment that ./workshop.sh made
    unset PYTHONPATH PYTHONHOME                           # (a site's modules set these, and would break it)
else
    PYTHON=${WORKSHOP_PYTHON:-python3}                    # or the one that you named, or the one that is active
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}    # where "workshop" may not be installed
    if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; then
        echo "$(basename "$0"): $PYTHON has no torch; make the environment first, with ./workshop.sh doctor" >&2
        exit 2
    fi
fi
export PYTHON
