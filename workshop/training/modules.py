"""Find the parameters of a module, and put other tensors in their places. The exercises of stage 06 need this."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

Place = tuple[nn.Module, str, int]


def describe(module: nn.Module) -> set[tuple]:
    """Return the name, identity, device and type of each parameter of a module, and whether it is trained."""
    return {(name, id(each), each.device, each.dtype, each.requires_grad) for name, each in module.named_parameters()}


def parts_of(module: nn.Module, layers: Iterable[type]) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Divide the parameters of a module into those of its layers and the others.

    Args:
        module: the whole module.
        layers: the classes of its layers.

    Returns:
        Pairs of a part and its parameters: first the whole module, then the layers. A parameter belongs to the smallest part that
        contains all of its places. Parts without parameters of their own are left out.
    """
    parts = [part for part in module.modules() if part is module or isinstance(part, tuple(layers))]
    inside = [set(part.modules()) for part in parts]
    own: list[list[nn.Parameter]] = [[] for _ in parts]
    for parameter in module.parameters():
        owners = {owner for owner in module.modules() if any(each is parameter for each in owner._parameters.values())}
        smallest = max(number for number, members in enumerate(inside) if owners <= members)  # inner parts come later
        own[smallest].append(parameter)
    return [(part, parameters) for part, parameters in zip(parts, own, strict=True) if parameters]


def places_of(parameters: Sequence[nn.Parameter], module: nn.Module) -> list[Place]:
    """Return where a module has these parameters: submodule, name and number of the parameter. A tied one has several places."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    found = [(owner, name, each) for owner in module.modules() for name, each in owner._parameters.items()]
    return [(owner, name, numbers[each]) for owner, name, each in found if each in numbers]


def put(tensors: Sequence[torch.Tensor], places: Iterable[Place]) -> None:
    """Put tensors in the places that ``places_of`` has found. They need not be parameters."""
    for owner, name, number in places:
        owner._parameters[name] = tensors[number]  # type: ignore[assignment]  # a gathered parameter is not a Parameter
