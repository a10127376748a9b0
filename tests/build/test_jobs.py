"""Exercise 8 of stage 06 as a job: tensor parallelism stays inside of a node, and the pipeline goes between two nodes."""

import json
import shutil

import pytest

import runs
from workshop.course.trial import Trial

SOLUTIONS = runs.ROOT / "solutions" / "06_build_your_own"
NEEDED = ("exercise4_tensor.py", "exercise5_pipeline.py", "exercise6_ring.py", "exercise8_all.py")


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(2, "mesh")


@pytest.mark.full
def test_a_job_trains_on_a_mesh_of_two_nodes_and_another_mesh_resumes(cluster, tmp_path):
    trial = Trial(SOLUTIONS / "launch_all_2N4G.sh", tmp_path, cluster, None)
    for name in NEEDED:
        shutil.copy(SOLUTIONS / name, trial.folder)
    options = ["--dtype", "float64", "--length", "16", "--batch-size", "4"]
    job = trial.submit([], [*options, "--steps", "4", "--pp", "2", "--tp", "2"])
    trial.follow(job, stall=90)
    assert job.state == "COMPLETED", job.output
    assert "pp: between nodes, groups of ranks [0, 2] [1, 3]" in job.output
    assert "tp: inside of a node, groups of ranks [0, 1] [2, 3]" in job.output
    folder = trial.folder / f"runs/launch_all_2N4G-{job.number}"
    assert len(json.loads((folder / "losses.json").read_text())["losses"]) == 4

    other = [*options, "--steps", "6", "--cp", "2", "--tp", "2", "--resume", "--folder", str(folder)]
    job = trial.submit([], other)
    trial.follow(job, stall=90)
    assert job.state == "COMPLETED", job.output
    assert "cp: between nodes" in job.output
    assert len(json.loads((folder / "losses.json").read_text())["losses"]) == 2
