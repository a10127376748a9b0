"""Exercise 8 of stage 06: any mesh has the losses of one process, and another mesh can resume its checkpoint."""

import json
import re
import sys

import pytest
import torch

import runs
from build.processes import in_processes, solution
from workshop.repository import ROOT
from workshop.training.decoder import Config, Transformer

PROGRAM = ROOT / "solutions" / "06_build_your_own" / "exercise8_all.py"
SMALL = ("--dtype", "float64", "--length", "16", "--batch-size", "4", "--folder", "run")
CLOSE = 1e-12


def train(folder, processes, *options, **changes):
    launch = ["-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [sys.executable, *launch, f"--nproc-per-node={processes}", str(PROGRAM), *SMALL, *options]
    return runs.run(command, folder, **changes)


def losses(folder, processes, *options):
    done = train(folder, processes, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "run" / "losses.json").read_text())["losses"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("alone"), 1, "--steps", "4")


@pytest.mark.parametrize(
    "mesh",
    ["--tp 2", "--cp 2", "--dp 2", "--pp 2", "--pp 2 --tp 2", "--pp 2 --cp 2 --tp 2"],
)
def test_any_mesh_has_the_losses_of_one_process(mesh, alone, tmp_path):
    words = mesh.split()
    processes = 2 ** (len(words) // 2)
    found = losses(tmp_path, processes, "--steps", "4", *words)
    assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) < CLOSE


def test_another_mesh_resumes_the_checkpoint(alone, tmp_path):
    losses(tmp_path, 4, "--steps", "2", "--pp", "2", "--tp", "2")
    found = losses(tmp_path, 2, "--steps", "4", "--dp", "2", "--resume")
    assert max(abs(a - b) for a, b in zip(found, alone[2:], strict=True)) < CLOSE


def test_a_resumed_run_prints_the_steps_of_the_whole_training(tmp_path):
    losses(tmp_path, 1, "--steps", "9")
    done = train(tmp_path, 1, "--steps", "11", "--resume")
    assert re.findall(r"step (\d+)/(\d+)", done.stdout) == [("10", "11"), ("11", "11")]


@pytest.mark.parametrize("mesh", ["--pp 2 --tp 2", pytest.param("--pp 2 --dp 2 --tp 2", marks=pytest.mark.full)])
def test_the_classes_of_pytorch_have_the_same_losses(mesh, alone, tmp_path):
    words = mesh.split()
    found = losses(tmp_path, 2 ** (len(words) // 2), "--steps", "4", *words, "--pytorch")
    assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) < CLOSE


@pytest.mark.full
@pytest.mark.parametrize("first", ["exercise", "pytorch"])
def test_the_exercise_and_pytorch_resume_the_checkpoint_of_each_other(first, alone, tmp_path):
    with_pytorch = ["--pytorch"]
    losses(tmp_path, 4, "--steps", "2", "--dp", "2", "--tp", "2", *(with_pytorch if first == "pytorch" else []))
    second = with_pytorch if first == "exercise" else []
    found = losses(tmp_path, 4, "--steps", "4", "--pp", "2", "--dp", "2", "--resume", *second)
    assert max(abs(a - b) for a, b in zip(found, alone[2:], strict=True)) < CLOSE


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("exercise8_run_all.sh", "--pp 3", "a mesh of pp 3 x dp 1 x cp 1 x tp 1 has 3 places for 2 processes"),
        ("exercise8_run_all.sh", "--dp 2 --batch-size 3", "dp = 2 does not divide the 3 sequences of a global batch"),
        ("exercise8_run_all.sh", "--cp 2 --length 18", "2 x cp x tp = 4 does not divide the 18 tokens of a sequence"),
        (
            "exercise8_run_all.sh",
            "--pp 2 --microbatches 1",
            "1 micro-batches are fewer than the 2 stages; use at least 2",
        ),
        ("exercise8_run_all.sh", "--dp 2 --microbatches 3", "3 micro-batches do not divide a batch of 4 sequences"),
        (
            "exercise8_run_all.sh",
            "--cp 2 --pytorch",
            "--pytorch: use --cp 1, because PyTorch's context_parallel does not run on the CPU",
        ),
        ("exercise6_run_ring.sh", "--pytorch", "--pytorch: PyTorch's context_parallel does not run on the CPU"),
        (
            "exercise5_run_pipeline.sh",
            "--microbatches 1",
            "1 micro-batches are fewer than the 2 stages; use at least 2",
        ),
        ("exercise7_run_experts.sh", "--experts 3", "2 processes do not divide the 3 experts"),
    ],
)
def test_sizes_that_cannot_work_are_one_line_before_anything_starts(program, options, message, tmp_path):
    done = runs.run([PROGRAM.with_name(program), *options.split()], tmp_path, NPROC=2)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.endswith(f": {message}\n")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def refused_by_layout():
    module, cpu = solution("exercise8_all"), torch.device("cpu")
    with pytest.raises(ValueError, match="has 3 places for 2 processes"):
        module.Layout(cpu, pp=3, dp=1, cp=1, tp=1)
    layout = module.Layout(cpu, pp=1, dp=2, cp=1, tp=1)
    with pytest.raises(ValueError, match="dp = 2 does not divide the 3 sequences"):
        layout.own_batch(torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="2 cp tp = 2 does not divide 5 tokens"):
        layout.build(Transformer(Config(tied=False)), 5, cpu)
    return True


def test_a_layout_that_cannot_work_is_an_error_on_all_ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))  # for the exercises that it imports
    assert in_processes(2, refused_by_layout) == [True, True]


def test_a_run_of_two_steps_says_what_it_cannot_show(tmp_path):
    done = train(tmp_path, 1, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "A run of 3 or more steps also prints what each rank holds and sends" in done.stdout
    assert "holds 0.00 MiB" not in done.stdout
