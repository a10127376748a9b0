"""Libraries that the check imports once, before it forks the processes of a program: each process would need seconds for it."""

import ast
import io
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

from workshop.check.folder import user_cache
from workshop.run.imports import no_collections

LIBRARIES = ("transformers", "peft", "torchmetrics", "sklearn", "scipy", "torchvision", "tokenizers")
# They read at their import where the caches are.
CACHING = ("huggingface_hub", "transformers", "peft", "datasets", "diffusers", "evaluate")
# They remember whether there are GPUs, and what these can do.
LOOKING = ("transformers.utils.import_utils", "accelerate.utils.imports")
# If a program sets such a variable itself, the import must come after that.
READ_AT_IMPORT = re.compile(r"environ.*\b(HF|HUGGINGFACE|TRANSFORMERS)_")

# By the id of a function of torch or safetensors: the modules that have it under a name of their own ("from torch import save").
copies: dict[int, list[tuple[ModuleType, str]]] = {}


def _cache_of_models() -> str:
    return os.environ.get("HF_HOME") or os.path.join(user_cache(), "huggingface")


BEFORE = _cache_of_models()


@cache
def preload(text: str, folder: Path, place: Path) -> None:
    """Import from large libraries what a program imports.

    Args:
        text: the program.
        folder: where it is. A module in this folder may have the name of a library.
        place: a folder for the caches of these libraries.
    """
    with suppress(SyntaxError, ValueError, RecursionError):
        imports = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Import | ast.ImportFrom)]
        chosen = [each for each in imports if _library(each) and not _is_local(_library(each), folder)]
        known = set(sys.modules)
        matplotlib = os.environ.get("MPLCONFIGDIR")
        os.environ["MPLCONFIGDIR"] = str(place)
        try:
            with no_collections(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                for each in () if READ_AT_IMPORT.search(text) else chosen:
                    with suppress(Exception):  # the program will fail with it too, or catch it
                        exec(ast.unparse(each), {})
        finally:
            os.environ.pop("MPLCONFIGDIR")
            os.environ |= {} if matplotlib is None else {"MPLCONFIGDIR": matplotlib}
        # Accelerate is imported before, by what observes it.
        _find_copies({name for name in known if name.partition(".")[0] != "accelerate"})


def _library(statement: ast.Import | ast.ImportFrom) -> str:
    """The large library from which a statement imports; "": none."""
    if isinstance(statement, ast.ImportFrom):
        names = [statement.module or ""] if not statement.level else []
    else:
        names = [each.name for each in statement.names]
    return next((top for name in names if (top := name.partition(".")[0]) in LIBRARIES), "")


def _is_local(name: str, folder: Path) -> bool:
    return (folder / name).exists() or (folder / f"{name}.py").exists()


def _find_copies(known: set[str]) -> None:
    opens = getattr(sys.modules.get("safetensors"), "safe_open", known)  # a class of Rust
    for name in sys.modules.keys() - known:
        module = sys.modules[name]
        for alias, value in [*vars(module).items()] if isinstance(module, ModuleType) else ():
            of_torch = isinstance(value, FunctionType) and (value.__module__ or "").startswith(
                ("torch.", "safetensors.")
            )
            if of_torch or value is opens:
                copies.setdefault(id(value), []).append((module, alias))


def use_own_caches() -> None:
    """In a process of a program: let the libraries use the folder for models that its variables name, and look for GPUs again."""
    for module in filter(None, map(sys.modules.get, LOOKING)):
        for answer in vars(module).values():
            if hasattr(answer, "cache_clear"):
                answer.cache_clear()
    after = _cache_of_models()
    for name, module in [*sys.modules.items()] if after != BEFORE else ():
        if name.partition(".")[0] in CACHING:
            for key, value in [*vars(module).items()]:
                place = os.fspath(value) if isinstance(value, str | Path) else ""
                if f"{place}{os.sep}".startswith(BEFORE + os.sep):
                    setattr(module, key, type(value)(after + place[len(BEFORE) :]))
