"""Cases for the class DDP of exercise 1."""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from workshop.course.built.cases import UPDATED, Case, alone, batches, decaying, difference, finish, made, together


def start(module: ModuleType) -> str:
    model = made(dist.get_rank(), uneven=False)
    model.register_buffer("offset", torch.full((6,), float(dist.get_rank()), dtype=torch.float64))
    module.DDP(model)
    expected = made(0).state_dict() | {"offset": torch.zeros(6, dtype=torch.float64)}
    wrong = [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
    wrong.sort(key="offset".__eq__)  # the buffer last
    if not wrong:
        return ""
    kind = "buffer" if wrong == ["offset"] else "parameter"
    return f"after DDP(), the {kind} {wrong[0]} of rank {dist.get_rank()} is not the one that rank 0 has created"


def changed(module: ModuleType) -> str:
    model = made(0)
    wrapped = module.DDP(model)
    model.unused = nn.Linear(6, 6).double()
    try:
        wrapped(batches()[0][:2], 0)
    except ValueError as error:
        return "" if "unused" in str(error) else f"the ValueError does not name the parameter: {error}"
    return "forward() raises no ValueError, although a parameter was replaced after DDP() wrapped the module"


def odd(module: ModuleType) -> str:
    model = made(0)
    together(module.DDP(model, bucket_bytes=200), torch.optim.SGD(model.parameters(), lr=0.1))
    return difference(model.state_dict(), alone())


def no_gradient(module: ModuleType) -> str:
    model = made(0)
    together(module.DDP(model), decaying(model.parameters(), lr=0.1))
    return difference(model.state_dict(), alone(decaying), UPDATED)


def twice(module: ModuleType) -> str:
    model = made(0, uneven=False)
    wrapped = module.DDP(model)
    for part in batches()[0].chunk(dist.get_world_size())[dist.get_rank()].chunk(2):
        (wrapped(part, 0).square().mean() / 2).backward()
    finish(wrapped)
    single = made(0, uneven=False)
    single(batches()[0], 0).square().mean().backward()
    found, expected = (
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        for model in (model, single)
    )
    return difference(found, expected, ", after two backward passes")


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "start": start,
    "changed": changed,
    "twice": twice,
    "no-gradient": no_gradient,
    "odd": odd,
}
