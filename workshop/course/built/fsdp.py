"""Cases for the class FSDP of exercise 3."""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from workshop.course.built.cases import UPDATED, Case, alone, decaying, difference, made, together


def odd(module: ModuleType) -> str:
    wrapped = module.FSDP(made(dist.get_rank()), [])
    together(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return difference(wrapped.full_state_dict(), alone())


def no_gradient(module: ModuleType) -> str:
    wrapped = module.FSDP(made(0), [])
    together(wrapped, decaying(wrapped.parameters(), lr=0.1))
    return difference(wrapped.full_state_dict(), alone(decaying), UPDATED)


def uneven_sizes(module: ModuleType) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    return difference(module.FSDP(model, [nn.Linear]).full_state_dict(), expected)


def precision(module: ModuleType) -> str:
    """The gradients of rank 0 and of the others are exact in bfloat16, but their sum is not."""
    torch.manual_seed(0)
    model, small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 3 * 2.0**-11
    wrapped = module.FSDP(model, [nn.Linear], compute_dtype=torch.bfloat16)
    output = wrapped(torch.ones(2, 8))
    if output.dtype != torch.bfloat16:
        return f"with compute_dtype=torch.bfloat16 the output is {output.dtype}"
    (output.float().sum() * (small if dist.get_rank() else 1)).backward()
    gradients = [each.grad for each in wrapped.parameters() if each.grad is not None]
    if {each.dtype for each in (*wrapped.parameters(), *gradients)} != {torch.float32}:
        return "with compute_dtype the shards or their gradients are not float32"
    with torch.no_grad():
        for shard in wrapped.parameters():
            shard.copy_(torch.zeros_like(shard) if shard.grad is None else shard.grad)
    others = dist.get_world_size() - 1
    found, expected = wrapped.full_state_dict()["1.bias"], 2 * (1 + small * others) / (1 + others)
    if float((found - expected).abs().max()) > 1e-6:
        return f"the mean of gradients is {float(found[0]):.6f} instead of {expected:.6f}: it was rounded to bfloat16"
    return ""


def old_parameters(module: ModuleType) -> str:
    torch.manual_seed(0)
    wrapped = module.FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [nn.Linear])
    wrapped(torch.ones(1, 4))  # no backward pass follows
    with torch.no_grad():
        for each in wrapped.parameters():
            each.zero_()
    found = float(wrapped(torch.ones(1, 4)).abs().sum().detach())
    return "the forward pass uses parameters from before the optimizer step" if found else ""


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "old-parameters": old_parameters,
    "precision": precision,
    "uneven-sizes": uneven_sizes,
    "no-gradient": no_gradient,
    "odd": odd,
}
