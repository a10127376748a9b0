"""The command ``workshop doctor``."""

import sys

import click

from workshop.errors import UserError


@click.command()
@click.option(
    "--class",
    "people",
    type=click.IntRange(min=1),
    metavar="PEOPLE",
    help="Also check whether a course can begin here.",
)
@click.option(
    "--nodes", "shape", metavar="2x4", help="Measure these nodes (nodes x GPUs per node) in a job, and name slow ones."
)
@click.option(
    "--site", metavar="SITE", help="With --nodes: name of the site.  [default: the site of this host, or local]"
)
@click.option("--account", metavar="ACCOUNT", help="With --nodes: project that is charged for the job.")
@click.option(
    "--queue", metavar="QUEUE", help="With --nodes: partition or QOS.  [default: the first that accepts the job]"
)
@click.option("--reservation", metavar="NAME", help="With --nodes: reservation, for example the one of a course.")
@click.option("--container", metavar="FILE.sif", help="With --nodes: Apptainer image in which Python runs.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="MINUTES",
    help="With --nodes: the longest time in the queue.  [default: 10]",
)
@click.option("--output", metavar="FILE", help="With --nodes: write all measurements as JSON.")
def doctor(people, shape, wait, output, site, **options) -> None:
    """Check this machine, and say how to solve each problem.

    With --nodes, measure the nodes of a job instead: cores, GPUs, speed, memory, network and clock.
    """
    if shape is None:
        if named := [
            name
            for name, value in {"site": site, "wait": wait, "output": output, **options}.items()
            if value is not None
        ]:
            raise UserError(f"--{named[0]} needs --nodes, such as --nodes 2x4")
        from workshop.doctor.machine import run_doctor

        sys.exit(run_doctor(people))
    if people:
        raise UserError("--class checks this machine, and --nodes checks the nodes of a job; use one of them")
    from workshop.doctor.nodes.command import run_nodes

    sys.exit(run_nodes(shape, site, 10 if wait is None else wait, output, **options))
