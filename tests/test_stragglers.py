"""Which rank computes slower than the others: the judgement, and three processes of which one is slow."""

import json

import pytest

import runs
from workshop.measure.exchange import stragglers
from workshop.run.environment import torchrun

PROGRAM = """\
import json, sys, time
import torch, torch.distributed as dist
from workshop.measure.exchange import measure_exchange

dist.init_process_group("gloo")
rank, slow = dist.get_rank(), int(sys.argv[1])

def step(exchange):
    time.sleep(0.3 if rank == slow else 0.1)
    if exchange:
        dist.all_reduce(torch.ones(1))

figures = measure_exchange(step, 8, 1, torch.device("cpu"))
if rank == 0:
    print(json.dumps(figures))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("rounds", "slow"),
    [
        ([[100, 100, 60, 100]] * 5, {2: 100 / 60}),
        ([[100, 50]] * 5, {1: 2.0}),
        ([[100, 100, 85, 100]] * 5, {}),
        ([[100, 100, 60, 100]] * 3 + [[100] * 4] * 2, {}),  # only for a while: other work on this machine
        ([[100, 100, 60, 100]] * 4 + [[100] * 4], {2: 100 / 60}),
        ([[100]] * 5, {}),
    ],
)
def test_a_rank_is_slow_if_it_is_in_all_rounds_but_one(rounds, slow):
    assert stragglers(rounds) == pytest.approx(slow)


@pytest.mark.parametrize("slow", [-1, 1])
def test_a_slow_rank_is_named_with_its_node(tmp_path, slow):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = runs.run([*torchrun(3), "program.py", slow], tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["without_exchange"] > figures["with_exchange"] * 0.9
    if slow < 0:
        assert figures["stragglers"] == []
    else:
        (sentence,) = figures["stragglers"]
        assert sentence.startswith("rank 1 on ")
        assert " times as long as the median of the other ranks" in sentence


def test_a_training_reports_no_slow_rank_or_names_it(tmp_path):
    program = runs.ROOT / "slurm-multinode" / "train_at_scale.py"
    options = ["--batch-size", 2, "--steps", 2, "--output", tmp_path / "figures.json"]
    done = runs.run([*torchrun(2), program, *options], tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert done.stdout.count("slow: rank") == len(figures["stragglers"])
