"""Replace functions of libraries so that a probe can observe them, and restore the originals."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from workshop.check.preloaded import copies
from workshop.check.probes.recorder import Recorder

Function = Callable[..., Any]


class Patches(ExitStack):
    """Replacements that ``close`` reverts, the last one first."""

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute with a value: a function of ``distributed_c10d`` also in ``torch.distributed``."""
        # Both must stay the same object, because PyTorch compares them: P2POp accepts no isend but that of distributed_c10d.
        shared = owner is c10d and name in vars(dist) and vars(dist)[name] is vars(c10d)[name]
        for place in (c10d, dist) if shared else (owner,):
            # Delete an inherited attribute later. Read vars(), because getattr() would turn a staticmethod into a function.
            if name in vars(place):
                self.callback(setattr, place, name, vars(place)[name])
            else:
                self.callback(delattr, place, name)
            for module, alias in copies.get(id(vars(place).get(name)), ()):
                self.callback(setattr, module, alias, vars(module)[alias])
                setattr(module, alias, value)
            setattr(place, name, value)


def replacement(recorder: Recorder, when: str, method: Function, original: Function) -> Function:
    """Return a function that calls a method of a probe before, after or around the original."""

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if when == "around":
            return method(original, *args, **kwargs)
        if when == "before":
            with recorder.guard:
                method(*args, **kwargs)
        result = original(*args, **kwargs)
        if when == "after":
            with recorder.guard:
                method(result, *args, **kwargs)
        return result

    vars(replaced)["__prepare_scriptable__"] = lambda: (
        original
    )  # for torch.jit.script, which compiles what a function calls
    return replaced


def _hook(when: str, owner: Any = None, *names: str, named: bool = False) -> Callable[[Any], Any]:
    """Let a method of a probe observe the functions with these names, if they exist, in the module or class ``owner``.

    The method is called "before" a function with its arguments, "after" it with its result and its arguments (both in the
    guard), or "around" it with the original and the arguments. With ``named`` the name of the function comes first. ``owner``
    can be a function that returns it, given the package. Without it, ``when`` names a list of the recorder ("after_step").
    """

    def mark(method: Any) -> Any:
        method.hooks = [*getattr(method, "hooks", ()), (when, owner, names, named)]
        return method

    return mark


on, before, after, around = _hook, partial(_hook, "before"), partial(_hook, "after"), partial(_hook, "around")
