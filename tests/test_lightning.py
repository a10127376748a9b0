"""Stage 03: Lightning trains what stage 02 trains, carries on exactly, and works under every launcher and on a real Slurm."""

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
    """Train in ``folder`` and return the epochs of the log. Fails unless the run ended well and really trained."""
    done = runs.run([*launcher, script, *options, "--checkpoint", checkpoint], folder, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / checkpoint).exists()
    return runs.read_log(folder / checkpoint)


def difference(first, second) -> float:
    """The largest difference between the weights of two checkpoints."""
    a, b = (runs.load(path)["state_dict"] for path in (first, second))
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of exercise 1's solution on two devices, three epochs of the digits."""
    folder = tmp_path_factory.mktemp("two")
    fit(MNIST, folder, "--epochs", 3, "--devices", 2)
    return folder


@pytest.mark.full
def test_it_is_the_training_of_stage_02(two, torchrun):
    """The same losses in every step, the same accuracy, and the weights of the same parameters."""
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
def test_one_curve_whoever_starts_it(options, launcher, two, tmp_path):
    epochs = fit(MNIST, tmp_path, "--epochs", 2, *options, launcher=launcher)
    assert runs.losses(epochs) == pytest.approx(runs.losses(runs.read_log(two / "run.ckpt"))[: 2 * 11], abs=1e-4)


@pytest.mark.full
def test_accuracy_is_exact_where_the_test_set_does_not_divide(tmp_path):
    (entry,) = fit(MNIST, tmp_path, "--epochs", 1, "--devices", 2, TEST_PATCH="odd_test_set")
    weights = runs.load(tmp_path / "run.ckpt")["state_dict"]
    plain = {name.removeprefix("model."): weight for name, weight in weights.items()}
    torch.save({"model": plain}, tmp_path / "plain.pt")
    assert entry["accuracy"] == pytest.approx(true_accuracy(tmp_path / "plain.pt", samples=357), abs=1e-6)


@pytest.mark.full  # every day the check of the solutions shows it
@pytest.mark.parametrize("script", [MNIST, FSDP2], ids=["ddp", "fsdp2"])
def test_it_carries_on_as_if_it_had_never_stopped(script, two, tmp_path):
    fit(script, tmp_path, "--epochs", 1, "--devices", 2)
    fit(script, tmp_path, "--epochs", 3, "--devices", 2)
    epochs, whole = runs.read_log(tmp_path / "run.ckpt"), runs.read_log(two / "run.ckpt")
    assert [entry["epoch"] for entry in epochs] == [0, 1, 2]
    # FSDP2 sums in another order than DDP: its checkpoint holds the same weights but for rounding.
    assert difference(tmp_path / "run.ckpt", two / "run.ckpt") <= (0.0 if script == MNIST else 1e-4)
    assert runs.losses(epochs) == pytest.approx(runs.losses(whole), abs=1e-4)


@pytest.mark.full
def test_fsdp2_shards_and_its_checkpoint_is_whole(tmp_path):
    """A checkpoint of two processes goes on with one, and holds plain tensors."""
    fit(FSDP2, tmp_path, "--epochs", 1, "--devices", 2)
    weights = runs.load(tmp_path / "run.ckpt")["state_dict"]
    assert all(type(weight) is torch.Tensor for weight in weights.values())
    epochs = fit(FSDP2, tmp_path, "--epochs", 2, "--devices", 1, "--batch-size", 128)
    assert [entry["processes"] for entry in epochs] == [2, 1]
    assert epochs[1]["losses"][0] < epochs[0]["losses"][0] / 2, "it goes on from what was learned"


def test_the_log_has_the_loss_of_each_step(tmp_path, monkeypatch):
    """Seven batches whose losses are 0 to 6, three to a step: the log has their means."""
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


# ---------------------------------------------------------------- exercise 2, and who starts its processes


def start_tasks(folder, *options, tasks=2, **env):
    """Start the solution of exercise 2 as srun would, on this machine; the outputs of the tasks."""
    number = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks)}
    command = [sys.executable, CIFAR10, "--checkpoint", "run.ckpt", *options]
    started = [
        runs.Running(command, folder, **{**TASKS, **number, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, **env})
        for rank in range(tasks)
    ]
    return [(task.wait(), task.text()) for task in started]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """The folder of exercise 2's solution in a session that is a Slurm job of one task, two epochs on two devices."""
    folder = tmp_path_factory.mktemp("resnet")
    fit(CIFAR10, folder, "--epochs", 2, "--devices", 2, **SESSION)
    return folder


@pytest.mark.full
def test_in_a_session_that_is_a_job(resnet):
    epochs = runs.read_log(resnet / "run.ckpt")
    assert [entry["processes"] for entry in epochs] == [2, 2]
    assert epochs[1]["losses"][-1] < epochs[0]["losses"][0] / 4, "it learns"


@pytest.mark.full
def test_what_it_leaves(resnet):
    """The last checkpoint and the best, the log, and a table of rate and speed from rank 0."""
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
def test_the_same_under_every_launcher(start, resnet, tmp_path):
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
    "torchrun of another number": (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3"},
        (2, 1),
        "torchrun has started 3 processes, where --nodes 1 --devices 2 says 2; change these options, "
        "or start it with torchrun --standalone --nproc-per-node=2",
    ),
    "torchrun on one node of two": (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"},
        (2, 2),
        "or start it with torchrun --nnodes=2 --nproc-per-node=2",
    ),
    "tasks that disagree with devices": (
        TASKS,
        (4, 1),
        "srun has started 2 tasks on 1 node, where --nodes 1 --devices 4 says 4 on 1; change these options, or start it with "
        "srun --nodes=1 --ntasks-per-node=4",
    ),
    "nodes that disagree with the allocation": (
        TASKS | {"SLURM_STEP_NUM_NODES": "2"},
        (2, 1),
        "srun has started 2 tasks on 2 nodes, where --nodes 1 --devices 2 says 2 on 1",
    ),
    "tasks of a node not said": (
        {name: value for name, value in TASKS.items() if name != "SLURM_NTASKS_PER_NODE"},
        (2, 1),
        "Lightning wants to hear from srun how many tasks a node has: --ntasks-per-node=2, not --ntasks",
    ),
    "nodes that nobody has started": (
        {},
        (2, 2),
        "--nodes 2 --devices 2: nobody has started the processes of the other nodes; let srun or torchrun",
    ),
    "a session that is a job, and a program that does not know": (
        SESSION,
        (2, None),
        "this shell is a Slurm job itself, and Lightning would take the program for its only task",
    ),
}


@pytest.mark.parametrize("case", WRONG_LAUNCHER)
def test_a_launcher_that_does_not_fit_is_one_line(case, monkeypatch, capsys):
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
    assert "srun has started 2 tasks on 1 node" in outputs[0][1]
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
    "mnist for colours": (CIFAR10, None, ["--dataset", "mnist"], "its images do not fit this program's model"),
    "cifar10 for grey": (MNIST, None, ["--dataset", "cifar10"], "its images do not fit this program's model"),
    "devices above the samples": (MNIST, None, ["--devices", "2048"], "2,048 processes are more than the 360 samples"),
    "devices 0": (CIFAR10, None, ["--devices", "0"], "--devices: '0' is not a whole number of at least 1"),
    "nodes 0": (CIFAR10, None, ["--nodes", "0"], "--nodes: '0' is not a whole number of at least 1"),
    "another ending": (MNIST, None, ["--checkpoint", "run.pt"], "Lightning's checkpoints end in .ckpt"),
    "a checkpoint of another model": (
        CIFAR10,
        another_model,
        ["--checkpoint", "other.ckpt"],
        "does not fit this model",
    ),
    "a checkpoint cut short": (MNIST, cut_short, ["--checkpoint", "other.ckpt"], "other.ckpt cannot be read"),
    "a checkpoint of stage 02": (
        MNIST,
        checkpoint_of_stage_02,
        ["--checkpoint", "other.ckpt"],
        "does not fit this model",
    ),
}
SHARED = ("epochs 0", "huge batch", "unknown option", "checkpoint is a folder")
CASES = OWN_MISTAKES | {f"{name}, {path.stem}": (path, *MISTAKES[name]) for name in SHARED for path in (MNIST, CIFAR10)}


@pytest.mark.parametrize("case", CASES)
def test_script_says_so_in_one_line(case, tmp_path, monkeypatch, capfd):
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
    """The job script and the solution of exercise 2 in a folder from which jobs are submitted."""
    trial = Trial(SOLUTIONS / "launch_lightning_2N4G.sh", tmp_path, cluster, None)
    shutil.copy(CIFAR10, trial.folder)
    return trial


@pytest.mark.full
def test_a_job_on_two_nodes(trial):
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


def test_both_folders_hold_the_same_job_script():
    name = "launch_lightning_2N4G.sh"
    assert (STAGE / name).read_text() == (SOLUTIONS / name).read_text()


RUN = ["--epochs", "4", "--checkpoint", "run.ckpt"]
TWO = ["--gpus-per-node=1", "--ntasks-per-node=1"]  # two processes: equal bit for bit


@pytest.fixture(scope="module")
def left_in_peace(cluster, tmp_path_factory):
    """The checkpoint of a job on two nodes with one process each."""
    trial = Trial(SOLUTIONS / "launch_lightning_2N4G.sh", tmp_path_factory.mktemp("peace"), cluster, None)
    shutil.copy(CIFAR10, trial.folder)
    job = trial.submit(TWO, RUN)
    trial.follow(job)
    assert job.state == "COMPLETED", job.output
    return trial.folder / "run.ckpt"


def finished(trial, job, reference):
    """Let a job that is back in the queue run to its end: each epoch once, and the weights of one that was left in peace."""
    trial.start_again(job)
    trial.follow(job)
    assert job.state == "COMPLETED", job.output
    assert job.restarts == 1
    assert [entry["epoch"] for entry in runs.read_log(trial.folder / "run.ckpt")] == [0, 1, 2, 3]
    assert difference(trial.folder / "run.ckpt", reference) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(10))
def test_lightning_puts_the_job_back_when_its_time_is_nearly_over(attempt, trial, left_in_peace, record_property):
    job = trial.submit(TWO, RUN)
    assert trial.follow(job, until=lambda job: "epoch 1/4" in job.output), job.output
    time.sleep(random.Random(attempt).uniform(0, 3))  # anywhere in an epoch
    start = time.monotonic()
    trial.on_login("scancel", "--signal=USR1", job.number)  # what --signal=USR1@60 brings
    assert trial.follow(job, until=lambda job: job.restarts > 0, stall=60), job.output
    record = {"back in the queue after s": round(time.monotonic() - start, 1)}
    finished(trial, job, left_in_peace)
    record["processes in different collectives"] = "mismatch" in job.output
    record_property("requeue", json.dumps(record))


@pytest.mark.full
def test_a_dead_node_costs_an_epoch_and_nothing_else(cluster, trial, left_in_peace):
    job = trial.submit(TWO, RUN)
    assert trial.follow(job, until=lambda job: "epoch 2/4" in job.output), job.output
    node = job.nodes[1]
    cluster.fault("kill", node)
    assert trial.follow(job, until=lambda job: job.restarts > 0, stall=60), job.output
    finished(trial, job, left_in_peace)
    assert node not in job.nodes
    cluster.fault("heal", node)
