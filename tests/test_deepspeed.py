"""Stage 05: DeepSpeed and Accelerate train like stage 02, resume exactly, and export parameters that plain PyTorch loads."""

import importlib.metadata
import importlib.util
import json
import os
import sys

import pytest
import torch

import runs
from needs import DEEPSPEED, needs, require
from test_bad_input import refused_as_rank_0
from test_training import true_accuracy
from workshop.data import load_dataset
from workshop.run.environment import torchrun as launcher
from workshop.training.finetuning import read_training
from workshop.training.logs import read_log
from workshop.training.models import SmallCNN

STAGE, SOLUTIONS = runs.ROOT / "05_deepspeed", runs.ROOT / "solutions" / "05_deepspeed"
ZERO, ACCELERATE = "exercise1_deepspeed.py", "exercise2_accelerate.py"

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed, an extra")


def trained(script, folder, *options, epochs=3, nproc=2) -> list[float]:
    """Train in ``folder`` with global batches of 128 and return the losses."""
    if script.name == ZERO:
        require(*DEEPSPEED)
    command = [*launcher(nproc), script, "--epochs", epochs, "--batch-size", 128 // nproc, "--folder", "run", *options]
    done = runs.run(command, folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs.losses(read_log(folder / "run" / "log"))


def with_config(name) -> list:
    folder = SOLUTIONS if name == "ds_config.json" else STAGE  # the solution has its own copy of this file
    return ["--config", folder / name]


@pytest.mark.full
@pytest.mark.parametrize("config", ["ds_config.json", "zero2.json", "zero3.json", "zero3_offload.json"])
def test_zero_has_the_losses_of_ddp(config, torchrun, tmp_path):
    """The losses are equal bit for bit in every ZeRO stage, because a sum over two processes has only one order."""
    assert trained(SOLUTIONS / ZERO, tmp_path, *with_config(config)) == runs.losses(torchrun.epochs)


@pytest.mark.full  # the daily check of the solution covers it
@pytest.mark.parametrize("config", ["zero3.json", "ds_config.json"])
def test_zero_resumes_exactly_and_exports_the_parameters(config, torchrun, tmp_path):
    options = with_config(config)
    trained(SOLUTIONS / ZERO, tmp_path, *options, epochs=1)
    assert trained(SOLUTIONS / ZERO, tmp_path, *options, "--export", "whole.pt") == runs.losses(torchrun.epochs)
    assert sorted(path.name for path in (tmp_path / "run").glob("epoch-*")) == ["epoch-2"]
    parts = list((tmp_path / "run" / "epoch-2").glob("zero_pp_rank_*_optim_states.pt"))
    assert len(parts) == 2
    model = SmallCNN()
    model.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    theirs = runs.load(torchrun.checkpoint)["model"]
    assert all(torch.equal(weights, theirs[name]) for name, weights in model.state_dict().items())


@pytest.mark.full
def test_the_accuracy_on_7_processes_is_that_of_the_whole_test_set(tmp_path):
    """360 samples do not divide evenly among 7 processes, but with ZeRO-3 all need the same number of forward passes."""
    trained(SOLUTIONS / ZERO, tmp_path, "--config", STAGE / "zero3.json", "--export", "whole.pt", epochs=1, nproc=7)
    assert len(load_dataset("digits", lambda image: image)[1]) % 7
    (entry,) = read_log(tmp_path / "run" / "log")
    torch.save({"model": torch.load(tmp_path / "whole.pt", weights_only=True)}, tmp_path / "checkpoint.pt")
    assert entry["accuracy"] == pytest.approx(true_accuracy(tmp_path / "checkpoint.pt"), abs=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("start", ["deepspeed", "mpirun"])
def test_the_deepspeed_launcher_and_mpirun_have_the_losses_of_torchrun(start, torchrun, tmp_path):
    options = ["--epochs", 3, "--batch-size", 64, "--folder", "run"]
    command = [
        os.path.join(os.path.dirname(sys.executable), "deepspeed"),
        "--no_local_rank",
        "--num_gpus=2",
        SOLUTIONS / ZERO,
    ]
    if start == "mpirun":
        require("mpiexec.openmpi")
        command = ["mpiexec.openmpi", "--oversubscribe", "-n", 2, SOLUTIONS / "exercise1_run_deepspeed.sh"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    done = runs.run([*command, *options], tmp_path, timeout=300, **as_root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.losses(read_log(tmp_path / "run" / "log")) == runs.losses(torchrun.epochs)


@pytest.mark.full
def test_accelerate_has_the_losses_of_ddp_and_resumes(torchrun, tmp_path):
    trained(SOLUTIONS / ACCELERATE, tmp_path, epochs=1)
    losses = trained(SOLUTIONS / ACCELERATE, tmp_path)
    # The batches are the same but their sums have a different order, so losses differ by about 1e-5, depending on the processor.
    assert losses == pytest.approx(runs.losses(torchrun.epochs), abs=5e-5)
    entries = read_log(tmp_path / "run" / "log")
    assert [entry["accuracy"] for entry in entries] == [entry["accuracy"] for entry in torchrun.epochs]
    assert [path.name for path in (tmp_path / "run").glob("*[0-9]")] == ["epoch-2"]


@pytest.mark.full
def test_accelerate_resumes_bit_for_bit(tmp_path):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    trained(SOLUTIONS / ACCELERATE, tmp_path / "broken", epochs=1)
    assert trained(SOLUTIONS / ACCELERATE, tmp_path / "broken") == trained(SOLUTIONS / ACCELERATE, tmp_path / "whole")


@pytest.mark.full
def test_the_language_model_has_the_losses_of_stage_04(data, tmp_path):
    for script in (runs.ROOT / "04_model_parallel_with_fsdp" / "finetune_ddp.py", STAGE / "zero_codellama.py"):
        options = ["--steps", 10, "--sequence-length", 64, "--folder", script.stem]
        done = runs.run([*launcher(2), script, *options], tmp_path, WORKSHOP_DATA=data, TEST_PATCH="float32")
        assert done.returncode == 0, done.stdout + done.stderr
    ddp, zero = (read_training(tmp_path / name) for name in ("finetune_ddp", "zero_codellama"))
    assert zero.losses == pytest.approx(ddp.losses, abs=1e-4)
    assert zero.losses[-1] < zero.losses[0] - 0.1
    assert zero.completions == ddp.completions


@pytest.mark.full
def test_the_vision_transformer_has_the_losses_of_train_at_scale(tmp_path):
    options = ["--steps", 4, "--batch-size", 2, "--image-size", 64, "--output", "figures.json"]
    curves = []
    for program in (
        [runs.ROOT / "slurm-multinode" / "train_at_scale.py", "--model", "vit_b_16"],
        [STAGE / "zero_vit.py", "--config", STAGE / "zero3.json"],
    ):
        done = runs.run([*launcher(2), *program, *options], tmp_path, timeout=400, TEST_PATCH="float32")
        assert done.returncode == 0, done.stdout + done.stderr
        curves.append(json.loads((tmp_path / "figures.json").read_text())["losses"])
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)
    assert curves[1][-1] != pytest.approx(curves[1][0], abs=0.05)


@pytest.mark.full
@pytest.mark.parametrize("script", [ZERO, ACCELERATE])
def test_the_unsolved_exercise_has_the_losses_of_stage_02(script, torchrun, tmp_path):
    trained(STAGE / script, tmp_path, epochs=1)
    assert trained(STAGE / script, tmp_path) == runs.losses(torchrun.epochs)


def config(**changes) -> dict:
    return {"train_micro_batch_size_per_gpu": 64, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}} | changes


MISTAKES = {
    "unknown key": (config(zero_optimisation={}), "DeepSpeed has no key 'zero_optimisation' and would ignore it"),
    "unknown key of ZeRO": (config(zero_optimization={"level": 3}), "\"zero_optimization\" has no key 'level'"),
    "no such stage": (config(zero_optimization={"stage": 4}), '"zero_optimization" must be 0, 1, 2 or 3, not 4'),
    "batches": (
        config(train_batch_size=100),
        '"train_batch_size" is 100, but 64 samples x 1 batches x 2 processes are 128',
    ),
    "accumulation": (config(gradient_accumulation_steps="auto"), 'must be a whole number of at least 1, not "auto"'),
    "not a block": (config(fp16=True), '"fp16" must be a JSON object, {...}, not true'),
    "float16": (config(fp16={"enabled": True}), '"fp16" needs a GPU'),
    "a list": ([], "must be a JSON object"),
    "not JSON": ("{", "is not valid JSON"),
    "missing file": (None, "No such file or directory"),
}


def refused(options, message, folder, monkeypatch, capfd, script=ZERO):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = refused_as_rank_0(SOLUTIONS / script, options, folder, monkeypatch, capfd)
    assert message in said.splitlines()[-1]  # the import of DeepSpeed may print lines first
    assert "Traceback" not in said


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_the_configuration_are_reported_in_one_line(case, tmp_path, monkeypatch, capfd):
    text, message = MISTAKES[case]
    if text is not None:
        (tmp_path / "ds.json").write_text(text if isinstance(text, str) else json.dumps(text))
    refused(["--config", "ds.json"], message, tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (SOLUTIONS / ZERO, ["--config", str(STAGE / "zero3.json")]),
        (STAGE / "zero_codellama.py", []),
        (runs.ROOT / "strategies" / "zero.py", ["--stage", "3"]),
    ],
    ids=lambda value: value.stem if isinstance(value, os.PathLike) else "",
)
def test_zero_3_on_cpus_refuses_a_deepspeed_that_does_not_wait(script, options, data, tmp_path, monkeypatch, capfd):
    installed = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.19.7" if name == "deepspeed" else installed(name))
    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    message = "DeepSpeed 0.19.7: on CPUs, ZeRO-3 does not wait until all parameters are gathered"
    refused(options, message, tmp_path, monkeypatch, capfd, script)


def test_every_key_that_deepspeed_reads_is_accepted(tmp_path):
    """Try a sample of the keys in the constants and in the documentation of DeepSpeed."""
    from workshop.training.deepspeed import check_config

    valid = ["bfloat16", "dump_state", "communication_data_type", "vocabulary_size", "optimizer", "scheduler", "wandb"]
    check_config(config(**{key: {} for key in [*valid, "data_efficiency", "checkpoint", "pipeline"]}), "ds.json", 2)


CHECKPOINTS = {
    "a different number of processes": (
        "zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        4,
        "of 4 processes, which 2 cannot load",
    ),
    "a different stage": ("zero_pp_rank_{}_mp_rank_00_model_states.pt", 2, "stage 3, which stage 1 cannot load"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_reported_in_one_line(case, tmp_path, monkeypatch, capfd):
    require(*DEEPSPEED)
    name, number, message = CHECKPOINTS[case]
    place = tmp_path / "run" / "epoch-0"
    place.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("epoch-0")
    for rank in range(number):
        (place / name.format(rank)).touch()
        (place / name.format(rank).replace("model", "optim")).touch()
    refused(["--folder", "run"], message, tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("script", [ZERO, ACCELERATE])
def test_a_folder_that_cannot_be_used_is_reported_in_one_line(script, tmp_path, monkeypatch, capfd):
    if script == ZERO:
        require(*DEEPSPEED)
    (tmp_path / "file").touch()
    (tmp_path / "run" / "epoch-3").mkdir(parents=True)
    refused(["--folder", "file/run"], "nothing can be written beneath it", tmp_path, monkeypatch, capfd, script)
    options = ["--folder", "run", "--epochs", "4"]
    refused(options, "already holds 4 epochs of the 4 asked for", tmp_path, monkeypatch, capfd, script)


def test_a_missing_compiler_is_reported_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "nothing built"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused([], "this machine has no no-such-compiler", tmp_path, monkeypatch, capfd)


@needs("g++", "ninja")
def test_missing_python_headers_are_reported_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "nothing built"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    refused([], "this machine has no Python.h; on Debian: apt install", tmp_path, monkeypatch, capfd)


def test_without_deepspeed_the_stage_says_how_to_install_it(tmp_path):
    hidden = tmp_path / "deepspeed_is_hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'deepspeed' else find(name, *rest)\n"
    )
    done = runs.run([sys.executable, SOLUTIONS / ZERO], tmp_path, PYTHONPATH=f"{hidden}:{runs.ROOT}")
    assert done.returncode == 2
    assert done.stderr.startswith("DeepSpeed is not installed here")
    assert done.stderr.count("\n") == 1
