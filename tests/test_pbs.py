"""The job scripts for PBS, on the nodes of a practice cluster, with a real mpiexec and a stand-in for PBS (pbs/stand_in.py).

There is no PBS server, so these tests do not cover ``place``, queues, cores and time limits.
"""

import json
import os
import shutil
import signal
import sys
import time

import pytest
import torch

import runs
from needs import require
from pbs.stand_in import StandIn
from workshop.run.processes import family
from workshop.slurm import cluster as practice
from workshop.slurm.script import read_script
from workshop.slurm.sites import find_site, known_sites
from workshop.slurm.submission import submission
from workshop.training.logs import read_log

STAGE = runs.ROOT / "slurm-multinode"
FINE_TUNING = runs.ROOT / "solutions" / "04_model_parallel_with_fsdp"
SCRIPTS = sorted((STAGE / "pbs").glob("*.sh"))
SHAPES = {  # nodes and GPUs per node
    "launch_ddp_1N4G": (1, 4),
    "launch_ddp_2N4G": (2, 2),
    "launch_ddp_4N4G": (4, 1),
    "launch_ddp_2N8G": (2, 4),
    "launch_mpi_2N4G": (2, 2),
    "launch_scale_2N4G": (2, 2),
    "requeue": (2, 2),
}

# Each process records its environment in a file, then trains.
LAST = 'if __name__ == "__main__":\n'
WITNESS = """
    import json, socket
    names = ("RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "NCCL_DEBUG", "HF_HUB_OFFLINE")
    seen = {"node": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "folder": os.getcwd()}
    seen |= {name: os.environ.get(name) for name in names}
    with open(f"seen-{os.environ['RANK']}.json", "w") as file:
        json.dump(seen, file)
"""
TRAINING = (STAGE / "multigpu_torchrun.py").read_text().replace(LAST, LAST + WITNESS)

FAILING = """
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 3:
        raise ValueError("rank 3 has had enough")
    {others}


main()
"""
OTHERS = {"wait": "import time; time.sleep(60)", "exchange": "dist.all_reduce(torch.ones(1))"}


# ---------------------------------------------------------------- what they request


def test_each_job_script_has_an_expected_shape():
    assert {path.stem for path in SCRIPTS} == SHAPES.keys()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_directives_request_the_expected_shape(path):
    nodes, gpus = SHAPES[path.stem]
    options = read_script(path, "pbs").options
    assert options["-N"] == path.stem
    # The script derives the GPUs per node from mpiprocs. Each GPU has two cores, as in the scripts for Slurm.
    assert options["select"] == f"{nodes}:ncpus={2 * gpus}:mpiprocs={gpus}:ngpus={gpus}"
    assert options.get("place") == ("scatter" if nodes > 1 else None)
    assert options["walltime"] == "00:10:00"
    assert (options["-j"], options["-k"]) == ("oe", "oed")
    assert options.get("-r") == ("y" if path.stem == "requeue" else None)
    assert all(
        "#" not in line[4:] for line in path.read_text().splitlines() if line.startswith("#PBS")
    )  # PBS has no comments in directives


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("site", [name for name in known_sites() if find_site(name).scheduler == "pbs"])
def test_each_pbs_site_accepts_each_job_script(site, path):
    nodes, gpus = SHAPES[path.stem]
    profile = find_site(site)
    job = submission(path, site, profile, account="a", arguments=["--epochs", "2"])
    assert (job.shape.nodes, job.shape.gpus, job.shape.tasks) == (nodes, gpus, gpus)
    assert f"ncpus={gpus * profile.cores_per_gpu}:mpiprocs={gpus}:" in " ".join(job.command)
    assert job.sources_site
    assert job.folder == STAGE


def test_job_scripts_for_several_nodes_differ_only_in_their_directives():
    """The commands are the same; only the request for nodes and GPUs differs."""
    bodies = {
        path.read_text().partition("\nset -euo pipefail\n")[2]
        for path in SCRIPTS
        if path.stem.startswith("launch_ddp") and "1N" not in path.stem
    }
    assert len(bodies) == 1


# ---------------------------------------------------------------- what they do


@pytest.fixture(scope="module")
def cluster():
    if runs.NO_CLUSTER:
        pytest.skip(runs.NO_CLUSTER)
    require("mpiexec.openmpi", "mpiexec.mpich")
    up = practice.up(4, name=f"pbs{os.getpid()}", mine=True)
    yield up
    up.end()


@pytest.fixture
def pbs(cluster, tmp_path):
    """A function that creates the stand-in, in a folder with the scripts, the settings of the site and a training program."""

    def make(mpiexec, program=TRAINING):
        shutil.copytree(STAGE / "pbs", tmp_path / "pbs")
        shutil.copy(STAGE / "first_failure.py", tmp_path)
        (tmp_path / "multigpu_torchrun.py").write_text(program)
        (tmp_path / "site.sh").write_text(
            f"export PATH={os.path.dirname(sys.executable)}:$PATH PYTHONPATH={runs.ROOT} PYTHON=python NCCL_DEBUG='not set'\n"
            "export HF_HUB_OFFLINE=1\n"
        )
        return StandIn(cluster, tmp_path, mpiexec)

    return make


def submit(pbs, script, *arguments, options=()):
    """Call qsub as ``workshop submit`` does."""
    variables = f"WORKSHOP_SITE={pbs.folder / 'site.sh'},ARGUMENTS='{' '.join(map(str, arguments))}'"
    return pbs.qsub(*options, "-v", variables, f"pbs/{script}.sh")


def witnesses(pbs):
    """Return what each process recorded, by rank."""
    return [json.loads(path.read_text()) for path in sorted(pbs.folder.glob("seen-*.json"))]


@pytest.mark.parametrize(
    ("script", "mpiexec"),
    [
        pytest.param("launch_ddp_1N4G", "openmpi", marks=pytest.mark.full),
        pytest.param("launch_ddp_2N4G", "openmpi", marks=pytest.mark.full),
        pytest.param("launch_ddp_4N4G", "mpich", marks=pytest.mark.full),
        pytest.param("launch_mpi_2N4G", "openmpi", marks=pytest.mark.full),
        pytest.param("launch_mpi_2N4G", "mpich", marks=pytest.mark.full),
    ],
)
def test_a_job_trains_on_all_its_nodes(script, mpiexec, pbs):
    nodes, gpus = SHAPES[script]
    pbs = pbs(mpiexec)
    job = submit(pbs, script, "--epochs", 2, "--batch-size", 32)
    # The script runs on the first node of the list, which is not the first by name.
    order = ["node3", "node1", "node4", "node2"]
    status = pbs.run(job, order)
    log = pbs.log(job).read_text()
    assert status == 0, log
    names = " ".join(sorted(order[:nodes]))
    assert f"job 17.server on {names}: {gpus} GPUs on a node, 2 cores for each\nNCCL_DEBUG=not set\n" in log
    assert ("rendezvous at node3:20017\n" in log) == (nodes > 1)
    assert log.count("training on cpu from epoch 1: 4 processes") == 1  # one group of four, not four groups of one

    seen = witnesses(pbs)
    assert [each["RANK"] for each in seen] == ["0", "1", "2", "3"]
    shares = {node: sorted(each["LOCAL_RANK"] for each in seen if each["node"] == node) for node in order[:nodes]}
    assert shares == {node: [str(number) for number in range(gpus)] for node in order[:nodes]}
    # All nodes have the same folder, the same variables and all cores of the machine.
    common = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "not set", "HF_HUB_OFFLINE": "1"}
    common |= {"cores": len(os.sched_getaffinity(0)), "folder": str(pbs.folder)}
    assert all(common.items() <= each.items() for each in seen), seen

    epochs = read_log(pbs.folder / f"runs/{script}-17.pt")
    assert [each["epoch"] for each in epochs] == [0, 1]
    golden = json.loads((runs.ROOT / "tests" / "golden_losses.json").read_text())  # also with global batches of 128
    losses = runs.losses(epochs)
    assert losses == pytest.approx(golden[: len(losses)], abs=0.01)


@pytest.mark.full
def test_a_job_trains_a_resnet_with_fsdp(pbs):
    pbs = pbs("openmpi")
    shutil.copy(STAGE / "train_at_scale.py", pbs.folder)
    options = ["--strategy", "fsdp", "--steps", 3, "--batch-size", 2, "--image-size", 64]
    job = submit(pbs, "launch_scale_2N4G", *options)
    assert pbs.run(job, ["node2", "node4"], seconds=300) == 0, pbs.log(job).read_text()
    figures = json.loads((pbs.folder / "runs/launch_scale_2N4G-17.json").read_text())
    assert (figures["processes"], figures["nodes"]) == (4, 2)
    assert len(figures["losses"]) == 3


@pytest.mark.full
def test_a_job_fine_tunes_a_language_model(pbs, data):
    pbs = pbs("mpich")
    for path in (FINE_TUNING / "launch_fsdp_2N4G_pbs.sh", FINE_TUNING / "exercise2_sharded_checkpoint.py"):
        shutil.copy(path, pbs.folder / ("pbs" if path.suffix == ".sh" else ""))
    with open(pbs.folder / "site.sh", "a") as site:
        site.write(f"export WORKSHOP_DATA={data}\n")
    options = ["--steps", 4, "--batch-size", 2, "--sequence-length", 64]
    job = submit(pbs, "launch_fsdp_2N4G_pbs", *options)
    assert pbs.run(job, ["node3", "node1"], seconds=300) == 0, pbs.log(job).read_text()
    log = pbs.log(job).read_text()
    assert "4 processes, validation loss" in log
    assert len(list((pbs.folder / "runs/launch_fsdp_2N4G-17/step-4").glob("*.distcp"))) == 4


@pytest.mark.parametrize(
    ("script", "mpiexec", "others"),
    [
        ("launch_mpi_2N4G", "openmpi", "wait"),
        # The mpiexec of MPICH does not end the other processes; they end when their connection to the failed rank is lost.
        pytest.param("launch_ddp_2N4G", "mpich", "exchange", marks=pytest.mark.full),
    ],
)
def test_a_failing_rank_ends_the_job_and_the_log(script, mpiexec, others, pbs):
    """The job fails within 40 s, and its log ends with the error of the rank that failed first."""
    pbs = pbs(mpiexec, FAILING.format(others=OTHERS[others]))
    job = submit(pbs, script)
    status = pbs.run(job, ["node2", "node1"], seconds=40)
    log = pbs.log(job).read_text()
    assert status == 1, log
    last = log[log.index("the first rank that failed says:") :]
    assert last.rstrip().endswith("ValueError: rank 3 has had enough")


def wait_for_epochs(checkpoint, number, process):
    """Wait until a run has logged this number of epochs."""
    while len(read_log(checkpoint)) < number:
        assert process.poll() is None, "the run ended before"
        time.sleep(0.1)


@pytest.mark.full
def test_a_run_survives_a_dead_node_and_its_time_limit(cluster, pbs):
    """One run needs three jobs: the first loses a node, the second reaches its time limit, and the third completes all epochs."""
    line = "        start = time.perf_counter()\n"
    assert line in TRAINING
    slow = '        time.sleep(0 if os.environ["TORCHELASTIC_RUN_ID"] == "19.server" else 0.5)\n'
    pbs = pbs("openmpi", TRAINING.replace(line, line + slow))
    first = submit(pbs, "requeue", "--epochs", 12, options=["-l", "select=2:ncpus=1:mpiprocs=1:ngpus=1"])
    checkpoint = pbs.folder / "runs/requeue-17.pt"

    running = pbs.start(first, ["node1", "node2"])
    wait_for_epochs(checkpoint, 2, running)
    cluster.fault("kill", "node2")
    assert running.wait(60) not in (0, 124)
    log = pbs.log(first).read_text()
    assert log.endswith("job 18.server resumes from the new checkpoint\n"), log

    second = pbs.submitted_by(first)
    assert (second.select, second.walltime) == (first.select, "00:10:00")
    assert second.variables["ARGUMENTS"] == "--epochs 12"
    done = torch.load(checkpoint, weights_only=True)["epoch"] + 1  # the log may be one epoch ahead of the checkpoint
    running = pbs.start(second, ["node3", "node1"])
    wait_for_epochs(checkpoint, done + 3, running)
    (clock,) = [process for process in family(running.pid) if process.name() == "timeout"]
    assert 530 <= int(clock.cmdline()[2]) <= 540  # the seconds until one minute before the time limit
    clock.send_signal(signal.SIGALRM)  # the timer of `timeout` sends this signal
    assert running.wait(60) == 124
    log = pbs.log(second).read_text()
    assert f"from epoch {done + 1}: 2 processes" in log
    assert log.endswith("the time is nearly over: stopped\njob 19.server resumes from the new checkpoint\n"), log

    third = pbs.submitted_by(second)
    assert pbs.run(third, ["node3", "node4"]) == 0
    assert pbs.submitted_by(third) is None
    assert [each["epoch"] for each in read_log(checkpoint)] == list(range(12))
    assert [path.name for path in (pbs.folder / "runs").glob("*.pt")] == ["requeue-17.pt"]


@pytest.mark.full
def test_a_job_that_makes_no_progress_is_not_resubmitted(pbs):
    """A program that fails before it writes a new checkpoint would fail again in every later job."""
    pbs = pbs("openmpi", "raise ValueError('no such pixel')\n")
    job = submit(pbs, "requeue", options=["-l", "select=2:ncpus=1:mpiprocs=1:ngpus=1"])
    assert pbs.run(job, ["node1", "node3"]) == 1
    assert pbs.submitted_by(job) is None
