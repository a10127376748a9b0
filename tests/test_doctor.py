"""``workshop doctor``: the finding of each check when something is wrong, and the exit status."""

import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

import runs
from workshop.doctor import machine as doctor
from workshop.doctor.result import GIB, OK, PROBLEM, WARNING, Result

Usage = namedtuple("Usage", "total used free")


@pytest.mark.machine
def test_this_machine_can_train():
    done = subprocess.run(
        [sys.executable, "-m", "workshop", "doctor"], env=runs.environment(COLUMNS=120), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "Training can run here" in done.stdout
    for check in (
        "Python",
        "torch",
        "torchvision",
        "devices",
        "backends",
        "process group",
        "training step",
        "packages",
        "data",
        "cores",
        "memory",
        "disk",
        "/dev/shm",
        "ports",
        "host name",
        "interconnect",
        "scheduler",
        "cluster",
    ):
        assert f" {check} " in done.stdout
    assert torch.__version__ in done.stdout


def test_a_problem_gives_exit_status_1_and_its_advice(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor,
        "CHECKS",
        (
            lambda: Result("disk", PROBLEM, "0.0 GiB free", "make room"),
            lambda: Result("cores", WARNING, "1", "ask for two"),
        ),
    )
    assert doctor.run_doctor() == 1
    seen = capsys.readouterr().out
    assert "disk: make room" in seen
    assert "cores: ask for two" in seen
    assert "Training cannot run here yet: see disk." in seen


def test_a_warning_alone_gives_exit_status_0(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: Result("cores", WARNING, "1", "ask for two"),))
    assert doctor.run_doctor() == 0


@pytest.mark.parametrize(("available", "status"), [(0.5, PROBLEM), (2, WARNING), (8, OK)])
def test_little_memory_is_a_warning_or_a_problem(available, status, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: namedtuple("Memory", "available")(available * GIB))
    assert doctor.check_memory().status == status


@pytest.mark.parametrize(("free", "status"), [(0.01, PROBLEM), (1, WARNING), (50, OK)])
def test_a_nearly_full_disk_is_a_warning_or_a_problem(free, status, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * GIB, 0, free * GIB))
    assert doctor.check_disk().status == status


def test_small_shared_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 * 2**20, 0, 64 * 2**20))
    finding = doctor.check_shared_memory()
    assert finding.status == WARNING
    assert "--shm-size" in finding.advice


def test_a_host_name_that_does_not_resolve_is_a_warning(monkeypatch):
    def fails(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    finding = doctor.check_host_name()
    assert finding.status == WARNING
    assert "127.0.1.1 node17" in finding.advice


def test_few_ports_are_a_warning(monkeypatch):
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, *a, **k: "40000 40100" if self.name == "ip_local_port_range" else read(self, *a, **k),
    )
    assert doctor.check_ports().status == WARNING


def test_a_single_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0}, raising=False)
    finding = doctor.check_cores()
    assert finding.status == WARNING
    assert "--cpus-per-task" in finding.advice


def test_a_quota_of_half_a_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_cgroup_cores", lambda: 0.5)
    assert doctor.check_cores().status == WARNING


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use the GPU of this machine")
def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_gpu_hardware", lambda: "an NVIDIA GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = doctor.check_devices()
    assert finding.status == WARNING
    assert "driver" in finding.advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset" in doctor.check_devices().advice


def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    """If torch cannot be imported, the doctor still gives its whole report, and exit status 1."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "workshop", "doctor"],
        capture_output=True,
        text=True,
        env={**runs.environment(COLUMNS=160), "PYTHONPATH": f"{tmp_path}:{runs.ROOT}"},
    )
    assert done.returncode == 1
    assert "libcudart.so.12" in done.stdout
    assert "delete .venv and run ./workshop.sh again" in done.stdout
    assert "scheduler" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_process_group_that_cannot_start_is_a_problem(monkeypatch, capsys):
    import torch.distributed as dist

    def refused(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with [/pytorch/gloo/pair.cc:144] no error")

    monkeypatch.setattr(dist, "TCPStore", refused)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_process_group,))
    assert doctor.run_doctor() == 1
    seen = " ".join(capsys.readouterr().out.split())
    assert "[/pytorch/gloo/pair.cc:144]" in seen
    assert "loopback" in seen


def test_a_training_step_that_fails_is_a_problem(monkeypatch):
    from workshop.training.models import SmallCNN

    def no_kernel(*_):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")

    monkeypatch.setattr(SmallCNN, "forward", no_kernel)
    finding = doctor.check_training_step()
    assert finding.status == PROBLEM
    assert finding.seen == "fails: CUDA error: no kernel image is available for execution on the device"


def test_the_memory_limit_of_a_job_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text(str(4 * GIB))
    (tmp_path / "memory.current").write_text(str(int(3.5 * GIB)))
    monkeypatch.setattr(doctor, "_cgroup_files", lambda *_: [tmp_path / "memory.max"])
    assert doctor.check_memory().status == PROBLEM


def test_the_doctor_names_the_scheduler_and_the_job(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/sbatch" if name == "sbatch" else None)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert doctor.check_scheduler().seen == "Slurm; you are inside job 4711"
