"""Stage 05 as jobs: on two nodes of a practice cluster, with four launchers, and with the job script for PBS."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

import runs
from needs import require
from test_pbs import pbs, submit  # noqa: F401 - a fixture
from workshop.course.trial import Trial
from workshop.training.logs import read_log

STAGE, SOLUTIONS = runs.ROOT / "05_deepspeed", runs.ROOT / "solutions" / "05_deepspeed"
ZERO, RUNNER = SOLUTIONS / "exercise1_deepspeed.py", SOLUTIONS / "exercise1_run_deepspeed.sh"
OPTIONS = ["--epochs", "3", "--folder", "run"]

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed, an extra")


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(2, "zero")


@pytest.fixture
def trial(cluster, tmp_path):
    """A folder with the job script, the solution and its configurations, from which a test submits jobs."""
    trial = Trial(SOLUTIONS / "launch_deepspeed_2N4G.sh", tmp_path, cluster, None)
    for path in (ZERO, SOLUTIONS / "ds_config.json", STAGE / "zero3.json"):
        shutil.copy(path, trial.folder)
    helper = tmp_path / "slurm-multinode" / "first_failure.py"  # the job script looks for it here
    helper.parent.mkdir()
    shutil.copy(runs.ROOT / "slurm-multinode" / helper.name, helper)
    return trial


@pytest.mark.full
def test_a_job_trains_on_two_nodes(trial, torchrun):
    job = trial.submit([], ["--epochs", "3", "--batch-size", "32", "--config", "zero3.json"])
    trial.follow(job, stall=60)
    assert job.state == "COMPLETED", job.output
    assert "training on cpu from epoch 1: 4 processes" in job.output
    folder = trial.folder / f"runs/launch_deepspeed_2N4G-{job.number}"
    assert runs.losses(read_log(folder / "log")) == pytest.approx(runs.losses(torchrun.epochs), abs=5e-5)
    assert len(list((folder / "epoch-2").glob("zero_pp_rank_*_optim_states.pt"))) == 4


@pytest.mark.full
def test_the_log_starts_with_the_error_of_the_rank_that_failed(trial):
    program = trial.folder / ZERO.name
    text = program.read_text()
    broken = (
        '        engine.step()\n        if dist.get_rank() == 3:\n            raise ValueError("broken on purpose")\n'
    )
    line = next(line for line in text.splitlines(keepends=True) if "engine.step()" in line)
    program.write_text(text.replace(line, broken))
    job = trial.submit([], ["--batch-size", "32"])
    trial.follow(job, stall=60)
    assert job.state == "FAILED", job.output
    assert job.output.partition("\n\nthe output of the job:")[0].endswith("ValueError: broken on purpose")


# For two processes on one node or on two: the options of sbatch, and the command of the job.
LAUNCHERS = {
    "torchrun": (["--nodes=1", "--ntasks=1"], f"NPROC=2 {RUNNER}"),
    "deepspeed": (
        ["--nodes=1", "--ntasks=1"],
        f"{Path(sys.executable).with_name('deepspeed')} --no_local_rank --num_gpus=2 {ZERO}",
    ),
    "srun": (["--nodes=2", "--ntasks-per-node=1"], f"srun {RUNNER}"),
    "mpirun": (["--nodes=1", "--ntasks=2"], f"mpiexec.openmpi --oversubscribe -n 2 {RUNNER}"),
}


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_trains_in_a_job(launcher, trial, torchrun):
    if launcher == "mpirun":
        require("mpiexec.openmpi")
    options, command = LAUNCHERS[launcher]
    script = trial.folder / f"{launcher}.sh"
    script.write_text(
        "#!/bin/bash\nset -euo pipefail\nexport OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
        f"export WORKSHOP_PYTHON={sys.executable} PYTHONPATH={runs.ROOT}\n"
        f"export PATH={Path(sys.executable).parent}:$PATH\n{command} {' '.join(OPTIONS)}\n"
    )
    job = trial.submit([*options, "--cpus-per-task=1"], [], script.name)
    trial.follow(job, stall=60)
    assert job.state == "COMPLETED", job.output
    assert "training on cpu from epoch 1: 2 processes" in job.output
    losses = runs.losses(read_log(trial.folder / "run" / "log"))
    assert losses == pytest.approx(runs.losses(torchrun.epochs), abs=1e-6)


@pytest.mark.full
def test_a_job_trains_on_pbs(pbs, torchrun):  # noqa: F811 - the fixture
    pbs = pbs("openmpi")
    for path in (SOLUTIONS / "launch_deepspeed_2N4G_pbs.sh", ZERO, SOLUTIONS / "ds_config.json"):
        shutil.copy(path, pbs.folder / ("pbs" if path.suffix == ".sh" else ""))
    job = submit(pbs, "launch_deepspeed_2N4G_pbs", "--epochs", 3, "--batch-size", 32)
    assert pbs.run(job, ["node2", "node1"], seconds=300) == 0, pbs.log(job).read_text()
    folder = pbs.folder / "runs/launch_deepspeed_2N4G-17"
    assert runs.losses(read_log(folder / "log")) == pytest.approx(runs.losses(torchrun.epochs), abs=5e-5)
    assert json.loads((pbs.folder / "ds_config.json").read_text())["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize("name", ["launch_deepspeed_2N4G.sh", "launch_deepspeed_2N4G_pbs.sh"])
def test_the_stage_and_the_solutions_have_the_same_job_script(name):
    assert (STAGE / name).read_text() == (SOLUTIONS / name).read_text()
