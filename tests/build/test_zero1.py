"""Exercise 2 of stage 06: the solution equals the optimizer in one process, and stores a part of its state."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from build.processes import in_processes, solution

CLOSE = 1e-12
CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}


class Odd(nn.Module):
    """A model with a tied matrix, a frozen one and one without gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.frozen, self.unused, self.last = nn.Linear(6, 8), nn.Linear(6, 6), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(torch.tanh(self.b(self.a(x))))))


def groups(model):
    few = [each for each in model.parameters() if each.dim() < 2]
    many = [each for each in model.parameters() if each.dim() > 1]
    return [{"params": many, "weight_decay": 0.1}, {"params": few}]


def train(make, steps=4, state=None, first=0, scheduled=False):
    """Train, and return the parameters and the state of the optimizer."""
    torch.manual_seed(0)
    model = Odd().double()
    if state:
        model.load_state_dict(state[0])
    optimizer = make(groups(model))
    if state:
        optimizer.load_state_dict(state[1])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    torch.manual_seed(1)
    for number, batch in enumerate(torch.randn(8, 5, 6, dtype=torch.float64)[: first + steps]):
        if number >= first:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()
    return {name: each.clone() for name, each in model.state_dict().items()}, optimizer.state_dict(), optimizer


def sharded(name):
    optimizer_class, options = CLASSES[name]
    return lambda parameters: solution("exercise2_zero1").ShardedOptimizer(parameters, optimizer_class, **options)


def plain(name):
    optimizer_class, options = CLASSES[name]
    return lambda parameters: optimizer_class(parameters, **options)


def assert_equal(found, expected):
    """Compare nested dictionaries of tensors and numbers."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert abs(found - expected).max() < CLOSE
    else:
        assert found == expected


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_parameters_and_state_equal_one_process(name, scheduled):
    expected = train(plain(name), scheduled=scheduled)
    for world_size in (1, 2, 3, 4):
        for found in in_processes(world_size, lambda: train(sharded(name), scheduled=scheduled)[:2]):
            assert_equal(found[0], expected[0])
            assert_equal(found[1]["state"], expected[1]["state"])


def test_each_rank_stores_its_part():
    def elements():
        state = train(sharded("AdamW"))[2].state
        return sum(value.numel() for each in state.values() for value in each.values() if value.dim())

    unused = 42
    whole = sum(each.numel() for each in Odd().parameters() if each.requires_grad) - unused
    for world_size in (1, 2, 4):
        stored = in_processes(world_size, elements)
        assert sum(stored) == 2 * whole
        assert max(stored) <= 2 * max(whole / world_size + 24, 36)


def test_it_sends_few_messages():
    def calls():
        count, original = [], dist.broadcast
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        optimizer = sharded("AdamW")(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        dist.broadcast = lambda tensor, **options: (count.append(tensor.nbytes), original(tensor, **options))[1]
        optimizer.step()
        return count, sum(each.nbytes for each in model.parameters())

    for sent, size in in_processes(2, calls):
        assert len(sent) == 2
        assert sum(sent) == size
        assert abs(sent[0] - sent[1]) < 0.1 * size


def test_a_state_moves_between_numbers_of_ranks_and_to_the_plain_optimizer():
    def first():
        return train(sharded("AdamW"), steps=2)[:2]

    def second(state):
        return train(sharded("AdamW"), steps=2, first=2, state=state)[0]

    expected = train(plain("AdamW"), steps=4)[0]
    saved = in_processes(2, first)[1]
    for world_size in (1, 3, 4):
        for found in in_processes(world_size, second, saved):
            assert_equal(found, expected)
    assert_equal(train(plain("AdamW"), steps=2, first=2, state=saved)[0], expected)


def test_a_group_of_parameters_can_be_added():
    def run(make):
        torch.manual_seed(0)
        one, two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        optimizer = make(one.parameters())
        optimizer.add_param_group({"params": two.parameters(), "lr": 0.5})
        two(one(torch.ones(1, 4, dtype=torch.float64))).sum().backward()
        optimizer.step()
        return [each.detach() for each in (*one.parameters(), *two.parameters())]

    expected = run(plain("AdamW"))
    for found in in_processes(2, lambda: run(sharded("AdamW"))):
        assert_equal(found, expected)


def test_low_precision():
    def run():
        model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).half(), nn.Linear(4, 4))
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(1)
                each.grad = torch.ones_like(each)
        sharded("SGD")(model.parameters()).step()
        return [each.detach().float() for each in model.parameters()]

    for found in in_processes(2, run):
        assert all((each < 0.9).all() for each in found)


@pytest.mark.parametrize("case", ["lbfgs", "different"])
def test_what_cannot_work_is_one_sentence_on_all_ranks(case):
    def run():
        model = nn.Linear(4, 5 if case == "different" and dist.get_rank() else 4)
        made = torch.optim.LBFGS if case == "lbfgs" else torch.optim.SGD
        try:
            solution("exercise2_zero1").ShardedOptimizer(model.parameters(), made, lr=0.1)
        except ValueError as error:
            return str(error)

    for message in in_processes(2, run):
        assert message
        assert "rank" in message
