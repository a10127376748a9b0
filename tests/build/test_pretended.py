"""The solutions of stage 06 train on two pretended GPUs, which refuse tensors on the wrong device."""

import json
import sys

import pytest

import runs

SOLUTIONS = runs.ROOT / "solutions" / "06_build_your_own"
OPTIONS = {"exercise5_pipeline": "--schedule 1f1b", "exercise7_experts": "--balance 0.1", "exercise8_all": "--tp 2"}
PROGRAMS = sorted(path.stem for path in SOLUTIONS.glob("exercise[1-8]*.py"))


def test_all_solutions_are_tried():
    assert len(PROGRAMS) == 8


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_solution_trains_on_pretended_gpus(name, tmp_path):
    launch = ["-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    options = ["--steps", "3", "--length", "32", "--folder", "run", *OPTIONS.get(name, "").split()]
    done = runs.run([sys.executable, *launch, SOLUTIONS / f"{name}.py", *options], tmp_path, **runs.pretended(2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training on cuda" in done.stdout
    losses = json.loads((tmp_path / "run" / "losses.json").read_text())["losses"]
    assert losses[2] < losses[0]
