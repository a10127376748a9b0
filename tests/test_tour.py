"""``workshop tour``: a whole tour, and runs that fail."""

import json
import os
import pickle
import subprocess
import sys

import psutil
import pytest
from PIL import Image

import runs
from workshop.demo import tour
from workshop.run.failures import first_failure
from workshop.run.processes import Outcome


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """The tour of the README, in a separate folder."""
    folder = tmp_path_factory.mktemp("tour")
    done = subprocess.run(
        [sys.executable, "-m", "workshop", "tour", "--output", str(folder)],
        cwd=folder,
        env=runs.environment(COLUMNS=80),
        capture_output=True,
        text=True,
    )
    return folder, done


@pytest.mark.full  # .ci/run starts the tour daily
def test_all_runs_of_the_tour_train_the_same(toured):
    folder, done = toured
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "tour.json").read_text())
    assert [(run["stage"], run["name"], run["processes"]) for run in summary["runs"]][:3] == [
        ("01", "single process", 1),
        ("02", "mp.spawn", 1),
        ("02", "mp.spawn", 2),
    ]
    assert {(run["name"], count) for run in summary["runs"] for count in [run["processes"]]} >= {
        ("torchrun", 1),
        ("torchrun", 2),
        ("Lightning", 1),
        ("Lightning", 2),
        ("DDP", 1),
        ("DDP", 2),
        ("FSDP", 1),
        ("FSDP", 2),
    }
    for run in summary["runs"]:
        assert run["failure"] == ""
        assert run["samples_per_second"] > 0
        if run["language"]:
            assert len(run["losses"]) == summary["epochs"] * tour.STEPS
            assert run["validation_loss"] < run["losses"][0] - 1
            continue
        assert run["accuracy"] >= 0.95
        assert len(run["losses"]) == summary["epochs"] * (1437 // summary["global_batch"])
        assert run["losses"][-1] < 0.3 * run["losses"][0]
    assert summary["largest_difference_between_loss_curves"] < 1e-3
    assert summary["largest_difference_between_loss_curves_of_the_language_model"] < 0.05  # one is in bfloat16
    assert summary["runs"][0]["speedup"] == 1


@pytest.mark.full  # .ci/run starts the tour daily
def test_the_tour_prints_a_table_and_draws_pictures(toured):
    folder, done = toured
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.lstrip().startswith("stage"))
    assert header.split() == ["stage", "run", "processes", "device", "samples/s", "speed-up", "accuracy", "seconds"]
    assert sum(line.lstrip().startswith(("01 ", "02 ", "03 ", "04 ")) for line in lines) == len(
        json.loads((folder / "tour.json").read_text())["runs"]
    )
    for name in ("tour.png", "tour-language.png"):
        with Image.open(folder / name) as picture:
            assert picture.width > 1000
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 20, "the picture is empty"


@pytest.mark.full
@pytest.mark.parametrize("name", ["mp.spawn", "torchrun"])
def test_a_run_that_fails_shows_the_traceback_of_the_rank_that_failed_first(name, tmp_path, monkeypatch):
    for key, value in runs.environment(TEST_PATCH="fail_on_rank_1").items():
        monkeypatch.setenv(key, value)
    entry = next(entry for entry in tour.entries() if entry.name == name)
    result = tour._run(entry, 2, 128, 1, runs.ROOT, tmp_path, lambda line: None)
    # On a busy machine both ranks may have ended before mp.spawn looks; then it prints the traceback of rank 0.
    said = ("rank 1 failed first:\n", *(["a rank other than 0 failed first:\n"] if name == "mp.spawn" else []))
    assert result["failure"].startswith(tuple(first + "Traceback (most recent call last)" for first in said))
    assert "ZeroDivisionError: rank 1 divides by zero" in result["failure"]
    assert "optimizer.step()" in result["failure"]


def test_the_original_error_is_shown_when_mp_spawn_prints_its_consequence(tmp_path):
    error = "Traceback (most recent call last):\nZeroDivisionError: rank 1 divides by zero\n"
    echo = "Traceback (most recent call last):\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:29\n"
    for name, traceback in (("a", echo), ("b", error)):
        (tmp_path / f"pytorch-errorfile-{name}.pickle").write_bytes(pickle.dumps(traceback))
    printed = f"torch.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n{echo}\n"
    outcome = Outcome(status=1, output=printed, seconds=1, peak_memory=1)
    assert first_failure(outcome, tmp_path, tmp_path) == f"a rank other than 0 failed first:\n{error.strip()}"


def test_the_traceback_of_torchrun_itself_is_not_shown(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os\nif os.environ['RANK'] == '1':\n    print('it ends', flush=True)\n    os.abort()\n")
    outcome = tour.launch(tour.torchrun(2, program), runs.environment(), tmp_path, lambda line: None)
    failure = first_failure(outcome, tmp_path)
    assert failure.startswith("rank 1 ended first, with exit status -6:")
    assert "it ends" in failure
    assert "ChildFailedError" in outcome.output
    assert "ChildFailedError" not in failure


@pytest.mark.full
def test_a_tour_with_failing_runs_shows_them_and_has_exit_status_1(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "workshop", "tour", "--stages", "02", "--epochs", "1", "--output", str(tmp_path)],
        cwd=tmp_path,
        env=runs.environment(TEST_PATCH="fail_on_rank_1", COLUMNS=80),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout.count("ZeroDivisionError: rank 1 divides by zero") == 2
    failed = [run for run in json.loads((tmp_path / "tour.json").read_text())["runs"] if run["failure"]]
    assert [(run["name"], run["processes"]) for run in failed] == [("mp.spawn", 2), ("torchrun", 2)]


def test_a_run_that_trains_nothing_is_a_failure(tmp_path):
    entry = tour.Entry("09", "idle", lambda n: [sys.executable, "-c", "print('epoch 1/1')"])
    result = tour._run(entry, 1, 128, 1, runs.ROOT, tmp_path, lambda line: None)
    assert "trained 0 of 1 epochs" in result["failure"]


def test_the_runs_of_a_tour_get_no_variables_of_a_slurm_job(tmp_path, monkeypatch):
    """In a terminal of JupyterLab in a Slurm job, the variables of the job would make Lightning wait for srun."""
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "jupyter", "SLURM_JOB_ID": "7", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    look = (
        "import os; print(*[name for name in sorted(os.environ) if name.startswith('SLURM') or name == 'RANK'], 'end')"
    )
    entry = tour.Entry("09", "look", lambda n: [sys.executable, "-c", look])
    tour._run(entry, 1, 128, 1, runs.ROOT, tmp_path, lambda line: None)
    assert (tmp_path / "09-look-1" / "output.txt").read_text() == "end\n"


def test_a_run_that_hangs_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    mark = f"600 + 0 * {os.getpid()}"
    child = f"import time; time.sleep({mark})"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{child}']); {child}"
    outcome = tour.launch([sys.executable, "-c", program], dict(os.environ), tmp_path, lambda line: None, stall=1)
    assert outcome.status is None
    assert "made no progress" in first_failure(outcome, tmp_path)
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if mark in " ".join(process.info["cmdline"] or [])
    ]


def test_process_counts_follow_the_machine(monkeypatch):
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for gpus, counts in ((2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda gpus=gpus: gpus)
        assert tour.process_counts() == counts
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    assert tour.process_counts() == [1, 2]
