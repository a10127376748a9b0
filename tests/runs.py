"""Starting the workshop's scripts in tests, watching them, killing them, and comparing what they leave."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import needs
from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.run.environment import environment as run_environment
from workshop.run.processes import Background
from workshop.slurm import cluster
from workshop.slurm.cluster import require_machine
from workshop.training.logs import read_log

SINGLE = ROOT / "01_single_gpu" / "single_gpu.py"
SPAWN = ROOT / "solutions" / "02_pytorch_ddp" / "exercise1_multigpu.py"
TORCHRUN = ROOT / "solutions" / "02_pytorch_ddp" / "exercise2_multigpu_torchrun.py"
METRICS = ROOT / "solutions" / "02_pytorch_ddp" / "exercise3_global_metrics.py"
PATCHES = ROOT / "tests" / "patches"  # what TEST_PATCH=... switches on: see sitecustomize.py there
TORCHRUN_RUNNER = TORCHRUN.with_name("exercise2_run_multigpu_torchrun.sh")


def environment(**changes) -> dict:
    """The environment of a run: one thread a process, this Python, no launcher's variables from outside; None drops one."""
    outer = {name: None for name in os.environ if name.startswith("WORKSHOP_")}
    fixed = {"OMP_NUM_THREADS": 1, "WORKSHOP_PYTHON": sys.executable, "PYTHONPATH": f"{PATCHES}{os.pathsep}{ROOT}"}
    # What the CPU computes is the same everywhere: GPUs are hidden from all tests but those marked gpu.
    return run_environment(gpus=False, **outer | fixed | changes)


def with_gpus() -> dict:
    """Changes to ``environment`` that let a run see the GPUs that this process sees."""
    return {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}


def command(kind: str, nproc: int = 1) -> list[str]:
    """The command that starts a script: kind is "single", "spawn" or "torchrun"."""
    if kind == "single":
        return [sys.executable, str(SINGLE)]
    if kind == "spawn":
        return [sys.executable, str(SPAWN), "--nproc", str(nproc)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(TORCHRUN)]


def run(arguments, cwd, timeout=180, **env) -> subprocess.CompletedProcess:
    """Run a command to its end, with its output captured as text."""
    return subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(kind, nproc, cwd, *options, checkpoint="run.pt", **env) -> list[dict]:
    """Train in ``cwd`` and return the epochs of the log. Fails unless the run ended well and really trained."""
    done = run([*command(kind, nproc), *options, "--checkpoint", checkpoint], cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = read_log(Path(cwd) / checkpoint)
    assert epochs, "the run trained nothing"
    assert (Path(cwd) / checkpoint).exists()
    assert f"epoch {len(epochs)}/{len(epochs)}" in done.stdout
    assert all(entry["losses"] for entry in epochs)
    return epochs


def losses(epochs: list[dict]) -> list[float]:
    """The losses of all steps of a log."""
    return [loss for entry in epochs for loss in entry["losses"]]


def load(path) -> dict:
    """A checkpoint, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def largest_difference(first, second) -> float:
    """The largest difference between the weights of two checkpoints (paths); 0.0 if they are equal bit for bit."""
    a, b = load(first)["model"], load(second)["model"]
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def command_lines(processes) -> str:
    """What everybody on the machine can read of these processes; those that have ended show nothing any more."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            lines += process.cmdline()
    return " ".join(lines)


def _without_cluster() -> str:
    if reason := needs.reason(*needs.SLURM):
        return reason
    try:
        require_machine()
    except UserError as reason:
        return str(reason)
    return ""


# Why no practice cluster can be started on this machine; "": one can.
NO_CLUSTER = _without_cluster()
needs_cluster = pytest.mark.skipif(bool(NO_CLUSTER), reason=NO_CLUSTER)


def practice_cluster(nodes: int, name: str):
    """What a fixture yields from: a practice cluster of its own, gone afterwards."""
    if NO_CLUSTER:
        pytest.skip(NO_CLUSTER)
    up = cluster.up(nodes, name=f"{name}{os.getpid()}", mine=True)
    yield up
    up.end()


class Running(Background):
    """A run in the background; that it does not come where it should fails the test."""

    def __init__(self, arguments, cwd, **env):
        super().__init__(arguments, cwd, environment(**env))

    def wait_for(self, line: str, timeout: float = 120) -> None:
        found = super().wait_for(line, timeout)
        assert found, f"no '{line}' (status {self.process.poll()}, within {timeout} s):\n{self.text()}"

    def wait(self, timeout: float = 180) -> int:
        status = super().wait(timeout)
        if status is None:
            self.end()
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}")
        return status
