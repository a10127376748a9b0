"""Starting programs, watching them, and what they leave: the environment, files, failures, runs that stand still."""

import os
import sys

import pytest

from workshop.files import write_atomically
from workshop.repository import ROOT
from workshop.run.environment import environment
from workshop.run.machine import cores, gpus, gpus_unopened


def test_the_environment_of_a_program(monkeypatch):
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


def test_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    assert cores() == 3
    assert gpus_unopened() == gpus()


def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path):
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
