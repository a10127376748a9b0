"""Starting and watching programs: their environment, atomic writes, failures, and runs that make no progress."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from workshop.files import remove, write_atomically
from workshop.repository import ROOT, packages, requirements
from workshop.run.environment import environment
from workshop.run.failures import explanation, first_failure, is_echo
from workshop.run.machine import cores, gpus, gpus_unopened
from workshop.run.processes import Outcome
from workshop.run.stillness import Patience, Watch
from workshop.slurm.shape import Shape


def test_a_program_gets_no_variables_of_a_launcher(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("UNWANTED", "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = environment(UNWANTED=None, OMP_NUM_THREADS=2)
    assert not found.keys() & {"SLURM_JOB_ID", "MASTER_PORT", "UNWANTED"}
    assert (found["OMP_NUM_THREADS"], found["WORKSHOP_PYTHON"]) == ("2", sys.executable)
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert found["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment(gpus=False)["CUDA_VISIBLE_DEVICES"] == ""


def test_cores_and_gpus_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    assert cores() == 3
    assert gpus_unopened() == gpus()


def test_a_folder_is_removed_although_a_signal_comes_meanwhile(tmp_path, monkeypatch):
    whole, calls = shutil.rmtree, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        whole(*args, **kwargs)

    (tmp_path / "folder" / "in it").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_atomically_and_keeps_its_mode(tmp_path):
    path = tmp_path / "figures.json"
    write_atomically(path, "{}")
    path.chmod(0o640)
    write_atomically(path, b"\xe2\x82\xac")
    assert path.read_text(encoding="utf-8") == "€"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    write_atomically(path, "old")

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["figures.json"]


def watched(program: str, patience: Patience, moves: bool = False) -> tuple[str, float]:
    """Watch a program; return the verdict and the seconds until it. With ``moves`` it makes progress at each look."""
    child = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        start, looks = time.monotonic(), 0
        watch = Watch(lambda: [psutil.Process(child.pid)], patience)
        while not (verdict := watch.look(looks if moves else 0)):
            looks += 1
            time.sleep(0.05)
        return verdict, time.monotonic() - start
    finally:
        child.kill()
        child.wait()


def test_a_sleeping_program_is_reported_as_idle():
    verdict, seconds = watched("import time; time.sleep(60)", Patience(idle=1, busy=20, total=30))
    assert verdict == "idle"
    assert seconds < 5


def test_a_computing_program_is_reported_as_busy_only_later():
    verdict, seconds = watched("while True: pass", Patience(idle=0.5, busy=2, total=30))
    assert verdict == "busy"
    assert seconds >= 2


def test_a_program_that_makes_progress_still_has_a_time_limit():
    verdict, seconds = watched("import time; time.sleep(60)", Patience(idle=0.3, busy=0.3, total=1.5), moves=True)
    assert verdict == "long"
    assert seconds >= 1.5


@pytest.mark.parametrize(
    ("text", "type_name", "echo"),
    [
        ("[gloo] Connection closed by peer [127.0.0.1]:29", "RuntimeError", True),
        ("Connection reset by peer", "", True),
        ("[Errno 32] Broken pipe", "BrokenPipeError", True),
        ("Timed out waiting 1800000ms for recv operation to complete", "RuntimeError", True),
        ("ncclRemoteError: ... a remote process exiting prematurely", "DistBackendError", True),
        ("socketProgress: Connection closed by remote peer node2<41234>", "DistBackendError", True),
        ("NCCL communicator was aborted on rank 0.", "DistBackendError", True),
        ("-- Process 1 terminated with the following error", "ProcessRaisedException", True),
        ("NCCL error: invalid usage. Duplicate GPU detected : rank 1 and rank 0", "DistBackendError", False),
        ("ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "ValueError", False),
        ("rank 1 divides by zero", "ZeroDivisionError", False),
    ],
)
def test_an_error_caused_by_a_different_rank_is_recognized(text, type_name, echo):
    assert is_echo(text, type_name) == echo


SHARED = """\
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SHARED, "Ranks 0 and 1 use the same GPU (1b000), which NCCL refuses."),
        (
            "RuntimeError: CUDA error: invalid device ordinal",
            "A process asked for a GPU with an index that it does not see.",
        ),
    ],
)
def test_the_error_of_two_processes_on_one_gpu_is_explained(error, words, tmp_path):
    known = explanation(error)
    assert known.startswith(words)
    for remedy in ("at most as many processes", "set_device_index with the local rank", "CUDA_VISIBLE_DEVICES="):
        assert remedy in known
    outcome = Outcome(status=1, output=f"Traceback (most recent call last):\n{error}", seconds=1, peak_memory=1)
    failure = first_failure(outcome, tmp_path)
    assert error.strip() in failure
    assert failure.splitlines()[-1] == known  # bench shows the last line
    assert explanation("ZeroDivisionError: rank 1 divides by zero") == ""


def test_a_shape_describes_what_a_job_requests():
    one, two = Shape(1, 4, 1, seconds=600), Shape(nodes=2, gpus=1, tasks=1, cores=4)
    assert (str(one), str(two)) == (
        "1 node with 4 GPUs for 00:10:00",
        "2 nodes with 1 GPU and 1 task each, 4 cores per task",
    )
    assert two.all_gpus == 2
    assert two.options(gres=True) == ["--nodes=2", "--gres=gpu:1", "--ntasks-per-node=1", "--cpus-per-task=4"]
    assert one.options(gres=False) == ["--nodes=1", "--gpus-per-node=4", "--ntasks-per-node=1"]


def test_the_required_packages_come_from_pyproject_or_from_the_metadata(monkeypatch, tmp_path):
    listed = packages()
    assert {"torch": "torch", "pillow": "PIL", "scikit-learn": "sklearn"}.items() <= listed.items()
    assert {"pytest", "xdist", "yaml"} <= set(requirements("development"))
    assert not set(requirements()) & set(requirements("development"))
    for module in requirements() + requirements("notebooks"):
        assert importlib.util.find_spec(module), module
    lines = [*(f"{name}>=1" for name in listed), "ninja>=1.11; extra == 'deepspeed'", 'x; sys_platform == "none"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    monkeypatch.setattr("workshop.repository.ROOT", tmp_path)
    assert packages() == listed
    assert requirements("deepspeed") == ["ninja"]
