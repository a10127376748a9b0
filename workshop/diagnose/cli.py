"""The command ``workshop diagnose``."""

import sys

import click

from workshop.errors import UserError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[JOBID | FOLDER | -- COMMAND]")
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    help="A process of the program: torchrun, a rank, or the script that calls mp.spawn.",
)
@click.option("--output", default="", metavar="FOLDER", help="Folder of the report.  [default: diagnosis-DATE-TIME]")
@click.option(
    "--patience",
    type=click.FloatRange(min=2),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="With COMMAND: time without progress before the first diagnosis.",
)
@click.option("--end", is_flag=True, help="With COMMAND: end the program when it hangs, with exit status 1.")
def diagnose(words, pid, output, patience, end) -> None:
    """Say why a distributed program hangs: the rank, the call and the line.

    workshop diagnose -- torchrun --nproc-per-node=2 train.py

    runs the program without changes, and reports when it makes no progress or has failed. Without a COMMAND, it looks once at a
    Slurm job (JOBID), at a process on this machine (--pid), or at the files that a program has written (FOLDER: log files, and
    files of PyTorch's flight recorder).
    """
    if sum((bool(words), pid is not None)) != 1:
        raise UserError("name one of: a job, a folder, --pid PID, or the command of the program after --")
    if pid is not None:
        from workshop.diagnose.once import diagnose_process

        sys.exit(diagnose_process(pid, output))
    if len(words) == 1 and words[0].split("_")[0].isdigit():
        from workshop.diagnose.slurm import diagnose_job

        sys.exit(diagnose_job(words[0], output))
    from pathlib import Path

    if len(words) == 1 and Path(words[0]).is_dir():
        from workshop.diagnose.remains import diagnose_folder

        sys.exit(diagnose_folder(Path(words[0]), output))
    from workshop.diagnose.watch import run_watched

    sys.exit(run_watched(words, output, patience, end))
