"""Exercise 8 of stage 06: any mesh has the losses of one process, and another mesh can resume its checkpoint."""

import json
import sys

import pytest

import runs
from workshop.repository import ROOT

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


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("--pp 3", "a mesh of {'pp': 3, 'dp': 1, 'cp': 1, 'tp': 1} has 3 places for 2 processes"),
        ("--dp 2 --batch-size 3", "dp = 2 does not divide the 3 sequences of a global batch"),
        ("--cp 2 --length 18", "2 cp tp = 4 does not divide 18 tokens"),
    ],
)
def test_a_mesh_that_cannot_work_is_one_line(mesh, message, tmp_path):
    done = train(tmp_path, 2, "--steps", "2", *mesh.split())
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if message in line]
    assert len(lines) == 1, done.stderr
    assert "(exercise8_all.py:" in lines[0]


def test_a_run_of_two_steps_says_what_it_cannot_show(tmp_path):
    done = train(tmp_path, 1, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "With --steps 3 or more, this program also prints what each rank holds and sends" in done.stdout
    assert "holds 0.00 MiB" not in done.stdout
