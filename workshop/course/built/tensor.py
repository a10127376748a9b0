"""Cases for the layers of exercise 4, and for the transformer that it divides."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from workshop.check.rules.words import plural
from workshop.course.built.cases import STEPS, Case, State, difference, far
from workshop.training.decoder import Config, Transformer


class Gated(nn.Module):
    """Two layers that share an input, and a third one for their product."""

    def __init__(self, bias: bool):
        super().__init__()
        size = 6 * dist.get_world_size()
        self.gate, self.up = nn.Linear(5, size, bias=bias), nn.Linear(5, size, bias=False)
        self.down = nn.Linear(size, 7, bias=bias)
        self.up.requires_grad_(not bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def trained(model: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr, momentum=0.9)


def of_layers(module: ModuleType, bias: bool, shape: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    single = Gated(bias).double()
    model = copy.deepcopy(single)
    model.gate, model.up = module.ColumnParallelLinear(model.gate), module.ColumnParallelLinear(model.up)
    model.down = module.RowParallelLinear(model.down)
    if bias and any(each.requires_grad for each in model.up.parameters()):
        return "the parameter of a frozen layer becomes trainable"
    optimizers = [trained(each, 0.1) for each in (single, model)]
    for step in range(STEPS):
        x = torch.randn(*shape, 5, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in optimizers]
        expected, found = single(inputs[0]), model(inputs[1])
        where = f" after {plural(step, 'step')}" if step else ""
        if wrong := far(found, expected, f"the output{where}"):
            return wrong
        for output, optimizer in zip((expected, found), optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
        if wrong := far(inputs[1].grad, inputs[0].grad, f"the gradient of the input{where}"):
            return wrong
    return ""


def layers(module: ModuleType) -> str:
    cases = ((bias, shape) for bias in (True, False) for shape in ((2, 3), (4,)))
    return next(filter(None, (of_layers(module, *case) for case in cases)), "")


def started(seed: int = 0, **sizes: Any) -> Transformer:
    ranks = dist.get_world_size()
    config = Config(
        **{"layers": 2, "width": 8 * ranks, "heads": 2 * ranks, "length": 3 * ranks, "vocabulary": 30} | sizes
    )
    torch.manual_seed(seed)
    return Transformer(config).double()


def losses(model: Transformer) -> torch.Tensor:
    """Train with two backward passes per step, of which the second one has a batch of one sequence."""
    chance, found, optimizer = torch.Generator().manual_seed(1), [], trained(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for sequences in (2, 1):
            size = (sequences, model.positions.num_embeddings + 1)
            batch = torch.randint(model.tokens.num_embeddings, size, generator=chance)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
    return torch.stack(found)


def frozen(model: Transformer) -> Transformer:
    model.blocks[0].norm1.weight.requires_grad_(False)
    model.blocks[1].mlp.down.weight.requires_grad_(False)
    return model


def of_transformer(module: ModuleType, sequence_parallel: bool, seed: int = 0, group: Any = None) -> str:
    for tied in (True, False):
        expected = losses(frozen(started(seed, tied=tied)))
        model = module.parallelize(frozen(started(seed, tied=tied)), group, sequence_parallel)
        found = losses(model)
        for number, (our, their) in enumerate(zip(found, expected, strict=True)):
            if wrong := far(our, their, f"the loss after {plural(number, 'backward pass')}"):
                return wrong
    return ""


def model(module: ModuleType) -> str:
    return of_transformer(module, sequence_parallel=False)


def sequence_model(module: ModuleType) -> str:
    return of_transformer(module, sequence_parallel=True)


def group(module: ModuleType) -> str:
    """Two groups, each with its own model; with an odd number of ranks, each rank is a group."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = ranks // 2 if ranks % 2 == 0 else 1
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return of_transformer(module, sequence_parallel=False, seed=rank // size, group=groups[rank // size])


def raises(action: Callable[[], object], what: str) -> str:
    """Return "" if an action raises a ValueError."""
    try:
        action()
    except ValueError:
        return ""
    return f"no ValueError, although the ranks do not divide {what}"


def undivided(module: ModuleType) -> str:
    ranks = dist.get_world_size()
    size = 4 * ranks + 1
    model = started(width=4 * (ranks + 1), heads=ranks + 1)
    return (
        raises(lambda: module.ColumnParallelLinear(nn.Linear(4, size)), f"the {size} output features")
        or raises(lambda: module.RowParallelLinear(nn.Linear(size, 4)), f"the {size} input features")
        or raises(lambda: module.parallelize(model), f"the {ranks + 1} heads")
    )


def sequence_undivided(module: ModuleType) -> str:
    model, length = module.parallelize(started()), 2 * dist.get_world_size() + 1
    return raises(lambda: model(torch.zeros(1, length, dtype=torch.int64)), f"the {length} tokens of a sequence")


def of_state(found: State, expected: State) -> str:
    """What is wrong with the state of a model whose parameters were doubled."""
    if unknown := sorted(set(found) - set(expected)):
        return f"the model had no {unknown[0]}"
    for name, value in expected.items():
        if name in found and found[name].shape != value.shape:
            return f"{name} has the shape {list(found[name].shape)} instead of {list(value.shape)}"
    return difference(found, {name: 2 * value for name, value in expected.items()})


def doubled(model: nn.Module) -> nn.Module:
    """Double the parameters, as a step of an optimizer might."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2)
    return model


def saved(module: ModuleType) -> str:
    for tied in (True, False):
        expected = started(tied=tied).state_dict()
        state = module.full_state_dict(doubled(module.parallelize(started(tied=tied))))
        if wrong := of_state(state, expected):
            return wrong
    size = 3 * dist.get_world_size()
    plain = nn.ModuleDict({"one": nn.Linear(4, size, bias=False), "two": nn.Linear(size, 4)}).double()
    plain["three"] = plain["one"]  # one layer with two names
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    column, row = module.ColumnParallelLinear(plain["one"]), module.RowParallelLinear(plain["two"])
    return of_state(
        module.full_state_dict(doubled(nn.ModuleDict({"one": column, "two": row, "three": column}))), expected
    )


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "linear-undivided": undivided,
    "sequence-undivided": sequence_undivided,
    "linear-layers": layers,
    "linear-model": model,
    "linear-group": group,
    "sequence-model": sequence_model,
    "whole-state": saved,
}
