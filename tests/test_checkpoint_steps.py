"""slurm-multinode/surviving/checkpoint_steps.py: no complete checkpoint is lost, and no sample is lost or trained twice."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, DistributedSampler

import kills
import runs
from conftest import EPOCHS, GLOBAL_BATCH
from needs import require

SURVIVING = runs.ROOT / "slurm-multinode" / "surviving"
STEPS = kills.WAYS["steps"]


@pytest.fixture
def program(monkeypatch):
    """The modules of the program and of its checkpoints."""
    monkeypatch.syspath_prepend(str(SURVIVING))
    import checkpoint_steps
    import complete_checkpoints

    return checkpoint_steps, complete_checkpoints


# ---------------------------------------------------------------- the loader


def used(loader, most=None):
    """Return the samples of the next ``most`` batches of an epoch."""
    found = []
    for number, batch in enumerate(loader, 1):
        found.append(batch.tolist())
        if number == most:
            break
    return found


def loaders(program, batch_size, world_size, **position):
    found = [program[0].StatefulLoader(range(101), batch_size, rank, world_size) for rank in range(world_size)]
    for loader in found:
        vars(loader).update(position)
    return found


def test_the_loader_gives_the_batches_of_the_epoch_wise_program(program):
    samplers = [DistributedSampler(range(101), 2, rank, seed=42, drop_last=True) for rank in range(2)]
    own = loaders(program, 8, 2)
    for epoch in range(2):
        for sampler, loader in zip(samplers, own, strict=True):
            sampler.set_epoch(epoch)
            expected = [batch.tolist() for batch in DataLoader(range(101), 8, sampler=sampler, drop_last=True)]
            assert used(loader) == expected
    assert [(loader.epoch, loader.samples) for loader in own] == [(2, 0)] * 2


@pytest.mark.parametrize("batch_size", [8, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_after_a_restart_no_sample_is_used_twice_with_any_number_of_processes(batch_size, world_size, program):
    before = loaders(program, 8, 2)
    first = {sample for loader in before for batch in used(loader, 3) for sample in batch}
    assert len(first) == before[0].samples == 48
    after = loaders(program, batch_size, world_size, samples=48)
    second = [sample for loader in after for batch in used(loader) for sample in batch]
    assert len(second) == (101 - 48) // (batch_size * world_size) * batch_size * world_size
    assert len({*second}) == len(second)
    assert not first & {*second}


def test_each_step_has_its_own_random_numbers_which_a_restart_repeats(program):
    def draws(samples):
        (loader,) = loaders(program, 8, 1, samples=samples)
        return [torch.rand(1).item() for _ in loader]

    whole = draws(0)
    assert len({*whole}) == len(whole) == 12
    assert draws(40) == whole[5:]


# ---------------------------------------------------------------- the checkpoints


class State(Stateful):
    """A state of one tensor, which contains its step."""

    def __init__(self):
        self.step, self.tensor = 0, torch.zeros(1000)

    def state_dict(self):
        return {"step": self.step, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.step = state["step"]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def started(program, group, tmp_path):
    """Return a function that starts like the program: with a new state, from the newest checkpoint in the folder."""

    def start(folder=tmp_path / "run"):
        checkpoints = program[1].Checkpoints(folder, State())
        checkpoints.load()
        return checkpoints

    return start


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.state.step = step
        checkpoints.state.tensor.fill_(step)
        checkpoints.save()
        checkpoints.state.tensor.fill_(-1)  # the training continues: the checkpoint must not change
    checkpoints.finish()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_two_checkpoints_remain_and_the_newest_is_loaded(started, tmp_path):
    save(started(), 3, 6, 9)
    assert names(tmp_path / "run") == ["step-0000006", "step-0000009"]
    state = started().state
    assert (state.step, state.tensor.unique().tolist()) == (9, [9])


@pytest.mark.parametrize("damage", ["no metadata", "metadata cut short", "data cut short", "no data", "nothing"])
def test_a_checkpoint_that_is_not_complete_is_not_loaded_but_replaced(damage, started, tmp_path, capsys):
    save(started(), 3, 6)
    newest = tmp_path / "run" / "step-0000006"
    file = newest / ("__0_0.distcp" if "data" in damage and "meta" not in damage else ".metadata")
    if damage == "nothing":
        for path in newest.iterdir():
            path.unlink()
    elif damage.startswith("no"):
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    again = started()
    assert (again.state.step, again.state.tensor.unique().tolist()) == (3, [3])
    assert f"{newest} is not complete and is not loaded: " in capsys.readouterr().out
    save(again, 6)
    assert started().state.step == 6


def test_what_a_killed_start_has_left_is_never_loaded_and_is_deleted_later(started, tmp_path):
    save(started(), 3)
    left = [tmp_path / "run" / f"step-{step:07d}.abcd.tmp" for step in (3, 6, 9)]
    for folder in left:
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")
    again = started()
    assert again.state.step == 3
    save(again, 6)
    assert names(tmp_path / "run") == ["step-0000003", "step-0000006", left[2].name]


def test_two_writers_never_share_a_folder_and_lose_no_checkpoint(started, tmp_path):
    one, other = started(), started()
    save(one, 3, 6)
    save(other, 3)  # it is slower, and finds that step 3 exists
    assert started().state.step == 6
    assert one.token != other.token
    save(other, 6, 9)
    save(one, 9)
    assert names(tmp_path / "run") == ["step-0000006", "step-0000009"]
    assert started().state.tensor.unique().tolist() == [9]


def test_the_clock_plays_no_role(started, tmp_path, monkeypatch):
    clock = time.time
    save(started(), 3)
    monkeypatch.setattr(time, "time", lambda: clock() - 10**6)
    save(started(), 6, 9)
    for path, when in ((tmp_path / "run" / "step-0000006", 2e9), (tmp_path / "run" / "step-0000009", 1e9)):
        os.utime(path, (when, when))
    assert started().state.step == 9


@pytest.fixture
def small_disk(tmp_path):
    """A function that creates a file system of a few megabytes in memory."""
    require("mount")
    folder = tmp_path / "disk"
    folder.mkdir()

    def create(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("only root can mount a file system")
        return folder

    yield create
    subprocess.run(["umount", folder], capture_output=True)


def test_a_full_disk_loses_no_checkpoint_and_the_training_continues(started, small_disk, capsys):
    disk = small_disk("1m")
    checkpoints = started(disk / "run")
    save(checkpoints, 3, 6)
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(b"x" * free)
    save(checkpoints, 9)
    assert "the checkpoint of step 9 was not saved (0 MB free): " in capsys.readouterr().out
    assert names(disk / "run") == ["step-0000003", "step-0000006"]
    with pytest.raises(SystemExit, match="the last checkpoint was not saved; the next start resumes from step 6"):
        checkpoints.close()
    assert started(disk / "run").state.step == 6
    filler.unlink()
    checkpoints.close()
    assert started(disk / "run").state.step == 9


# ---------------------------------------------------------------- the programs


def options(nproc, folder="run"):
    return ["--epochs", EPOCHS, "--batch-size", GLOBAL_BATCH // nproc, "--folder", folder]


def command(nproc=2):
    return [*runs.command("torchrun", nproc)[:-1], STEPS.script]


def same_parameters(reference, folder: Path) -> bool:
    """Return whether a run ends with the parameters of the epoch-wise program, bit for bit."""
    return kills.equal(STEPS.content(folder)["model"], runs.load(reference.checkpoint)["model"])


@pytest.mark.full
def test_two_starts_at_the_same_time_end_with_the_parameters_of_the_epoch_wise_program(torchrun, tmp_path):
    both = [runs.Running([*command(), *options(2)], tmp_path) for _ in range(2)]
    assert [run.wait() for run in both] == [0, 0], [run.text() for run in both]
    assert same_parameters(torchrun, tmp_path)
    assert not STEPS.writing(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("way", kills.WAYS.values(), ids=lambda way: way.name)
def test_a_run_on_a_full_disk_resumes_when_there_is_space(way, torchrun, small_disk):
    """The disk has space for one checkpoint of 14 MB, but not for two."""
    disk = small_disk("20m")
    program = way.script if way.name == "steps" else runs.TORCHRUN
    arguments = [*command()[:-1], program, *options(2)[:4], *way.options]
    done = runs.run(arguments, disk)
    assert done.returncode == 1
    assert len(list(disk.glob("run*/step*") if way.name == "steps" else disk.glob("run.pt"))) == 1
    subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
    done = runs.run(arguments, disk)
    assert done.returncode == 0, done.stderr
    assert "from step 1:" not in done.stdout
    assert "from epoch 1:" not in done.stdout
    assert kills.equal(way.content(disk)["model"], runs.load(torchrun.checkpoint)["model"])


@pytest.mark.full
@pytest.mark.parametrize("way", kills.WAYS.values(), ids=lambda way: way.name)
def test_a_clock_that_jumps_back_while_a_run_is_restarted_loses_nothing(way, torchrun, tmp_path):
    program = way.script if way.name == "steps" else runs.TORCHRUN
    run = runs.Running([*command()[:-1], program, *options(2)[:4], *way.options], tmp_path)
    run.wait_for("epoch 2/3")
    run.process.kill()
    run.wait()
    patch = {"TEST_PATCH": "clock_jumps"}
    done = runs.run([*command()[:-1], program, *options(2)[:4], *way.options], tmp_path, **patch)
    assert done.returncode == 0, done.stderr
    assert "from step 1:" not in done.stdout
    assert kills.equal(way.content(tmp_path)["model"], runs.load(torchrun.checkpoint)["model"])


def test_a_complete_run_has_nothing_left_to_train(tmp_path):
    arguments = [*command(1), *options(1)]
    arguments[arguments.index("--epochs") + 1] = 1
    for first in (1, 12):
        done = runs.run(arguments, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"training on cpu from step {first}: 1 processes\n")
        assert done.stdout.endswith("trained 1 epochs in 11 steps\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--save-every", 0], "argument --save-every: '0' is not a whole number of at least 1"),
        (["--folder", "file"], "is a file, so nothing can be written beneath it"),
        (
            ["--folder", "other"],
            "--folder other: step-0000003 does not fit this model (a different program wrote it); delete it",
        ),
        (["--batch-size", 2000], "needs 2,000 samples per step; digits has 1,437 to train on"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(given, message, started, tmp_path):
    (tmp_path / "file").touch()
    save(started(tmp_path / "other"), 3)
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = runs.run([sys.executable, STEPS.script, *given], tmp_path, **launcher)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
    assert names(tmp_path) == ["file", "other"]


# ---------------------------------------------------------------- kills


def kill(way, count, folder):
    """Kill runs in a new process: it forks them, and this process may have threads."""
    arguments = ["-m", "kills", way, "--count", count, "--place", folder, "--output", folder]
    path = os.pathsep.join((str(runs.ROOT), str(runs.ROOT / "tests")))
    done = runs.run([sys.executable, "-P", *arguments], folder, timeout=count * 60 + 120, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return kills.read(folder / f"kills-{way}-2-cores.json")


def test_two_killed_runs_resume_with_the_same_parameters(tmp_path):
    rows = kill("steps", 2, tmp_path)
    assert [row["kind"] for row in rows] == ["worker", "torchrun"]
    assert all(row["same"] for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("way", kills.WAYS)
def test_runs_recover_from_20_kills_in_a_row(way, tmp_path):
    rows = kill(way, 20, tmp_path)
    assert {row["kind"] for row in rows} == {"worker", "torchrun", "node"}
    assert sum(row["writing"] for row in rows) > 0
    assert [row["seed"] for row in rows if not (row["same"] and row["tidy"])] == []
