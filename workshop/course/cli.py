"""The command ``workshop hint``."""

import sys

import click


@click.command()
@click.argument("file")
@click.argument("goal", type=int, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def hint(file, goal, as_json) -> None:
    """Show the next hint for a GOAL (default: the first open one)."""
    from workshop.course.learning import run_hint

    sys.exit(run_hint(file, goal, as_json=as_json))
