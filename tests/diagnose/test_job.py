"""``workshop diagnose JOBID`` on two nodes of the practice cluster."""

import subprocess
import sys
import time

import pytest

import runs
from diagnose.cases import LAB

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=job.log
export OMP_NUM_THREADS=1 MASTER_ADDR=$(hostname) MASTER_PORT=29511 WORLD_SIZE=2
srun --overlap bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=0; exec {start} {program}'
"""


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(2, "diagnose")


def diagnosed(cluster, folder, program, start, sentence):
    """Submit a job, diagnose it until it hangs, and return what was printed."""
    (folder / "job.sh").write_text(SCRIPT.format(start=start, program=LAB / program))
    python = [sys.executable, "-P", "-m", "workshop"]

    def inside(*command):
        words = cluster.inside(["env", f"PYTHONPATH={runs.ROOT}", *command], folder=folder)
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    job = inside("sbatch", "--parsable", "job.sh").stdout.strip()
    assert job.isdigit()
    try:
        end = time.monotonic() + 150
        while time.monotonic() < end:
            result = inside(*python, "diagnose", job, "--output", "report")
            if sentence in result.stderr:
                break
            time.sleep(2)
        return job, result, inside
    finally:
        inside("scancel", job)


@pytest.mark.full
def test_a_job_on_two_nodes_is_diagnosed_with_the_numbers_of_its_collectives(cluster, tmp_path):
    start = f"{sys.executable} -P -m workshop diagnose --patience=600 -- {sys.executable}"
    sentence = "rank 0 called barrier #15 (skipped.py:15), and rank 1 called all_reduce #15 (skipped.py:13)"
    _, result, _ = diagnosed(cluster, tmp_path, "skipped.py", start, sentence)
    assert sentence in result.stderr, result.stderr + (tmp_path / "job.log").read_text()
    assert result.returncode == 1
    assert "on node1, node2" in result.stderr


@pytest.mark.full
def test_a_job_that_was_started_as_usual_is_diagnosed_by_its_stacks(cluster, tmp_path):
    sentence = "Rank 1 never called barrier (server.py:13): it is waiting for the network (server.py:12)."
    job, result, inside = diagnosed(cluster, tmp_path, "server.py", sys.executable, sentence)
    assert sentence in result.stderr, result.stderr + (tmp_path / "job.log").read_text()
    for _ in range(20):
        ended = inside(sys.executable, "-P", "-m", "workshop", "diagnose", job)
        if ended.returncode == 2:
            break
        time.sleep(1)
    assert ended.returncode == 2
    assert "does not run" in ended.stderr or "is COMPLETING" in ended.stderr
