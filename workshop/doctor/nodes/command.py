"""Run ``workshop doctor --nodes``: start one small job on the nodes, wait for its result, and say which nodes are slow."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from workshop.doctor.nodes.compare import METRICS, Slow, busy, slow_nodes
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import ROOT, open_folder
from workshop.run.processes import end_family
from workshop.slurm.sites import find_site
from workshop.slurm.submission import Submission, submission
from workshop.slurm.submit import choose_site, on_practice_cluster, submit_job, write_settings

SCRIPT = Path(__file__).with_name("job.sh")
ENDED = 10  # seconds after the end of a job in which its result must be visible on this machine
SAY = 5  # seconds in the queue after which the reason is printed
# The reasons of Slurm with which a job waits forever.
NEVER = re.compile(
    r"Partition(Config|NodeLimit|TimeLimit|Inactive)|BadConstraints|Invalid(Account|QOS)|(QOS|Assoc)Max\w+PerJob"
)


def run_nodes(shape: str, site: str | None, wait: float, output: str | None, **options) -> int:
    """Measure nodes, print a table, and name those that are slower than the others.

    Args:
        shape: nodes, or nodes x GPUs per node, such as "2x4".
        site: the name of the site's profile; None: the site of this host.
        wait: minutes in the queue after which the job is cancelled.
        output: a file for the result as JSON; None: none.
        **options: of ``submission``: account, queue, reservation, container.

    Returns:
        0: all nodes are alike; 1: a node is slow, does not answer, or did not start.

    Raises:
        UserError: the job cannot be started, does not start in time, or leaves no result.
    """
    nodes, gpus = parse_shape(shape)
    if output:
        open_folder(Path(output).absolute().parent)
    result = open_folder("runs") / f"doctor-nodes-{os.getpid()}-{int(time.time())}.json"
    try:
        where = _measure(nodes, gpus, site, wait, result, options)
        content = {"command": f"workshop doctor --nodes {shape}", "where": where, **json.loads(result.read_text())}
    finally:
        result.unlink(missing_ok=True)
    slow = slow_nodes(content["nodes"])
    content["slow"] = [vars(each) for each in slow]
    if output:
        write_atomically(Path(output), json.dumps(content, indent=1) + "\n")
    show(content, slow)
    return 1 if slow or content["missing"] or content["silent"] or content["unreachable"] else 0


def parse_shape(text: str) -> tuple[int, int | None]:
    """Return nodes and GPUs per node (None: the number that a node of the site has) for "2", "2x4".

    Raises:
        UserError: the text is no shape.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d?))?", text.strip())
    if not found:
        raise UserError(f"--nodes {text}: write nodes, or nodes x GPUs per node, such as 2 or 2x4")
    return int(found[1]), int(found[2]) if found[2] else None


def _measure(nodes: int, gpus: int | None, site: str | None, wait: float, result: Path, options: dict) -> str:
    """Run the measurement, and return where it ran."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return _inside(job, nodes, result)
    try:
        name = choose_site(site)
    except UserError:
        if nodes > 1:
            raise
        return _here(result)
    profile = find_site(name)
    if profile.scheduler != "slurm":
        raise UserError(f"{profile.name} has no Slurm: `doctor --nodes` starts its programs with srun")
    gpus = gpus or profile.gpus_per_node
    planned = submission(
        SCRIPT, name, profile, nodes=nodes, gpus_per_node=gpus, arguments=[str(result), str(nodes)], **options
    )
    write_settings(planned.settings_path, planned.settings)
    number = submit_job(planned, name)
    try:
        _follow(number, planned, name, result, wait)
    except BaseException:
        _on_login(["scancel", number], name)
        raise
    return f"job {number} at {profile.name}"


def _here(result: Path) -> str:
    """Measure this machine alone."""
    program = [sys.executable, "-P", "-m", "workshop.doctor.nodes.program"]
    return _run([*program, str(result), "0", socket.gethostname()], result, "this machine")


def _inside(job: str, nodes: int, result: Path) -> str:
    """Measure nodes of the job in which this command runs."""
    if shutil.which("srun") is None:
        raise UserError(f"this is job {job}, but there is no srun here; run the command on a node of the job")
    has = int(os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES", 1)))
    if nodes > has:
        raise UserError(f"job {job} has {has} nodes, not {nodes}")
    return _run(["bash", str(SCRIPT), str(result), str(nodes)], result, f"job {job}")


def _run(command: Sequence[str], result: Path, where: str) -> str:
    """Run the measurement as a child of this process.

    Raises:
        UserError: it left no result.
    """
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        problem = process.communicate()[1]
    finally:
        end_family(process)
    if not result.exists():
        raise UserError(f"the measurement in {where} failed: {failure(problem)}")
    return where


def _follow(number: str, planned: Submission, name: str, result: Path, wait: float) -> None:
    """Wait until a job has written its result, and has ended.

    Raises:
        UserError: it waits too long in the queue, or ended without a result.
    """
    begin, said, ended = time.monotonic(), "", 0.0
    while True:
        state, reason = _state(number, name)
        if state == "PENDING":
            waited = time.monotonic() - begin
            if waited > 60 * wait:
                raise UserError(
                    f"job {number} did not start within {wait:g} minutes ({reason}), and was cancelled; "
                    "ask for fewer nodes, or wait longer with --wait"
                )
            if waited > SAY and NEVER.match(reason):
                raise UserError(
                    f"job {number} would wait forever ({reason}), and was cancelled; ask for fewer nodes, and look which nodes "
                    "and limits the partition has: sinfo, scontrol show partition"
                )
            if waited > SAY and reason != said:
                print(f"job {number} waits in the queue ({reason}); Ctrl-C cancels it", file=sys.stderr, flush=True)
                said = reason
        elif not state:
            if result.exists():
                return
            ended = ended or time.monotonic()
            if time.monotonic() - ended > ENDED:
                log = Path(planned.log.replace("%j", number))
                text = log.read_text(errors="replace") if log.exists() else ""
                raise UserError(f"job {number} left no result: {failure(text)} ({log})")
        time.sleep(1)


def _state(number: str, name: str) -> tuple[str, str]:
    """Return the state of a job and the reason why it waits; ("", ""): it has ended."""
    done = _on_login(["squeue", "--noheader", f"--jobs={number}", "--format=%T|%r"], name)
    state, _, reason = done.stdout.strip().partition("|")
    return (state, reason) if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED") else ("", "")


def _on_login(command: list[str], name: str) -> subprocess.CompletedProcess:
    """Run a command of Slurm; for the practice cluster, on its login node."""
    if name == "local" and not on_practice_cluster():
        from workshop.slurm.cluster import require_cluster

        command = require_cluster().inside(command)
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def failure(text: str) -> str:
    """Return why a measurement failed, from its output: the node that did not start, or the first error."""
    if node := re.search(r"failed on node (\S+): (.+)", text):
        return (
            f"{node[1]} did not start the program ({node[2]}). Exclude it with `#SBATCH --exclude={node[1]}` in the job script, "
            "and tell the administrators"
        )
    lines = text.strip().splitlines() or ["it printed nothing"]
    return next((line for line in lines if "rror" in line), lines[-1])


def show(content: dict, slow: Sequence[Slow]) -> None:
    """Print the table of all nodes, and what to do about those that are slow."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    nodes = content["nodes"]
    keys = [key for key in METRICS if any(key in node for node in nodes.values())]
    table = Table(box=None, padding=(0, 1))
    for title in ("node", "cores", "GPUs", *(key.replace("_", " ") for key in keys), "clock"):
        table.add_column(title, justify="left" if title == "node" else "right")
    for name, node in nodes.items():
        style = "yellow" if any(each.node == name for each in slow) else None
        values = [METRICS[key].show(METRICS[key].best(node[key])) if key in node else "" for key in keys]
        table.add_row(name, str(node["cores"]), str(node["gpus"]), *values, _clock(node, nodes), style=style)
    console.print(f"{content['where']}: {content['passes']} passes in {content['seconds']:.0f} s")
    console.print(table)
    for sentence in sentences(content, slow):
        console.print(sentence, soft_wrap=True)


def _clock(node: dict, nodes: dict) -> str:
    """Return by how much the clock of a node differs from that of the first node."""
    first = next(iter(nodes.values()))
    if "clock" not in node or "clock" not in first:
        return ""
    return f"{(node['clock'] - first['clock']) * 1000:+,.1f} ms"


def sentences(content: dict, slow: Sequence[Slow]) -> list[str]:
    """Return what is wrong with the nodes, what it means, and what to do."""
    said = [
        f"{name} did not start the program within two minutes, or cannot reach the first node."
        for name in content["missing"]
    ]
    said += [f"{name} stopped answering ({order})." for name, order in content["silent"].items()]
    said += [f"{pair['from']} cannot connect to {pair['to']}: {pair['error']}." for pair in content["unreachable"]]
    if (share := busy(content["nodes"])) is not None:
        said.append(
            f"Something else uses the cores: the median node got {share:.0%} of their time. Only large differences can be seen; "
            "measure again when the nodes are idle."
        )
    for each in slow:
        said.append(f"{each.node} differs from the other nodes:")
        said += [f"  - {reason}" for reason in each.reasons]
    if (pace := min((each.pace for each in slow), default=1.0)) < 1:
        said.append(
            "In each step all ranks wait for the slowest one, so all nodes of the job compute at about "
            f"{pace:.0%} of their speed."
        )
    if bad := [*content["missing"], *content["silent"], *(each.node for each in slow)]:
        names = ",".join(dict.fromkeys(bad))
        said.append(f"Exclude {names} with `#SBATCH --exclude={names}` in the job script, and tell the administrators.")
    elif not content["unreachable"]:
        count = len(content["nodes"])
        said.append(f"The {count} nodes are alike." if count > 1 else "There is no other node to compare it with.")
    return said
