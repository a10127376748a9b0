"""Spare programs the import of torch.compile, which takes as long as that of the rest of torch."""

import importlib
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME, UTILS = "torch._dynamo", "torch._dynamo.utils"
# Programs with these words import torch.compile or DTensor in any case: better once, before the processes are forked.
NEEDED = re.compile(
    r"_dynamo|\bcheckpoint\(|fsdp|fully_shard|FullyShard|distributed\.(?:tensor|checkpoint|pipelining|device_mesh)|DTensor|device_mesh"
    r"|parallelize_module|vmap|functorch|torch\.(?:export|jit|func)\b"
    r"|^\s*(?:import|from)\s+(?!torch\b|torchvision|numpy|tqdm|workshop)\w*(?:torch|lightning|accelerate|transformers|deepspeed|timm|peft)",
    re.MULTILINE,
)


class _NotImported(ModuleType):
    """Stands for a module until something uses more than the names that it knows; then it imports the module."""

    def __init__(self, name: str, spec: ModuleSpec | None, **known: Any):
        super().__init__(name)
        vars(self).update(known, __spec__=spec)

    def __getattr__(self, name: str) -> Any:
        # Python asks the package for __path__ before it imports a module below it.
        if name.startswith("__") and (name, self.__name__) != ("__path__", NAME):
            raise AttributeError(name)
        return getattr(_imported(self.__name__), name)


def _imported(name: str) -> ModuleType:
    """Import a module instead of what stands for it and for the other ones."""
    for each, module in list(sys.modules.items()):
        if isinstance(module, _NotImported):
            del sys.modules[each]
    return importlib.import_module(name)


def prepare_compiler(text: str, needed: bool) -> None:
    """Import torch.compile and DTensor if they are needed, or a program with this text uses them; otherwise, let it run without.

    The check never compiles. Optimizers, DistributedDataParallel and the process group use only four functions of torch._dynamo,
    which do nothing for a program that is not compiled.
    """
    if needed or not text or NEEDED.search(text):
        importlib.import_module(NAME)
        importlib.import_module("torch.distributed.tensor")
    elif NAME not in sys.modules:
        _stand_in()


def _stand_in() -> None:
    def disable(function: Any = None, *args: Any, **options: Any) -> Any:
        return function

    def is_compile_supported(*args: Any) -> Any:
        """torchvision imports this function, but calls it only in operations such as ``roi_align``."""
        return _imported(UTILS).is_compile_supported(*args)

    spec = find_spec(NAME)
    below = PathFinder.find_spec(UTILS, spec.submodule_search_locations) if spec else None
    known = {"get_optimize_ddp_mode": lambda: "ddp_optimizer", "is_compile_supported": is_compile_supported}
    utils = sys.modules[UTILS] = _NotImported(UTILS, below, **known)
    sys.modules[NAME] = torch._dynamo = _NotImported(
        NAME,
        spec,
        graph_break=lambda *args, **options: None,
        disable=disable,
        utils=utils,
        trace_rules=_Part("trace_rules", clear_lru_cache=lambda: None),
    )


class _Part(SimpleNamespace):
    """What stands for a part of torch._dynamo that no program imports by its name."""

    def __init__(self, name: str, **known: Any):
        super().__init__(**known)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(f"{NAME}.{self._name}"), name)
