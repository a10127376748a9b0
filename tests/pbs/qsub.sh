#!/usr/bin/env bash
# qsub, for a job that submits another: it keeps the script and the options, and answers with the next number.
set -euo pipefail
next=$((${PBS_JOBID%%.*} + 1))
cp "${@: -1}" "$STAND_IN/jobs/$next.again"
printf '%s\0' "${@:1:$#-1}" >"$STAND_IN/jobs/$next.options"
echo "$next.server"
