"""The notebook of slurm-multinode submits, follows and shows jobs on a practice cluster that ends with its kernel."""

import os
import re
import shutil
import signal
import tempfile
import time

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel

import runs
from test_notebooks import checks, copy, execute, exercises, goals_left, pictures, solve, text  # noqa: F401 - a fixture
from workshop.jupyter import jobs, solutions

STAGE = "slurm-multinode"


@pytest.fixture
def notebook(copy, monkeypatch):  # noqa: F811
    """The notebook in a copy of the stage; its clusters belong to the test and must end with it."""
    ignored = shutil.ignore_patterns("runs", "*.log", "__pycache__")
    shutil.copytree(runs.ROOT / STAGE, copy / STAGE, ignore=ignored, dirs_exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ws-") as place:  # a socket path has at most 107 characters
        monkeypatch.setenv("TMPDIR", place)
        yield copy / STAGE / f"{STAGE}.ipynb"
        end = time.monotonic() + 10
        while left := on_clusters(place):
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.1)


def on_clusters(place) -> list[list[str]]:
    """Return the command lines of the processes of clusters whose files are in a folder."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(word.startswith(f"{place}/workshop-") for word in line)]


def table(said: str) -> list[list[str]]:
    """Return the rows of the first table of processes in the output of a cell."""
    lines = said[said.index("HOST ") :].splitlines()[1:]
    return [line.split() for line in lines if re.match(r"node\d ", line)]


def judge(there):
    """Check the outputs that every run shows, as delivered or solved."""
    said = text(there)
    assert "Traceback" not in said
    assert "not done" not in said
    assert text(there, "sinfo").count("idle") == 4
    assert "1 node with 4 GPUs" in text(there, "run-first")
    assert "launch_d" in text(there, "run-first")  # from squeue
    assert "training on cpu from epoch 1: 4 processes" in text(there, "log-first")
    assert "epoch 3/3" in text(there, "log-first")
    assert len(table(text(there, "run-2n4g"))) == 4
    trap = text(there, "run-trap")
    assert "on nodes node1 in" in trap
    assert "a space after # makes it a comment" in trap
    sweep = text(there, "run-array")
    assert [sweep.count(f"_{number}   COMPLETED") for number in range(4)] == [1, 1, 1, 1]
    assert "node2 is dead" in text(there, "run-kill")
    assert "node2 is back" in text(there, "run-kill")
    assert re.search(r"communication [\d.]+% of each step", text(there, "log-scale"))
    assert "all_reduce" in text(there, "log-collectives")
    sites = text(there, "run-sites")
    assert "--mem-per-gpu" in sites
    assert "--qos=acc_debug" in sites
    assert "qsub" in sites
    assert "module" in text(there, "run-settings")
    assert "The cluster and all its processes have ended" in text(there, "leave-site")
    shown = pictures(there)
    assert len(shown) == 6
    for number, picture in enumerate(
        ["Loss curves", "Jobs over time", "Losses", "Jobs over time", "Samples per", "Bars"]
    ):
        assert shown[number].startswith(picture)
    assert shown[2].count("learning rate") == 4


def judge_solved(there):
    """Check the outputs of a run in which all goals are met."""
    judge(there)
    assert [row[:4] for row in table(text(there, "run-2n4g"))] == [
        ["node1", "0", "0", "4"],
        ["node1", "1", "1", "4"],
        ["node2", "2", "0", "4"],
        ["node2", "3", "1", "4"],
    ]
    assert [row[:4] for row in table(text(there, "run-4n4g"))] == [[f"node{n + 1}", f"{n}", "0", "4"] for n in range(4)]
    assert [row[4:] for row in table(text(there, "run-2n4g"))] == [["0", "0", "2"]] * 2 + [["1", "0", "2"]] * 2
    # Without torchrun the rank, local rank and world size are those of Slurm.
    assert [row[1:4] for row in table(text(there, "run-srun"))] == [row[4:] for row in table(text(there, "run-srun"))]
    assert [row[1] for row in table(text(there, "run-srun"))] == ["0", "1", "2", "3"]
    losses = re.findall(r"from ([\d.]+) to ([\d.]+) in 15 steps", pictures(there)[0])
    assert len(losses) == 3
    assert len(set(losses)) == 1
    killed = text(there, "run-kill")
    assert re.search(r"RUNNING on node\[1-2\](?s:.*)PENDING(?s:.*)RUNNING on (?s:.*)COMPLETED", killed)
    history = text(there, "history-kill").partition("epochs in its log: ")[2]
    assert history.split() == [str(epoch) for epoch in range(1, 16)]
    assert re.search(r"training on cpu from epoch [2-9]", text(there, "log-kill"))
    assert goals_left(there) == set()
    assert checks(there).keys() == exercises(STAGE)


@pytest.mark.full
@runs.needs_cluster
def test_a_notebook_runs_as_delivered(notebook):
    there = execute(notebook)
    judge(there)
    assert goals_left(there) == exercises(STAGE)
    for name in exercises(STAGE):
        assert (notebook.parent / name).read_text() == (runs.ROOT / STAGE / name).read_text()


@pytest.mark.full
@runs.needs_cluster
def test_a_notebook_runs_with_the_solutions(notebook):
    solve(notebook.parent.parent)
    judge_solved(execute(notebook))


def test_the_solution_notebook_shows_a_solved_run():
    _, path = solutions.paths(STAGE)
    judge_solved(nbformat.read(path, as_version=4))


def cells(path, *names) -> list[str]:
    """Return the source of the cells with these names."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell["id"] in names]


@runs.needs_cluster
def test_the_cluster_ends_with_the_kernel(notebook):
    kernel, client = start_new_kernel(cwd=str(notebook.parent), startup_timeout=60)
    try:
        for source in cells(notebook, "start", "use-site"):
            client.execute_interactive(source, timeout=60)
        assert on_clusters(os.environ["TMPDIR"])
    finally:
        client.stop_channels()
        os.kill(kernel.provisioner.pid, signal.SIGKILL)  # the fixture checks that the cluster ends
        kernel.cleanup_resources()


@pytest.mark.full
def test_without_a_cluster_the_notebook_says_what_is_missing(notebook):
    (notebook.parent.parent / "sitecustomize.py").write_text(
        "import shutil\nwhich = shutil.which\n"
        "shutil.which = lambda name, *rest, **more: None if name == 'slurmctld' else which(name, *rest, **more)\n"
    )
    there = execute(notebook)
    said = text(there, "use-site")
    assert re.search(r"a practice cluster needs programs that are not installed: sudo .* slurmctld\b", said)
    assert "Traceback" not in text(there)
    for name in ("sinfo", "run-first", "run-2n4g", "run-array", "run-kill", "run-scale", "plot-scale"):
        assert set(text(there, name).splitlines()) <= {
            "not done: no jobs can be submitted here (see the cell with use_site)",
        }, name
    for name, exercise in checks(there).items():
        if name.endswith(".sh"):  # the programs of exercise 5 need no cluster
            assert "not checked: what the script does: a practice cluster needs programs" in " ".join(exercise.split())
    assert "qsub" in text(there, "run-sites")  # cells that need no cluster still run


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "there is no site 'nowhere'; choose from adroit, "),
        ("derecho", "Derecho (NCAR) uses PBS, and this notebook shows Slurm"),
        ("lumi", "there is no sbatch here: open the notebook at LUMI-G, or write site = "),
    ],
)
def test_a_site_without_slurm_on_this_machine_is_refused(name, why, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    jobs.use_site(name)
    assert capsys.readouterr().out.startswith(why)
    assert jobs.submit("launch_ddp_1N4G.sh") is None
    assert "not done" in capsys.readouterr().out


def test_commands_go_to_the_slurm_of_the_site(monkeypatch, capsys, tmp_path):
    """Commands use the Slurm of this machine without the job variables of the session; each submission has the site's options."""
    for name, commands in {
        "sbatch": 'echo "$@" > sbatch.txt; echo "Submitted batch job 7"',
        "scontrol": "echo JobId=7 JobName=launch_ddp_1N4G StdOut=$PWD/log WorkDir=$PWD",
        "squeue": 'echo "7|COMPLETED|node1|None"; env | grep SLURM_ > squeue.txt',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{commands}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    jobs.use_site("lumi", account="project_1")
    job = jobs.submit("launch_ddp_1N4G.sh", "--epochs", "3")
    jobs.follow(job)
    said = capsys.readouterr().out
    assert "submit slurm-multinode/launch_ddp_1N4G.sh --site=lumi --account=project_1 -- --epochs 3" in said
    assert "7   COMPLETED on node1" in said
    assert "--account=project_1" in (tmp_path / "sbatch.txt").read_text()
    assert (tmp_path / "squeue.txt").read_text() == ""
    assert jobs.kill_node(job) == ""
    assert "scontrol requeue 7" in capsys.readouterr().out
    jobs.leave_site()
