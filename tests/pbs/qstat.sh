#!/usr/bin/env bash
# qstat -f -F dsv JOB, as OpenPBS writes it, for a job that asks about itself.
set -euo pipefail
[[ $1 == -f && $2 == -F && $3 == dsv ]]
cat "$STAND_IN/jobs/$4.dsv"
