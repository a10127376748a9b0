# shellcheck shell=bash
# Sourced by the runners (exerciseK_run_*.sh): finds the workshop's Python, as $PYTHON.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${WORKSHOP_PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then
    PYTHON=$root/.venv/bin/python                         # the environment that ./workshop.sh made
    unset PYTHONPATH PYTHONHOME                           # (a site's modules set these, and would break it)
else
    PYTHON=${WORKSHOP_PYTHON:-python3}                    # or the one that you named, or the one that is active
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}    # where "workshop" may not be installed
fi
export PYTHON
