"""Run ``workshop doctor``: check this machine, and say how to solve each problem."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from workshop.doctor.result import GIB, OK, PROBLEM, WARNING, Result
from workshop.repository import ROOT, packages
from workshop.run.machine import cores, gpus
from workshop.training.container import closed_to_gpus


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def check_python() -> Result:
    seen = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036 - WORKSHOP_PYTHON may name any version
        return Result("Python", PROBLEM, seen, "use Python 3.11 or newer: load a newer module, or set WORKSHOP_PYTHON")
    return Result("Python", OK, seen)


def check_torch() -> Result:
    try:
        import torch
    except Exception as error:  # a broken installation raises anything from ImportError to OSError
        return Result(
            "torch", PROBLEM, f"cannot be imported: {error}", "install it: delete .venv and run ./workshop.sh again"
        )
    built_for = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "the CPU"
    )
    seen = f"{torch.__version__}, built for {built_for}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
        return Result(
            "torch", WARNING, seen, "the scripts are tested with torch 2.9 and newer; update it if something fails"
        )
    return Result("torch", OK, seen)


def check_torchvision() -> Result:
    try:
        version = importlib.metadata.version("torchvision")
        import torch
        import torchvision  # noqa: F401

        torch.ops.torchvision.nms  # noqa: B018 - missing if the compiled part of torchvision does not fit torch
    except Exception as error:
        return Result(
            "torchvision",
            PROBLEM,
            f"does not work with this torch: {_first_line(error)}",
            "install torch and torchvision together, from the same index",
        )
    return Result("torchvision", OK, version)


def check_devices() -> Result:
    try:
        import torch
    except Exception:
        return Result("devices", PROBLEM, "unknown, because torch cannot be imported", "see torch above")
    if closed := closed_to_gpus():
        seen, _, advice = closed.partition("; ")
        return Result("devices", PROBLEM, seen, advice)
    hardware = _gpu_hardware()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        count = gpus()
        names = (
            sorted({torch.get_device_module(kind).get_device_name(i) for i in range(count)})
            if kind in ("cuda", "xpu")
            else [kind]
        )
        return Result("devices", OK, f"{count} x {', '.join(names)}")
    if hardware and os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES")) == "":
        return Result(
            "devices",
            WARNING,
            f"{hardware}, hidden by an empty CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES",
            "unset that variable to train on the GPU",
        )
    if hardware:
        built_for = (
            "CUDA " + torch.version.cuda if torch.version.cuda else "ROCm" if torch.version.hip else "the CPU only"
        )
        return Result(
            "devices",
            WARNING,
            f"{hardware}, but torch (built for {built_for}) cannot use it",
            "install a torch that fits the driver (nvidia-smi or rocm-smi shows its version), or a newer driver",
        )
    return Result("devices", OK, "the CPU; the whole course runs on it, with gloo")


def _gpu_hardware() -> str:
    """Return the kind of GPU that the system has, even if torch cannot use it; "": none."""
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        return "an NVIDIA GPU"
    if Path("/dev/kfd").exists():
        return "an AMD GPU"
    return ""


def check_backends() -> Result:
    try:
        import torch.distributed as dist
    except Exception:
        return Result("backends", PROBLEM, "unknown, because torch cannot be imported", "see torch above")
    if not dist.is_available() or not dist.is_gloo_available():
        return Result(
            "backends",
            PROBLEM,
            "this torch has no gloo",
            "install a standard torch: delete .venv and run ./workshop.sh again",
        )
    names = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if getattr(dist, f"is_{name}_available", lambda: False)()
    ]
    return Result("backends", OK, ", ".join(names))


def check_process_group() -> Result:
    """Join a process group of one over the loopback interface: store, gloo and a collective, as in every training."""
    try:
        import torch
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except Exception as error:
        return Result(
            "process group",
            PROBLEM,
            f"gloo cannot start: {_first_line(error)}",
            "check the loopback interface (ip addr show lo); with several networks, set GLOO_SOCKET_IFNAME=lo",
        )
    return Result("process group", OK, "gloo works on the loopback interface")


def check_training_step() -> Result:
    """Take one training step on each device, because only computing shows that torch has no kernels for a GPU."""
    try:
        import torch

        from workshop.training.models import SmallCNN

        devices = [torch.device("cpu")]
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            devices += [torch.device(kind, index) for index in range(gpus())]
        for device in devices:
            loss = SmallCNN().to(device)(torch.zeros(2, 1, 28, 28, device=device)).sum()
            loss.backward()
            loss.item()  # waits until the device is done
    except Exception as error:
        return Result(
            "training step",
            PROBLEM,
            f"fails: {_first_line(error)}",
            "install a torch built for this device and its driver",
        )
    return Result("training step", OK, f"works on {', '.join(map(str, devices))}")


def check_packages() -> Result:
    missing = [package for package, module in packages().items() if importlib.util.find_spec(module) is None]
    if missing:
        return Result(
            "packages",
            PROBLEM,
            "missing: " + ", ".join(missing),
            f"{sys.executable} -m pip install {' '.join(missing)}",
        )
    shown = (name for name in ("lightning", "transformers") if importlib.util.find_spec(name))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in shown)
    return Result("packages", OK, f"all required packages; {versions}")


def check_cores() -> Result:
    usable = cores()
    quota = _cgroup_cores()
    seen = f"{usable} of {os.cpu_count()} for this session" + (
        f", limited to the time of {quota:g} cores" if quota and quota < usable else ""
    )
    if min(usable, quota or usable) < 2:
        return Result(
            "cores", WARNING, seen, "two processes on one core are not faster: request --cpus-per-task=2 or more"
        )
    return Result("cores", OK, seen)


def _cgroup_files(controller: str, name: str, name_v1: str) -> list[Path]:
    """Return the files that may contain a limit for this process: of its cgroup and all above it, for cgroup v2 and v1."""
    files = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            root, file = Path("/sys/fs/cgroup"), name
        elif controller in controllers.split(","):
            root, file = Path("/sys/fs/cgroup") / controller, name_v1
        else:
            continue
        own = root / place.lstrip("/")
        files += [folder / file for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return [file for file in files if file.exists()]


def _cgroup_cores() -> float | None:
    """Return how many cores' worth of CPU time this process may use; None without a limit, or with cgroup v1."""
    limits = []
    for file in _cgroup_files("cpu", "cpu.max", "cpu.max"):
        quota, _, period = file.read_text().partition(" ")
        if quota != "max":
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _cgroup_memory() -> int | None:
    """Return how many bytes of memory the job of this process may still allocate; None without a limit."""
    left = []
    for file in _cgroup_files("memory", "memory.max", "memory.limit_in_bytes"):
        limit = file.read_text().strip()
        used = file.with_name("memory.current" if file.name == "memory.max" else "memory.usage_in_bytes")
        if limit != "max" and used.exists():
            left.append(int(limit) - int(used.read_text()))
    return min(left, default=None)


def check_memory() -> Result:
    import psutil

    available = psutil.virtual_memory().available
    if (left := _cgroup_memory()) is not None:
        available = min(available, left)
    seen = f"{available / GIB:.1f} GiB available"
    if available < 1 * GIB:
        return Result(
            "memory", PROBLEM, seen, "a training process needs about 0.7 GiB: close programs or request more memory"
        )
    if available < 3 * GIB:
        return Result("memory", WARNING, seen, "the tour needs up to 3 GiB: close other programs or request --mem=4G")
    return Result("memory", OK, seen)


def check_disk() -> Result:
    free = shutil.disk_usage(ROOT).free
    seen = f"{free / GIB:.1f} GiB free on the disk of the repository"
    if not os.access(ROOT, os.W_OK):
        return Result(
            "disk",
            WARNING,
            seen + ", but the repository is not writable",
            "run the programs in a folder of your own: they write their results to runs/ there",
        )
    if free < 0.1 * GIB:
        return Result(
            "disk", PROBLEM, seen, "free space, or clone to a larger file system; your home quota may be even smaller"
        )
    if free < 2 * GIB:
        return Result(
            "disk", WARNING, seen, "checkpoints and data need up to 2 GiB; set WORKSHOP_DATA to a larger file system"
        )
    return Result("disk", OK, seen)


def check_shared_memory() -> Result:
    if not Path("/dev/shm").is_dir():
        return Result("/dev/shm", OK, "none; this system shares memory in a different way")
    size = shutil.disk_usage("/dev/shm").total
    seen = f"{size / GIB:.1f} GiB"
    if size < 256 * 2**20:
        return Result(
            "/dev/shm",
            WARNING,
            seen,
            "DataLoader workers and NCCL can crash: start the container with --shm-size=1g or --ipc=host",
        )
    return Result("/dev/shm", OK, seen)


def check_ports() -> Result:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return Result("ports", OK, "range unknown on this system; each run searches for a free port")
    seen = f"{low} to {high} for connections"
    if high - low < 1000:
        return Result(
            "ports",
            WARNING,
            seen,
            "these ports may not suffice for many processes; ask the administrator to widen ip_local_port_range",
        )
    return Result("ports", OK, seen)


def check_host_name() -> Result:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        return Result(
            "host name",
            WARNING,
            f"{name} does not resolve",
            f"the runners work (with --local-addr=127.0.0.1); for other programs add '127.0.1.1 {name}' to /etc/hosts",
        )
    return Result("host name", OK, f"{name} resolves to {address}")


def check_scheduler() -> Result:
    found = [name for program, name in (("sbatch", "Slurm"), ("qsub", "PBS")) if shutil.which(program)]
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    seen = (", ".join(found) or "none on PATH") + (f"; you are inside job {job}" if job else "")
    from workshop.slurm.sites import detect_site, find_site

    site = detect_site()
    if site:
        seen += f"; this is {find_site(site).name}"
        return Result("scheduler", OK, seen, f"./workshop.sh submit SCRIPT --site {site} uses its queues and modules")
    return Result("scheduler", OK, seen)


def check_practice_cluster() -> Result:
    """Check whether a practice cluster, Slurm with several nodes, can be started on this machine."""
    from workshop.errors import UserError
    from workshop.slurm.cluster import find_cluster, require_machine

    if up := find_cluster():
        return Result("cluster", OK, f"a practice cluster of {up.nodes} nodes is up")
    try:
        require_machine()
    except UserError as error:
        return Result("cluster", OK, "no practice cluster can be started here", str(error))
    return Result("cluster", OK, "a practice cluster can be started: ./workshop.sh cluster up 4")


def check_interconnect() -> Result:
    """Report the networks that connect this machine to others."""
    seen = []
    fabric = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    for port in fabric:
        rate, state = ((port / name).read_text().strip() for name in ("rate", "state"))
        seen.append(f"{port.parts[-3]} {rate.split('(')[0].strip()}, {state.split(':')[-1].strip().lower()}")
    interfaces = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo")
    slingshot = [name for name in interfaces if name.startswith("hsn")]
    if slingshot:
        seen.append(f"Slingshot: {', '.join(slingshot)}")
    others = [name for name in interfaces if name not in slingshot]
    seen.append(f"interfaces: {', '.join(others)}" if others else "only the loopback interface")
    return Result("interconnect", OK, "; ".join(seen))


def check_data() -> Result:
    try:
        from workshop.data import data_folder, load_dataset
        from workshop.data.mnist import missing_files

        load_dataset("digits")
    except Exception as error:
        return Result(
            "data",
            PROBLEM,
            f"the digits cannot be read: {error}",
            "install scikit-learn again: delete .venv and run ./workshop.sh",
        )
    return Result(
        "data", OK, f"digits; mnist is {'not fetched' if missing_files(data_folder()) else 'in ' + str(data_folder())}"
    )


def check_deepspeed() -> Result:
    """Check what stage 05 needs: DeepSpeed, and on CPUs also a compiler and ninja, which build a DeepSpeed extension."""
    from workshop.training import deepspeed

    if not importlib.util.find_spec("deepspeed"):
        return Result("DeepSpeed", OK, "not installed; only stage 05 needs it: pip install -e '.[deepspeed]'")
    seen = importlib.metadata.version("deepspeed")
    try:
        built = deepspeed.is_built()
    except ImportError:  # check_torch reports the details
        return Result("DeepSpeed", WARNING, f"{seen}, which needs torch")
    if built:
        return Result("DeepSpeed", OK, f"{seen}, its extension for CPUs is built")
    if missing := deepspeed.missing_tools():
        return Result(
            "DeepSpeed",
            WARNING,
            f"{seen}; it cannot build its extension for CPUs: there is no {' and no '.join(missing)}",
            "only stage 05 needs it; on Debian: apt install g++ ninja-build python3-dev",
        )
    return Result("DeepSpeed", OK, f"{seen}; its first run on CPUs builds an extension, which takes half a minute")


CHECKS: tuple[Callable[[], Result], ...] = (
    check_python,
    check_torch,
    check_torchvision,
    check_devices,
    check_backends,
    check_process_group,
    check_training_step,
    check_packages,
    check_data,
    check_cores,
    check_memory,
    check_disk,
    check_shared_memory,
    check_ports,
    check_host_name,
    check_interconnect,
    check_scheduler,
    check_practice_cluster,
    check_deepspeed,
)


def run_doctor(people: int | None = None) -> int:
    """Print the result of each check with its advice; return 1 if a check found a problem, else 0.

    Args:
        people: also check whether a course with this number of people can begin here.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    checks = list(CHECKS)
    if people:
        from workshop.doctor.classroom import class_checks

        checks += class_checks(people)
    findings = [check() for check in checks]
    table = Table(box=None, padding=(0, 1), show_header=False)
    colours = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
    for finding in findings:
        table.add_row(f"[{colours[finding.status]}]{finding.status}", finding.name, escape(finding.seen))
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(
                f"[{colours[finding.status]}]{finding.name}[/]: {escape(finding.advice)}",
                highlight=False,
                soft_wrap=True,
            )
    problems = [finding.name for finding in findings if finding.status == PROBLEM]
    if problems:
        what = "The course cannot begin" if people else "Training cannot run"
        console.print(f"{what} here yet: see {', '.join(problems)}.", soft_wrap=True)
        return 1
    console.print("The course can begin." if people else "Training can run here. Next: ./workshop.sh tour")
    return 0
