"""Stage 03: Lightning trains like stage 02, resumes exactly, and works under every launcher and on a real Slurm."""

import json
import os
import random
import runpy
import shutil
import sys
import time

import lightning
import pytest
import torch

import runs
from test_bad_input import MISTAKES, files
from test_training import true_accuracy
from workshop.course.real import SESSION, TASKS
from workshop.course.trial import Trial
from workshop.training.arguments import ArgumentParser, check_launcher

STAGE, SOLUTIONS = runs.ROOT / "03_pytorch_lightning", runs.ROOT / "solutions" / "03_pytorch_lightning"
MNIST, CIFAR10 = SOLUTIONS / "exercise1_lightning_mnist.py", SOLUTIONS / "exercise2_lightning_cifar10.py"
FSDP2 = STAGE / "lightning_fsdp2.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def fit(script, folder, *options, launcher=(sys.executable,), checkpoint="run.ckpt", **env) -> list[dict]:
    """Train in ``folder`` and return the epochs of the log. Fail unless the run succeeds and trains at least one epoch."""
    done = runs.run([*launcher, script, *options, "--checkpoint", checkpoint], folder, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / checkpoint).exists()
    return runs.read_log(folder / checkpoint)


def difference(first, second) -> float:
    """Return the largest difference between the parameters of two checkpoints."""
    a, b = (runs.load(path)["state_dict"] for path in (first, second))
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run of the solution of exercise 1: two devices, three epochs of the digits."""
    folder = tmp_path_factory.mktemp("two")
    fit(MNIST, folder, "--epochs", 3, "--devices", 2)
    return folder


@pytest.mark.full
def test_lightning_trains_like_stage_02(two, torchrun):
    """Both have the same losses in every step, the same accuracy, and the same parameters at the end."""
    epochs = runs.read_log(two / "run.ckpt")
    assert [entry["processes"] for entry in epochs] == [2, 2, 2]
    assert runs.losses(epochs) == pytest.approx(runs.losses(torchrun.epochs), abs=1e-4)
    expected = [entry["accuracy"] for entry in torchrun.epochs]
    assert [entry["accuracy"] for entry in epochs] == pytest.approx(
        expected, abs=1e-6
    )  # torchmetrics counts in float32
    ours, theirs = runs.load(two / "run.ckpt")["state_dict"], runs.load(torchrun.checkpoint)["model"]
    assert ours.keys() == {f"model.{name}" for name in theirs}
    assert max((ours[f"model.{name}"] - theirs[name]).abs().max().item() for name in theirs) < 1e-4


@pytest.mark.parametrize(
    ("options", "launcher"),
    [
        pytest.param(["--devices", 1, "--batch-size", 128], [sys.executable], id="one device"),
        pytest.param(["--devices", 2], TORCHRUN, id="torchrun"),
    ],
)
@pytest.mark.full
def test_losses_are_the_same_with_one_device_and_with_torchrun(options, launcher, two, tmp_path):
    epochs = fit(MNIST, tmp_path, "--epochs", 2, *options, launcher=launcher)
    assert runs.losses(epochs) == pytest.approx(runs.losses(runs.read_log(two / "run.ckpt"))[: 2 * 11], abs=1e-4)


@pytest.mark.full
def test_accuracy_is_exact_when_the_test_set_does_not_divide_evenly(tmp_path):
    (entry,) = fit(MNIST, tmp_path, "--epochs", 1, "--devices", 2, TEST_PATCH="odd_test_set")
    weights = runs.load(tmp_path / "run.ckpt")["state_dict"]
    plain = {name.removeprefix("model."): weight for name, weight in weights.items()}
    torch.save({"model": plain}, tmp_path / "plain.pt")
    assert entry["accuracy"] == pytest.approx(true_accuracy(tmp_path / "plain.pt", samples=357), abs=1e-6)


@pytest.mark.full  # the daily check of the solutions covers it
@pytest.mark.parametrize("script", [MNIST, FSDP2], ids=["ddp", "fsdp2"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(script, two, tmp_path):
    fit(script, tmp_path, "--epochs", 1, "--devices", 2)
    fit(script, tmp_path, "--epochs", 3, "--devices", 2)
    epochs, whole = runs.read_log(tmp_path / "run.ckpt"), runs.read_log(two / "run.ckpt")
    assert [entry["epoch"] for entry in epochs] == [0, 1, 2]
    # FSDP2 sums in a different order than DDP, so its parameters differ by rounding.
    assert difference(tmp_path / "run.ckpt", two / "run.ckpt") <= (0.0 if script == MNIST else 1e-4)
    assert runs.losses(epochs) == pytest.approx(runs.losses(whole), abs=1e-4)


@pytest.mark.full
def test_one_process_resumes_the_whole_checkpoint_of_fsdp2(tmp_path):
    """A checkpoint of two processes contains plain tensors, and one process resumes from it."""
    fit(FSDP2, tmp_path, "--epochs", 1, "--devices", 2)
    weights = runs.load(tmp_path / "run.ckpt")["state_dict"]
    assert all(type(weight) is torch.Tensor for weight in weights.values())
    epochs = fit(FSDP2, tmp_path, "--epochs", 2, "--devices", 1, "--batch-size", 128)
    assert [entry["processes"] for entry in epochs] == [2, 1]
    assert epochs[1]["losses"][0] < epochs[0]["losses"][0] / 2, "the run did not resume from the checkpoint"


def test_the_log_has_the_loss_of_each_step(tmp_path, monkeypatch):
    """The losses of seven batches are 0 to 6, and a step has three batches: the log has the mean of each step."""
    from workshop.training.lightning import EpochReport

    class Counting(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_index):
            return (0 * self.weight + batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(7.0)))
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[EpochReport(tmp_path / "run.ckpt")],
    )  # fmt: skip
    trainer.fit(Counting(), batches)
    assert runs.losses(runs.read_log(tmp_path / "run.ckpt")) == pytest.approx([1.0, 4.0, 6.0])


# ---------------------------------------------------------------- exercise 2 and its launchers


def start_tasks(folder, *options, tasks=2, **env):
    """Start the solution of exercise 2 on this machine as srun would; return the status and output of each task."""
    number = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks)}
    command = [sys.executable, CIFAR10, "--checkpoint", "run.ckpt", *options]
    started = [
        runs.Running(command, folder, **{**TASKS, **number, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, **env})
        for rank in range(tasks)
    ]
    return [(task.wait(), task.text()) for task in started]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """The folder of a run of the solution of exercise 2 in a session that is a Slurm job of one task: two epochs, two devices."""
    folder = tmp_path_factory.mktemp("resnet")
    fit(CIFAR10, folder, "--epochs", 2, "--devices", 2, **SESSION)
    return folder


@pytest.mark.full
def test_lightning_trains_in_a_session_that_is_a_job(resnet):
    epochs = runs.read_log(resnet / "run.ckpt")
    assert [entry["processes"] for entry in epochs] == [2, 2]
    assert epochs[1]["losses"][-1] < epochs[0]["losses"][0] / 4, "the training does not learn"


@pytest.mark.full
def test_a_run_writes_checkpoints_a_log_and_metrics(resnet):
    """A run writes the last and the best checkpoint, the log, and a table of learning rate and speed from rank 0."""
    assert {"run.ckpt", "run-best.ckpt", "run.jsonl", "run-metrics"} <= {path.name for path in resnet.iterdir()}
    (table,) = resnet.rglob("metrics.csv")
    names, *rows = (line.split(",") for line in table.read_text().splitlines())
    rates = [float(row[names.index("lr-AdamW")]) for row in rows if row[names.index("lr-AdamW")]]
    assert len(rates) == 2 * 11
    assert max(rates) == pytest.approx(4e-3, rel=0.1)
    assert rates[-1] < 1e-5
    assert any("samples_per_sec" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("start", ["torchrun", "srun"])
def test_losses_are_the_same_under_every_launcher(start, resnet, tmp_path):
    options = ["--epochs", 2, "--devices", 2]
    if start == "torchrun":
        fit(CIFAR10, tmp_path, *options, launcher=TORCHRUN)
    else:
        outputs = start_tasks(tmp_path, *options)
        assert [status for status, _ in outputs] == [0, 0], outputs
    assert runs.losses(runs.read_log(tmp_path / "run.ckpt")) == runs.losses(runs.read_log(resnet / "run.ckpt"))
    assert difference(tmp_path / "run.ckpt", resnet / "run.ckpt") == 0.0


# ---------------------------------------------------------------- bad input

WRONG_LAUNCHER = {
    "torchrun with a different number": (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3"},
        (2, 1),
        "torchrun started 3 processes, but --nodes 1 --devices 2 asks for 2; change these options, "
        "or start the program with torchrun --standalone --nproc-per-node=2",
    ),
    "torchrun on one node of two": (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"},
        (2, 2),
        "or start the program with torchrun --nnodes=2 --nproc-per-node=2",
    ),
    "tasks that disagree with devices": (
        TASKS,
        (4, 1),
        "srun started 2 tasks on 1 node, but --nodes 1 --devices 4 asks for 4 on 1; change these options, or start the "
        "program with srun --nodes=1 --ntasks-per-node=4",
    ),
    "nodes that disagree with the allocation": (
        TASKS | {"SLURM_STEP_NUM_NODES": "2"},
        (2, 1),
        "srun started 2 tasks on 2 nodes, but --nodes 1 --devices 2 asks for 2 on 1",
    ),
    "tasks per node missing": (
        {name: value for name, value in TASKS.items() if name != "SLURM_NTASKS_PER_NODE"},
        (2, 1),
        "Lightning needs the number of tasks per node from srun: use --ntasks-per-node=2 instead of --ntasks",
    ),
    "nodes without a launcher": (
        {},
        (2, 2),
        "--nodes 2 --devices 2: no launcher started the processes on the other nodes; start this program with srun",
    ),
    "session that is a job, program unaware of it": (
        SESSION,
        (2, None),
        "this shell belongs to a Slurm job, so Lightning would take the program for the only task of that job",
    ),
}


@pytest.mark.parametrize("case", WRONG_LAUNCHER)
def test_a_launcher_that_does_not_fit_is_reported_in_one_line(case, monkeypatch, capsys):
    environment, (devices, nodes), message = WRONG_LAUNCHER[case]
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC", "WORLD_SIZE", "RANK"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        check_launcher(ArgumentParser(prog="train.py"), devices, nodes)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith("train.py: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.full
def test_tasks_that_disagree_with_devices_end_at_once(tmp_path):
    outputs = start_tasks(tmp_path, "--devices", 4)
    assert [status for status, _ in outputs] == [2, 2]
    assert "srun started 2 tasks on 1 node" in outputs[0][1]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("output")] == []


def another_model(folder):
    torch.save(
        {"state_dict": torch.nn.Linear(2, 2).state_dict(), "optimizer_states": [], "epoch": 0}, folder / "other.ckpt"
    )


def cut_short(folder):
    another_model(folder)
    os.truncate(folder / "other.ckpt", 300)


def checkpoint_of_stage_02(folder):
    from workshop.training.models import SmallCNN

    torch.save({"model": SmallCNN().state_dict(), "optimizer": {}, "epoch": 2}, folder / "other.ckpt")


OWN_MISTAKES = {
    "cifar10 not fetched": (CIFAR10, None, ["--dataset", "cifar10"], "fetch it once with: ./workshop.sh fetch cifar10"),
    "mnist for a colour model": (CIFAR10, None, ["--dataset", "mnist"], "its images do not fit this program's model"),
    "cifar10 for a grey model": (MNIST, None, ["--dataset", "cifar10"], "its images do not fit this program's model"),
    "more devices than samples": (MNIST, None, ["--devices", "2048"], "2,048 processes are more than the 360 samples"),
    "devices 0": (CIFAR10, None, ["--devices", "0"], "--devices: '0' is not a whole number of at least 1"),
    "nodes 0": (CIFAR10, None, ["--nodes", "0"], "--nodes: '0' is not a whole number of at least 1"),
    "wrong suffix": (MNIST, None, ["--checkpoint", "run.pt"], "Lightning checkpoints end in .ckpt"),
    "checkpoint of a different model": (
        CIFAR10,
        another_model,
        ["--checkpoint", "other.ckpt"],
        "does not fit this model",
    ),
    "truncated checkpoint": (MNIST, cut_short, ["--checkpoint", "other.ckpt"], "other.ckpt cannot be read"),
    "checkpoint of stage 02": (
        MNIST,
        checkpoint_of_stage_02,
        ["--checkpoint", "other.ckpt"],
        "does not fit this model",
    ),
}
SHARED = ("epochs 0", "huge batch", "unknown option", "checkpoint is a folder")
CASES = OWN_MISTAKES | {f"{name}, {path.stem}": (path, *MISTAKES[name]) for name in SHARED for path in (MNIST, CIFAR10)}


@pytest.mark.parametrize("case", CASES)
def test_a_script_reports_a_mistake_in_one_line(case, tmp_path, monkeypatch, capfd):
    script, prepare, options, message = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    if prepare:
        prepare(tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    seen = capfd.readouterr()
    assert end.value.code == 2
    assert message in seen.err
    assert seen.err.count("\n") == 1
    assert seen.out == ""
    assert files(tmp_path) == before


# ---------------------------------------------------------------- jobs


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(3, "lightning")


@pytest.fixture
def trial(cluster, tmp_path):
    """A folder with the job script and the solution of exercise 2, from which a test submits jobs."""
    trial = Trial(SOLUTIONS / "launch_lightning_2N4G.sh", tmp_path, cluster, None)
    shutil.copy(CIFAR10, trial.folder)
    return trial


@pytest.mark.full
def test_a_job_trains_on_two_nodes(trial):
    job = trial.submit([], ["--epochs", "1", "--batch-size", "32"])
    trial.follow(job)
    assert job.state == "COMPLETED", job.output
    assert f"job {job.number} on node[1-2]: 2 tasks on a node, 2 cores for each" in job.output
    assert "training on cpu from epoch 1: 4 processes" in job.output
    (entry,) = runs.read_log(trial.folder / f"runs/launch_lightning_2N4G-{job.number}.ckpt")
    assert entry["processes"] == 4
    assert entry["losses"][-1] < entry["losses"][0] / 2


@pytest.mark.full
def test_a_task_that_fails_ends_the_job(trial):
    program = trial.folder / CIFAR10.name
    text = program.read_text()
    program.write_text(text.replace("        images, labels = batch\n", """        images, labels = batch
        if self.trainer.global_rank == 3 and batch_index == 5:
            raise ValueError("broken on purpose")
""", 1))  # fmt: skip
    job = trial.submit([], ["--epochs", "50", "--batch-size", "32"])
    trial.follow(job)
    assert job.state == "FAILED", job.output
    assert "ValueError: broken on purpose" in job.output


def test_the_stage_and_the_solutions_have_the_same_job_script():
    name = "launch_lightning_2N4G.sh"
    assert (STAGE / name).read_text() == (SOLUTIONS / name).read_text()


RUN = ["--epochs", "4", "--checkpoint", "run.ckpt"]
TWO = ["--gpus-per-node=1", "--ntasks-per-node=1"]  # two processes, so that the results are equal bit for bit


@pytest.fixture(scope="module")
def left_in_peace(cluster, tmp_path_factory):
    """The checkpoint of an uninterrupted job on two nodes with one process each."""
    trial = Trial(SOLUTIONS / "launch_lightning_2N4G.sh", tmp_path_factory.mktemp("peace"), cluster, None)
    shutil.copy(CIFAR10, trial.folder)
    job = trial.submit(TWO, RUN)
    trial.follow(job)
    assert job.state == "COMPLETED", job.output
    return trial.folder / "run.ckpt"


def finished(trial, job, reference):
    """Let a requeued job run to its end; fail unless it has each epoch once and the parameters of an uninterrupted job."""
    trial.start_again(job)
    trial.follow(job)
    assert job.state == "COMPLETED", job.output
    assert job.restarts == 1
    assert [entry["epoch"] for entry in runs.read_log(trial.folder / "run.ckpt")] == [0, 1, 2, 3]
    assert difference(trial.folder / "run.ckpt", reference) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(10))
def test_lightning_requeues_a_job_whose_time_is_nearly_over(attempt, trial, left_in_peace, record_property):
    job = trial.submit(TWO, RUN)
    assert trial.follow(job, until=lambda job: "epoch 1/4" in job.output), job.output
    time.sleep(random.Random(attempt).uniform(0, 3))  # at a random moment of an epoch
    start = time.monotonic()
    trial.on_login("scancel", "--signal=USR1", job.number)  # as --signal=USR1@60 does
    assert trial.follow(job, until=lambda job: job.restarts > 0, stall=60), job.output
    record = {"back in the queue after s": round(time.monotonic() - start, 1)}
    finished(trial, job, left_in_peace)
    record["processes in different collectives"] = "mismatch" in job.output
    record_property("requeue", json.dumps(record))


@pytest.mark.full
def test_a_dead_node_costs_only_the_interrupted_epoch(cluster, trial, left_in_peace):
    job = trial.submit(TWO, RUN)
    assert trial.follow(job, until=lambda job: "epoch 2/4" in job.output), job.output
    node = job.nodes[1]
    cluster.fault("kill", node)
    assert trial.follow(job, until=lambda job: job.restarts > 0, stall=60), job.output
    finished(trial, job, left_in_peace)
    assert node not in job.nodes
    cluster.fault("heal", node)
