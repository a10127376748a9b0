"""Exercise 1 of stage 06: the solution equals one process, for any module."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from build.processes import in_processes, solution
from workshop.training.decoder import Config, Transformer

CLOSE = 1e-12


class Odd(nn.Module):
    """A model with a tied matrix, a frozen one, one that no batch uses and one that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.frozen, self.unused, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("offset", torch.rand(6))

    def forward(self, x, use=True):
        x = self.frozen(torch.tanh(self.b(torch.tanh(self.a(x))))) + self.offset
        return self.sometimes(x) if use else x


def train_odd(rank, world_size, wrap):
    torch.manual_seed(0)
    data = torch.randn(3, 12, 6, dtype=torch.float64)
    torch.manual_seed(rank)
    model = wrap(Odd().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for batch in data:
        for number, part in enumerate(batch.chunk(world_size)):
            if number == rank:
                (model(part, use=rank == 0).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def one_process(world_size):
    """Train without DDP on the mean of the ranks' losses."""
    torch.manual_seed(0)
    data = torch.randn(3, 12, 6, dtype=torch.float64)
    torch.manual_seed(0)
    model = Odd().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for batch in data:
        for number, part in enumerate(batch.chunk(world_size)):
            (model(part, use=number == 0).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_odd_model_equals_one_process(world_size, bucket_bytes):
    def train():
        rank = torch.distributed.get_rank()
        return train_odd(rank, world_size, lambda model: solution("exercise1_ddp").DDP(model, bucket_bytes))

    expected = one_process(world_size)
    for parameters in in_processes(world_size, train):
        for name, value in parameters.items():
            assert abs(torch.from_numpy(value) - expected[name.removeprefix("module.")]).max() < CLOSE, name


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_transformer_equals_one_process(world_size):
    config = Config(layers=2, width=16, heads=2, length=8)

    def data():
        torch.manual_seed(1)
        return torch.randint(256, (3, 8, 9))

    def losses(model, part):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        found = []
        for batch in data():
            batch = part(batch)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def train():
        rank = torch.distributed.get_rank()
        torch.manual_seed(rank)
        model = solution("exercise1_ddp").DDP(Transformer(config).double(), 4096)
        return losses(model, lambda batch: batch[rank::world_size])

    torch.manual_seed(0)
    expected = losses(Transformer(config).double(), lambda batch: batch)
    found = torch.tensor(in_processes(world_size, train), dtype=torch.float64).mean(0)
    assert abs(found - torch.tensor(expected, dtype=torch.float64)).max() < CLOSE


def test_buckets_start_during_the_backward_pass_and_are_few():
    def count():
        calls, original = [], torch.distributed.all_reduce
        model = solution("exercise1_ddp").DDP(Transformer(Config(layers=4, width=16, heads=2, length=8)), 8_000)
        first = next(model.module.blocks.parameters())
        torch.distributed.all_reduce = lambda tensor, **options: (
            calls.append((tensor.nbytes, first.grad is None)), original(tensor, **options)
        )[1]  # fmt: skip
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        return calls, sum(each.nbytes for each in model.parameters())

    for calls, size in in_processes(2, count):
        assert 6 <= len(calls) <= 12
        assert size <= sum(sent for sent, _ in calls) < 1.02 * size
        assert sum(early for _, early in calls) >= 3


def test_low_precision_and_mixed_types():
    def train():
        model = nn.ModuleDict({"a": nn.Linear(4, 4).half(), "b": nn.Linear(4, 4)})
        model.forward = lambda x: model["b"](model["a"](x.half()).float())
        wrapped = solution("exercise1_ddp").DDP(model)
        wrapped(torch.full((2, 4), float(torch.distributed.get_rank() + 1))).sum().backward()
        return [each.grad.float().numpy() for each in model.parameters()]

    first, second = in_processes(2, train)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("change", ["replaced", "frozen", "moved"])
def test_a_change_after_wrapping_is_an_error(change):
    def run():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wrapped = solution("exercise1_ddp").DDP(model)
        if change == "replaced":
            model[1] = nn.Linear(4, 4)
        elif change == "frozen":
            model[1].requires_grad_(False)
        else:
            wrapped.double()
        try:
            wrapped(torch.zeros(1, 4, dtype=torch.float64 if change == "moved" else torch.float32))
        except ValueError as error:
            return str(error)

    for message in in_processes(2, run):
        assert "after DDP() wrapped the module" in message
