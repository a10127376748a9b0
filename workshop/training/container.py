"""A container that was started without its door to the GPUs: torch finds none in it, and would train on the CPU for days."""

import os
import sys
from pathlib import Path

HIDDEN_BY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# For a torch built for each: a device file that its GPUs have on the node, and what lets them into a container.
DEVICES = {"cuda": Path("/dev/nvidia0"), "rocm": Path("/dev/kfd")}
FLAGS = {
    "apptainer exec": {"cuda": "--nv", "rocm": "--rocm"},
    "singularity exec": {"cuda": "--nv", "rocm": "--rocm"},
    "docker run": {"cuda": "--gpus all", "rocm": "--device /dev/kfd --device /dev/dri"},
}


def started_by() -> str:
    """What started the container that this process is in; "": it is in none."""
    if "APPTAINER_CONTAINER" in os.environ:
        return "apptainer exec"
    if "SINGULARITY_CONTAINER" in os.environ:
        return "singularity exec"
    return "docker run" if Path("/.dockerenv").exists() else ""


def closed_to_gpus() -> str:
    """Why torch finds none of the node's GPUs in this container, and what to do; "": this is not so, or torch is not imported."""
    start, torch = started_by(), sys.modules.get("torch")
    if not start or not torch or any(os.environ.get(name) in ("", "-1") for name in HIDDEN_BY):
        return ""
    kind = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else ""
    if not kind or not _node_has_gpus(DEVICES[kind]):
        return ""
    if _has_driver() if kind == "cuda" else torch.accelerator.is_available():  # an image for ROCm has its libraries
        return ""
    flag = FLAGS[start][kind]
    return (
        f"this container was started without {flag}, so the node's GPUs are closed to it; start it with {start} {flag} ..., "
        "or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def _node_has_gpus(device: Path) -> bool:
    """Whether their device file is there (it is visible without the driver, too), or this job was given some."""
    null = Path("/dev/null").stat().st_rdev  # lies over it on the practice cluster
    if device.is_char_device() and device.stat().st_rdev != null:
        return True
    if os.environ.get("SLURM_CLUSTER_NAME") == "practice":
        return False  # its GPUs are for counting
    return os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0" or "CUDA_VISIBLE_DEVICES" in os.environ


def _has_driver() -> bool:
    """Whether NVIDIA's driver can be loaded: it is the host's, and no image has it."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
