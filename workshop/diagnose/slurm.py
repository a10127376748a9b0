"""``workshop diagnose JOBID``: look once at all nodes of a Slurm job, in a job step of our own beside the program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from workshop.diagnose.causes import judge
from workshop.diagnose.collect import collect
from workshop.diagnose.evidence import Scene, from_json, to_json
from workshop.diagnose.report import folder_for, show
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import ROOT

TIMEOUT = 60  # seconds for the job step


def diagnose_job(job: str, output: str = "") -> int:
    """Report why a running Slurm job hangs.

    Args:
        job: the job ID.
        output: the folder of the report; all nodes of the job must see it.

    Returns:
        0: it makes progress; 1: it hangs.

    Raises:
        UserError: Slurm is not here, or the job does not run, or it belongs to a different user.
    """
    nodes = _nodes(job)
    folder = folder_for(output)
    # --overlap: the step uses the processors and GPUs of the program, which keeps running.
    command = [
        "srun",
        f"--jobid={job}",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
    ]
    command += [
        "--mem=0",
        "--kill-on-bad-exit=0",
        sys.executable,
        "-P",
        "-m",
        "workshop.diagnose.slurm",
        job,
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        step = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        problem = step.stderr.strip().splitlines()[-1:] if step.returncode else []
    except subprocess.TimeoutExpired:
        problem = [f"the job step did not end within {TIMEOUT} s"]
    scenes, missing = [], list(problem)
    for node in nodes:
        try:
            scenes.append(from_json(json.loads((folder / f"{node}.json").read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            missing.append(f"nothing could be read on {node}")
    scene = join(scenes, missing)
    diagnosis = judge(scene)
    show(diagnosis, scene, str(folder), f"job {job} on {', '.join(nodes)}")
    return 0 if diagnosis.cause in ("moves", "slow") else 1


def join(scenes: Sequence[Scene], missing: Sequence[str] = ()) -> Scene:
    """Return the scenes of several nodes as one."""
    ranks = sorted((rank for scene in scenes for rank in scene.ranks), key=lambda rank: (rank.rank, rank.node))
    sentences = dict.fromkeys([*missing, *(sentence for scene in scenes for sentence in scene.missing)])
    return Scene(
        tuple(rank for rank in ranks if rank.rank >= 0 or not any(other.rank >= 0 for other in ranks)),
        {node: names for scene in scenes for node, names in scene.interfaces.items()},
        tuple(sentences),
        killed_for_memory=tuple(pid for scene in scenes for pid in scene.killed_for_memory),
    )


def _nodes(job: str) -> list[str]:
    if shutil.which("squeue") is None:
        raise UserError(
            "squeue was not found, so there is no Slurm here. Use --pid on the node on which the program runs"
        )
    line = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T|%N|%u"], capture_output=True, text=True)
    words = line.stdout.strip().splitlines()
    if not words:
        raise UserError(f"job {job} does not run: it has ended, or Slurm does not know it (sacct -j {job})")
    state, names, user = words[0].split("|")
    if state != "RUNNING":
        raise UserError(f"job {job} is {state}, so it has no processes to look at")
    hosts = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True).stdout.split()
    if not hosts:
        raise UserError(f"Slurm names no nodes for job {job} of {user}")
    return hosts


def on_this_node(job: str, folder: Path) -> None:
    """Write what is seen of a job on this node into a folder."""
    node = os.environ.get("SLURMD_NODENAME", "")
    answers = [place for place in (_answers(process) for process in _members(job, node)) if place]
    scene, texts = collect(lambda: _members(job, node), Path(answers[0]) if answers else None)
    write_atomically(folder / f"{scene.here}.json", json.dumps(to_json(scene)))
    for pid, stacks in texts.items():
        if stacks:
            write_atomically(folder / f"stacks-{scene.here}-{pid}.txt", stacks + "\n")


def _answers(process: psutil.Process) -> str:
    try:
        return process.environ().get("WORKSHOP_DIAGNOSE", "")
    except psutil.Error:
        return ""


def _members(job: str, node: str) -> list[psutil.Process]:
    """Return the processes of a job on a node, without those of this job step."""
    own = os.environ.get("SLURM_STEP_ID", "")
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        mine = environment.get("SLURM_STEP_ID", "") == own and own
        if environment.get("SLURM_JOB_ID") == job and not mine and environment.get("SLURMD_NODENAME", node) == node:
            found.append(process)
    return found


if __name__ == "__main__":
    on_this_node(sys.argv[1], Path(sys.argv[2]))
