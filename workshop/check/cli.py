"""Define the command ``workshop-check``. ``workshop check`` has the same options, and calls the same function."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from workshop.errors import UserError

FILE = click.Path(dir_okay=False, resolve_path=True, path_type=Path)
OPTIONS = (
    click.option("--json", is_flag=True, help="Print JSON."),
    click.option("--verbose", is_flag=True, help="Print tracebacks, and the stacks of processes that hang."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu"]),
        default="auto",
        help="auto: use GPUs if there is one per process.  [default: auto]",
    ),
    click.option(
        "--steps",
        type=click.IntRange(min=2),
        help="Optimizer steps after which a COMMAND is stopped.  [default: 30, if it takes long]",
    ),
    click.option(
        "--resume-args",
        metavar="'--resume {latest}'",
        default="",
        help="Arguments with which a second start of a COMMAND resumes; {latest} is its newest checkpoint.",
    ),
    click.option(
        "--ignore", metavar="KIND", multiple=True, help="Do not report the findings of this rule; repeatable."
    ),
    click.option("--baseline", type=FILE, metavar="PATH", help="Report only the findings that are not in PATH."),
    click.option("--write-baseline", type=FILE, metavar="PATH", help="Write the findings to PATH; exit with status 0."),
    click.option("--junit", type=FILE, metavar="PATH", help="Also write a report in JUnit XML, for CI services."),
    click.option("--sarif", type=FILE, metavar="PATH", help="Also write a report in SARIF, for GitHub."),
)  # each is a parameter of run_command()


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the check."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND")
@options
def app(words: tuple[str, ...], **chosen: Any) -> None:
    """Run a training program, and report what its processes really do.

    Change to the folder of the program, and write the command that starts it after --:

    workshop-check -- torchrun --nproc-per-node=2 train.py --epochs 1

    Without COMMAND, run the one in [tool.workshop-check] of pyproject.toml.
    """
    from workshop.check.command import run_command

    leave(run_command(words, **chosen))


def leave(status: int) -> NoReturn:
    """End this process at once: a normal exit takes most of a second after torch was imported."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(status)


def call(command: click.Command, arguments: Sequence[str], name: str) -> NoReturn:
    """Run a command line. A mistake of the user ends it with one line on standard error and exit status 2."""
    # As Ctrl-C does, SIGTERM (of ``timeout`` or Slurm), or the end of the terminal, ends a command only after it has removed its
    # temporary files.
    for blow in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(blow) is signal.SIG_DFL:  # ``nohup`` ignores SIGHUP
            signal.signal(blow, lambda number, _: sys.exit(128 + number))
    try:
        command.main(args=list(arguments), prog_name=name, standalone_mode=False)
        sys.exit(0)
    except (click.ClickException, UserError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    except (KeyboardInterrupt, click.Abort):
        print(f"{name}: stopped", file=sys.stderr)
        sys.exit(130)
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main() -> NoReturn:
    """Run the command ``workshop-check``."""
    call(app, sys.argv[1:], "workshop-check")
