"""Run a function of a test in several processes that form a process group of gloo."""

import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from workshop.repository import ROOT

SECONDS = 60  # after which a run of all processes counts as a hang


@cache
def solution(name: str) -> ModuleType:
    """Import a solution of stage 06, for example "exercise1_ddp", without running its training."""
    path = ROOT / "solutions" / "06_build_your_own" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_processes(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` in ``count`` forked processes that are ranks of one group, and return the results by rank.

    Raises:
        AssertionError: a process raised an exception, or the processes still ran after ``SECONDS``.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, count, folder, function, args)) for rank in range(count)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(SECONDS)
        hung = [rank for rank, each in enumerate(ranks) if each.is_alive()]
        for each in ranks:
            each.kill()
        files = [Path(folder, f"result-{rank}") for rank in range(count)]
        results = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    failed = [f"rank {rank}: {result[1]}" for rank, result in enumerate(results) if result and result[0]]
    assert not failed, "\n".join(failed)
    assert not hung, f"ranks {hung} still ran after {SECONDS} s"
    assert all(results), "a process ended without a result"
    return [result[1] for result in results]


def _rank(rank: int, count: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count)
    try:
        result = (False, function(*args))
    except BaseException:
        result = (True, traceback.format_exc())
    Path(folder, f"writing-{rank}").write_bytes(pickle.dumps(result))
    Path(folder, f"writing-{rank}").rename(Path(folder, f"result-{rank}"))
    if not result[0]:
        dist.destroy_process_group()
