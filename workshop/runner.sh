# shellcheck shell=bash
# Sourced by the runners (exerciseK_run_*.sh): finds the workshop's Python, as $PYTHON.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${WORKSHOP_PYTHON:-$root/.venv/bin/python}     # the environment that you named, or that ./workshop.sh made,
[ -x "$PYTHON" ] || PYTHON=python3                    # or the one that is active
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}    # finds the package "workshop" also where it is not installed
