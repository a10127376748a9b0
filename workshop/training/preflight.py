"""Check the options of a script before a runner launches it: ``python -m workshop.training.preflight SCRIPT [OPTION ...]``.

This prints the number of processes to start: ``$NPROC`` if set, else the number of accelerators, else 2 (on the CPU). It runs
the script up to the check of its options, as rank 0 of these processes. A mistake ends it with one line and exit status 2.
"""

import contextlib
import os
import runpy
import sys

from workshop.run.machine import gpus
from workshop.training.arguments import PREFLIGHT, ArgumentParser, positive_int


def default_nproc() -> int:
    """Return the number of processes to start on this machine: one per accelerator, or 2 on the CPU."""
    count = gpus()
    if count == 1:
        print("1 GPU: starting one process; set NPROC=2 to train with two processes on the CPU", file=sys.stderr)
    return count or 2


def main() -> None:
    script, *options = sys.argv[1:]
    parser = ArgumentParser(prog=os.path.basename(script))
    try:
        nproc = positive_int(os.environ["NPROC"]) if "NPROC" in os.environ else default_nproc()
    except Exception as error:
        parser.error(f"NPROC: {error}")
    os.environ.update(
        {PREFLIGHT: "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    )
    sys.argv = [script, *options]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # where Python looks first when it starts a script
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the runner expects only a number on standard output
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, None):
            raise
    print(nproc)


if __name__ == "__main__":
    main()
