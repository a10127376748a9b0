"""The job scripts on a real Slurm: what they start, what they do after a failure, and how the check judges them."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest

import runs
from workshop.course.checking import check_file
from workshop.course.trial import STAND_IN, Trial
from workshop.errors import UserError
from workshop.slurm import cluster as practice
from workshop.slurm.script import ignored_directives
from workshop.training.logs import read_log

STAGE, SOLUTIONS = runs.ROOT / "slurm-multinode", runs.ROOT / "solutions" / "slurm-multinode"
LAUNCH = SOLUTIONS / "exercise1_launch_ddp.sh"
SCRIPTS = sorted([*STAGE.glob("*.sh"), *SOLUTIONS.glob("*.sh")])


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(4, "jobs")


def done(trial, *arguments, options=()):
    """Run the job script with the real training to its end."""
    job = trial.submit(list(options), [str(argument) for argument in arguments])
    trial.follow(job)
    return job


@pytest.fixture(scope="module")
def one_node(cluster, tmp_path_factory):
    """The losses of a training with 4 processes on one node."""
    trial = Trial(STAGE / "launch_ddp_1N4G.sh", tmp_path_factory.mktemp("one"), cluster, None)
    job = done(trial, "--epochs", 2, "--batch-size", 32)
    assert job.state == "COMPLETED", job.output
    assert f"job {job.number} on node1: 4 GPUs on a node, 2 cores for each" in job.output
    return runs.losses(read_log(trial.folder / f"runs/launch_ddp_1N4G-{job.number}.pt"))


@pytest.mark.full  # the daily check of a solution runs a job
@pytest.mark.parametrize(
    ("script", "nodes", "processes"),
    [
        ("launch_ddp_2N4G", 2, 4),
        ("launch_ddp_4N4G", 4, 4),
        ("launch_ddp_2N8G", 2, 8),
        ("exercise2_srun", 2, 4),
        ("exercise3_requeue", 2, 4),
    ],
)
def test_a_job_has_the_losses_of_one_node(script, nodes, processes, one_node, cluster, tmp_path):
    """The same global batches give the same losses with every launcher and on any number of nodes."""
    trial = Trial(SOLUTIONS / f"{script}.sh", tmp_path, cluster, None)
    job = done(trial, "--epochs", 2, "--batch-size", 128 // processes)
    assert job.state == "COMPLETED", job.output
    assert len(job.nodes) == nodes
    assert f"training on cpu from epoch 1: {processes} processes" in job.output
    assert "rendezvous at node1:2" in job.output
    epochs = read_log(trial.folder / f"runs/{script}-{job.number}.pt")
    assert [entry["epoch"] for entry in epochs] == [0, 1]
    assert runs.losses(epochs) == pytest.approx(one_node, abs=1e-4)
    assert one_node[-1] < one_node[0] / 2, "the training does not learn"


@pytest.mark.full
def test_a_job_trains_a_resnet_with_fsdp(cluster, tmp_path):
    trial = Trial(STAGE / "launch_scale_2N4G.sh", tmp_path, cluster, None)
    shutil.copy(STAGE / "train_at_scale.py", trial.folder)
    job = done(trial, "--strategy", "fsdp", "--steps", 3, "--batch-size", 2, "--image-size", 64)
    assert job.state == "COMPLETED", job.output
    figures = json.loads((trial.folder / f"runs/launch_scale_2N4G-{job.number}.json").read_text())
    assert (figures["processes"], figures["nodes"]) == (4, 2)
    assert len(figures["losses"]) == 3


def python_on_gpus(bound, reports):
    """Return a shell script that starts Python with pretended GPUs; ``bound`` hides them as --gpus-per-task=1 does."""
    variables = " ".join(f"{name}={value}" for name, value in runs.pretended(2).items() if value)
    hide = "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID" if bound else ""
    return f"""#!/usr/bin/env bash
export {variables} WORKSHOP_PRETEND_NODE=$SLURM_NODEID WORKSHOP_PRETEND_REPORT={reports}/$SLURM_PROCID
mkdir -p "$WORKSHOP_PRETEND_REPORT"
{hide}
exec {sys.executable} "$@"
"""


@pytest.mark.full
@pytest.mark.parametrize(("bound", "indices"), [(False, [0, 1, 0, 1]), (True, [0, 0, 0, 0])], ids=["all", "bound"])
def test_each_task_of_srun_uses_a_gpu_of_its_own(bound, indices, cluster, tmp_path, monkeypatch):
    """A job shows each task all GPUs of its node, or only its own one, which then has index 0."""
    reports, python = tmp_path / "reports", tmp_path / "python"
    python.write_text(python_on_gpus(bound, reports))
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    trial = Trial(SOLUTIONS / "exercise2_srun.sh", tmp_path, cluster, None)
    job = done(trial, "--epochs", 1, "--batch-size", 64)
    assert job.state == "COMPLETED", job.output
    assert "training on cuda from epoch 1: 4 processes" in job.output
    found = [json.loads(path.read_text()) for rank in range(4) for path in (reports / str(rank)).glob("*.json")]
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert [each["gpu"] for each in found] == indices
    assert [[*each["peak"]] for each in found] == [[str(index)] for index in indices]  # it uses no other GPU
    places = [(each["node"], each["visible"][each["gpu"]]) for each in found]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


FAILING = """
import os
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 3:
        raise ValueError("rank 3 has had enough")
    time.sleep(60)  # the other ranks have no error and wait


main()
"""


@pytest.mark.parametrize("script", ["exercise1_launch_ddp", pytest.param("exercise2_srun", marks=pytest.mark.full)])
def test_a_failing_rank_ends_the_job_and_its_error_starts_the_log(script, cluster, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FAILING)
    trial = Trial(SOLUTIONS / f"{script}.sh", tmp_path, cluster, program)
    start = time.monotonic()
    job = done(trial)
    assert job.state == "FAILED"
    assert time.monotonic() - start < 45, "the other ranks waited to the end of their sleep"
    assert job.output.startswith("the first rank that failed says:\n")
    error, _, output = job.output.partition("\n\nthe output of the job:\n")
    assert error.endswith("ValueError: rank 3 has had enough")
    assert "in main" in error
    assert f"job {job.number} on " in output
    assert output.rstrip().endswith("at the top of this log: ValueError: rank 3 has had enough")


HOLD = """
import socket, sys, time
held = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
time.sleep(100)
"""


def test_a_job_avoids_a_port_that_is_taken(cluster, tmp_path):
    trial = Trial(LAUNCH, tmp_path, cluster, STAND_IN)
    job = trial.submit(["--hold"], ["--epochs", "1"])
    port = 20000 + int(job.number) % 10000
    command = cluster.inside([sys.executable, "-c", HOLD, str(port)], node="node1")
    holder = subprocess.Popen(command, env=practice.environment(), stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"listening\n"
        cluster.run("scontrol", "release", job.number)
        trial.follow(job)
    finally:
        holder.kill()
    assert job.state == "COMPLETED", job.output
    assert f"rendezvous at node1:{port + 1}" in job.output


def test_a_node_that_cannot_resolve_the_first_node_fails_the_job(cluster, tmp_path):
    """Slurm uses addresses, but the processes need the name."""
    script = tmp_path / LAUNCH.name
    script.write_text(LAUNCH.read_text().replace("| head -n 1)", "| head -n 1).elsewhere"))
    trial = Trial(script, tmp_path, cluster, STAND_IN)
    job = done(trial)
    assert job.state == "FAILED"
    assert "a node of this job does not know node1.elsewhere by name" in job.output


@pytest.mark.parametrize(
    "script", SCRIPTS, ids=lambda path: path.stem + ("_solved" if "solutions" in path.parts else "")
)
def test_a_job_script_is_short_and_has_no_ignored_directive(script):
    lines = script.read_text().splitlines()
    assert len([line for line in lines if not re.match(r"\s*# ", line)]) <= 40  # the comments of TODOs do not count
    assert max(map(len, lines)) <= 130
    assert ignored_directives(script.read_text()) == []
    assert script.stat().st_mode & 0o111


def test_every_job_script_switches_hugging_face_to_offline():
    """Compute nodes may have no internet, so each script sets the variables after the settings of the site."""
    scripts = [path for path in runs.ROOT.glob("[0s]*/**/*.sh") if re.search("(?m)^#(SBATCH|PBS) ", path.read_text())]
    assert len(scripts) > 25
    line = "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 #"
    wrong = [path for path in scripts if not re.search(f"\nsource .*WORKSHOP_SITE.*\n{line}", path.read_text())]
    assert wrong == []


def test_job_scripts_for_several_nodes_differ_only_in_their_directives():
    """The commands are the same; only the request for nodes and GPUs differs."""
    scripts = [LAUNCH, *(SOLUTIONS / f"launch_ddp_{shape}.sh" for shape in ("2N4G", "4N4G", "2N8G"))]
    assert len({path.read_text().partition("\nset -euo pipefail\n")[2] for path in scripts}) == 1


def test_the_program_is_the_solution_of_stage_02():
    """Except for its docstring and one more option it is the solution of exercise 2, so stage 02 need not be solved first."""
    ours, theirs = ((path.read_text().split('"""\n', 1)[1]) for path in (STAGE / "multigpu_torchrun.py", runs.TORCHRUN))
    ours = ours.replace("positive_float, ", "").replace("lr=args.learning_rate", "lr=1e-3")
    ours = "\n".join(line for line in ours.splitlines() if "--learning-rate" not in line)
    assert ours == theirs.rstrip("\n")


# -- the check: its mistakes and correct styles are in check/rules/test_jobs.py


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello\n", "must begin with #!"),
        ("#!/bin/bash\r\necho hello\r\n", "Windows line endings"),
        ("#!/bin/bash\nif true; then\n", "bash cannot read the script"),
        ("#!/bin/bash\n#PBS -l select=1\n", "is for PBS"),
    ],
)
def test_a_file_that_is_not_a_job_script_is_refused(text, words, tmp_path):
    script = tmp_path / "job.sh"
    script.write_bytes(text.encode())
    with pytest.raises(UserError, match=words):
        list(check_file(script))
    with pytest.raises(UserError, match="No such file"):
        list(check_file(tmp_path / "other.sh"))


@runs.needs_cluster
def test_without_namespaces_the_check_still_judges_the_request(monkeypatch):
    def no_namespaces(*_, **__):
        raise UserError("this system lets only root create namespaces")

    monkeypatch.setattr(practice, "up", no_namespaces)
    *_, verdict = check_file(LAUNCH)
    assert verdict.findings == []
    assert "only root create namespaces" in verdict.unchecked[0]
    assert [goal for goal, state in verdict.states().items() if state == "met"] == [1]
    *_, verdict = check_file(STAGE / LAUNCH.name)
    assert [finding.kind for finding in verdict.findings] == ["job-shape"]
    assert "1 node with 4 GPUs and 1 task each, 8 cores per task" in verdict.findings[0].seen


def test_without_slurm_the_check_says_what_it_could_not_check(monkeypatch):
    monkeypatch.setattr(practice, "SEARCH_PATH", "/nowhere")
    monkeypatch.setattr("workshop.slurm.model.SEARCH_PATH", "/nowhere")
    *_, verdict = check_file(LAUNCH)
    assert verdict.findings == []
    assert "needs programs that are not installed" in verdict.unchecked[0]
    assert set(verdict.states().values()) == {"unjudged"}


# -- a node dies


def killed_and_finished(cluster, folder, victim, epoch, reference):
    """Run the requeue script, kill a node of its job, and compare the result with that of an uninterrupted job."""
    trial = Trial(SOLUTIONS / "exercise3_requeue.sh", folder, cluster, None)
    shape = [
        "--nodes=2",
        "--gpus-per-node=1",
        "--cpus-per-task=2",
    ]  # two processes, so that the results are equal bit for bit
    job = trial.submit(shape, ["--epochs", "6", "--batch-size", "64", "--checkpoint", "run.pt"])
    assert trial.follow(job, until=lambda job: f"epoch {epoch}/6" in job.output), job.output
    node = job.nodes[victim]
    cluster.fault("kill", node)
    assert trial.follow(job, until=lambda job: job.restarts > 0, stall=60), job.output
    trial.start_again(job)
    trial.follow(job)
    cluster.fault("heal", node)
    assert job.state == "COMPLETED", job.output
    assert job.restarts == 1
    assert [entry["epoch"] for entry in read_log(trial.folder / "run.pt")] == list(range(6)), (
        "the log must have each epoch once"
    )
    assert job.output.count("training on cpu from epoch") == 2
    assert runs.largest_difference(trial.folder / "run.pt", reference) == 0.0


@pytest.fixture(scope="module")
def left_in_peace(cluster, tmp_path_factory):
    """The checkpoint of an uninterrupted job of the requeue script, on two nodes with one process each."""
    trial = Trial(SOLUTIONS / "exercise3_requeue.sh", tmp_path_factory.mktemp("peace"), cluster, None)
    shape = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2"]
    job = done(trial, "--epochs", 6, "--batch-size", 64, "--checkpoint", "run.pt", options=shape)
    assert job.state == "COMPLETED", job.output
    return trial.folder / "run.pt"


@pytest.mark.full
def test_a_dead_node_costs_only_the_interrupted_epoch(cluster, tmp_path, left_in_peace):
    killed_and_finished(cluster, tmp_path, victim=1, epoch=2, reference=left_in_peace)
