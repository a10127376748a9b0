"""Detect a container that was started without access to the GPUs: torch finds none in it and would train on the CPU."""

import os
import sys
from pathlib import Path

HIDDEN_BY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# For each build of torch: a device file of its GPUs on the node, and the options that make the GPUs visible in a container.
DEVICES = {"cuda": Path("/dev/nvidia0"), "rocm": Path("/dev/kfd")}
FLAGS = {
    "apptainer exec": {"cuda": "--nv", "rocm": "--rocm"},
    "singularity exec": {"cuda": "--nv", "rocm": "--rocm"},
    "docker run": {"cuda": "--gpus all", "rocm": "--device /dev/kfd --device /dev/dri"},
}


def started_by() -> str:
    """Return the command that started the container of this process; "": it is not in a container."""
    if "APPTAINER_CONTAINER" in os.environ:
        return "apptainer exec"
    if "SINGULARITY_CONTAINER" in os.environ:
        return "singularity exec"
    return "docker run" if Path("/.dockerenv").exists() else ""


def closed_to_gpus() -> str:
    """Return why torch finds no GPU of the node in this container, and what to do; "": it finds them, or is not imported."""
    start, torch = started_by(), sys.modules.get("torch")
    if not start or not torch or any(os.environ.get(name) in ("", "-1") for name in HIDDEN_BY):
        return ""
    kind = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else ""
    if not kind or not _node_has_gpus(DEVICES[kind]):
        return ""
    if _has_driver() if kind == "cuda" else torch.accelerator.is_available():  # ROCm images contain its libraries
        return ""
    flag = FLAGS[start][kind]
    return (
        f"this container was started without {flag}, so it cannot use the GPUs of the node; start it with {start} {flag} ..., "
        "or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def _node_has_gpus(device: Path) -> bool:
    """Return whether the device file exists (it is visible even without the driver), or this job has GPUs."""
    null = Path("/dev/null").stat().st_rdev  # the practice cluster mounts it over the device file
    if device.is_char_device() and device.stat().st_rdev != null:
        return True
    if os.environ.get("SLURM_CLUSTER_NAME") == "practice":
        return False  # its GPUs are not real: Slurm only counts them
    return os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0" or "CUDA_VISIBLE_DEVICES" in os.environ


def _has_driver() -> bool:
    """Return whether the NVIDIA driver can be loaded. It comes from the host; no image contains it."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
