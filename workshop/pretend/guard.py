"""The backward pass on pretended GPUs: errors of hooks, and gradients that return from the CPU.

PyTorch leaves an error of a hook set in the thread of the backward pass while C++ asks the device guard for its type. Python
refuses to return a result while an error is set, and the process would be aborted. So the guard keeps the error for later.
"""

import ctypes

import torch

_kept: list[BaseException] = []
_fetch = ctypes.pythonapi.PyErr_Fetch  # it clears the error
_fetch.restype = None
_parts = [
    ctypes.py_object() for _ in range(3)
]  # type, value, traceback: C would refuse to make them while an error is set
_places = tuple(map(ctypes.byref, _parts))


class Guard(torch._C._acc.DeviceGuard):
    """What PyTorch asks for the device type of the pretended tensors."""

    def type_(self):
        _fetch(*_places)
        if _parts[0]:
            kind, error, trace = (each.value if each else None for each in _parts)
            if not isinstance(error, BaseException):  # until Python 3.11, it may be only the text
                error = kind() if error is None else kind(error)
            _kept.append(error.with_traceback(trace))
        return torch._C._autograd.DeviceType.PrivateUse1


def send_back(result: object, gpu: int) -> object:
    """Let the gradient of a copy on the CPU return to the GPU of its source: C++ knows only that this is a pretended GPU."""
    node = result.grad_fn if type(result) is torch.Tensor else None
    if node is None or type(node).__name__ not in ("ToCopyBackward0", "CopyBackwards"):
        return result

    def place(gradients, _):
        return tuple(type(each)(each.on_cpu, gpu) if getattr(each, "gpu", gpu) != gpu else each for each in gradients)

    node.register_hook(place)
    return result


def install() -> None:
    """Let a backward pass raise the error that its thread has lost."""
    original = torch.autograd._engine_run_backward

    def run(*args, **kwargs):
        _kept.clear()
        try:
            return original(*args, **kwargs)
        except SystemError:  # an error was reported, but none was set
            if _kept:
                raise _kept[0] from None
            raise

    torch.autograd._engine_run_backward = run
