"""Gradients that a program reduces by hand after each backward pass, and adds up in tensors of its own."""

import pytest

from check.made import CORE, Made
from workshop.check.probes.reductions import Reductions
from workshop.check.rules.by_hand import counted_twice, reduces_each_batch

PROGRAM = """
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    master = model.weight.detach().clone()
    total = torch.zeros_like(master)
    optimizer = torch.optim.SGD([master], lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(3):
        for batch in range(2):
            model(torch.rand(4, 20)).square().mean().backward()
            mean = model.weight.grad.clone()
            dist.all_reduce(mean)  # sums
            total += mean / 2
            model.zero_grad()  # after each batch
        master.grad = 0.5 * total
        optimizer.step()
        total.zero_()
        model.weight.data.copy_(master)
        model.zero_grad()
    dist.destroy_process_group()
"""
TWICE = PROGRAM.replace("            model.zero_grad()  # after each batch\n", "")
REPLACED = TWICE.replace(
    "total += mean / 2", "total = mean / 2"
)  # .grad contains all batches, and the last result counts


def made(folder, text):
    found = Made(folder, text, "torchrun", 2, probes=(*CORE, Reductions)).well()
    assert reduces_each_batch(found.run)
    return found


def test_the_results_of_reductions_and_the_gradients_of_steps_are_noted(place):
    run = made(place("reductions"), PROGRAM)
    first, second = (process.reductions for process in run.ranks)
    assert [each.what for each in first] == ["backward", "reduced", "backward", "reduced", "step"] * 3
    assert {each.left for each in first} == {False}
    assert {each.where for each in first if each.what == "reduced"} == {run.line("# sums")}
    assert [each.sketches for each in first] == [each.sketches for each in second]


@pytest.mark.parametrize(
    ("text", "count"), [(PROGRAM, None), (TWICE, 2), (REPLACED, None)], ids=["cleared", "twice", "replaced"]
)
def test_a_batch_that_counts_twice_is_seen(text, count, place):
    run = made(place("twice"), text)
    for process in run.ranks:
        assert counted_twice(process) == (count and (count, run.line("# sums")))


def test_a_step_of_one_batch_is_not_looked_at(place):
    run = Made(place("one"), PROGRAM.replace("range(2)", "range(1)"), "torchrun", 2).well()
    assert not reduces_each_batch(run.run)
