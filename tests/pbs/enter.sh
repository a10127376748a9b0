#!/usr/bin/env bash
# Start a command on another node of the practice cluster, for mpiexec:  enter.sh NODE COMMAND...
# In place of PBS's daemon there: like that, it gives the command none of the job script's variables, and starts it in $HOME.
set -euo pipefail
if [[ $1 == -x ]]; then shift; fi # MPICH takes this for ssh
# The nodes share the cores of this machine: a thread that waits must not take one (OMP_WAIT_POLICY).
exec nsenter --target="$(cat "$STAND_IN/nodes/$1")" --mount --net --uts --pid --ipc \
    env --ignore-environment --chdir="$HOME" HOME="$HOME" USER="$USER" PATH=/usr/bin:/bin OMP_WAIT_POLICY=passive \
    bash -c "${*:2}"
