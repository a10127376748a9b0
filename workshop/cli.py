"""Define the command ``workshop``. Each command imports its module only when it runs, so ``--help`` stays fast."""

import sys

import click

from workshop.board.cli import board
from workshop.check.cli import call, leave
from workshop.check.cli import options as check_options
from workshop.course.cli import hint
from workshop.diagnose.cli import diagnose
from workshop.doctor.cli import doctor
from workshop.grades.cli import report
from workshop.plan.cli import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """Learn multi-GPU and multi-node PyTorch training, hands on."""


for command in (board, diagnose, doctor, hint, plan, report):
    app.add_command(command)


@app.command()
@click.option("--stages", default="", metavar="01,02", help="Run only these stages.  [default: all]")
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Passes over the training set per run.",
)
@click.option("--output", metavar="FOLDER", help="Folder for tour.json, tour.png and the logs.  [default: runs/tour]")
def tour(stages, epochs, output) -> None:
    """Train stages 01 to 04 and all strategies, and compare them."""
    from workshop.demo.tour import run_tour

    sys.exit(run_tour(stages, epochs, output))


@app.command()
@click.option("--steps", type=click.IntRange(min=4), default=20, show_default=True, help="Steps per training.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--processes", type=click.Choice(["2", "4", "8"]), default="2", show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of each strategy; the table shows their median, lowest and highest speed.",
)
@click.option("--output", metavar="FOLDER", help="Folder for the results.  [default: runs/strategies]")
def strategies(steps, dtype, processes, rounds, output) -> None:
    """Train one model with every strategy, and compare the costs.

    The losses agree; speed, memory and communication differ. A page of the results says when to use which strategy.
    """
    from workshop.demo.strategies import run_strategies

    sys.exit(run_strategies(steps, dtype, int(processes), output, rounds))


@app.command()
@click.option(
    "--port", type=click.IntRange(min=1, max=65535), help="Port of the server.  [default: 8888, or the next free port]"
)
@click.option(
    "--ip", default="127.0.0.1", show_default=True, help="Address that the server listens on; 0.0.0.0: all addresses."
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def lab(port, ip, no_browser) -> None:
    """Start JupyterLab with the Python environment of the course."""
    from workshop.jupyter.lab import run_lab

    run_lab(port, ip, browser=not no_browser)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("script")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def profile(script, options) -> None:
    """Show which lines and operations of SCRIPT take the time.

    SCRIPT must define main() and train_one_epoch(). OPTIONS are passed to SCRIPT.
    """
    from pathlib import Path

    from workshop.measure.profile import profile

    profile(Path(script), list(options))


@app.command()
@click.argument("name")
@click.option("--mirror", metavar="URL", help="Base URL of a different server with the same files.")
@click.option("--from", "source", default="", metavar="URL-or-file", help="Where to get chess, a file of JSON lines.")
@click.option("--sha256", default="", metavar="HEX", help="The expected SHA-256 of that file.")
def fetch(name, mirror, source, sha256) -> None:
    """Download a data set or a model once, and verify it.

    NAME is mnist, cifar10, chess, codellama, or tiny-codellama (which is created, not downloaded). The command writes the files
    to $WORKSHOP_DATA or, if this variable is not set, to data/ in the repository.
    """
    from workshop.data.fetch import fetch_dataset

    fetch_dataset(name, mirror, source, sha256)


@app.command()
@click.argument("folder", metavar="DIR")
@click.option("--data", default="", metavar="mnist,cifar10,chess", help="Data sets to include.")
@click.option("--model", default="", metavar="codellama,tiny-codellama", help="Models to include.")
@click.option(
    "--platform", type=click.Choice(["x86_64", "aarch64"]), help="Processor of the other machine.  [default: as here]"
)
@click.option("--python", metavar="3.11", help="Python version of the other machine.  [default: as here]")
def pack(folder, data, model, platform, python) -> None:
    """Pack the course into a folder, for use without internet.

    DIR will contain this repository, its Python packages, and the data sets and models that you name.
    """
    from workshop.ship.pack import run_pack

    run_pack(folder, data, model, platform, python)


@app.command()
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FILE | -- COMMAND]")
@click.option("--watch", is_flag=True, help="Check FILE again at every save.")
@click.option(
    "--nproc",
    type=click.IntRange(min=2, max=8),
    default=2,
    show_default=True,
    help="Number of processes for FILE. A COMMAND sets its own number.",
)
@check_options
def check(words, watch, nproc, **chosen) -> None:
    """Run FILE or COMMAND, and report what its processes really do.

    FILE is an exercise. Without FILE and COMMAND, run the command in [tool.workshop-check] of pyproject.toml, or, if there is
    none, check the first exercise that is not done.

    To check a program of your own, change to its folder, and write the command that starts it after --:

    workshop check -- torchrun --nproc-per-node=2 train.py --epochs 1
    """
    from workshop.course.command import run_check

    leave(run_check(words, watch=watch, nproc=nproc, **chosen))


@app.command(context_settings={"ignore_unknown_options": True})
@click.option("--gpus", type=click.IntRange(1, 16), default=2, show_default=True, help="Pretended GPUs per node.")
@click.option("--nodes", type=click.IntRange(1, 8), default=1, show_default=True, help="Simulated nodes, for torchrun.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND")
def pretend(gpus, nodes, command) -> None:
    """Run a program on pretended GPUs, and show how it uses them.

    COMMAND is the command of the program, for example torchrun --nproc-per-node=2 train.py. Its tensors say that they are on
    cuda:0, cuda:1 and so on, but the CPU computes them.
    """
    from workshop.measure.pretended import run_pretended

    sys.exit(run_pretended(gpus, nodes, command))


@app.command()
@click.argument("file")
@click.option("--solution", is_flag=True, help="Show the solution even if some goals are not met yet.")
def diff(file, solution) -> None:
    """Compare your exercise FILE with its solution."""
    from workshop.course.learning import run_diff

    sys.exit(run_diff(file, force=solution))


@app.command()
@click.argument("file")
def reset(file) -> None:
    """Restore the exercise FILE; your version is kept beside it."""
    from workshop.course.learning import run_reset

    sys.exit(run_reset(file))


@app.command()
def progress() -> None:
    """Show how many goals of each exercise you have met."""
    from rich.console import Console

    from workshop.course.progress import show_progress

    show_progress(Console(highlight=False))


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--processes", default="", metavar="1,2,4", help="Process counts.  [default: 1, 2, 4, ... up to the GPUs or cores]"
)
@click.option(
    "--mode",
    type=click.Choice(["strong", "weak", "both"]),
    default="both",
    show_default=True,
    help="strong: constant global batch; weak: constant batch per process.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs per measurement.")
@click.option("--output", default="", metavar="FOLDER", help="Folder for the table, the picture and the data.")
@click.option("--collectives", is_flag=True, help="Measure how fast the processes communicate, without a SCRIPT.")
@click.option("--logs", is_flag=True, help="Run nothing: compare the logs of jobs, which are the arguments.")
@click.option("--card", is_flag=True, help="Measure this machine for workshop plan --gpu here; --output is a file.")
def bench(script, arguments, processes, mode, repeats, output, collectives, logs, card) -> None:
    """Measure how much faster SCRIPT trains with more processes.

    Write the ARGUMENTS of SCRIPT after --. To measure several nodes, submit the job script with 1, 2 and 4 nodes, then run:
    workshop bench --logs runs/scale-*.json
    """
    from workshop.measure.bench import run_bench, run_collectives
    from workshop.measure.scaling import run_logs

    if card:
        from workshop.measure.card import run_card

        sys.exit(run_card(processes, output))
    if collectives:
        sys.exit(run_collectives(processes, output))
    if logs:
        sys.exit(run_logs([script, *arguments] if script else [], output))
    sys.exit(run_bench(script, list(arguments), processes, mode, repeats, output))


@app.command()
@click.argument("model", metavar="MODEL")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences per GPU.")
@click.option(
    "--sequence-length", type=click.IntRange(min=2), help="Tokens per sequence.  [default: 2048 or the model's maximum]"
)
@click.option("--gpus", default="1,2,4,8,16", show_default=True, metavar="N,N", help="Numbers of GPUs to compare.")
@click.option("--measure", is_flag=True, help="Also train MODEL for some steps here, and compare the memory.")
@click.option("--output", default="", metavar="FOLDER", help="Folder for the picture and the data.")
def memory(model, batch_size, sequence_length, gpus, measure, output) -> None:
    """Estimate the memory per GPU that DDP, FSDP and ZeRO need.

    MODEL is codellama-7b, -13b, -34b, -70b, tiny-codellama, or the folder of a model.
    """
    from workshop.measure.memory import run_memory

    sys.exit(run_memory(model, batch_size, sequence_length, gpus, measure, output))


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL | -- train.py ...]")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks (GPUs).")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank to simulate.")
@click.option("--mesh", default="", metavar="fsdp=128,tp=8", help="Sizes of dp, fsdp, tp, pp, cp, ep.  [default: fsdp]")
@click.option(
    "--sequence-length", type=click.IntRange(min=2), help="Tokens per sequence.  [default: 2048 or the model's maximum]"
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences per micro-batch."
)
@click.option(
    "--micro-batches", type=click.IntRange(min=1), help="Micro-batches per step.  [default: 1, or 2 per stage with pp]"
)
@click.option(
    "--schedule",
    type=click.Choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    default="1f1b",
    show_default=True,
    help="Schedule of the pipeline.",
)
@click.option("--recompute", is_flag=True, help="Keep only the input of each layer for the backward pass.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "float32"]),
    default="bf16",
    show_default=True,
    help="Data type of the computation.",
)
@click.option("--output", default="", metavar="FOLDER", help="Folder for the timeline and the data.")
def simulate(words, ranks, rank, mesh, **options) -> None:
    """Run one rank of many without GPUs, memory or network.

    The parallel strategies of PyTorch run on tensors without values. MODEL is a name that workshop plan knows, such as
    llama-3-70b or mixtral-8x7b, or the folder or config.json of a model. Or write a training script after --.
    """
    from workshop.simulate.command import run

    leave(run(words, ranks, rank, mesh, **options))


@app.command("gpu-day")
@click.option("--minutes", type=float, default=9, show_default=True, help="Time until the command ends.")
@click.option("--output", required=True, metavar="DIR", help="Folder for gpu-day.json and the logs.")
@click.option("--only", default="", metavar="WORD", help="Only the items whose name contains WORD.  [default: all]")
def gpu_day(minutes, output, only) -> None:
    """Run everything that needs a GPU, the most valuable first.

    The items are the tests for GPUs, the programs of all stages, and the benchmarks. The command ends within the given time,
    even if an item hangs, and says which items did not run. It needs no network and only some packages of the course.
    """
    from workshop.measure.gpu_day import run_gpu_day

    sys.exit(run_gpu_day(minutes, output, only))


@app.command()
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--site", metavar="SITE", help="Name of the site.  [default: the site of this host, or local]")
@click.option("--account", metavar="ACCOUNT", help="Project that is charged for the job.")
@click.option("--queue", metavar="QUEUE", help="Partition, QOS or queue.  [default: the first that accepts the job]")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes, instead of the number in SCRIPT.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs per node, instead of the number in SCRIPT.")
@click.option("--time", metavar="HH:MM:SS", help="Time limit, instead of the one in SCRIPT.")
@click.option("--reservation", metavar="NAME", help="Reservation, for example the one of a course.")
@click.option("--container", metavar="FILE.sif", help="Apptainer image in which Python runs.")
@click.option("--plan", metavar="FILE", help="Nodes and GPUs from the file that workshop plan --output wrote.")
@click.option("--dry-run", is_flag=True, help="Print the command and the site's settings; submit nothing.")
def submit(script, site, arguments, **options) -> None:
    """Submit the job SCRIPT to a site; write its ARGUMENTS after --."""
    from workshop.slurm.submit import run_submit

    sys.exit(run_submit(script, site, arguments=arguments, **options))


@app.group()
def cluster() -> None:
    """Practice on a real Slurm cluster on this machine."""


cluster_name = click.option("--name", default="local", show_default=True, help="Name; several clusters can be up.")


@cluster.command("up")
@click.argument("nodes", type=click.IntRange(1, 16))
@click.option(
    "--gpus", type=click.IntRange(1, 8), default=4, show_default=True, help="GPUs per node; programs cannot use them."
)
@click.option("--cores", type=click.IntRange(1, 256), default=8, show_default=True, help="Cores that a node reports.")
@cluster_name
def cluster_up(nodes, gpus, cores, name) -> None:
    """Start a cluster of NODES compute nodes."""
    from workshop.slurm.cluster import run_up

    run_up(nodes, gpus, cores, name)


@cluster.command("status")
@cluster_name
def cluster_status(name) -> None:
    """Show the nodes and jobs of the cluster."""
    from workshop.slurm.cluster import run_status

    run_status(name)


@cluster.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--node", default="", metavar="NODE", help="Run on this compute node.  [default: the login node]")
@cluster_name
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def cluster_exec(command, node, name) -> None:
    """Run COMMAND on the login node; without COMMAND, open a shell."""
    from workshop.slurm.cluster import run_exec

    run_exec(command, node, name)


def _fault(action: str, text: str) -> None:
    @cluster.command(action, help=text)
    @click.argument("node")
    @cluster_name
    def fault(node, name) -> None:
        from workshop.slurm.cluster import run_fault

        run_fault(action, node, name)


_fault("kill", "Kill a NODE, as if its power had failed.")
_fault("cut", "Cut the network of a NODE; its processes keep running.")
_fault("heal", "Bring back a NODE that was killed or cut.")


@cluster.command("down")
@cluster_name
def cluster_down(name) -> None:
    """Stop the cluster and everything that runs on it."""
    from workshop.slurm.cluster import run_down

    run_down(name)


@app.command(context_settings={"ignore_unknown_options": True})
@click.option("--full", is_flag=True, help="Also run the long tests: repeated kills, the oldest versions.")
@click.argument("pytest_options", nargs=-1, type=click.UNPROCESSED)
def test(full, pytest_options) -> None:
    """Run the tests; other options are passed to pytest."""
    from workshop.dev.testing import run_tests

    sys.exit(run_tests(full, list(pytest_options)))


@app.command()
@click.option("--output", metavar="FOLDER", help="The folder of the web site.  [default: runs/book]")
def book(output) -> None:
    """Build the course as a web site, with all solved notebooks."""
    from workshop.dev.book import run_book

    sys.exit(run_book(output))


@app.group()
def dev() -> None:
    """Commands for contributors: see CONTRIBUTING.md."""


@dev.command("new")
@click.argument("kind", type=click.Choice(["rule", "exercise", "stage", "site"]))
@click.argument("name")
@click.option(
    "--launch",
    type=click.Choice(["single", "spawn", "torchrun"]),
    default="single",
    show_default=True,
    help="How an exercise starts its processes.",
)
def dev_new(kind, name, launch) -> None:
    """Write the skeleton of a rule, exercise, stage or site.

    NAME is FAMILY/NAME for a rule, STAGE/exerciseK_TOPIC for an exercise, NN_TOPIC for a stage.
    """
    from workshop.dev.new import run_dev_new

    sys.exit(run_dev_new(kind, name, launch))


@dev.command("check")
@click.argument("files", nargs=-1)
@click.option(
    "--all", "everything", is_flag=True, help="Run all exercises, not only those that differ from the last commit."
)
def dev_check(files, everything) -> None:
    """Report what is missing after a change to the course.

    Also run the exercises that FILES belong to, unsolved and solved. Without FILES, run those that differ from the last commit.
    """
    from workshop.dev.check import run_dev_check

    sys.exit(run_dev_check(files, everything))


@app.command()
@click.argument("sets", nargs=-1, metavar="[oldest] [lock] [newest]")
@click.option("--stage", default="", metavar="01,02", help="Test only these stages.  [default: all]")
@click.option("--output", metavar="FOLDER", help="Folder for the tables and reports.  [default: runs/versions]")
def versions(sets, stage, output) -> None:
    """Test the stages with other versions of the packages.

    If a test fails, the command names the package that causes the failure. newest (the default): the newest versions that
    pyproject.toml allows. lock: the versions of requirements.lock. oldest: the lower bounds in pyproject.toml. uv creates each
    environment in a temporary folder, which is removed afterwards.
    """
    from workshop.ship.versions import run_versions, tidy_up_when_stopped

    tidy_up_when_stopped()
    sys.exit(run_versions(sets, stage, output))


def main() -> None:
    """Run the command line."""
    call(app, sys.argv[1:] or ["--help"], "workshop")
