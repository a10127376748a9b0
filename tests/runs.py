"""Helpers for tests: start the scripts of the workshop, watch and kill them, and compare their logs and checkpoints."""

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
from workshop.measure.pretended_processes import variables
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
# Its sitecustomize.py applies the changes that TEST_PATCH names, and always the optimizers of a GPU.
PATCHES = ROOT / "tests" / "patches"
TORCHRUN_RUNNER = TORCHRUN.with_name("exercise2_run_multigpu_torchrun.sh")


def environment(**changes) -> dict:
    """Return the environment of a run: one thread per process, this Python, no variables of a launcher; None drops a variable."""
    outer = {name: None for name in os.environ if name.startswith("WORKSHOP_")}
    fixed = {"OMP_NUM_THREADS": 1, "WORKSHOP_PYTHON": sys.executable, "PYTHONPATH": f"{PATCHES}{os.pathsep}{ROOT}"}
    # Only tests marked gpu see GPUs, so the other tests compute on the CPU on every machine.
    return run_environment(gpus=False, **outer | fixed | changes)


def with_gpus() -> dict:
    """Return changes for ``environment`` that make the GPUs of this process visible to the run."""
    return {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}


def on_gpus(count: int):
    """Run a test on GPUs (marked gpu) and on pretended ones; it gets ``gpus``, the changes for ``environment``."""
    real = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason="needs a GPU")]
    cases = [pytest.param(with_gpus(), marks=real, id="gpu"), pytest.param(pretended(count), id="pretended")]
    return pytest.mark.parametrize("gpus", cases)


def pretended(gpus: int, report: Path | None = None) -> dict:
    """Return changes for ``environment`` that give the processes of a run pretended GPUs."""
    path = os.pathsep.join((str(PATCHES), str(ROOT)))
    return {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None} | variables(gpus, path, report)


def command(kind: str, nproc: int = 1) -> list[str]:
    """Return the command that starts a script; kind is "single", "spawn" or "torchrun"."""
    if kind == "single":
        return [sys.executable, str(SINGLE)]
    if kind == "spawn":
        return [sys.executable, str(SPAWN), "--nproc", str(nproc)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(TORCHRUN)]


def run(arguments, cwd, timeout=180, **env) -> subprocess.CompletedProcess:
    """Run a command to its end and capture its output as text."""
    return subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(kind, nproc, cwd, *options, checkpoint="run.pt", **env) -> list[dict]:
    """Train in ``cwd`` and return the epochs of the log. Fail unless the run succeeds and trains at least one epoch."""
    done = run([*command(kind, nproc), *options, "--checkpoint", checkpoint], cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = read_log(Path(cwd) / checkpoint)
    assert epochs, "the run trained nothing"
    assert (Path(cwd) / checkpoint).exists()
    assert f"epoch {len(epochs)}/{len(epochs)}" in done.stdout
    assert all(entry["losses"] for entry in epochs)
    return epochs


def losses(epochs: list[dict]) -> list[float]:
    """Return the losses of all steps of a log."""
    return [loss for entry in epochs for loss in entry["losses"]]


def load(path) -> dict:
    """Load a checkpoint onto the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def largest_difference(first, second) -> float:
    """Return the largest difference between the parameters of two checkpoints (paths); 0.0 if all are equal bit for bit."""
    a, b = load(first)["model"], load(second)["model"]
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def command_lines(processes) -> str:
    """Return the command lines of these processes, which all users can read; processes that have ended are skipped."""
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


# Why this machine cannot start a practice cluster, or "" if it can.
NO_CLUSTER = _without_cluster()
needs_cluster = pytest.mark.skipif(bool(NO_CLUSTER), reason=NO_CLUSTER)


def practice_cluster(nodes: int, name: str):
    """Start a practice cluster for a fixture, and end it afterwards."""
    if NO_CLUSTER:
        pytest.skip(NO_CLUSTER)
    up = cluster.up(nodes, name=f"{name}{os.getpid()}", mine=True)
    yield up
    up.end()


class Running(Background):
    """A run in the background; the test fails if an expected line does not appear or the run does not end."""

    def __init__(self, arguments, cwd, **env):
        super().__init__(arguments, cwd, environment(**env))

    def wait_for(self, line: str, timeout: float = 120) -> None:
        found = super().wait_for(line, timeout)
        assert found, f"'{line}' was not printed within {timeout} s (status {self.process.poll()}):\n{self.text()}"

    def wait(self, timeout: float = 180) -> int:
        status = super().wait(timeout)
        if status is None:
            self.end()
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}")
        return status
