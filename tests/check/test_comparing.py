"""The comparison with one process: joined batches, steps without chance, and the targets of a loss."""

import math
import re
import socket
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader

from check.made import Made
from workshop.check.command import check_command
from workshop.check.comparing import TensorPickler, _once, dealt, joined, paddings
from workshop.check.evidence.events import LossComputed
from workshop.check.probes.schedules import schedule_length
from workshop.check.recollated import Drawn, Samples, interleaved, joins, without_known

Pair = namedtuple("Pair", "tokens tags")
ONE, TWO = torch.tensor([[1, 2, 0]]), torch.tensor([[3, 4, 5]])


def test_batches_are_joined_by_their_fields():
    whole = joined([{"x": ONE, "names": ["a"], "size": 1}, {"x": TWO, "names": ["b"], "size": 1}])
    assert whole["x"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert whole["names"] == ["a", "b"]
    pair = joined([Pair(ONE, [ONE]), Pair(TWO, [TWO])])
    assert isinstance(pair, Pair)
    assert pair.tags[0].tolist() == [[1, 2, 0], [3, 4, 5]]


def test_shorter_sequences_are_padded_as_their_neighbors_are():
    short, long = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]])
    assert joined([short, long]).tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [5, 6, 7, 0], [8, 0, 0, 0]]
    assert joined([short, long], rank=0).tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]


def test_a_frequent_last_value_is_no_padding_if_a_different_one_is_repeated():
    short, long = torch.tensor([[3, 2], [4, 2]]), torch.tensor([[5, 0, 0, 0], [2, 1, 1, 2]])
    assert joined([short, long]).tolist() == [[3, 2, 0, 0], [4, 2, 0, 0], [5, 0, 0, 0], [2, 1, 1, 2]]


def test_the_padding_of_a_field_is_that_of_all_batches():
    full, more = [torch.tensor([[3, 2], [4, 2]])], [torch.tensor([[5, 6, 2], [7, 2, 2]])]
    fills = paddings([full, more, [torch.tensor([[3, 0, 0], [2, 0, 0], [9, 9, 1]])]])
    assert fills == {(0,): 0}
    assert joined([full, more], fills=lambda: fills)[0].tolist() == [[3, 2, 0], [4, 2, 0], [5, 6, 2], [7, 2, 2]]


def test_an_evaluated_batch_has_the_order_of_the_data_set():
    parts = [
        {"x": torch.tensor([[0.0], [2.0], [4.0]]), "name": ["a", "c", "e"]},
        {"x": torch.tensor([[1.0], [3.0]]), "name": ["b", "d"]},
    ]
    whole = dealt(joined(parts), [3, 2])
    assert whole["x"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert whole["name"] == ["a", "b", "c", "d", "e"]


def test_samples_that_a_sampler_repeats_are_evaluated_once():
    seen = set()
    first, last = torch.arange(4.0).reshape(4, 1), torch.tensor([[4.0], [0.0]])
    assert len(_once((first, torch.arange(4)), seen, 1)[0]) == 4
    rows, labels = _once((last, torch.tensor([4, 0])), seen, 1)
    assert (rows.tolist(), labels.tolist()) == ([[4.0]], [4])
    assert len(_once(last, seen, 0)) == 2  # the data set contains equal samples


def test_times_are_no_numbers_to_compare():
    code = """
import time
from workshop.check.clock import mark_times
mark_times()
begin = time.perf_counter()
elapsed = time.perf_counter() - begin
rate = 100 / max(elapsed, 1e-9)
minutes, seconds = divmod(elapsed, 60)
assert int(60 + elapsed - 60) == int(elapsed - 0) == 0
assert elapsed < 60 and elapsed >= 0 and not elapsed > 60
assert time.time() + 5 > time.time()
print(f"{elapsed:.2f} {rate:.1f} {seconds} %.3f" % (elapsed * 2), int(elapsed), round(elapsed, 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["nan", "nan", "nan", "nan", "0", "nan"]


def test_batches_that_cannot_be_joined_are_refused():
    with pytest.raises(ValueError, match="a batch contains object"):
        joined([object(), object()])
    with pytest.raises(ValueError, match="different lengths"):
        joined([[ONE], [TWO, TWO]])


def test_batches_with_edges_are_made_of_the_samples_again():
    def edges(rows):
        return torch.zeros(rows, 3), torch.zeros(2, 7, dtype=torch.int64)

    assert joins((torch.zeros(4, 3), torch.zeros(4)), 4, joined)
    assert joins({"tokens": torch.zeros(2, 9, dtype=torch.int64)}, 2, joined)
    assert not joins(edges(4), 4, joined)
    assert not joins({"graph": object()}, 4, joined)
    data = [(torch.full((2,), float(number)), number) for number in range(5)]
    loader = iter(DataLoader(data, 3, collate_fn=lambda samples: [number for _, number in samples]))
    drawn = Drawn(loader)
    assert (next(loader), [number for _, number in drawn.samples], drawn.size) == ([0, 1, 2], [0, 1, 2], 5)
    assert drawn.collate(data[3:]) == [3, 4]
    assert Drawn(iter(DataLoader(data, 3))).collate is None  # such batches are joined


def test_samples_of_several_ranks_are_dealt_and_counted_once():
    whole = interleaved([Samples([0, 2, 4]), Samples([1, 3])])
    assert whole == [0, 1, 2, 3, 4]
    seen = set()
    assert without_known([torch.tensor(0), torch.tensor(1)], seen, 0, TensorPickler) == [0, 1]
    assert without_known([torch.tensor(2), torch.tensor(0)], seen, 1, TensorPickler) == [2]
    assert without_known([torch.tensor(0)], seen, 0, TensorPickler) == [0]  # the data set contains equal samples


TAMED = """
import torch
from torch import nn
from torch.nn import functional as F
from workshop.check.taming import tame

norm = nn.BatchNorm1d(3)
size = part = 0
tame(lambda: size, lambda: part)
for draw in (torch.rand(4, 3), torch.randn(4, 3), torch.randint(9, (4, 3)), torch.rand_like(torch.ones(4, 3)),
             torch.empty(4, 3).normal_(2.0, 0.1), torch.empty(4, 3).uniform_(-1, 1), torch.rand((4, 3))):
    assert (draw == draw[0]).all(), draw
assert not torch.equal(torch.rand(4, 3), torch.rand(4, 3))
assert torch.rand(()) == torch.rand(())  # as drawn for each sample in a loop
size = 3  # samples in the batch
views = torch.rand(2, 3, 4)
assert (views == views[:, :1]).all() and not torch.equal(views[0], views[1])
size, part = 6, 3  # a joined batch, of a program that draws as many numbers as a rank has samples
assert torch.randn(3, 4).shape == torch.randint(9, (6, 4)).shape == (6, 4) and torch.randn(2, 3).shape == (2, 3)
size = part = 0
assert 1.5 < torch.empty(4, 3).normal_(2.0, 0.1).mean() < 2.5
assert torch.randint(3, 5, (2,)).min() >= 3
assert torch.randperm(4).tolist() == [0, 1, 2, 3]
ones = torch.ones(4, 3)
assert torch.equal(nn.Dropout(0.5)(ones), ones) and torch.equal(F.dropout(ones, 0.9), ones)
both = torch.cat([ones, 5 * ones])
assert torch.allclose(norm(both)[:4], norm(ones))
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert nn.Linear(3, 3)(ones).dtype == torch.float32
"""


def test_tamed_random_numbers_are_the_same_for_each_sample():
    done = subprocess.run([sys.executable, "-c", TAMED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CROSS_ENTROPY = """
    import torch
    from torch.nn import functional as F

    model = torch.nn.Linear(2, 3)
    targets = torch.tensor([0, 1, -100, 2])
    loss = F.cross_entropy(model(torch.ones(4, 2)), targets)
    total = F.cross_entropy(model(torch.ones(4, 2)), targets, reduction="sum")
    with torch.no_grad():
        F.cross_entropy(model(torch.ones(4, 2)), targets)
    print(loss.item())
"""


def test_the_targets_of_a_cross_entropy_are_counted(place):
    made = Made(place("losses"), CROSS_ENTROPY).well()
    (process,) = made.run.processes
    losses = process.of(LossComputed)
    assert [event.targets for event in losses] == [3, 3]
    assert [event.mean for event in losses] == pytest.approx([float(process.stdout)] * 2, abs=1e-6)
    assert losses[0].where == made.line("loss = F.cross_entropy")


def test_lists_with_one_element_per_sample_are_continued():
    one, two = ([ONE[0], ONE[0]], [{"box": ONE}, {"box": ONE}]), ([TWO[0]], [{"box": TWO}])
    inputs, targets = joined([one, two])
    assert [each.tolist() for each in inputs] == [[1, 2, 0], [1, 2, 0], [3, 4, 5]]
    assert [each["box"].tolist() for each in targets] == [[[1, 2, 0]], [[1, 2, 0]], [[3, 4, 5]]]
    assert len(joined([one, two], rank=1)[1]) == 1
    assert joined([[{"x": 1}], [{"x": 2}]]) == [{"x": 1}, {"x": 2}]
    clouds = [
        {"x": torch.zeros(2, 3), "points": [torch.full((size,), size) for size in sizes]} for sizes in ((5, 4), (7, 6))
    ]
    assert [len(each) for each in joined(clouds)["points"]] == [5, 4, 7, 6]
    assert [len(each) for each in dealt(joined(clouds), [2, 2])["points"]] == [5, 7, 4, 6]
    views = [{"x": torch.zeros(2, 3), "views": [torch.zeros(2), torch.zeros(2)]}] * 2
    assert [len(each) for each in joined(views)["views"]] == [4, 4]


EVALUATED = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

begin = time.perf_counter()
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
test_data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))
model = nn.Linear(4, 1)
ddp_model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size())  # one process trains differently
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
evaluated = DataLoader(test_data, 4, sampler=DistributedSampler(test_data, shuffle=False))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp_model(inputs), targets)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        worst = max(float((model(inputs) - targets).abs().max()) for inputs, targets in evaluated)
        worst = torch.tensor(worst)
    REDUCED
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.3f}, validation: {worst:.4f} after {time.perf_counter() - begin:.2f} s")
dist.destroy_process_group()
"""
MEAN = "dist.all_reduce(worst)\n    worst /= dist.get_world_size()"


@pytest.mark.parametrize(
    ("reduced", "kinds"), [("dist.all_reduce(worst, dist.ReduceOp.MAX)", []), (MEAN, ["metric-depends-on-processes"])]
)
def test_what_each_rank_computes_of_all_samples_in_advance_is_that_of_one_process(tmp_path, reduced, kinds):
    table = "    table = torch.cat([inputs.sum(1, keepdim=True) for inputs, _ in DataLoader(test_data, 4)])\n"
    text = EVALUATED.replace("REDUCED", reduced).replace("torch.randn(30, 1)", "torch.arange(30)[:, None]")
    text = text.replace("for epoch in", f"with torch.no_grad():\n{table}for epoch in")
    (tmp_path / "train.py").write_text(
        text.replace("model(inputs) - targets)", "model(inputs) - table[targets[:, 0]])")
    )
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds, verdict.errors


@pytest.mark.parametrize(
    ("reduced", "kinds"), [("dist.all_reduce(worst, dist.ReduceOp.MAX)", []), (MEAN, ["metric-depends-on-processes"])]
)
def test_a_metric_is_that_of_one_process_with_the_same_parameters(tmp_path, reduced, kinds):
    (tmp_path / "train.py").write_text(EVALUATED.replace("REDUCED", reduced))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds, verdict.errors
    if kinds:
        assert re.match(
            r"after step 4 the program prints validation [\d.]+; one process with the same parameters and samples, [\d.]+$",
            verdict.errors[0].seen,
        )
        assert verdict.errors[0].where == "train.py:29"


def test_a_program_may_ask_for_a_batch_once_more_after_the_last_one(tmp_path):
    text = EVALUATED.replace("REDUCED", MEAN).replace(
        "        optimizer.step()\n", "        optimizer.step()\n    next(batches, None)\n"
    )
    text = text.replace(
        "    for inputs, targets in loader:", "    batches = iter(loader)\n    for inputs, targets in batches:"
    )
    (tmp_path / "train.py").write_text(text)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == ["metric-depends-on-processes"]


GRAPHS = """
from typing import NamedTuple
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

class Batch(NamedTuple):
    nodes: torch.Tensor
    edges: torch.Tensor
    graph: torch.Tensor
    target: torch.Tensor

def collate(samples):
    sizes = [len(nodes) for nodes, *_ in samples]
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return Batch(
        torch.cat([nodes for nodes, *_ in samples]),
        torch.cat([edges + offset for (_, edges, _), offset in zip(samples, offsets)], dim=1),
        torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes)),
        torch.stack([target for *_, target in samples]),
    )

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(3, 4), nn.Linear(4, 1)

    def forward(self, batch):
        nodes = self.embedding(batch.nodes)
        nodes = nodes.index_add(0, batch.edges[1], nodes[batch.edges[0]])
        return self.out(torch.zeros(len(batch.target), 4).index_add(0, batch.graph, nodes))[:, 0]

dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = torch.randint(3, 6, (62,)).tolist()
nodes = [torch.randint(3, (size,)) for size in sizes]
data = [(each, torch.randint(len(each), (2, 5)), each.float().sum() + torch.randn(())) for each in nodes]
model = Net()
ddp_model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
sampler = DistributedSampler(data[:32])
loader = DataLoader(data[:32], 4, sampler=sampler, collate_fn=collate)
evaluated = DataLoader(data[32:][dist.get_rank() :: dist.get_world_size()], 4, collate_fn=collate)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp_model(batch), batch.target).backward()
        optimizer.step()
    with torch.no_grad():
        pairs = [(model(batch), batch.target) for batch in evaluated]
    outputs, targets = (torch.cat(each) for each in zip(*pairs))
    sums = torch.stack([(outputs - targets).square().sum(), targets.sum(), targets.square().sum(), torch.tensor(len(targets))])
    REDUCED
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: R2 {r2:.4f}")
dist.destroy_process_group()
"""
OF_ALL = """dist.all_reduce(sums)
    r2 = 1 - sums[0] / (sums[2] - sums[1] ** 2 / sums[3])"""
OF_EACH = """r2 = 1 - sums[0] / (sums[2] - sums[1] ** 2 / sums[3])
    dist.all_reduce(r2)
    r2 /= dist.get_world_size()"""


@pytest.mark.parametrize(("reduced", "kinds"), [(OF_ALL, []), (OF_EACH, ["metric-depends-on-processes"])])
def test_one_process_gets_batches_of_graphs_made_of_the_samples_of_all_ranks(tmp_path, reduced, kinds):
    (tmp_path / "train.py").write_text(GRAPHS.replace("REDUCED", reduced))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds, verdict.errors
    assert [text for text in verdict.unchecked if "one process" in text] == []


NUMBERS = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
scores = torch.rand(40) + 3 * (torch.arange(40) % 2)  # those of rank 1 are larger
model = nn.Embedding(40, 1)
ddp_model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(3):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
    for batch in order.split(5):  # one process takes more steps
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp_model(batch)[:, 0], scores[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        errors = torch.stack([(model(torch.tensor(user)) - scores[user]).abs() for user in range(rank, 40, world_size)])
    REDUCED
    if rank == 0:
        print(f"epoch {epoch}: error {worst.item():.4f}")
dist.destroy_process_group()
"""
LARGEST = """worst = errors.max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)"""
MEAN_OF_LARGEST = """worst = errors.max()
    dist.all_reduce(worst)
    worst /= world_size"""


@pytest.mark.parametrize(("reduced", "kinds"), [(LARGEST, []), (MEAN_OF_LARGEST, ["metric-depends-on-processes"])])
def test_a_program_without_a_loader_is_compared_evaluation_by_evaluation(tmp_path, reduced, kinds):
    (tmp_path / "train.py").write_text(NUMBERS.replace("REDUCED", reduced))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds, verdict.errors


SPAWNED = """
import argparse
import torch.multiprocessing as mp

def train(rank, world_size):
    import os
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "%PORT%"}
    TRAINING

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    processes = parser.parse_args().world_size
    mp.spawn(train, args=(processes,), nprocs=processes)
"""


def test_a_program_that_spawns_its_processes_is_compared_with_one_process(tmp_path):
    training = EVALUATED.replace("REDUCED", MEAN).replace("\n", "\n    ")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "train.py").write_text(SPAWNED.replace("TRAINING", training).replace("%PORT%", str(port)))
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == ["metric-depends-on-processes"], verdict.errors
    assert [text for text in verdict.unchecked if "one process" in text] == []


HASHED = """
    print(hash("a"), hash(3), hash(("a", 3)))
"""


def test_each_rank_has_its_own_hashes_of_strings_in_the_program(place):
    made = Made(place("hashes"), HASHED, "torchrun", 2).well()
    one, two = (process.stdout.split() for process in made.run.processes)
    assert one[0] != two[0]
    assert one[1:] == two[1:]


@pytest.mark.parametrize("clamped", [True, False])
def test_the_length_of_a_schedule_is_that_of_its_first_fall(clamped):
    def rate(step):
        progress = step / 100
        return 0.5 * (1 + math.cos(math.pi * (min(1.0, progress) if clamped else progress)))

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert schedule_length(torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) == 100


@pytest.mark.parametrize(("total", "length"), [(100, 100), (None, None)])
def test_a_schedule_with_restarts_ends_with_the_last_fall(total, length):
    def rate(step):
        return 0.0 if total and step >= total else 0.5 * (1 + math.cos(math.pi * (step % 25) / 25))

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert schedule_length(torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) == length


def test_a_loader_keeps_its_signature():
    """Lightning reads the names of the arguments, to create the loader again with a DistributedSampler."""
    code = """
import inspect
from torch.utils.data import DataLoader
from workshop.check.comparing import _each_batch
_each_batch(lambda place, data, size: data)
assert [*inspect.signature(DataLoader.__init__).parameters][:2] == ["self", "dataset"]
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
