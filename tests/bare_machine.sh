#!/usr/bin/env bash
# bare_machine.sh FOLDER: put links to the programs of a bare Debian into FOLDER: its essential packages, Python and git. With FOLDER
# as the PATH, a machine that has more installed stands for a bare one. (/usr/sbin stays where the practice cluster looks for daemons.)
set -euo pipefail
folder=$1
mkdir -p "$folder"
{
    dpkg-query --show --showformat '${Essential} ${Package}\n' | sed -n 's/^yes //p'
    echo mawk # base-files, an essential package, depends on it
} | xargs dpkg --listfiles | grep -E '^(/usr)?/s?bin/[^/]+$' | xargs -I '{}' ln -sf '{}' "$folder/"
ln -sf mawk "$folder/awk"
ln -sf "$(command -v git)" "$folder/git"
# No link: an environment made from it would need FOLDER for ever.
python=$(python3 -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
printf '#!/bin/sh\nexec %s "$@"\n' "$python" >"$folder/python3"
chmod +x "$folder/python3"
