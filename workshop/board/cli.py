"""The command ``workshop board``."""

import sys
from pathlib import Path

import click


@click.group(invoke_without_command=True)
@click.option(
    "--export", metavar="FILE", help="Write the report of the course to FILE.json, FILE.csv or FILE.md, and end."
)
@click.option("--names", is_flag=True, help="With --export to JSON: add the figures of each learner, by name.")
@click.option("--once", is_flag=True, help="Print the board once, and end.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the page.  [default: a free one]")
@click.pass_context
def board(context, export, names, once, port) -> None:
    """Show who is stuck where, in this terminal and on a page.

    Instructors run it without a subcommand. Learners run board join NAME, so that their checks and hints appear on it.
    WORKSHOP_CLASS, or class: in ondemand/settings.yml, is the folder of the class.
    """
    if context.invoked_subcommand:
        return
    from workshop.errors import UserError

    if names and not export:
        raise UserError("--names belongs to --export FILE")
    if export:
        from workshop.board.export import run_export

        sys.exit(run_export(Path(export), names))
    from workshop.board.live import run_live, run_once

    sys.exit(run_once() if once else run_live(port))


@board.command("join")
@click.argument("name", envvar="WORKSHOP_NICKNAME")
def board_join(name) -> None:
    """Share your checks and hints with your class, as NAME.

    NAME can be a nickname. The board shows which goals you have met, how many checks and hints you needed, and the rule of the
    first finding. It never shows your programs.
    """
    from workshop.course.progress import sharing_path
    from workshop.course.sharing import join

    member = join(name, sharing_path())
    print(f"You share your checks and hints with the board in {member.folder}, as {member.name!r}.")
    print("To stop, and to delete what you have shared: ./workshop.sh board leave")


@board.command("leave")
def board_leave() -> None:
    """Stop sharing, and delete what you have shared."""
    from workshop.course.progress import sharing_path
    from workshop.course.sharing import leave

    member = leave(sharing_path())
    print(f"{member.path} is deleted; you share nothing now." if member else "You share nothing.")
