"""Running a program in forked processes that have torch imported already, and watching it until it ends.

``forked.py`` has the processes: a keeper, which is the parent of each process that loses its own, so everything that a
run starts ends with it; below it a launcher, which is the program's own main process, or forks the ranks as torchrun would.
"""

import gc
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.utils.data.distributed

from workshop.check import forked
from workshop.check.evidence.events import Backward, Joining, StoreOpened
from workshop.check.evidence.run import Asked, Run
from workshop.check.forked import Program
from workshop.check.probes import PROBES, Probe
from workshop.check.probes.recorder import Recorder, read_failures, read_process
from workshop.run.processes import family
from workshop.run.stillness import Patience, Watch

OUTPUT_LIMIT = 20_000_000  # bytes
SHORT = 5  # seconds of patience for a second run that may hang


def prepare(probes: Sequence[type[Probe]], on_cpu: bool) -> None:
    """Import what the probes need and what most programs import: the forked processes have it then.

    Args:
        probes: those that will be installed.
        on_cpu: whether the GPUs will be hidden.
    """
    collecting = gc.isenabled()
    gc.disable()  # collections take a tenth of the time of these imports, and find nothing
    torch.set_num_threads(1)
    for probe in probes:
        probe.prepare(on_cpu)
    for name in ("tqdm", "torchvision.transforms"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if collecting:
        gc.enable()


def run_program(
    script: Path,
    arguments: Sequence[str],
    *,
    launch: str,
    nproc: int,
    scratch: Path,
    probes: Sequence[type[Probe]],
    nodes: int = 1,
    devices: bool = True,
    on_cpu: bool = True,
    fails: bool = False,
    dies: bool = False,
    patience: Patience | None = None,
    before: Callable[[Recorder], None] | None = None,
    asked: Asked | None = None,
) -> Run:
    """Run a program once, and return what was seen.

    Args:
        script: the program.
        arguments: its options.
        launch: "single" (one process), "spawn" (the program starts ``nproc`` processes itself) or "torchrun" (they are forked
            here, with torchrun's environment variables).
        nproc: the number of processes.
        scratch: the folder that it runs in, the only one that it can write to; it may hold checkpoints of an earlier run.
        probes: what is observed, beside what always is.
        nodes: on how many simulated machines the processes run; with more than one each seems to have devices.
        devices: let each of several machines seem to have devices.
        on_cpu: hide the GPUs.
        fails: let rank 1 raise an exception in its third step.
        dies: let the rank that saves die in the step after its first checkpoint.
        patience: when it counts as hanging.
        before: called in each process that runs the program, before the probes are installed.
        asked: what the program was asked for, for the rules.
    """
    program = Program(
        script=script,
        arguments=tuple(map(str, arguments)),
        launch=launch,
        nproc=nproc,
        scratch=scratch,
        folder=scratch,
        probes=(*(probe for probe in PROBES if probe.always or probe in probes), *(set(probes) - set(PROBES))),
        nodes=nodes,
        devices=devices,
        on_cpu=on_cpu,
        fails=fails,
        dies=dies,
        before=before,
    )
    patience = patience or Patience()
    run = _run_once(program, patience)
    if run.hung == "idle" and _hung_on_the_way_to_the_group(run):
        # A thread of a store runs in the process that forks here. A fork at the wrong moment copies what it has locked, so in
        # some hundred runs one rank waits for ever. New interpreters have no such locks: a real hang happens again.
        run = _run_once(program, replace(patience, idle=min(patience.idle, SHORT)))
    run.asked = asked
    run.settle_identity()
    return run


def _hung_on_the_way_to_the_group(run: Run) -> bool:
    """Whether processes had begun to form a group, and none has reached a step."""
    forming = any(process.first(StoreOpened) or process.first(Joining) for process in run.processes)
    return forming and not any(process.first(Backward) for process in run.processes)


def _run_once(program: Program, patience: Patience) -> Run:
    """One run, as ``run_program`` describes it."""
    folder = Path(tempfile.mkdtemp(prefix="evidence-", dir=program.scratch.parent))
    program = replace(program, folder=folder)
    (program.scratch / "tmp").mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = None
    try:
        with _interrupts_later():
            keeper = forked.start(program)
        status, hung, flooded = _watch(keeper, folder, patience)
    finally:
        with _interrupts_later(), suppress(ProcessLookupError, ChildProcessError):
            if keeper:
                forked.end(keeper)
    seconds = time.monotonic() - start
    processes = [read_process(folder, pid) for pid in sorted(_pids(folder))]
    if failures := read_failures(folder):
        logging.getLogger(__name__).warning("the check failed to record a part of the run:\n%s", failures)
    error_files = {int(path.stem.split("-")[1]) for path in folder.glob("error-*.json")}
    shutil.rmtree(folder, ignore_errors=True)
    return Run(
        nproc=program.nproc,
        processes=processes,
        status=status,
        hung=hung,
        flooded=flooded,
        seconds=seconds,
        launch=program.launch,
        error_files=error_files,
    )


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Put Ctrl-C off to the end of this block.

    Around a fork Python calls functions of its libraries, and ignores what they raise: the interrupt would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets interrupts
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
    """Look at a run until it ends, hangs, takes too long or prints too much.

    Returns:
        Its exit status (None: it has to be ended), how it hangs ("" if it does not), and whether it prints too much.
    """
    watch = Watch(lambda: family(keeper), patience)
    next_look = time.monotonic() + 0.5
    while True:
        pid, ended = os.waitpid(keeper, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(ended), "", False
        time.sleep(0.01)
        now = time.monotonic()
        if now < next_look:
            continue
        next_look = now + 0.1
        events, output = _sizes(folder)
        if output > OUTPUT_LIMIT:
            return None, "", True
        if hung := watch.look(events):
            _ask_for_stacks(folder)
            return None, hung, False


def _sizes(folder: Path) -> tuple[int, int]:
    """The bytes of all events and of all output so far."""
    events = output = 0
    for entry in os.scandir(folder):
        size = entry.stat().st_size
        if entry.name.startswith("events-"):
            events += size
        elif entry.name.startswith("std"):
            output += size
    return events, output


def _ask_for_stacks(folder: Path) -> None:
    for pid in _pids(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)


def _pids(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in folder.glob("events-*")]
