"""The functions that the notebook of slurm-multinode calls to submit jobs, follow them and show their results.

Without a scheduler, each function only prints one line, so that the notebook can still be read to the end.
"""

import base64
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workshop.errors import UserError
from workshop.jupyter.pictures import show_figure
from workshop.measure.plots import COLOURS
from workshop.repository import ROOT, python_path, workshop_command
from workshop.run.environment import for_scheduler
from workshop.slurm.cluster import FINAL, Cluster, find_cluster, up
from workshop.slurm.sites import find_site
from workshop.training.logs import read_log

NODES = 4  # of the practice cluster
PATIENCE = 60  # seconds without news after which a job on the practice cluster is cancelled, because it may hang
PROGRAM = "multigpu_torchrun.py"
# Waits until all training processes of a node have their ranks, and prints a line for each process.
LOOK = """\
for attempt in {1..40}; do
    lines=$(for process in $(pgrep -u "$(id -u)" -f "$1"); do
        tr '\\0' '\\n' < /proc/$process/environ 2> /dev/null | grep -E "^(SLURM_JOB_ID=$SLURM_JOB_ID\\$|$2)" | sort -u | xargs
    done | grep SLURM_JOB_ID | grep -E "(^| )RANK=" | sed "s/^/HOST=$(hostname -s) /")
    wanted=$(grep -o -m 1 "LOCAL_WORLD_SIZE=[0-9]*" <<< "$lines" | cut -d= -f2)
    [ -n "$wanted" ] && [ "$(wc -l <<< "$lines")" -ge "$wanted" ] && break
    sleep 0.5
done
echo "$lines"
"""


@dataclass
class Job:
    """A job or a job array that was submitted.

    Attributes:
        number: its job id.
        name: its job name.
        log: the file with its output.
        folder: its working directory.
        changes: the output of squeue: seconds since it was submitted, job id (with the index in an array), state, nodes.
    """

    number: str
    name: str
    log: Path
    folder: Path
    start: float = field(default_factory=time.monotonic)
    changes: list[tuple[float, str, str, str]] = field(default_factory=list)

    @property
    def states(self) -> dict[str, str]:
        """The latest state of each job, by job id."""
        return {number: state for _, number, state, _ in self.changes}

    def nodes(self) -> list[str]:
        """Return the nodes that the job used last."""
        listed = next((nodes for *_, nodes in reversed(self.changes) if nodes), "")
        return _hostnames(listed) if listed else []


@dataclass
class _Place:
    """The place for jobs: the name of a site, its options for ``workshop submit``, and the practice cluster, if it is one."""

    site: str
    options: dict[str, str]
    cluster: Cluster | None


_place: _Place | None = None
_reason = "run the cell with use_site(...) first"
_own: Cluster | None = None  # the cluster that this kernel has started; without this reference it would end


def _with_scheduler(function):
    """Decorate a function so that it prints one line, and no traceback, if there is no scheduler or job, or after a mistake."""

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        if _place is None:
            print(f"not done: {_reason}")
        elif None in arguments:
            print("not done: there is no such job")
        else:
            try:
                return function(*arguments, **options)
            except UserError as error:
                print(f"not done: {error}")
        return None

    return wrapped


# ---------------------------------------------------------------- the place


def use_site(name: str, **options: str) -> None:
    """Choose the site for jobs, and start the practice cluster if you choose it.

    Args:
        name: the name of a profile in slurm-multinode/sites; "local": a practice cluster on this machine.
        options: options of ``workshop submit``: account, queue, reservation.
    """
    global _place, _reason
    _place = None
    try:
        site = find_site(name)
        if site.scheduler != "slurm":
            raise UserError(f"{site.name} uses PBS, and this notebook shows Slurm: read slurm-multinode/pbs/README.md")
        if name != "local" and not shutil.which("sbatch"):
            raise UserError(f'there is no sbatch here: open the notebook at {site.name}, or write site = "local"')
        _place = _Place(name, options, _practice_cluster() if name == "local" else None)
    except UserError as error:
        _reason = "no jobs can be submitted here (see the cell with use_site)"
        print(f"{error}\nThe cells below will not submit jobs. Read on, or solve the problem and run this cell again.")


def _practice_cluster() -> Cluster:
    """Return the practice cluster that is up, or else start one that ends with this kernel."""
    global _own
    cluster = find_cluster()
    if cluster:
        print(f"the practice cluster is already up: {cluster.nodes} nodes; stop it: {workshop_command()} cluster down")
        return cluster
    print(f"$ {workshop_command()} cluster up {NODES}")
    _own = up(NODES, mine=True)
    print(f"{NODES} nodes of {_own.cores} cores and {_own.gpus} GPUs are up; they end with this notebook's kernel")
    return _own


def leave_site() -> None:
    """Stop the practice cluster; at a site, do nothing."""
    global _place, _reason
    if _place and _place.cluster:
        _print(_workshop("cluster", "down"))
        _place, _reason = None, "the practice cluster has been stopped: run the cell with use_site(...) again"


def _scheduler(*command: str) -> subprocess.CompletedProcess:
    """Run a command of the scheduler on the login node, and return it with its output."""
    words = _place.cluster.inside(command) if _place.cluster else list(command)
    environment = for_scheduler(os.environ)  # this session may itself be a job
    return subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def _hostnames(nodes: str) -> list[str]:
    """Expand "node[1-2]" to ["node1", "node2"]."""
    return _scheduler("scontrol", "show", "hostnames", nodes).stdout.split()


def _workshop(*arguments: str) -> subprocess.CompletedProcess:
    """Run a command of the workshop, and print it as you would type it in a terminal."""
    print(f"$ {workshop_command()} {shlex.join(arguments)}")
    return subprocess.run(
        [sys.executable, "-P", "-m", "workshop", *arguments],
        env=os.environ | {"PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def _print(done: subprocess.CompletedProcess) -> None:
    """Print the output of a command, with paths relative to the repository."""
    print((done.stdout + done.stderr).replace(f"{ROOT}/", "").rstrip())


# ---------------------------------------------------------------- jobs


@_with_scheduler
def slurm(command: str) -> None:
    """Run a command on the login node, and print it and its output, with paths relative to the repository."""
    print(f"$ {command}".replace(f"{ROOT}/", ""))
    _print(_scheduler("bash", "-c", command))


@_with_scheduler
def submit(script: str, *arguments: str, **options: int | str) -> Job:
    """Submit a job script with ``workshop submit``.

    Args:
        script: the path of the script, or its name in slurm-multinode.
        arguments: arguments for the script.
        options: options of ``workshop submit``, such as nodes=4.
    """
    path = script if Path(script).exists() else os.path.relpath(ROOT / "slurm-multinode" / script)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (_place.options | options).items()]
    done = _workshop("submit", path, f"--site={_place.site}", *words, *(["--", *arguments] if arguments else []))
    _print(done)
    if done.returncode != 0:
        return None
    number = done.stdout.split()[1].rstrip(":")
    shown = _scheduler("scontrol", "--oneliner", "show", "job", number).stdout
    known = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    return Job(number, known["JobName"], Path(known["StdOut"]), Path(known["WorkDir"]))


@_with_scheduler
def follow(job: Job, until: str = "", epochs: int = 0) -> None:
    """Print the state of a job whenever it changes, until the job has ended.

    Args:
        job: the job.
        until: stop when the job is in this state.
        epochs: stop when this number of epochs is in its log.
    """
    pause, moved, seen = (0.3 if _place.cluster else 10), time.monotonic(), ()
    try:
        while not _look(job, until, epochs):
            time.sleep(pause)
            now = (len(job.changes), len(trained(job)))
            if now != seen:
                moved, seen = time.monotonic(), now
            if _place.cluster and time.monotonic() - moved > PATIENCE:
                print(f"no news for {PATIENCE} s, so the job is cancelled: scancel {job.number}")
                _scheduler("scancel", job.number)
    except KeyboardInterrupt:
        print(f"the job keeps running; run the cell again to follow it, or cancel the job: scancel {job.number}")


def _look(job: Job, until: str, epochs: int) -> bool:
    """Run squeue once, and print what is new; return whether to stop waiting."""
    # --states=all: also jobs that ended in the last minutes. --array: one line for each job of an array.
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job.number}", "--format=%i|%T|%N|%r"]
    for line in _scheduler(*command).stdout.splitlines():
        number, state, nodes, reason = line.split("|")
        latest = next((change[2:] for change in reversed(job.changes) if change[1] == number), ())
        if (state, nodes) != latest:
            seconds = time.monotonic() - job.start
            job.changes.append((seconds, number, state, nodes))
            why = f" ({reason})" if state == "PENDING" and reason != "None" else ""
            print(f"{seconds:5.1f} s   {number}   {state}{why}{' on ' * bool(nodes)}{nodes}", flush=True)
    states = set(job.states.values())
    return until in states or (0 < epochs <= len(trained(job))) or (bool(states) and states <= FINAL)


def trained(job: Job | None, element: int | None = None) -> list[dict]:
    """Return the epochs in the log of a job; in an array, of the job with this index."""
    if job is None:
        return []
    ending = "" if element is None else f"-{element}"
    return read_log(job.folder / "runs" / f"{job.name}-{job.number}{ending}.pt")


@_with_scheduler
def show_log(job: Job, pattern: str = "") -> None:
    """Print the output of a job, or only the lines that match a pattern. A long output is shortened in the middle."""
    lines = job.log.read_text(errors="replace").splitlines() if job.log.exists() else []
    if pattern:
        print(f"$ grep -E '{pattern}' {job.log.name}")
        lines = [line for line in lines if re.search(pattern, line)]
    else:
        print(f"$ cat {job.log.name}")
    if len(lines) > 40:
        lines[20:-20] = [f"... {len(lines) - 40} lines ..."]
    print("\n".join(lines).replace(f"{ROOT}/", "") or "no output")


@_with_scheduler
def show_processes(job: Job, *names: str) -> None:
    """Print these environment variables of each training process of a running job, one line per process.

    HOST stands for the node. srun --overlap starts a command beside the programs that are already running.
    """
    follow(job, until="RUNNING")
    nodes = job.nodes()
    pattern = f"({'|'.join([*names, 'LOCAL_WORLD_SIZE', 'RANK'])})="
    print(f"$ srun --jobid={job.number} --overlap ...   # on each node: read /proc/PROCESS/environ")
    step = [
        f"--jobid={job.number}",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
    ]
    done = _scheduler("srun", *step, "bash", "-c", LOOK, "bash", PROGRAM, pattern)
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in done.stdout.splitlines() if line]
    if not rows:
        print(f"no process of {PROGRAM} has started; look for the reason in the log")
        return
    table = [names, *sorted(([row.get(name, "") for name in names] for row in rows), key=lambda row: row[1:])]
    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    for row in table:
        print("".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@_with_scheduler
def kill_node(job: Job) -> str:
    """Kill the last node of a job on the practice cluster, and return its name; at a site, only requeue the job."""
    if _place.cluster is None:
        slurm(f"scontrol requeue {job.number}")
        return ""
    if not (nodes := job.nodes()) or set(job.states.values()) <= FINAL:
        print("not done: the job has ended")
        return ""
    _print(_workshop("cluster", "kill", nodes[-1]))
    return nodes[-1]


@_with_scheduler
def heal_node(node: str) -> None:
    """Bring back a node that ``kill_node`` has killed."""
    if node:
        _print(_workshop("cluster", "heal", node))


# ---------------------------------------------------------------- pictures


@_with_scheduler
def show_queue(job: Job) -> None:
    """Draw when a job waited and on which nodes it ran, as recorded by ``follow``; in an array, for each job."""
    import matplotlib.pyplot as plt

    numbers = sorted(job.states)
    spans = [span for number in numbers for span in _spans(job, number)]
    whole = max((end for _, _, end, _ in spans), default=1)
    rows = ["waiting", *sorted({node for *_, nodes in spans for node in nodes})]
    figure, axes = plt.subplots(figsize=(7, 0.6 * len(rows) + 0.9))
    height = 0.8 / len(numbers)
    for number, begin, end, nodes in spans:
        lane = numbers.index(number)
        for row in nodes or ["waiting"]:
            place = rows.index(row) - 0.4 + (lane + 0.5) * height
            colour = COLOURS[lane % len(COLOURS)]
            axes.barh(place, end - begin, height * 0.9, begin, color=colour if nodes else "white", edgecolor=colour)
            if end - begin > 0.05 * whole:  # shorter bars have no space for text
                middle, ink = (begin + end) / 2, "white" if nodes else "black"
                axes.text(middle, place, number, ha="center", va="center", fontsize=8, color=ink)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the job was submitted")
    axes.spines[["top", "right"]].set_visible(False)
    words = (
        f"{number} {'on ' + ' and '.join(nodes) if nodes else 'waiting'} from {begin:.0f} to {end:.0f} s"
        for number, begin, end, nodes in spans
    )
    show_figure(figure, "Jobs over time: " + "; ".join(words))


def _spans(job: Job, number: str) -> list[tuple[str, float, float, list[str]]]:
    """Return the periods in which a job waited (no nodes) or ran: job id, begin, end, nodes."""
    changes = [change for change in job.changes if change[1] == number]
    last = max(seconds for seconds, *_ in job.changes)
    ends = [seconds for seconds, *_ in changes[1:]] + [last]
    return [
        (number, begin, end, _hostnames(nodes) if state == "RUNNING" else [])
        for (begin, _, state, nodes), end in zip(changes, ends, strict=True)
        if state in ("PENDING", "RUNNING")
    ]


def show_sweep(job: Job | None, labels: Sequence[str]) -> None:
    """Draw the loss curves of the jobs of an array, with one label for each index of the array."""
    import matplotlib.pyplot as plt

    curves = [[loss for epoch in trained(job, number) for loss in epoch["losses"]] for number in range(len(labels))]
    if not all(curves):
        print("not done: not every job of the array has trained")
        return
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for number, (label, losses) in enumerate(zip(labels, curves, strict=True)):
        steps = range(1, len(losses) + 1)
        style = ("solid", "dashed", "dashdot", "dotted")[number % 4]
        axes.plot(steps, losses, label=label, color=COLOURS[number], linestyle=style, linewidth=2)
    axes.set(xlabel="step", ylabel="loss, logarithmic", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    words = (f"{label} from {losses[0]:.2f} to {losses[-1]:.2f}" for label, losses in zip(labels, curves, strict=True))
    show_figure(figure, "Losses: " + "; ".join(words))


@_with_scheduler
def show_study(*jobs: Job) -> float | None:
    """Compare jobs of train_at_scale.py with ``workshop bench --logs``, and show its table and its picture.

    Returns:
        The samples/s of the largest job divided by those of the smallest job; None: a job has written no results.
    """
    from IPython.display import HTML, display

    files = [os.path.relpath(job.folder / "runs" / f"{job.name}-{job.number}.json") for job in jobs]
    done = _workshop("bench", "--output", "runs/study", "--logs", *files)
    _print(done)
    if done.returncode != 0:
        return None
    study = json.loads(Path("runs/study/bench.json").read_text())
    data = base64.b64encode(Path("runs/study/bench.png").read_bytes()).decode()
    display(HTML(f'<img alt="{study["alt_text"]}" style="max-width:100%" src="data:image/png;base64,{data}">'))
    return next(iter(study["series"].values()))[-1]["speedup"]
