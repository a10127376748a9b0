"""The command ``workshop report``."""

from pathlib import Path

import click

from workshop.check.cli import leave

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("paths", nargs=-1, type=FILE, metavar="[FOLDER | FILES]")
@click.option(
    "--points", type=FILE, metavar="FILE", help="TOML file with the exercises and the points.  [default: 1 per goal]"
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["junit", "json", "gradescope", "otter", "markdown"]),
    help="Also write the report in this format; repeatable.",
)
@click.option(
    "--output", "outputs", multiple=True, type=FILE, metavar="FILE", help="File for the format.  [default: print it]"
)
def report(paths, points, formats, outputs) -> None:
    """Check the exercises of a learner again, and report their points.

    FOLDER is a copy of the course, or a folder with files of exercises. Without FOLDER and FILES, the report is about the
    exercises in this course. It judges only the programs: everything else is taken from this course. The exit status is 0 for
    all points, 1 for fewer, and 2 if something could not be judged.

    The programs run as your user. Run the report of a program that you do not trust in a container or in CI.
    """
    from workshop.grades.report import run_report

    leave(run_report(paths, points, formats, outputs))
