"""Running a program in forked processes that have torch imported already, and ending all of it.

The judge forks a keeper, and the keeper a launcher. The launcher is the program's own main process where the program starts
its processes itself (mp.spawn), or it forks the ranks as torchrun would. The keeper is the parent of all that loses its own:
everything that the run starts, however deep, ends with it.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import multiprocessing.context
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.utils.data.distributed

from workshop.check import recorder
from workshop.check.evidence import Run, read_process
from workshop.data import datasets
from workshop.run.environment import loopback, without_launcher
from workshop.run.processes import family

OUTPUT_LIMIT = 20_000_000  # bytes
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Patience:
    """How long a run may stand still, and last, in seconds.

    Attributes:
        idle: without an event while nobody computes: they wait for each other.
        busy: without an event while somebody computes.
        total: of the whole run.
    """

    idle: float = 3.5
    busy: float = 12
    total: float = 60


def run_program(
    script: Path,
    arguments: Sequence[str],
    *,
    launch: str,
    nproc: int,
    scratch: Path,
    nodes: int = 1,
    samples: int | None = None,
    on_cpu: bool = True,
    fails: bool = False,
    dies: bool = False,
    devices: bool = True,
    patience: Patience | None = None,
) -> Run:
    """Run a program once, and return what was seen.

    Args:
        script: the program.
        arguments: its options.
        launch: "single" (one process), "spawn" (the program starts ``nproc`` processes itself) or "torchrun" (they are forked
            here, with torchrun's environment variables).
        nproc: the number of processes.
        scratch: the folder that it runs in, the only one that it can write to; snapshots of an earlier run may lie in it.
        nodes: over how many simulated machines the processes are spread; with more than one each seems to have devices.
        devices: let each of several machines seem to have devices.
        samples: give it only so many of the digits to train on, and few to test on, for speed; None: all.
        on_cpu: hide the GPUs.
        fails: let rank 1 raise an exception in its third step.
        dies: let the rank that saves die in the step after its first snapshot.
        patience: when it counts as hanging.
    """
    patience = patience or Patience()
    settings = (script, list(arguments), launch, nproc, scratch)
    run = _run_once(settings, nodes, devices, samples, on_cpu, fails, dies, patience)
    if run.hung == "idle" and _hung_on_the_way_to_the_group(run):
        # A store's thread runs in the process that forks here, and a fork at the wrong moment copies what it has locked: once in
        # some hundred runs a rank waits for ever. Fresh interpreters do not: what really hangs, hangs again.
        patience = Patience(idle=min(patience.idle, 5), busy=patience.busy, total=patience.total)
        run = _run_once(settings, nodes, devices, samples, on_cpu, fails, dies, patience)
    return run


def _hung_on_the_way_to_the_group(run: Run) -> bool:
    """Whether processes had begun to meet, and no rank has come as far as a step."""
    return any(process.of("store", "joining") for process in run.processes) and not any(
        process.of("backward") for process in run.processes
    )


def _run_once(settings, nodes, devices, samples, on_cpu, fails, dies, patience) -> Run:
    """One run, as ``run_program`` has described it."""
    script, arguments, launch, nproc, scratch = settings
    folder = Path(tempfile.mkdtemp(prefix="evidence-", dir=scratch.parent))
    program = (script, arguments, launch, nproc, scratch, folder, nodes, devices, samples, on_cpu, fails, dies)
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = None
    try:
        with _interrupts_later():
            keeper = os.fork()
            if keeper == 0:
                _child(_keep, *program)
        watcher = _Watcher(keeper, folder, patience)
        status = watcher.watch()
    finally:
        with _interrupts_later(), suppress(ProcessLookupError, ChildProcessError):
            if keeper:
                _kill_below(keeper)
                # Last: while it lives, it is the parent of what its children leave behind.
                os.kill(keeper, signal.SIGKILL)
                os.waitpid(keeper, 0)
    processes = [read_process(folder, int(path.name.split("-")[1])) for path in folder.glob("events-*")]
    processes.sort(key=lambda process: process.pid)
    run = Run(nproc, processes, status, watcher.hung, watcher.flooded, time.monotonic() - start, launch)
    run.error_files = {int(path.stem.split("-")[1]) for path in folder.glob("error-*.json")}
    shutil.rmtree(folder, ignore_errors=True)
    return run


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Put Ctrl-C off to the end of this block.

    Around a fork Python calls functions of its libraries, and ignores what they raise: the interrupt would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # an interrupt is no matter of this thread
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _child(function, *arguments) -> None:
    """What a forked process does: the function, and nothing of its parent's code after it."""
    gc.freeze()  # a collection would look at the million objects of what is imported, and copy their pages
    status = 70
    try:
        status = function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _keep(*arguments) -> int:
    """The keeper: runs the launcher to its end, then ends what is left over; its exit status is the launcher's."""
    os.setsid()
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes a child of this one
    _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the judge dies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: (_kill_below(os.getpid()), os._exit(70)))
    launcher = os.fork()
    if launcher == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _child(_launcher, *arguments)
    pid = 0
    while pid != launcher:
        pid, ended = os.wait()
    code = os.waitstatus_to_exitcode(ended)
    _kill_below(os.getpid())
    return code if code >= 0 else 128 - code


def _kill_below(pid: int) -> None:
    """Kill all that a process has started, and what that starts meanwhile, until nothing is left."""
    for _ in range(500):
        members = family(pid)[1:]
        if not members:
            return
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        if pid == os.getpid():
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        time.sleep(0.005)


def _launcher(script, arguments, launch, nproc, scratch, folder, nodes, devices, samples, on_cpu, fails, dies) -> int:
    """The first process of the program; its exit status is the run's."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the keeper
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # What whoever runs the check (pytest, a notebook) has put in the way of output, or has left to do at a crash or at its exit,
    # is not ours.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.stdin = os.fdopen(0, closefd=False)
    faulthandler.disable()
    atexit._clear()
    os.chdir(scratch)
    _environment(scratch, on_cpu)
    random.seed()  # the parent's state would name every run's temporary files alike
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    if samples:
        _small_data(samples)
    # "spawn" would start Python, and import torch, anew for each process: forked, they start in a tenth of a second.
    contexts = multiprocessing.context._concrete_contexts
    contexts["spawn"] = contexts["forkserver"] = contexts["fork"]
    multiprocessing.set_start_method("fork", force=True)
    if launch == "torchrun":
        return _ranks(script, arguments, nproc, scratch, folder, nodes, devices, fails, dies)
    return _run(script, arguments, scratch, folder, dies=dies)


def _environment(scratch: Path, on_cpu: bool) -> None:
    for name in os.environ.keys() - without_launcher(os.environ).keys() | {"TORCH_DISTRIBUTED_DEBUG"}:
        os.environ.pop(name, None)
    os.environ.update(TMPDIR=str(scratch / "tmp"), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback())
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = str(scratch / "tmp")  # what libraries keep, where the program may write
    if on_cpu:
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def _ranks(script, arguments, nproc, scratch, folder, nodes, devices, fails, dies) -> int:
    """Fork the ranks as torchrun would, and wait for them: the first that fails ends the rest."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    local = nproc // nodes
    children = {}
    for rank in range(nproc):
        child = os.fork()
        if child == 0:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(nproc),
                LOCAL_RANK=str(rank % local),
                LOCAL_WORLD_SIZE=str(local),
                GROUP_RANK=str(rank // local),
                GROUP_WORLD_SIZE=str(nodes),
                ROLE_RANK=str(rank),
                ROLE_WORLD_SIZE=str(nproc),
                ROLE_NAME="default",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(store.port),
                TORCHELASTIC_RUN_ID="check",
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
                TORCHELASTIC_MAX_RESTARTS="0",
                TORCHELASTIC_ERROR_FILE=str(folder / f"error-{rank}.json"),
            )
            _child(
                _rank,
                script,
                arguments,
                scratch,
                folder,
                local if nodes > 1 and devices else 0,
                fails and rank == 1,
                dies,
            )
        children[child] = rank
    status = 0
    while children:
        pid, ended = os.wait()
        if pid not in children:
            continue
        del children[pid]
        code = os.waitstatus_to_exitcode(ended)
        if code != 0 and status == 0:
            status = code if 0 < code < 128 else 1
            # Its peers fail too, in a moment, or wait for ever: what they still have to say is how they noticed.
            deadline = time.monotonic() + 3
            while children and time.monotonic() < deadline:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid:
                    children.pop(pid, None)
                else:
                    time.sleep(0.02)
            for child in children:
                os.kill(child, signal.SIGKILL)
    return status


def _rank(script, arguments, scratch, folder, pretended, fails, dies) -> int:
    """A rank as torchrun starts it."""
    _prctl(1, signal.SIGKILL)
    if pretended:
        _pretend_devices(pretended)
    return _run(script, arguments, scratch, folder, fails, dies)


def _run(script, arguments, scratch, folder, fails=False, dies=False) -> int:
    """Run the program in this process."""
    torch.set_num_threads(1)  # makes torch's pool anew after the fork: autograd's threads would all do it, and collide
    sys.modules.pop("workshop.training.launcher", None)  # it remembers the parent of the process that imported it
    r = recorder.Recorder(folder, script, scratch)
    r.fails, r.dies = fails, dies
    recorder.install(r)
    _recorders.append(r)
    status = recorder.run_script(r, script, arguments)
    multiprocessing.util._exit_function()
    return status if 0 <= status < 256 else 1


def _small_data(samples: int) -> None:
    """Give ``Digits`` a part of its samples: quick to train on, and a test set that divides by no number of processes."""
    get = datasets.Digits.__getitem__

    def __init__(self, train, transform=None):
        images, labels = _digits[train]
        count = samples if train else TEST_SAMPLES
        self.images, self.labels, self.transform = images[:count], labels[:count], transform
        for r in _recorders:
            if not train and (transform is not None or r.test_set is None):
                r.test_set = self

    def __getitem__(self, index):
        for r in _recorders:
            r.prepared += not r.quiet
        return get(self, index)

    datasets.Digits.__init__, datasets.Digits.__getitem__ = __init__, __getitem__


TEST_SAMPLES = 47
_digits = {}  # what prepare() has read: True: the training part, False: the test part, each (images, labels)
_recorders = []  # of this process: empty but in a process that runs a checked program


def prepare(script: Path | None = None, on_cpu: bool = True) -> None:
    """Read the digits and import what programs import, once; the forked processes have it then."""
    for name in re.findall(
        r"^(?:import|from) ((?:pytorch_)?lightning)\b", script.read_text() if script else "", re.MULTILINE
    ):
        importlib.import_module(f"{name}.pytorch" if name == "lightning" else name)
    torch.set_num_threads(1)
    if script and "import deepspeed" in script.read_text() and importlib.util.find_spec("deepspeed"):
        if on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # it chooses when it is imported
        import deepspeed  # noqa: F401 - takes four seconds
    if script and "transformers" in script.read_text():
        from transformers.models.llama import LlamaForCausalLM  # noqa: F401
        from transformers.utils.logging import disable_progress_bar

        from workshop.check import recorder_fsdp  # noqa: F401

        disable_progress_bar()
    if _digits:
        return
    for train in (True, False):
        part = datasets.Digits(train)
        _digits[train] = (part.images, part.labels)
    import tqdm  # noqa: F401
    from torchvision import transforms  # noqa: F401

    from workshop.training import arguments, models  # noqa: F401


def _pretend_devices(count: int) -> None:
    """Let this machine seem to have ``count`` accelerators, which are the CPU: what matters is which one is asked for."""
    cpu = torch.device("cpu")

    def check(device):
        index = recorder._device_index(device)
        if index is not None and not 0 <= index < count:
            raise RuntimeError(f"invalid device ordinal: device {index} of {count}")

    library = os.path.dirname(torch.__file__)

    def pretend(module, name, value):
        """Tell the program the value, and torch itself the truth."""
        original = getattr(module, name)

        def answer(*args, **kwargs):
            inside = sys._getframe(1).f_code.co_filename.startswith(library)
            return original(*args, **kwargs) if inside else value

        setattr(module, name, answer)

    for module in (torch.accelerator, torch.cuda):
        pretend(module, "is_available", True)
        pretend(module, "device_count", count)
    pretend(torch.accelerator, "current_accelerator", cpu)
    torch.accelerator.set_device_index = check
    torch.accelerator.set_device_idx = check
    torch.accelerator.synchronize = torch.cuda.synchronize = lambda *_: None
    torch.accelerator.current_device_index = lambda: int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device = check
    torch.cuda.current_device = lambda: int(os.environ["LOCAL_RANK"])


class _Watcher:
    """Looks at a run until it ends, hangs, floods or takes too long."""

    def __init__(self, keeper: int, folder: Path, patience: Patience):
        self.keeper, self.folder, self.patience = keeper, folder, patience
        self.hung, self.flooded = "", False

    def watch(self) -> int | None:
        start = moved = time.monotonic()
        progress, busy, next_look = -1, 0.0, start + 0.5
        looks = runnable = 0
        while True:
            pid, ended = os.waitpid(self.keeper, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(ended)
            time.sleep(0.01)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + 0.1
            events, output = self._sizes()
            if output > OUTPUT_LIMIT:
                self.flooded = True
                return None
            if events != progress:
                progress, moved, busy = events, now, self._processor_seconds()
                looks = runnable = 0
                continue
            looks += 1
            runnable += self._is_runnable()
            still = now - moved
            if now - start > self.patience.total:
                self.hung = "long"
            elif still > self.patience.idle:
                # Computing, or waiting? A gloo rank that waits takes next to no processor time. Who computes on a crowded machine
                # gets little of it too, but would take more.
                working = (self._processor_seconds() - busy) / still > 0.3 or runnable > 0.3 * looks
                if not working:
                    self.hung = "idle"
                elif still > self.patience.busy:
                    self.hung = "busy"
            if self.hung:
                self._ask_for_stacks()
                return None

    def _sizes(self) -> tuple[int, int]:
        events = output = 0
        for entry in os.scandir(self.folder):
            size = entry.stat().st_size
            if entry.name.startswith("events-"):
                events += size
            elif entry.name.startswith("std"):
                output += size
        return events, output

    def _processor_seconds(self) -> float:
        total = 0.0
        for process in family(self.keeper):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _is_runnable(self) -> bool:
        """Whether some process computes, waits for a processor, or waits for the disk."""
        for process in family(self.keeper):
            with suppress(psutil.Error):
                if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                    return True
        return False

    def _ask_for_stacks(self) -> None:
        for path in self.folder.glob("events-*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.name.split("-")[1]), signal.SIGUSR1)
        time.sleep(0.3)
