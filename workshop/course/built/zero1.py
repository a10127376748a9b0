"""Cases for the class ShardedOptimizer of exercise 2."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from workshop.course.built.cases import UNEVEN, Case, State, difference, made


def give_gradients(model: nn.Module, number: int) -> None:
    chance = torch.Generator().manual_seed(number)
    for each in model.parameters():
        each.grad = torch.randn(each.shape, dtype=each.dtype, generator=chance) if each.requires_grad else None


def plain(parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sharded(module: ModuleType) -> Callable[[Any], Any]:
    return lambda parameters: module.ShardedOptimizer(parameters, torch.optim.Adagrad, lr=0.1)


def trained(
    make: Callable[..., Any], steps: range, state: Any = None, start: Any = None, scheduled: bool = False
) -> tuple[State, Any]:
    """Train with random gradients that are equal on all ranks; return the parameters and the optimizer."""
    model = made(0)
    if start:
        model.load_state_dict(start)
    optimizer = make(model.parameters())
    if state:
        optimizer.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    for number in steps:
        give_gradients(model, number)
        optimizer.step()
        if schedule:
            schedule.step()
            for group in optimizer.param_groups:  # OneCycleLR, for example, changes more than the learning rate
                group["weight_decay"] = 0.1 * number
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer


def stored(optimizer: Any) -> int:
    """The elements of the state that an optimizer, and those that it contains, stores on this rank."""
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    states = [value for each in (optimizer, *inner) for state in each.state.values() for value in state.values()]
    return sum({id(each): each.numel() for each in states if isinstance(each, torch.Tensor) and each.dim()}.values())


def other_class(module: ModuleType) -> str:
    return difference(trained(sharded(module), range(3))[0], trained(plain, range(3))[0], ", with Adagrad")


def scheduled(module: ModuleType) -> str:
    found = trained(sharded(module), range(3), scheduled=True)[0]
    return difference(found, trained(plain, range(3), scheduled=True)[0])


def shares(module: ModuleType) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(40, 40), *(nn.Linear(20, 20) for _ in range(4)))
    optimizer = module.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    give_gradients(model, 0)
    optimizer.step()
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, stored(optimizer))
    elements = [each.numel() for each in model.parameters()]
    largest = sum(sizes) * max(elements) / sum(elements)  # with many ranks, this parameter alone is more than a share
    if max(sizes) > UNEVEN * max(sum(sizes) / len(sizes), largest):
        return f"the ranks store {' and '.join(map(str, sizes))} elements of optimizer state, which is uneven"
    return ""


def saved(module: ModuleType) -> str:
    state = trained(sharded(module), range(2))[1].state_dict()["state"]
    expected = trained(plain, range(2))[1].state_dict()["state"]
    if dist.get_rank() > 0:
        return ""  # rank 0 saves the checkpoint
    # Adagrad has a state for frozen parameters too, which no step uses.
    expected = {number: expected[number] for number, each in enumerate(made(0).parameters()) if each.requires_grad}
    if missing := set(expected) - set(state):
        return f"on rank 0, state_dict() has no state of {len(missing)} of {len(expected)} trained parameters"
    found, sums = (
        {f"the state of parameter {key}": each[key]["sum"].cpu() for key in each} for each in (state, expected)
    )
    return difference(found, sums)


def loaded(module: ModuleType) -> str:
    start, optimizer = trained(plain, range(2))
    found = trained(sharded(module), range(2, 4), optimizer.state_dict(), start)[0]
    return difference(found, trained(plain, range(4))[0], ", after the state was loaded")


def loaded_part(module: ModuleType) -> str:
    share = stored(trained(sharded(module), range(1))[1])
    state = trained(plain, range(2))[1].state_dict()
    own = stored(trained(sharded(module), range(0), state)[1])
    name = f"rank {dist.get_rank()}"
    return f"after load_state_dict(), {name} stores {own} elements; its share is {share}" if own > share else ""


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "shares": shares,
    "other-class": other_class,
    "scheduled": scheduled,
    "saved": saved,
    "loaded": loaded,
    "loaded-part": loaded_part,
}
