"""Find and compare the parameters of a module, and put other tensors in their places. The exercises of stage 06 need this."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

Place = tuple[nn.Module, str, int]


def require_same(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Compare the parameters and buffers of all ranks before they are communicated. All ranks must call this together.

    Args:
        tensors: of this rank, in the same order on all ranks.
        group: the ranks; None: all.

    Raises:
        ValueError: on all ranks, if the tensors differ in number, shape or data type, are on the meta device, or are lazy.
    """
    tensors = list(tensors)
    if any(map(is_lazy, tensors)):
        raise ValueError(
            "a lazy parameter has no shape yet; run the module once before you divide it or copy it to other ranks"
        )
    own = [(tuple(each.shape), str(each.dtype), each.is_meta) for each in tensors]
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    for rank, each in enumerate(everyone):
        if each != everyone[0]:
            raise ValueError(f"the parameters of rank {rank} differ from those of rank 0 in number, shape or type")
    if any(is_meta for *_, is_meta in own):
        raise ValueError(
            "a parameter is on the meta device, so no rank has its numbers; create the module on a real device"
        )


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
    paths = [(f"{path}.".lstrip("."), part) for path, part in module.named_modules(remove_duplicate=False)]
    starts = [tuple(path for path, part in paths if part is each) for each in parts]
    places: dict[nn.Parameter, list[str]] = {}  # a parameter, or its module, may have several
    for path, owner in paths:
        for parameter in owner._parameters.values():
            if parameter is not None:
                places.setdefault(parameter, []).append(path)
    own: list[list[nn.Parameter]] = [[] for _ in parts]
    for parameter in module.parameters():
        inside = [all(path.startswith(start) for path in places[parameter]) for start in starts]
        own[max(number for number, fits in enumerate(inside) if fits)].append(parameter)  # inner parts come later
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
