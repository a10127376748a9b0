"""The processes of a run: a keeper, and below it a launcher, which is the main process of the program or forks its ranks.

The keeper becomes the parent of each process that loses its parent, so it can end everything that a run starts.
"""

import atexit
import faulthandler
import gc
import multiprocessing.context
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workshop.check import cuda_on_cpu, ranks_of_mpi
from workshop.check.evidence.events import Ended, Exited
from workshop.check.evidence.run import Asked
from workshop.check.folder import extensions, own_caches, top_of
from workshop.check.preloaded import use_own_caches
from workshop.check.probes.probe import Probe
from workshop.check.probes.process import note_exception
from workshop.check.probes.recorder import Recorder
from workshop.check.spawned import (
    FAILED,
    Salt,
    SpawnedProcess,
    fork_in_place_of_spawn,
    renew_random_state,
    string_hash,
)
from workshop.check.start import LOCAL_RANK
from workshop.pretend import installation
from workshop.pretend.collectives import NODE
from workshop.run.environment import loopback, without_launcher
from workshop.run.processes import adopt_orphans, kill_below, prctl
from workshop.run.stillness import Patience

PR_SET_PDEATHSIG = 1  # of prctl() on Linux
ENOUGH = 20  # seconds of computing in the steps of a run, after which it counts as long
LAST_WORDS = 3  # seconds that the other ranks may continue after one has failed
KILLED = 1  # the same if the check has killed it: what the others report then is not read, but they may still save their part
DRIVERS = "/dev/nvidiactl", "/dev/kfd"  # of CUDA and ROCm: without them, there are no GPUs to hide
# Libraries must put their caches where the program may write.
CACHES = ["TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
          "IPYTHONDIR"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and how to run it."""

    script: Path
    launch: str  # "single", "spawn" (the program starts ``nproc`` processes), or a launcher, which forks them here
    nproc: int
    scratch: Path  # the folder in which it runs and may write; it may contain checkpoints of an earlier run
    folder: Path = Path()  # the folder of the evidence; ``run_program`` creates it
    arguments: tuple[str, ...] = ()
    probes: tuple[type[Probe], ...] = ()  # the probes to install in addition to those that are always installed
    nodes: int = 1  # simulated machines
    devices: bool = False  # each simulated machine has one pretended GPU per process
    bound: bool = False  # each rank sees only one of them
    shell: str = ""  # commands that each rank runs before the program, to set its environment
    on_cpu: bool = True  # hide the GPUs
    fails: bool = False  # rank 1 raises an exception in its third step
    dies: int = 0  # the rank that saves is killed in the step after this number of its checkpoints; 0: it is not
    before: Callable[[Recorder], None] | None = None  # called in each of its processes, before the probes are installed
    patience: Patience = field(default_factory=Patience)  # after how many seconds it counts as hanging
    asked: Asked | None = None  # what the exercise asked for; the rules read it
    # For a program of its owner, which runs in a copy of its folder:
    original: Path | None = None  # the folder that ``scratch`` copies
    module: str = ""  # the name of the module, if it is started with ``python -m``
    variables: dict[str, str] = field(default_factory=dict)  # for its environment
    steps: int | None = None  # after this number of optimizer steps the run is stopped
    at_once: bool = False  # also if it is a short run
    warmup: int = 0  # the steps that it takes before it wraps a model, which do not count
    entropy: int = 0  # seeds the random states of the processes; 0: they are new in each run
    of_others: tuple[str, ...] = ()  # arguments that only ranks after the first of each machine get
    port: int = 0  # a free port, for launchers that do not choose one
    gpus: int | None = (
        None  # the number of GPUs that the program is told; its tensors stay on the CPU. None: the real number
    )


def start(program: Program) -> int:
    """Start a run; return the process id of its keeper, whose exit status is that of the run."""
    return _fork(_keep, program)


def end(keeper: int) -> None:
    """End a run and all processes that it has started."""
    kill_below(keeper)
    os.kill(keeper, signal.SIGKILL)  # last, because it becomes the parent of orphaned processes
    os.waitpid(keeper, 0)


def _fork(function: Callable[..., int], *arguments: object) -> int:
    """Fork a process that calls the function and then exits without returning to this code; return its process id."""
    if child := os.fork():
        return child
    gc.freeze()  # a garbage collection would visit a million imported objects, and copy their pages
    status = FAILED
    try:
        status = function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _keep(program: Program) -> int:
    """Keeper: wait for the launcher, then end what is left; the exit status is that of the launcher."""
    os.setsid()
    adopt_orphans()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # sent when the process of the check dies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _give_up)
    launcher = _fork(_launch, program)
    pid = ended = 0
    while pid != launcher:
        pid, ended = os.wait()
    code = os.waitstatus_to_exitcode(ended)
    kill_below(os.getpid())
    return code if code >= 0 else 128 - code


def _give_up(*_: object) -> None:
    kill_below(os.getpid())
    os._exit(FAILED)


def _launch(program: Program) -> int:
    """Run the first process of the program; its exit status is that of the run."""
    for blow in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(blow, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the keeper
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # pytest or a notebook may have redirected the output of this process, and registered handlers for a crash or exit.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.stdin = os.fdopen(0, closefd=False)
    faulthandler.disable()
    atexit._clear()
    os.chdir(program.scratch)
    # The owner of a program that starts its processes itself may set their address; its port may be in use here.
    address = _addressed(program) if program.launch == "spawn" and "MASTER_PORT" in os.environ else {}
    for name in os.environ.keys() - without_launcher(os.environ).keys() | {"TORCH_DISTRIBUTED_DEBUG"}:
        os.environ.pop(name, None)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra hides where an error is
    os.environ |= address | program.variables
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback())
    kept = own_caches(program.scratch / "tmp") if program.original else {}
    os.environ |= {"TORCH_EXTENSIONS_DIR": extensions()} | dict.fromkeys(CACHES, str(_temporary(program))) | kept
    counted = _counted(program)
    if program.on_cpu:
        os.environ.update(CUDA_VISIBLE_DEVICES=counted, HIP_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    # Otherwise torch.cuda.is_available() opens the GPUs, and processes that are forked afterwards cannot use them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    use_own_caches()
    random.seed()  # otherwise the temporary files of all runs would have the same names
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    SpawnedProcess.entropy = program.entropy
    SpawnedProcess.evidence = None if program.on_cpu else program.folder
    fork_in_place_of_spawn()
    if program.devices:
        if installation.unsupported():
            return FAILED
        if not counted:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        installation.install(program.nproc // program.nodes)
    elif program.gpus is not None and program.on_cpu:
        cuda_on_cpu.install(program.gpus)
    if program.launch not in ("single", "spawn"):
        return _ranks(program)
    renew_random_state(program.entropy)
    return _run(_after_shell(program) if program.shell else program)


def _counted(program: Program) -> str:
    """Return the GPUs in CUDA_VISIBLE_DEVICES if the owner has set it, because programs read it. "": hide all."""
    counts = program.devices or program.launch == "spawn"  # some programs start a process for each
    if not counts or not os.environ.get("CUDA_VISIBLE_DEVICES") or any(map(os.path.exists, DRIVERS)):
        return ""
    return ",".join(map(str, range(program.nproc // program.nodes if program.devices else program.gpus or 0)))


def _ranks(program: Program) -> int:
    """Fork the ranks as torchrun would, and wait for them; when one fails, end the others."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = {_fork(_rank, program, rank, store.port) for rank in range(program.nproc)}
    status = 0
    while children:
        pid, ended = os.wait()
        children.discard(pid)
        code = os.waitstatus_to_exitcode(ended)
        if code != 0 and status == 0:
            status = code if 0 < code < 128 else 1
            _end_soon(children, KILLED if program.dies else LAST_WORDS)
    return status


def _end_soon(children: set[int], seconds: float) -> None:
    """End the ranks after one has failed; give them a moment to fail and report it, because some would wait forever."""
    deadline = time.monotonic() + seconds
    while children and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.discard(pid)
        else:
            time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _rank(program: Program, rank: int, port: int) -> int:
    local = program.nproc // program.nodes
    os.environ |= LAUNCHERS[program.launch](program, rank, local, port) | {NODE: str(rank // local)}
    if program.devices and program.bound:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank % local)
    if program.launch == "deepspeed":
        program = replace(program, arguments=(f"--local_rank={rank % local}", *program.arguments))
    if rank % local:
        program = replace(program, arguments=(*program.arguments, *program.of_others))
    given = tuple(each.replace(LOCAL_RANK, str(rank % local)) for each in program.arguments)
    program = replace(program, arguments=given)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if program.launch == "mpirun":
        ranks_of_mpi.install(rank, program.nproc, port)
    renew_random_state(program.entropy and program.entropy + rank)
    Salt.number = rank
    if of_lightning := sys.modules.get("lightning_utilities.core.rank_zero"):
        of_lightning.rank_zero_only.rank = rank  # it was imported before the process had a rank
    return _run(_after_shell(program) if program.shell else program)


def _after_shell(program: Program) -> Program:
    """Take over the variables that the owner's commands set, also in the arguments; the address remains a free one."""
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    command = ["bash", "-c", f"{program.shell}\nprintf '\\0'; env -0"]
    with suppress(OSError):
        told = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False).stdout
        variables = (each.partition("=") for each in told.split("\0")[1:-1])
        os.environ |= {name: value for name, _, value in variables} | address
    return replace(program, arguments=tuple(map(os.path.expandvars, program.arguments)))


def _of_torchrun(program: Program, rank: int, local: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(program.nproc), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local), "GROUP_WORLD_SIZE": str(program.nodes),
        "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(program.nproc), "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "check", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": str(program.folder / f"error-{rank}.json"),
    }  # fmt: skip


def _of_deepspeed(program: Program, rank: int, local: int, port: int) -> dict[str, str]:
    variables = _of_torchrun(program, rank, local, port)
    own = {name: value for name, value in variables.items() if not name.startswith("TORCHELASTIC_")}
    return own | _addressed(program)  # rank 0 opens the store, so its port must be free


def _of_srun(program: Program, rank: int, local: int, port: int) -> dict[str, str]:
    everywhere = f"{local}(x{program.nodes})" if program.nodes > 1 else str(local)  # as Slurm writes it
    numbers = {
        "PROCID": rank, "LOCALID": rank % local, "NODEID": rank // local, "NTASKS": program.nproc, "NPROCS": program.nproc,
        "NNODES": program.nodes, "JOB_NUM_NODES": program.nodes, "STEP_NUM_NODES": program.nodes, "NTASKS_PER_NODE": local,
        "TASKS_PER_NODE": everywhere, "STEP_NUM_TASKS": program.nproc, "STEP_TASKS_PER_NODE": everywhere,
        "CPUS_PER_TASK": 1, "CPUS_ON_NODE": local, "JOB_CPUS_PER_NODE": everywhere, "JOB_ID": 1, "JOBID": 1, "STEP_ID": 0,
        "STEPID": 0, "TASK_PID": os.getpid(),
    }  # fmt: skip
    names = ("JOB_NODELIST", "NODELIST", "STEP_NODELIST", "TOPOLOGY_ADDR")
    return {
        **{f"SLURM_{name}": str(number) for name, number in numbers.items()},
        **{f"SLURM_{name}": "localhost" for name in names},
        "SLURMD_NODENAME": "localhost", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_JOB_NAME": "check", "SLURM_SUBMIT_DIR": os.getcwd(),
        "PATH": f"{_scontrol(program.folder / f'bin-{rank}')}{os.pathsep}{os.environ.get('PATH', '')}",
    } | _addressed(program)  # fmt: skip


def _scontrol(folder: Path) -> Path:
    """Make a folder with the command that programs ask for the names of the nodes; the one of Slurm needs a cluster."""
    folder.mkdir(exist_ok=True)
    command = folder / "scontrol"
    command.write_text('#!/bin/sh\ncase "$1 $2" in "show hostname"*) echo localhost ;; *) exit 1 ;; esac\n')
    command.chmod(0o755)
    return folder


def _of_mpirun(program: Program, rank: int, local: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(program.nproc),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMI_RANK": str(rank), "PMI_SIZE": str(program.nproc),
    } | _addressed(program)  # fmt: skip


def _addressed(program: Program) -> dict[str, str]:
    """The address that the owner sets in the command or in a job script; it is free on this machine."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(program.port)}


# For each launcher, the variables that it sets in a rank.
LAUNCHERS: dict[str, Callable[[Program, int, int, int], dict[str, str]]] = {
    "torchrun": _of_torchrun,
    "deepspeed": _of_deepspeed,
    "srun": _of_srun,
    "mpirun": _of_mpirun,
}


def _temporary(program: Program) -> Path:
    """The folder for temporary files, by a short name: a worker of a loader sends tensors by a socket of at most 107 letters."""
    folder = program.scratch / "tmp"
    if program.original is None:
        return folder
    top = top_of(program.scratch, program.original)
    short = top.with_name(f"t{top.name}")
    with suppress(FileExistsError):
        short.symlink_to(folder)
    return short


def _sharded(program: Program) -> int:
    """The number of complete checkpoints of DCP, which writes .metadata last; counted only for a run that is to be killed."""
    # os.walk() passes over a folder that another rank removes at the same moment.
    return sum(".metadata" in files for *_, files in os.walk(program.scratch)) if program.dies else 0


def _in_the_copy(path: str, program: Program) -> str:
    """A folder for imports, such as "." in PYTHONPATH: that in the copy of the program's folder, if it is there."""
    place = Path(path)
    if program.original and path and place.is_relative_to(program.original) and "site-packages" not in path:
        copied = program.scratch / place.relative_to(program.original)
        return str(copied) if copied.is_dir() else path
    return path


def _run(program: Program) -> int:
    """Run the program as ``__main__`` in this process, to its end; return its exit status."""
    torch.set_num_threads(1)  # after the fork, creates the thread pool before threads of autograd do, which collide
    recorder = Recorder(program.folder, program.script, program.scratch, program.original and program.scratch)
    recorder.original = program.original
    recorder.warmup = program.warmup
    if program.original:
        recorder.around = f"{os.path.realpath(top_of(program.scratch, program.original))}{os.sep}"
    before = _sharded(program)

    def at_step() -> None:
        if program.steps is not None and recorder.done >= program.steps:
            recorder.stop(after=0 if program.at_once else ENOUGH)
        if program.fails and recorder.steps == 2 and dist.is_initialized() and dist.get_rank() == 1:
            raise ZeroDivisionError("the check lets this rank fail")
        if program.dies and recorder.saved + _sharded(program) - before >= program.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    recorder.at_step = at_step
    if program.before:
        program.before(recorder)
    SpawnedProcess.recorder = recorder
    recorder.open()
    for probe in program.probes:
        probe(recorder).install()
    sys.argv = [str(program.script), *program.arguments]
    sys.path[:] = [_in_the_copy(each, program) for each in sys.path]
    sys.path.insert(0, str(program.scratch if program.module else program.script.parent))
    status = 0
    try:
        if program.module:
            runpy.run_module(program.module, {"hash": string_hash}, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(program.script), {"hash": string_hash}, run_name="__main__")
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if status and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        recorder.note(Exited(status=status))
    except BaseException as error:  # everything that ends a program, also KeyboardInterrupt
        note_exception(recorder, error)
        status = 1
    with suppress(BaseException):
        atexit._run_exitfuncs()  # those of the program, because os._exit() skips them
    recorder.call(recorder.at_end)
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    recorder.note(Ended())
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    return status if 0 <= status < 256 else 1
