"""Run a program in the processes of ``forked.py``, and watch it until it ends."""

import importlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.utils.data.distributed

from workshop.check import forked, spawned
from workshop.check.evidence.events import Backward, Joining, StepBegun, Stopped, StoreOpened
from workshop.check.evidence.run import Run
from workshop.check.forked import Program
from workshop.check.probes import ALWAYS, PROBES, Probe
from workshop.check.probes.recorder import read_process
from workshop.check.uncompiled import prepare_compiler
from workshop.run.imports import no_collections
from workshop.run.processes import family
from workshop.run.stillness import Patience, Watch

OUTPUT_LIMIT = 20_000_000  # bytes
COMPILERS = ("cc1plus", "cicc", "ptxas", "cudafe++", "ld")
SHORT = 5  # seconds of patience for a second run that may hang


def prepare(probes: Sequence[type[Probe]], on_cpu: bool, text: str = "", compiler: bool = False) -> None:
    """Import what the probes and a program with this text need, so that the forked processes already have it.

    ``compiler``: it needs torch.compile or DTensor, whatever its text says.
    """
    torch.set_num_threads(1)
    with no_collections():
        for probe in probes:
            probe.prepare(on_cpu)
        prepare_compiler(text, compiler)
        for name in ("tqdm", "torchvision.transforms", "torch.distributed.elastic.multiprocessing"):
            library = name.partition(".")[0]
            if library in text and importlib.util.find_spec(library):
                importlib.import_module(name)
        if "torch.distributed.checkpoint" in text:
            importlib.import_module("torch.distributed.checkpoint")
        if re.search("accelerate|transformers", text) and importlib.util.find_spec("accelerate"):
            importlib.import_module("accelerate.state")  # cuda_on_cpu.py changes it


class GpuOpened(Exception):
    """The first process of a program has opened the GPUs, so the processes forked from it cannot use them."""


def run_program(program: Program) -> Run:
    """Run a program, and return the evidence.

    Raises:
        GpuOpened: the program cannot run on the GPUs here, although it can with new interpreters in place of forked processes.
    """
    run, _ = run_beside(program)
    return run


def run_beside(program: Program, *others: Program) -> tuple[Run, list[Run | None]]:
    """Run programs at the same time, which takes less time than one after the other.

    Args:
        program: the most important one. If it fails, the others are ended at once.
        others: programs that can be run again if they are ended or hang while they form the process group.

    Returns:
        The evidence of the program, and that of the others; None: run it again.

    Raises:
        GpuOpened: as ``run_program`` does.
    """
    program = _with_all_probes(program)
    run, beside = _run_once(program, *map(_with_all_probes, others))
    if _hangs_while_forming(run):
        patience = replace(program.patience, idle=min(program.patience.idle, SHORT))
        run, _ = _run_once(replace(program, patience=patience))
    beside = [None if each and _hangs_while_forming(each) else each for each in beside]
    for each in filter(None, (run, *beside)):
        each.settle_steps()
        each.settle_identity()
    return run, beside


def _hangs_while_forming(run: Run) -> bool:
    """Whether a run hangs before the training, so that it must be run again.

    The forking process runs a thread of a store. A fork at the wrong moment copies a held lock, so in one of some hundred runs a
    rank waits forever. New interpreters have no such locks, and a real hang repeats.
    """
    forming = any(process.first(StoreOpened) or process.first(Joining) for process in run.processes)
    training = any(process.first(Backward) or process.first(StepBegun) for process in run.processes)
    return run.hung == "idle" and forming and not training


def _with_all_probes(program: Program) -> Program:
    chosen = [probe for probe in PROBES if probe in (*ALWAYS, *program.probes)]
    return replace(program, probes=(*chosen, *(probe for probe in program.probes if probe not in PROBES)))


def _run_once(*programs: Program) -> tuple[Run, list[Run | None]]:
    """Run programs at the same time, and return the evidence of the first one and of the others; see ``run_beside``."""
    programs = tuple(
        replace(each, folder=Path(tempfile.mkdtemp(prefix="evidence-", dir=each.scratch.parent))) for each in programs
    )
    for each in programs:
        (each.scratch / "tmp").mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    keepers: list[int] = []
    ends: list[tuple[int | None, str, bool, float]] = []
    try:
        with _interrupts_later():
            keepers += map(forked.start, programs)
        for keeper, each in zip(keepers, programs, strict=True):
            ends.append((*_watch(keeper, each.folder, each.patience), time.monotonic() - start))
            if ends[0][0] != 0:
                break
    finally:
        with _interrupts_later():
            for keeper in keepers:
                with suppress(ProcessLookupError, ChildProcessError):
                    forked.end(keeper)
    run, *others = [_evidence(program, *end) for program, end in zip(programs, ends, strict=False)]
    ended = programs[len(ends) :]
    for each in ended:
        shutil.rmtree(each.folder, ignore_errors=True)
    return run, [*others, *(None for _ in ended)]


def _evidence(program: Program, status: int | None, hung: str, flooded: bool, seconds: float) -> Run:
    folder = program.folder
    processes = [read_process(folder, pid) for pid in sorted(_pids(folder))]
    if failures := "".join(path.read_text(errors="replace") for path in sorted(folder.glob("failures-*"))):
        logging.getLogger(__name__).warning("the check failed to record a part of the run:\n%s", failures)
    gpu_opened = (folder / spawned.NO_GPU).exists()
    error_files = {int(path.stem.split("-")[1]) for path in folder.glob("error-*.json")}
    shutil.rmtree(folder, ignore_errors=True)
    if gpu_opened:
        raise GpuOpened
    run = Run(program.nproc, processes, status, hung, flooded, seconds, program.launch, program.asked, error_files)
    stopped = [process for process in processes if process.first(Stopped)]
    running = [process for process in run.trained if process not in stopped]
    if stopped and not running:
        run.cut, run.hung, run.status = True, "", 0  # the others may wait for the ranks that were stopped
    elif program.original and hung == "long" and run.trained and all(len(process.steps) > 1 for process in run.trained):
        run.cut, run.hung, run.status = True, "", 0
    return run


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C to the end of this block, because Python ignores exceptions around a fork and would lose it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives interrupts
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _watch(keeper: int, folder: Path, patience: Patience) -> tuple[int | None, str, bool]:
    """Watch a run until it ends, hangs, takes too long or prints too much; return ``status``, ``hung`` and ``flooded``."""
    watch = Watch(lambda: family(keeper), patience)
    next_look = time.monotonic() + 0.5
    while True:
        pid, ended = os.waitpid(keeper, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(ended), "", False
        time.sleep(0.01)
        if time.monotonic() < next_look:
            continue
        look = time.monotonic()
        if _size(folder, "std*") > OUTPUT_LIMIT:
            return None, "", True
        hung = watch.look((_size(folder, "events-*"), _compiling(keeper)))
        now = time.monotonic()
        next_look = now + max(0.1, now - look)  # hundreds of processes take long to look at
        if hung:
            for process in _pids(folder):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR1)  # it writes its stack
            time.sleep(0.3)
            return None, hung, False


def _size(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def _compiling(keeper: int) -> int:
    """A number that grows while a library, such as DeepSpeed, compiles an extension."""
    seconds = 0.0
    for process in family(keeper):
        with suppress(psutil.Error):
            if process.name() in COMPILERS:
                seconds += sum(process.cpu_times()[:2])
    return int(seconds / 5)


def _pids(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in folder.glob("events-*")]
