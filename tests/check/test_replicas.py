"""Where the parameters of replicas become different: what the probe notes, and what the rules read in it."""

import pytest

from check.made import CORE, Made
from workshop.check.probes.replicas import Replicas
from workshop.check.rules.replicas import parted

START = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
"""

TOGETHER = """
    model = nn.Linear(3, 5)
    with torch.no_grad():
        model.weight.mul_(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 3))
"""

OWN_COUNT = """
    def write(model, values):
        nn.utils.vector_to_parameters(values, model.parameters())  # changes

    def main():
        server = nn.Linear(3, 5)
        values = torch.zeros(20)
        for number in range(3):
            sums, count = torch.ones(20), torch.tensor(1.0 + rank)
            dist.all_reduce(sums)
            mean = sums / count  # the own count
            values = values + mean
            write(server, values)
            with torch.no_grad():
                server(torch.ones(2, 3))  # used

    main()
"""

OWN_DECISION = """
    model, second = nn.Linear(3, 5), nn.Linear(3, 5)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(6):
        ddp(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if number % (2 + rank) == 1:  # decides alone
            second.load_state_dict(model.state_dict())  # changes
        with torch.no_grad():
            second(torch.ones(2, 3))  # used
"""

IN_FORWARD = """
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.ready = nn.Parameter(torch.ones(8)), False

        def forward(self, x):
            if not self.ready:
                self.scale.data.fill_(x.mean())  # changes
                self.ready = True
            return x * self.scale

    model = Scale()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(2):
        batch = torch.full((2, 8), 2.0 + rank)
        if number == 0:
            with torch.no_grad():
                model(batch)  # the first batch
        ddp(batch).sum().backward()
        optimizer.step()  # used
"""


def traced(folder, text):
    made = Made(folder, START + text, "torchrun", 2, probes=(*CORE, Replicas)).well()
    for process in made.ranks:
        process.replica = process.trail
    return made


def test_the_changes_and_uses_of_a_model_are_noted(place):
    made = traced(place("replicas"), TOGETHER)
    wheres = [made.line(text) for text in ("model = nn.Linear", "mul_(2)", "optimizer.step", "optimizer.step")]
    for process in made.ranks:
        changes = process.replica.changes
        assert [each.what for each in changes] == ["changed", "changed", "used", "changed", "used"]
        assert [each.places[0][0] for each in changes][:4] == wheres
        assert {each.model for each in changes} == {0}
        assert changes[0].sketches != changes[1].sketches == changes[2].sketches != changes[3].sketches
    assert parted(made.run, made.line("optimizer.step")) is None


@pytest.mark.parametrize(
    ("text", "cause", "says"),
    [
        (OWN_COUNT, "mean = sums / count", "which changes them at"),
        (OWN_DECISION, "second.load_state_dict", "after 4 steps rank 0 changes them at"),
        (IN_FORWARD, "# changes", "they differ after"),
    ],
    ids=["own-count", "own-decision", "in-forward"],
)
def test_the_line_after_which_replicas_differ_is_named(text, cause, says, place):
    made = traced(place("apart"), text)
    found = parted(made.run, made.line("# used"))
    assert says in found.text
    assert found.where == made.line(cause)


def test_without_a_trace_nothing_is_said(place):
    made = Made(place("untraced"), START + TOGETHER, "torchrun", 2, probes=CORE).well()
    assert parted(made.run, made.line("optimizer.step")) is None
