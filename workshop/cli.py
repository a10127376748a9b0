"""The command ``workshop``: each command is a few lines that call one module. Heavy imports wait until a command needs them."""

import os
import sys
from contextlib import suppress

import click

from workshop.errors import UserError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """Learn multi-GPU and multi-node PyTorch training by doing it."""


@app.command()
@click.option("--stages", default="", metavar="01,02", help="Only these stages.  [default: all]")
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Passes over the training set in each run.",
)
@click.option("--output", metavar="FOLDER", help="Where tour.json, tour.png and the logs go.  [default: runs/tour]")
def tour(stages, epochs, output) -> None:
    """Train every stage's solution on this machine and compare."""
    from workshop.demo.tour import run_tour

    sys.exit(run_tour(stages, epochs, output))


@app.command()
@click.option("--steps", type=click.IntRange(min=4), default=20, show_default=True, help="Of each training.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--processes", type=click.Choice(["2", "4", "8"]), default="2", show_default=True)
@click.option("--output", metavar="FOLDER", help="Where picture, figures and page go.  [default: runs/strategies]")
def strategies(steps, dtype, processes, output) -> None:
    """One training under every strategy: the same losses, what each costs, and which to use."""
    from workshop.demo.strategies import run_strategies

    sys.exit(run_strategies(steps, dtype, int(processes), output))


@app.command()
@click.option(
    "--port", type=click.IntRange(min=1, max=65535), help="Where it listens.  [default: 8888, or the next free one]"
)
@click.option(
    "--ip", default="127.0.0.1", show_default=True, help="The address that it listens on; 0.0.0.0: all of them."
)
@click.option("--no-browser", is_flag=True, help="Open no browser.")
def lab(port, ip, no_browser) -> None:
    """Start JupyterLab here, with a kernel of this environment."""
    from workshop.jupyter.lab import run_lab

    run_lab(port, ip, browser=not no_browser)


@app.command()
@click.option(
    "--class", "people", type=click.IntRange(min=1), metavar="PEOPLE", help="Also whether a course can begin here."
)
def doctor(people) -> None:
    """Look at this machine, and say what to do about each problem."""
    from workshop.doctor.machine import run_doctor

    sys.exit(run_doctor(people))


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("script")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def profile(script, options) -> None:
    """Say where the time of a training SCRIPT goes, by line and by operation; OPTIONS go on to it."""
    from pathlib import Path

    from workshop.measure.profile import profile

    profile(Path(script), list(options))


@app.command()
@click.argument("name")
@click.option("--mirror", metavar="URL", help="A folder to fetch from in place of the known ones.")
@click.option("--from", "source", default="", metavar="URL-or-file", help="Where chess is: a file of JSON lines.")
@click.option("--sha256", default="", metavar="HEX", help="What that file has to have.")
def fetch(name, mirror, source, sha256) -> None:
    """Download a data set (mnist, cifar10, chess) or a model (codellama; tiny-codellama is made) once, verified, into
    $WORKSHOP_DATA.

    Without WORKSHOP_DATA it goes into data/ in the repository.
    """
    from workshop.data.fetch import fetch_dataset

    fetch_dataset(name, mirror, source, sha256)


@app.command()
@click.argument("folder", metavar="DIR")
@click.option("--data", default="", metavar="mnist,cifar10,chess", help="Data sets to take along.")
@click.option("--model", default="", metavar="codellama,tiny-codellama", help="Models to take along.")
@click.option(
    "--platform", type=click.Choice(["x86_64", "aarch64"]), help="The processors it is for.  [default: this machine's]"
)
@click.option("--python", metavar="3.11", help="The Python it is for.  [default: this one]")
def pack(folder, data, model, platform, python) -> None:
    """Collect everything in one folder DIR, for a machine without internet: this repository, its packages, data."""
    from workshop.ship.pack import run_pack

    run_pack(folder, data, model, platform, python)


@app.command()
@click.argument("file", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--watch", is_flag=True, help="Check again at every save.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose", is_flag=True, help="Print tracebacks, and the stacks of processes that hang.")
@click.option("--nproc", type=click.IntRange(min=2, max=8), default=2, show_default=True, help="Processes.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu"]),
    default="auto",
    help="auto: GPUs where there are as many as processes.  [default: auto]",
)
@click.option(
    "--launch",
    type=click.Choice(["torchrun", "spawn", "single"]),
    help="How a FILE that is no exercise is started; its options follow after --.",
)
def check(file, arguments, watch, as_json, verbose, nproc, device, launch) -> None:
    """Run FILE, and say what it really does.

    Without FILE: the next exercise that is not done.

    Any training script: workshop check my_train.py --launch torchrun -- --epochs 1
    """
    from workshop.course.command import run_check

    options = {"launch": launch or "", "nproc": nproc, "device": device, "arguments": list(arguments)}
    status = run_check(file, json=as_json, watch=watch, verbose=verbose, **options)
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(status)  # Python takes most of a second to take down all that torch has imported


@app.command()
@click.argument("file")
@click.argument("goal", type=int, required=False)
def hint(file, goal) -> None:
    """The next of three hints for a GOAL of the exercise FILE."""
    from workshop.course.learning import run_hint

    sys.exit(run_hint(file, goal))


@app.command()
@click.argument("file")
@click.option("--solution", is_flag=True, help="Also while goals are open.")
def diff(file, solution) -> None:
    """Compare the exercise FILE with its solution."""
    from workshop.course.learning import run_diff

    sys.exit(run_diff(file, force=solution))


@app.command()
@click.argument("file")
def reset(file) -> None:
    """Put the exercise FILE back to its start; your version is kept beside it."""
    from workshop.course.learning import run_reset

    sys.exit(run_reset(file))


@app.command()
def progress() -> None:
    """Show which goals are met."""
    from rich.console import Console

    from workshop.course.progress import show_progress

    show_progress(Console(highlight=False))


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--processes", default="", metavar="1,2,4", help="How many.  [default: 1, 2, 4, ... up to the GPUs or cores]"
)
@click.option(
    "--mode",
    type=click.Choice(["strong", "weak", "both"]),
    default="both",
    show_default=True,
    help="What stays: the global batch, or that of each process.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each.")
@click.option("--output", default="", metavar="FOLDER", help="Where table, picture and figures go.")
@click.option("--collectives", is_flag=True, help="Measure how fast the processes exchange data.")
@click.option("--logs", is_flag=True, help="Compare the logs of jobs (the arguments); run nothing.")
def bench(script, arguments, processes, mode, repeats, output, collectives, logs) -> None:
    """How much faster a training SCRIPT gets with more processes.

    Its ARGUMENTS follow after --. Several nodes: submit the job script with 1, 2 and 4 nodes, then:
    workshop bench --logs runs/scale-*.json
    """
    from workshop.measure.bench import run_bench, run_collectives
    from workshop.measure.scaling import run_logs

    if collectives:
        sys.exit(run_collectives(processes, output))
    if logs:
        sys.exit(run_logs([script, *arguments] if script else [], output))
    sys.exit(run_bench(script, list(arguments), processes, mode, repeats, output))


@app.command()
@click.argument("model", metavar="MODEL")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences, on each GPU.")
@click.option(
    "--sequence-length", type=click.IntRange(min=2), help="Tokens of each.  [default: 2048, or the model's most]"
)
@click.option("--gpus", default="1,2,4,8,16", show_default=True, metavar="N,N", help="How many share the work.")
@click.option("--measure", is_flag=True, help="Take steps with it on this machine, and compare.")
@click.option("--output", default="", metavar="FOLDER", help="Where picture and figures go.")
def memory(model, batch_size, sequence_length, gpus, measure, output) -> None:
    """What DDP, FSDP and ZeRO need on each GPU to train MODEL (codellama-7b, -13b, -34b, -70b, tiny-codellama, or a folder)."""
    from workshop.measure.memory import run_memory

    sys.exit(run_memory(model, batch_size, sequence_length, gpus, measure, output))


@app.command()
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--site", metavar="SITE", help="Where to.  [default: this host's site, or the practice cluster]")
@click.option("--account", metavar="ACCOUNT", help="The project that pays.")
@click.option("--queue", metavar="QUEUE", help="Partition, QOS or queue.  [default: the first that takes the job]")
@click.option("--nodes", type=click.IntRange(min=1), help="In place of the script's.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="In place of the script's.")
@click.option("--time", metavar="HH:MM:SS", help="In place of the script's.")
@click.option("--reservation", metavar="NAME", help="Of a course, say.")
@click.option("--container", metavar="FILE.sif", help="An image of Apptainer in which Python runs.")
@click.option("--dry-run", is_flag=True, help="Show the line and the site's settings; submit nothing.")
def submit(script, site, arguments, **options) -> None:
    """Submit the job SCRIPT with the options of a site; ARGUMENTS for the script follow after --."""
    from workshop.slurm.submit import run_submit

    sys.exit(run_submit(script, site, arguments=arguments, **options))


@app.group()
def cluster() -> None:
    """A real Slurm of several nodes on this machine, to practise on."""


cluster_name = click.option("--name", default="local", show_default=True, help="Several can be up side by side.")


@cluster.command("up")
@click.argument("nodes", type=click.IntRange(1, 16))
@click.option(
    "--gpus", type=click.IntRange(1, 8), default=4, show_default=True, help="On each node, for counting only."
)
@click.option("--cores", type=click.IntRange(1, 256), default=8, show_default=True, help="That each node says it has.")
@cluster_name
def cluster_up(nodes, gpus, cores, name) -> None:
    """Start a cluster of NODES compute nodes."""
    from workshop.slurm.cluster import run_up

    run_up(nodes, gpus, cores, name)


@cluster.command("status")
@cluster_name
def cluster_status(name) -> None:
    """Show its nodes and jobs."""
    from workshop.slurm.cluster import run_status

    run_status(name)


@cluster.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--node", default="", metavar="NODE", help="On this compute node.  [default: the login node]")
@cluster_name
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def cluster_exec(command, node, name) -> None:
    """Run COMMAND on its login node; without COMMAND a shell."""
    from workshop.slurm.cluster import run_exec

    run_exec(command, node, name)


def _fault(action: str, text: str) -> None:
    @cluster.command(action, help=text)
    @click.argument("node")
    @cluster_name
    def fault(node, name) -> None:
        from workshop.slurm.cluster import run_fault

        run_fault(action, node, name)


_fault("kill", "Kill a NODE, as if its power failed.")
_fault("cut", "Cut the network of a NODE, which runs on.")
_fault("heal", "Bring a NODE back that was killed or cut.")


@cluster.command("down")
@cluster_name
def cluster_down(name) -> None:
    """End it, and all that runs on it."""
    from workshop.slurm.cluster import run_down

    run_down(name)


@app.command(context_settings={"ignore_unknown_options": True})
@click.option("--full", is_flag=True, help="The long runs too: kills in a row, the oldest versions.")
@click.argument("pytest_options", nargs=-1, type=click.UNPROCESSED)
def test(full, pytest_options) -> None:
    """Run the test-suite; further options go on to pytest."""
    from workshop.dev.testing import run_tests

    sys.exit(run_tests(full, list(pytest_options)))


@app.group()
def dev() -> None:
    """For those who change the course: see CONTRIBUTING.md."""


@dev.command("new")
@click.argument("kind", type=click.Choice(["rule", "exercise", "stage", "site"]))
@click.argument("name")
@click.option(
    "--launch",
    type=click.Choice(["single", "spawn", "torchrun"]),
    default="single",
    show_default=True,
    help="Of an exercise.",
)
def dev_new(kind, name, launch) -> None:
    """Write the skeleton of a rule (FAMILY/NAME), an exercise (STAGE/exerciseK_TOPIC), a stage (NN_TOPIC) or a site."""
    from workshop.dev.new import run_dev_new

    sys.exit(run_dev_new(kind, name, launch))


@dev.command("check")
@click.argument("files", nargs=-1)
@click.option(
    "--all", "everything", is_flag=True, help="Run all exercises, not only those that differ from the last commit."
)
def dev_check(files, everything) -> None:
    """Say what a change has forgotten; FILES of exercises are run as well, unsolved and solved."""
    from workshop.dev.check import run_dev_check

    sys.exit(run_dev_check(files, everything))


@app.command()
@click.argument("sets", nargs=-1, metavar="[oldest] [lock] [newest]")
@click.option("--stage", default="", metavar="01,02", help="Only these stages.  [default: all]")
@click.option("--output", metavar="FOLDER", help="Where tables and reports go.  [default: runs/versions]")
def versions(sets, stage, output) -> None:
    """Run the stages' tests with other versions of the packages, and name the package that broke one.

    newest (the default): the newest that pyproject.toml admits. lock: those of requirements.lock. oldest: the lower bounds.
    Environments are made with uv in a temporary folder, and removed.
    """
    from workshop.ship.versions import run_versions, tidy_up_when_stopped

    tidy_up_when_stopped()
    sys.exit(run_versions(sets, stage, output))


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit status 2."""
    try:
        app.main(args=sys.argv[1:] or ["--help"], prog_name="workshop", standalone_mode=False)
        sys.exit(0)
    except (click.ClickException, UserError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    except (KeyboardInterrupt, click.Abort):
        print("workshop: stopped", file=sys.stderr)
        sys.exit(130)
    print(f"workshop: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
