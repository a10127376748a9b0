#!/usr/bin/env bash
# Trains on one device; options are passed on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"      # sets $PYTHON

exec "$PYTHON" "$here/exercise1_waiting.py" "$@"
