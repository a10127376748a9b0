"""What the stage scripts compute: golden losses, equal for any number of processes, exact accuracy, one line per epoch."""

import json
import math
import re
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms

import runs
from conftest import EPOCHS
from workshop.data import load_dataset
from workshop.measure.pretended_processes import GPUS
from workshop.run.environment import why_hidden
from workshop.run.failures import explanation
from workshop.training.models import SmallCNN

FAST = runs.ROOT / "solutions" / "01_single_gpu" / "exercise1_fast_single_gpu.py"
# Losses of each step with torch 2.15.0 on an AMD EPYC (AVX-512). Torch 2.9.0 differs there by less than 1e-5, and
# 2.15.0 limited to AVX2 by at most 1.3e-4, or 0.1 %, so a difference of 2 % means a different computation.
GOLDEN = Path(__file__).with_name("golden_losses.json")
TOLERANCE = 0.02
KINDS = ["single", pytest.param("spawned", marks=pytest.mark.full), "torchrun"]


@pytest.mark.parametrize("name", KINDS)
def test_losses_match_the_golden_losses(name, request):
    golden = json.loads(GOLDEN.read_text())
    losses = runs.losses(request.getfixturevalue(name).epochs)
    assert len(losses) == len(golden) == EPOCHS * (1437 // 128)
    assert losses == pytest.approx(golden, rel=TOLERANCE, abs=2e-3)
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)  # ten classes before any training


@pytest.mark.parametrize("name", KINDS)
def test_digits_are_learned(name, request):
    assert request.getfixturevalue(name).epochs[-1]["accuracy"] >= 0.95


def true_accuracy(checkpoint, samples=None) -> float:
    """Return the accuracy of a checkpoint, computed in this process on the first ``samples`` of the test set in one batch."""
    model = SmallCNN()
    model.load_state_dict(runs.load(checkpoint)["model"])
    _, test_set = load_dataset(
        "digits", transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    )
    images, labels = zip(*[test_set[index] for index in range(samples or len(test_set))], strict=True)
    with torch.inference_mode():
        return (model(torch.stack(images)).argmax(dim=1) == torch.tensor(labels)).double().mean().item()


@pytest.mark.parametrize("name", KINDS)
def test_accuracy_is_that_of_the_whole_test_set(name, request):
    reference = request.getfixturevalue(name)
    assert reference.epochs[-1]["accuracy"] == pytest.approx(true_accuracy(reference.checkpoint), abs=1e-9)


@pytest.mark.full
def test_accuracy_is_exact_when_the_ranks_do_not_divide_the_test_set(tmp_path):
    log = runs.train("torchrun", 2, tmp_path, "--epochs", 1, TEST_PATCH="odd_test_set")
    assert log[-1]["accuracy"] == pytest.approx(true_accuracy(tmp_path / "run.pt", samples=357), abs=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_rank_0_prints_one_line_per_epoch_and_no_progress_bar(name, request):
    lines = request.getfixturevalue(name).output.splitlines()
    # Up to torch 2.9 gloo prints a line per rank to standard output; the ranks write at once, so a line may be empty.
    lines = [line for line in lines if line and "[Gloo]" not in line and "peer ranks" not in line]
    pattern = r"epoch (\d)/3 \| loss \d+\.\d{4} \| accuracy \d+\.\d\d% \| [\d,]+ samples/s"
    assert [re.fullmatch(pattern, line)[1] for line in lines if line.startswith("epoch")] == ["1", "2", "3"]
    assert len(lines) == EPOCHS + 1
    assert lines[0].startswith("training on ")


def test_a_checkpoint_contains_the_plain_model(torchrun):
    checkpoint = runs.load(torchrun.checkpoint)
    assert checkpoint.keys() == {"model", "optimizer", "epoch"}
    assert checkpoint["model"].keys() == SmallCNN().state_dict().keys()  # the names have no prefix "module."
    assert {path.name for path in torchrun.folder.iterdir()} == {"run.pt", "run.jsonl"}


@pytest.fixture(scope="session")
def exact_single(tmp_path_factory):
    """A run of one process in float64 with SGD: 89 steps of 16 samples."""
    folder = tmp_path_factory.mktemp("exact")
    return folder, runs.losses(
        runs.train("single", 1, folder, "--epochs", 1, "--batch-size", 16, TEST_PATCH="float64,sgd")
    )


@pytest.mark.full
@pytest.mark.parametrize(("kind", "nproc"), [("spawn", 2), ("torchrun", 4)])
def test_losses_are_the_same_for_any_number_of_processes(kind, nproc, exact_single, tmp_path):
    folder, expected = exact_single
    losses = runs.losses(
        runs.train(kind, nproc, tmp_path, "--epochs", 1, "--batch-size", 16 // nproc, TEST_PATCH="float64,sgd")
    )
    assert len(losses) >= 50
    assert expected[-1] < 0.5 * expected[0], "nothing was learned, so equal losses would prove nothing"
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6
    assert runs.load(tmp_path / "run.pt")["model"]["fc1.weight"].dtype == torch.float64
    assert runs.largest_difference(tmp_path / "run.pt", folder / "run.pt") < 1e-6


@pytest.mark.parametrize("name", KINDS[1:])
def test_float32_loss_curves_coincide(name, single, request):
    curves = [runs.losses(run.epochs) for run in (single, request.getfixturevalue(name))]
    assert max(max(step) - min(step) for step in zip(*curves, strict=True)) < 1e-3


def train_fast(device, folder, **names) -> dict:
    """Train one epoch with the solution of stage 01 in this process, with other values for some names; return its checkpoint."""
    functions = runpy.run_path(str(FAST))
    functions["train"].__globals__.update(names)
    path = str(folder / "fast.pt")
    args = SimpleNamespace(epochs=1, batch_size=64, save_every=1, checkpoint=path, dataset="digits")
    functions["train"](torch.device(device), args)
    return runs.load(path)


def test_the_fast_solution_indexes_with_tensors_and_updates_all_parameters_together(tmp_path):
    """With a list of indices, each step would copy the list to the GPU and wait for the copy."""
    samplers = []

    def loader(*args, **kwargs):
        samplers.append(kwargs["sampler"])
        return DataLoader(*args, **kwargs)

    checkpoint = train_fast("cpu", tmp_path, DataLoader=loader)
    assert [type(batch) for sampler in samplers for batch in sampler] == [torch.Tensor] * (6 + 22)
    assert checkpoint["optimizer"]["param_groups"][0]["fused"]


needs_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@runs.on_gpus(1)
@pytest.mark.parametrize("kind", ["single", "spawn", "torchrun"])
def test_one_process_on_the_gpu_gives_the_golden_losses(kind, gpus, tmp_path):
    """The tolerance is wider, because newer GPUs round convolutions to TF32."""
    log = runs.train(kind, 1, tmp_path, "--epochs", EPOCHS, "--batch-size", 128, **gpus)
    assert log[0]["device"] == "cuda"
    assert runs.losses(log) == pytest.approx(json.loads(GOLDEN.read_text()), rel=0.1, abs=2e-2)
    assert log[-1]["accuracy"] >= 0.95


@pytest.mark.gpu
@needs_gpus
def test_no_step_of_the_fast_solution_waits_for_the_gpu(tmp_path):
    """An epoch has 22 steps; the program may wait only outside of them, such as for the losses at the end of the epoch."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train_fast("cuda", tmp_path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in seen if "synchronizing" in str(each.message)]
    assert max(map(waits.count, waits), default=0) < 20, waits


WAITS = ("wait", "wait-inside", "synchronize", "pageable", "pinned")


def test_no_step_of_a_resumed_run_waits_for_a_pretended_gpu(tmp_path):
    """The optimizer state of a checkpoint must not make each step wait. An epoch has 22 steps; other waits are rarer."""
    for epochs in (1, 2):
        reports = tmp_path / str(epochs)
        reports.mkdir()
        options = ["--epochs", epochs, "--batch-size", 64, "--checkpoint", tmp_path / "run.pt"]
        done = runs.run([sys.executable, FAST, *options], tmp_path, **runs.pretended(1, reports))
        assert done.returncode == 0, done.stderr
        assert f"epoch {epochs}/{epochs}" in done.stdout
        (report,) = reports.glob("*.json")
        notes = json.loads(report.read_text())["notes"]
        found = {(kind, line): count for kind, _, places in notes if kind in WAITS for line, count in places.items()}
        assert found, "it certainly copies the data to the GPU"
        assert max(found.values()) < 20, found


@runs.on_gpus(2)
@pytest.mark.parametrize("kind", ["spawn", "torchrun"])
def test_two_processes_on_two_gpus_give_the_golden_losses(kind, gpus, tmp_path):
    log = runs.train(kind, 2, tmp_path, "--epochs", EPOCHS, "--batch-size", 64, **gpus)
    assert log[0]["device"] == "cuda"
    assert runs.losses(log) == pytest.approx(json.loads(GOLDEN.read_text()), rel=0.1, abs=2e-2)


@runs.on_gpus(1)
def test_more_processes_than_gpus_do_not_silently_train_on_the_cpu(gpus, tmp_path):
    nproc = int(gpus.get(GPUS) or torch.cuda.device_count()) + 1
    options = ["--epochs", 1, "--batch-size", 16]
    done = runs.run([*runs.command("torchrun", nproc), *options], tmp_path, **gpus)
    assert done.returncode != 0
    assert "use the same GPU" in explanation(done.stderr)
    if GPUS in gpus:
        return  # the runner looks for the device files of real GPUs
    done = runs.run([runs.TORCHRUN_RUNNER, *options], tmp_path, NPROC=nproc, **gpus)
    assert done.returncode == 0, done.stderr
    assert why_hidden(nproc, nproc - 1) in done.stderr
    assert f"training on cpu from epoch 1: {nproc} processes, 0 GPUs here" in done.stdout
