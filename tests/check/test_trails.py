"""Where ranks part: the trails that the probe writes, and what the rules read in them."""

import pytest

from check.made import CORE, Made
from workshop.check.probes.trails import Trails
from workshop.check.rules.ending import ending
from workshop.check.rules.parting import parting
from workshop.check.rules.walk import Walk

START = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    rank = dist.get_rank()
"""

TOGETHER = """
    def double(value):
        return 2 * value

    total = 0
    for number in range(3):
        total = double(number)
        if rank == 0:
            print(total)
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
"""

OWN_DECISION = """
    scores = [[0.1, 0.2, 0.3], [0.9, 0.2, 0.3]][rank]
    for step in range(3):
        solved = scores[step] > 0.5  # decided alone
        if solved:
            break
        dist.all_reduce(torch.ones(2))
"""

UNEVEN = """
    def batches():
        mine = list(range(8))[rank::2]
        kept = [each for each in mine if each != 3]  # after the division
        return DataLoader(kept, 1)

    loader = batches()
    for batch in loader:
        dist.all_reduce(torch.ones(2))
"""

SKIPPED = """
    counts = [[5, 5, 5], [5, 0, 5]][rank]
    for step in range(3):
        if counts[step] == 0:  # skips alone
            continue
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3))
"""

FIRST_RANK = """
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        total = torch.ones(2)
        dist.all_reduce(total)  # rank 0 alone
"""

HELPER = """
    def is_first():
        if dist.is_initialized():
            if dist.get_rank() == 0:
                return True
            else:
                return False
        return True

    dist.all_reduce(torch.ones(2))
    if is_first():
        total = torch.ones(3)
        dist.all_reduce(total)  # of the first rank
    dist.all_reduce(torch.ones(1))
"""

REDUCED = """
    state = {"left": 3}
    while state["left"] > 0:
        total = torch.ones(1)
        dist.reduce(total, 0)  # to one rank
        state["left"] -= int(total.item())
    dist.all_reduce(torch.ones(2))
"""

COMPARED = """
    losses = [[0.1, 0.2], [0.9, 0.2]][rank]
    loss = sum(losses)
    if loss > 0.5:  # decided here
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(2))
"""

SHAPES = """
    rows = torch.ones(2, 3 + rank)  # a different width
    parts = [torch.zeros_like(rows) for _ in range(2)]
    dist.all_gather(parts, rows)
"""

FOLDERS = """
    def folder():
        return f"runs/{os.getpid()}"  # its own name

    place = folder()
    os.makedirs(place)
    if rank == 0:
        open(f"{place}/best.txt", "w").close()
    dist.barrier()
    print(open(f"{place}/best.txt").read())
"""


def traced(folder, text):
    return Made(folder, START + text, "torchrun", 2, probes=(*CORE, Trails))


def test_a_trail_has_the_lines_the_values_and_the_calls(place):
    made = traced(place("together"), TOGETHER).well()
    walks = [Walk(process, known) for known in [{}] for process in made.ranks]
    loop, double = made.line("for number"), made.line("return 2")
    for walk in walks:
        lines = [walk.place(at) for at in range(len(walk))]
        assert (lines.count(loop), lines.count(double)) == (4, 3)
        assert made.line("rank = dist.get_rank()") in lines
        at = walk.latest_at(double)
        assert (walk.values(at), walk.steps[at].depth) == ({"value": "2"}, walk.steps[walk.latest_at(loop)].depth + 1)
        reduced = walk.latest_at(made.line("dist.all_reduce"))
        assert walk.called(reduced)["all_reduce"]["tensor"] == "[1.0, 1.0]"
        assert [walk.place(before - 1) for before, _ in walk.calls] == [made.line("dist.all_reduce")] * 3
    assert parting(made.run) is None


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (OWN_DECISION, "# decided alone", "`solved` is False on rank 0 and True on rank 1"),
        (UNEVEN, "# after the division", "ends after 3 iterations on rank 1, but rank 0 begins iteration 4"),
        (SKIPPED, "# skips alone", "the ranks diverge at line"),
        (FIRST_RANK, "# rank 0 alone", "rank 0 calls all_reduce of [2]"),
        (HELPER, "# of the first rank", "(`if is_first():`): rank 0 goes to"),
        (REDUCED, "# to one rank", "before that, reduce() at"),
        (COMPARED, "# decided here", "`loss` is"),
        (SHAPES, "# a different width", "is a tensor of shape [2, 3] on rank 0 and a tensor of shape [2, 4] on rank 1"),
    ],
)
def test_the_line_at_which_ranks_part(tmp_path, text, line, says):
    made = traced(tmp_path, text)
    assert made.run.apart
    found = parting(made.run)
    assert (found.where, says in found.text) == (made.line(line), True), found
    assert found.fix


def test_ranks_with_a_folder_each(tmp_path):
    made = traced(tmp_path, FOLDERS)
    found = ending(made.run)
    assert "the ranks use different folders" in found.text
    assert found.where == made.line("# its own name"), found


def test_a_debugger_keeps_its_trace_function(tmp_path):
    text = "    sys.settrace(lambda *_: None)\n    dist.all_reduce(torch.ones(2))\n"
    debugged = START.replace("    dist.init", "    sys.settrace(lambda *_: None)\n    dist.init")
    made = Made(tmp_path, debugged + text + "    sys.settrace(None)\n", "torchrun", 2, probes=(*CORE, Trails))
    assert not any(process.trail.entries for process in made.ranks)
