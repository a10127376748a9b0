"""Spare programs the import of torch.compile, which takes as long as that of the rest of torch."""

import importlib
import re
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "torch._dynamo"
# Programs with these words import torch.compile or DTensor in any case: better once, before the processes are forked.
NEEDED = re.compile(
    r"_dynamo|\bcheckpoint\(|fsdp|fully_shard|FullyShard|distributed\.(?:tensor|checkpoint|pipelining|device_mesh)|DTensor|device_mesh"
    r"|parallelize_module|vmap|functorch|torch\.(?:export|jit|func)\b"
    r"|^\s*(?:import|from)\s+(?!torch\b|torchvision|numpy|tqdm|workshop)\w*(?:torch|lightning|accelerate|transformers|deepspeed|timm|peft)",
    re.MULTILINE,
)


class _NotImported(ModuleType):
    """Stands for a module until something uses more than the names that it knows; then it imports the module."""

    def __init__(self, name: str, **known: Any):
        super().__init__(name)
        vars(self).update(known, __spec__=find_spec(name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # __path__: a module below it is imported
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


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

    sys.modules[NAME] = torch._dynamo = _NotImported(
        NAME,
        graph_break=lambda *args, **options: None,
        disable=disable,
        utils=_Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        trace_rules=_Part("trace_rules", clear_lru_cache=lambda: None),
    )


class _Part(SimpleNamespace):
    """What stands for a module of torch._dynamo."""

    def __init__(self, name: str, **known: Any):
        super().__init__(**known)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(f"{NAME}.{self._name}"), name)
