"""A run that is killed with kill -9 and started again ends with exactly the parameters of an uninterrupted run."""

import ast
import runpy
import time

import psutil
import pytest
import torch

import runs
from conftest import EPOCHS, GLOBAL_BATCH
from workshop.training.models import SmallCNN


def options(nproc, checkpoint="run.pt"):
    return ["--epochs", EPOCHS, "--batch-size", GLOBAL_BATCH // nproc, "--checkpoint", checkpoint]


def assert_same_as(reference, folder, checkpoint="run.pt"):
    """Fail unless the parameters are equal bit for bit and the log has each epoch once, with the same losses."""
    assert runs.largest_difference(folder / checkpoint, reference.checkpoint) == 0.0
    log = runs.read_log(folder / checkpoint)
    assert [entry["epoch"] for entry in log] == list(range(EPOCHS))
    assert runs.losses(log) == runs.losses(reference.epochs)


def gone_within(processes, seconds) -> bool:
    """Return whether all processes end within this number of seconds. (A zombie, which its parent has not reaped, has ended.)"""
    end = time.monotonic() + seconds
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize("script", [runs.SINGLE, runs.SPAWN], ids=lambda script: script.stem)
def test_after_a_restart_the_step_counts_of_adamw_are_on_the_cpu(script, tmp_path):
    """On a GPU, each optimizer step would wait for them. Here the meta device is in the place of the GPU."""
    functions, path = runpy.run_path(str(script)), str(tmp_path / "run.pt")
    for device in ("cpu", "meta"):
        model = SmallCNN().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        if device == "cpu":
            model(torch.zeros(2, 1, 28, 28)).sum().backward()
            optimizer.step()
            functions["save_checkpoint"](path, model, optimizer, 0)
        else:
            functions["load_checkpoint"](path, model, optimizer)
    devices = [{name: value.device.type for name, value in state.items()} for state in optimizer.state.values()]
    assert devices == [{"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}] * len([*model.parameters()])


def test_every_program_loads_its_checkpoint_on_the_cpu():
    folders = [*runs.ROOT.glob("0*"), *(runs.ROOT / name for name in ("slurm-multinode", "solutions", "docs"))]
    loads = {}
    for path in (path for folder in folders for path in folder.rglob("*.py") if "runs" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                loads[f"{path.relative_to(runs.ROOT)}:{node.lineno}"] = ast.unparse(node)
    assert len(loads) > 15
    assert {place: call for place, call in loads.items() if "map_location='cpu'" not in call} == {}


@pytest.mark.full
def test_a_killed_single_process_resumes_exactly(single, tmp_path):
    run = runs.Running([*runs.command("single"), *options(1)], tmp_path)
    run.wait_for("epoch 2/3")
    run.process.kill()
    run.wait()
    assert runs.load(tmp_path / "run.pt")["epoch"] < EPOCHS - 1, "the run was killed too late, after its last epoch"
    runs.train("single", 1, tmp_path, *options(1))
    assert_same_as(single, tmp_path)


@pytest.mark.full
def test_a_killed_spawn_leaves_no_process_and_resumes_exactly(spawned, tmp_path):
    run = runs.Running([*runs.command("spawn", 2), *options(2)], tmp_path)
    run.wait_for("epoch 2/3")  # so the checkpoint of epoch 1 exists
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert len(family) >= 2
    run.process.kill()
    assert gone_within(family, 20)  # two seconds on an idle machine
    assert runs.load(tmp_path / "run.pt")["epoch"] < EPOCHS - 1
    runs.train("spawn", 2, tmp_path, *options(2))
    assert_same_as(spawned, tmp_path)


@pytest.mark.parametrize("victims", ["one worker", pytest.param("all workers", marks=pytest.mark.full)])
def test_torchrun_restarts_killed_workers(victims, torchrun, tmp_path):
    run = runs.Running([runs.TORCHRUN_RUNNER, *options(2)], tmp_path, NPROC=2)
    run.wait_for("epoch 1/3")
    workers = run.workers()
    assert len(workers) == 2
    for worker in workers[1:] if victims == "one worker" else workers:
        worker.kill()
    assert run.wait() == 0, run.text()
    assert run.text().count("training on cpu") == 2
    assert_same_as(torchrun, tmp_path)


@pytest.mark.full
def test_torchrun_restarts_a_worker_that_dies_while_saving(torchrun, tmp_path):
    done = runs.run([runs.TORCHRUN_RUNNER, *options(2)], tmp_path, NPROC=2, TEST_PATCH="die_while_saving")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.pt.tmp.died").exists()
    assert done.stdout.count("epoch 2/3") == 2, "epoch 2 must be trained again, because its checkpoint was truncated"
    assert_same_as(torchrun, tmp_path)


@pytest.mark.full
def test_workers_end_within_2_seconds_of_a_killed_torchrun_and_the_next_start_resumes(torchrun, tmp_path):
    run = runs.Running([runs.TORCHRUN_RUNNER, *options(2)], tmp_path, NPROC=2)
    run.wait_for("epoch 2/3")  # so the checkpoint of epoch 1 exists
    workers = run.workers()
    assert len(workers) == 2
    run.process.kill()
    # Start again at once, while old workers may still run; they must have ended before the new run saves.
    again = runs.Running([runs.TORCHRUN_RUNNER, *options(2)], tmp_path, NPROC=2)
    assert gone_within(workers, 2)
    assert again.wait() == 0, again.text()
    assert "epoch 1/3" not in again.text(), "the run did not resume from the checkpoint"
    assert_same_as(torchrun, tmp_path)


def test_stopping_the_runner_leaves_no_process(tmp_path):
    run = runs.Running([runs.TORCHRUN_RUNNER, "--epochs", 50], tmp_path, NPROC=2)
    run.wait_for("epoch 1/50")
    workers = run.workers()
    run.process.terminate()
    run.wait(timeout=40)
    assert gone_within(workers, 2)
