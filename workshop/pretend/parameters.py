"""Parameters of modules on pretended GPUs stay the objects that they were, with their own classes and attributes."""

import contextlib
import functools
import types

import torch

from workshop.pretend.tensor import PretendTensor, attributes


def install() -> None:
    """Let modules move, and classes of parameters be made, as on CUDA."""
    torch.nn.Module._apply = _keeping_parameters(_beside_graphs(torch.nn.Module._apply))
    torch.nn.Parameter.__new__ = _of_own_class(torch.nn.Parameter.__new__)
    # Weak references, such as those of torch_ema, forbid a swap of tensors. They refer to the Parameter, which stays as on CUDA.
    torch.utils.weakref = types.SimpleNamespace(getweakrefs=lambda tensor: [])


def _of_own_class(original):
    """On CUDA, ``Parameter`` makes a tensor of its subclass; for a wrapper, it returns the wrapper."""

    @functools.wraps(original)
    def __new__(cls, data=None, requires_grad=True):
        made = original(cls, data, requires_grad)
        if isinstance(made, PretendTensor) and cls is not torch.nn.Parameter:
            made.__class__ = _both(cls)
        return made

    return __new__


@functools.cache
def _both(own):
    """The class of a tensor on a pretended GPU that is a parameter of this class, too."""
    return type(own.__name__, (PretendTensor, own), {"own": own})


def _own_class(parameter):
    """The program's own class of a parameter; None: it has none."""
    own = getattr(type(parameter), "own", type(parameter))
    return own if issubclass(own, torch.nn.Parameter) and own is not torch.nn.Parameter else None


def _keeping_parameters(apply):
    """Let a module that moves keep its Parameter objects, also to the CPU, their classes, and what is set on them."""

    @functools.wraps(apply)
    def applied(module, function, recurse=True):
        before = {
            name: (each, _own_class(each), attributes(each))
            for name, each in module._parameters.items()
            if each is not None
        }
        apply(module, function, recurse)
        for name, (old, own, known) in before.items():
            new = module._parameters[name]
            if new is not old and hasattr(old, "on_cpu"):
                with contextlib.suppress(RuntimeError):  # a graph refers to it
                    torch.utils.swap_tensors(old, new)
                    module._parameters[name] = new = old
            vars(new).update(known)
            if own and not isinstance(new, own):
                new.__class__ = _both(own) if isinstance(new, PretendTensor) else own
        return module

    return applied


def _beside_graphs(apply):
    """Let a module move while a graph or DDP still refers to its parameters, as on CUDA."""

    @functools.wraps(apply)
    def applied(module, function, recurse=True):
        try:
            return apply(module, function, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
        with torch.no_grad():
            for name, parameter in module._parameters.items():
                if hasattr(parameter, "on_cpu"):  # it is on a GPU already
                    parameter.data = function(parameter)
                elif parameter is not None:
                    # A tensor on the CPU cannot become one on a GPU while something refers to it.
                    module._parameters[name] = torch.nn.Parameter(function(parameter), parameter.requires_grad)
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else function(buffer)
        return module

    return applied
