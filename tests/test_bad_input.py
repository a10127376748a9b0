"""A mistake of the user gives one line on standard error and exit status 2; nothing is launched and nothing is written."""

import argparse
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import runs
from needs import DEEPSPEED, require
from workshop.training.arguments import ArgumentParser, check_arguments, require_writable

SCRIPTS = {"single": runs.SINGLE, "spawn": runs.SPAWN, "torchrun": runs.TORCHRUN}


def file_above(folder):
    (folder / "file").write_text("not a folder")


def link_to_nothing(folder):
    (folder / "link").symlink_to(folder / "gone")


def truncated_checkpoint(folder):
    torch.save({"model": {"weight": torch.zeros(100)}, "optimizer": {}, "epoch": 0}, folder / "cut.pt")
    os.truncate(folder / "cut.pt", 300)


def empty_checkpoint(folder):
    (folder / "empty.pt").touch()


def other_checkpoint(folder):
    torch.save({"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {}, "epoch": 0}, folder / "other.pt")


def not_a_checkpoint(folder):
    torch.save([1, 2, 3], folder / "list.pt")


def finished_checkpoint(folder):
    from workshop.training.models import SmallCNN

    torch.save({"model": SmallCNN().state_dict(), "optimizer": {}, "epoch": 2}, folder / "done.pt")


MISTAKES = {
    "epochs 0": (None, ["--epochs", "0"], "--epochs: '0' is not a whole number of at least 1"),
    "epochs not a number": (None, ["--epochs", "many"], "'many' is not a whole number"),
    "negative batch": (None, ["--batch-size", "-3"], "'-3' is not a whole number of at least 1"),
    "huge batch": (None, ["--batch-size", "1000000"], "digits has 1,437 to train on"),
    "save every 0": (None, ["--save-every", "0"], "--save-every: '0' is not a whole number"),
    "unknown option": (None, ["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    "unknown data set": (None, ["--dataset", "imagenet"], "unknown data set 'imagenet'; choose from: digits, mnist"),
    "data not fetched": (None, ["--dataset", "mnist"], "fetch it once with: ./workshop.sh fetch mnist"),
    "checkpoint beneath a file": (
        file_above,
        ["--checkpoint", "file/run.pt"],
        "file is a file, so nothing can be written beneath it",
    ),
    "checkpoint in a folder that cannot be created": (
        None,
        ["--checkpoint", f"{'long' * 80}/run.pt"],
        "File name too long",
    ),
    "checkpoint in a system folder": (
        None,
        ["--checkpoint", "/proc/none/run.pt"],
        "--checkpoint /proc/none/run.pt: ",
    ),
    "checkpoint beneath a broken link": (
        link_to_nothing,
        ["--checkpoint", "link/run.pt"],
        "link is a link to a place that does not exist",
    ),
    "checkpoint with the name of the log": (None, ["--checkpoint", "run.jsonl"], "the log of the run will have this"),
    "checkpoint is a folder": (None, ["--checkpoint", "."], "--checkpoint . is a folder"),
    "truncated checkpoint": (truncated_checkpoint, ["--checkpoint", "cut.pt"], "cut.pt cannot be read"),
    "empty checkpoint": (empty_checkpoint, ["--checkpoint", "empty.pt"], "empty.pt cannot be read"),
    "checkpoint of a different model": (
        other_checkpoint,
        ["--checkpoint", "other.pt"],
        "other.pt does not fit this model",
    ),
    "not a checkpoint": (not_a_checkpoint, ["--checkpoint", "list.pt"], "list.pt does not fit this model"),
    "nothing left to train": (
        finished_checkpoint,
        ["--checkpoint", "done.pt", "--epochs", "3"],
        "nothing left to train",
    ),
}


def files(folder: Path) -> dict:
    return {path.relative_to(folder): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def refused_as_rank_0(script: Path, options: list, folder: Path, monkeypatch, capfd) -> str:
    """Run a script in this process as rank 0 of 2 and return its message. Fail unless it exits with 2 and leaves no files."""
    monkeypatch.chdir(folder)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    before = files(folder)
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    seen = capfd.readouterr()
    assert end.value.code == 2, seen
    assert seen.out == ""
    assert files(folder) == before
    return seen.err


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_reports_a_mistake_in_one_line(kind, mistake, tmp_path, monkeypatch, capfd):
    prepare, options, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "data"))
    if prepare:
        prepare(tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS[kind]), *options])
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    start = time.monotonic()
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS[kind]), run_name="__main__")
    seen = capfd.readouterr()
    assert end.value.code == 2
    assert message in seen.err
    assert seen.err.count("\n") == 1
    assert seen.err.startswith(SCRIPTS[kind].name + ": ")
    assert seen.out == ""
    assert files(tmp_path) == before
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "script",
    [
        "04_model_parallel_with_fsdp/finetune_ddp.py",
        "solutions/04_model_parallel_with_fsdp/exercise1_fsdp_codellama.py",
        "solutions/05_deepspeed/exercise1_deepspeed.py",
    ],
)
@pytest.mark.parametrize("place", ["/proc/none", "file/runs", "new/" + "long" * 80])
def test_a_folder_that_cannot_be_created_is_reported_in_one_line(script, place, tmp_path, monkeypatch, capfd):
    file_above(tmp_path)
    options = ["--folder", place]
    if "deepspeed" in script:
        pytest.importorskip("deepspeed")
        require(*DEEPSPEED)
        capfd.readouterr()  # discard what DeepSpeed prints at its first import
        options += ["--config", str((runs.ROOT / script).with_name("ds_config.json"))]
    said = refused_as_rank_0(runs.ROOT / script, options, tmp_path, monkeypatch, capfd)
    assert said.startswith(f"{Path(script).name}: --folder {place}: ")
    assert said.count("\n") == 1


def test_checking_that_a_folder_is_writable_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for place in ("runs", "runs/new/deeper", "new", "new/../../other"):
        require_writable("--folder", Path(place))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    assert not (tmp_path.parent / "other").exists()


@pytest.mark.parametrize(
    "script",
    [
        "03_pytorch_lightning/lightning_fsdp2.py",
        "04_model_parallel_with_fsdp/hsdp.py",
        "slurm-multinode/train_at_scale.py --strategy fsdp",
        "solutions/04_model_parallel_with_fsdp/exercise1_fsdp_codellama.py",
        "strategies/fsdp.py",
    ],
)
def test_fsdp_on_cpus_refuses_a_torch_that_sums_gradients(script, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    script, *options = script.split()
    said = refused_as_rank_0(runs.ROOT / script, options, tmp_path, monkeypatch, capfd)
    assert said.startswith(f"{Path(script).name}: torch 2.8.0+cu128: on CPUs, FSDP adds up the gradients")
    assert said.count("\n") == 1


def test_a_folder_without_write_permission_is_reported_in_one_line(tmp_path):
    if os.geteuid() == 0:
        require("setpriv")  # root may write everywhere
    locked = tmp_path / "locked"
    locked.mkdir()
    command = [*runs.command("single"), "--checkpoint", locked / "run.pt"]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    # Since Python 3.14, Path.exists() returns False in a folder without permissions, so both modes give the same message.
    unseen = "Permission denied" if sys.version_info < (3, 14) else "no permission to write in"
    for mode, message in ((0o555, "no permission to write in"), (0o000, unseen)):
        locked.chmod(mode)
        done = runs.run(command, tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr


@pytest.mark.parametrize(
    ("restarted", "message"),
    [
        ({"SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"}, None),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None),
        ({"SLURM_RESTART_COUNT": "1"}, "nothing left to train"),
        ({"SLURM_RESTART_COUNT": "0", "SLURM_STEP_ID": "0"}, "nothing left to train"),
    ],
    ids=["by srun", "by torchrun", "session that is a job", "first start"],
)
def test_only_a_restarted_run_may_have_no_epochs_left(restarted, message, tmp_path, monkeypatch, capfd):
    from workshop.training.models import SmallCNN

    finished_checkpoint(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    for name, value in restarted.items():
        monkeypatch.setenv(name, value)
    args = argparse.Namespace(batch_size=64, epochs=3, checkpoint=tmp_path / "done.pt")
    if message is None:
        check_arguments(ArgumentParser(), args, SmallCNN(), world_size=1)
        return
    with pytest.raises(SystemExit) as end:
        check_arguments(ArgumentParser(), args, SmallCNN(), world_size=1)
    assert end.value.code == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("declared", ["checkpoint", "snapshot"])
def test_the_old_name_of_the_option_checkpoint_still_works(declared, monkeypatch):
    monkeypatch.setattr("workshop.training.arguments.closed_to_gpus", lambda: "")
    parser = ArgumentParser()
    parser.add_argument(f"--{declared}", default="runs/default.pt", help="the file")
    assert vars(parser.parse_args([])) == {declared: "runs/default.pt"}
    for used in ("--checkpoint", "--snapshot"):
        assert vars(parser.parse_args([used, "other.pt"])) == {declared: "other.pt"}
    described = parser.format_help()
    assert ("--checkpoint" in described, "--snapshot" in described) == (
        declared == "checkpoint",
        declared == "snapshot",
    )


def test_more_processes_than_samples_are_refused(tmp_path):
    done = runs.run([*runs.command("spawn", 2048), "--batch-size", 1], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "2,048 processes are more than the 360 samples" in done.stderr


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (["--epochs", "0"], {}, "'0' is not a whole number"),
        (["--dataset", "imagenet"], {}, "unknown data set"),
        ([], {"NPROC": "2048"}, "2,048 processes are more than"),
        ([], {"NPROC": "two"}, "NPROC: 'two' is not a whole number of at least 1"),
    ],
)
def test_the_torchrun_runner_reports_mistakes_before_it_launches(options, environment, message, tmp_path):
    done = runs.run([runs.TORCHRUN_RUNNER, *options], tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert files(tmp_path) == {}


def test_torchrun_without_the_runner_shows_the_message_once(tmp_path):
    done = runs.run([*runs.command("torchrun", 2), "--dataset", "imagenet"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("unknown data set 'imagenet'") == 1
    # torchrun's own traceback and table follow; the script adds none.
    assert done.stderr.index("unknown data set") < done.stderr.index("ChildFailedError")
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_a_torchrun_script_without_torchrun_says_how_to_start_it(tmp_path):
    done = runs.run([sys.executable, runs.TORCHRUN], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "start this program with torchrun: torchrun --standalone --nproc-per-node=2" in done.stderr


@pytest.mark.full
def test_two_runs_train_while_the_usual_ports_are_taken(tmp_path):
    """No port is hard-coded: two runs train at once although the usual ports are taken and MASTER_PORT names one of them."""
    taken = []
    for port in (29400, 29500, 12355):
        taken.append(socket.socket())
        try:
            taken[-1].bind(("0.0.0.0", port))
            taken[-1].listen()
        except OSError:
            continue  # a different program already uses it
    common = ["--epochs", 1, "--checkpoint"]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    background = runs.Running([runs.TORCHRUN_RUNNER, *common, "first.pt"], tmp_path, NPROC=2, **environment)
    second = runs.run([*runs.command("spawn", 2), *common, "second.pt"], tmp_path, **environment)
    assert second.returncode == 0, second.stderr
    assert background.wait() == 0, background.text()
    assert (tmp_path / "first.pt").exists()
    assert (tmp_path / "second.pt").exists()
    for sock in taken:
        sock.close()


RUNNERS = [runs.ROOT / "01_single_gpu" / "run_single_gpu.sh", *runs.ROOT.glob("solutions/**/*_run_*.sh")]


@pytest.mark.parametrize(
    "runner",
    [pytest.param(runner, marks=[] if number % 6 == 0 else pytest.mark.full) for number, runner in enumerate(RUNNERS)],
    ids=lambda path: path.stem,
)
def test_a_runner_shows_the_help_of_its_script(runner, tmp_path):
    done = runs.run([runner, "--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("--steps" if re.search("0[46]_", str(runner)) else "--epochs") in done.stdout


@pytest.mark.full
def test_a_runner_imports_no_module_from_the_current_folder(tmp_path):
    """A folder "workshop" and a broken torch.py in the current folder are not imported."""
    (tmp_path / "workshop").mkdir()
    (tmp_path / "torch.py").write_text("raise ImportError('not the real one')")
    done = runs.run([runs.TORCHRUN_RUNNER, "--epochs", 0], tmp_path, PYTHONPATH=runs.ROOT)
    assert "'0' is not a whole number" in done.stderr
    done = runs.run([runs.ROOT / "workshop.sh", "doctor"], tmp_path, PYTHONPATH=runs.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_runner_without_an_environment_says_how_to_create_it(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = runs.run([runs.TORCHRUN_RUNNER], tmp_path, WORKSHOP_PYTHON=tmp_path / "bare" / "bin" / "python")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "create the environment first" in done.stderr


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the host name")
def test_torchrun_trains_where_the_host_name_does_not_resolve(tmp_path):
    renamed = ["unshare", "--uts", "bash", "-c", 'hostname no-such-host.invalid && exec "$@"', "-"]
    done = runs.run([*renamed, runs.TORCHRUN_RUNNER, "--epochs", 1], tmp_path, NPROC=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1/1" in done.stdout
