"""Connect the processes of a JAX program: call ``meet()`` before you ask JAX for its devices.

JAX needs an address at which process 0 listens, the number of processes, and the number (rank) of each process. torchrun passes
them in the environment variables of PyTorch, which ``meet()`` hands to JAX. In a job step of srun, JAX finds them itself.
Without a launcher there is only one process, so there is nothing to connect.
"""

import importlib.util
import os
import socket
import sys
import threading
import traceback

import torch

from workshop.training.arguments import PREFLIGHT

if not all(importlib.util.find_spec(name) for name in ("jax", "optax")):
    print("JAX is not installed here; run pip install -e '.[jax]' in the folder of the workshop", file=sys.stderr)
    sys.exit(2)
import jax

# By default, JAX catches SIGTERM, so that a program can save before its job ends. Then the SIGTERM of a launcher would not end
# the processes.
jax.config.update("jax_enable_preemption_service", False)


def meet() -> None:
    """Wait until all processes have connected, and choose the device: a GPU per process, or the CPU on a machine without a GPU.

    A process waits ``$MEETING_SECONDS`` (default: 60) for the others. Then it prints one sentence and ends with exit status 1.
    """
    if os.environ.get(PREFLIGHT):  # the runner only checks the options
        sys.exit(0)
    # A CPU build of PyTorch cannot count GPUs, so JAX then chooses the device itself. On a machine without a GPU, JAX must not
    # look for one, because its CUDA plugin can crash.
    built_for_gpus = torch.accelerator.current_accelerator() is not None
    visible = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if built_for_gpus and not visible:
        jax.config.update("jax_platforms", "cpu")
    # One GPU per process: the visible GPU with its local rank. If a job shows it only its own GPU, the index is 0.
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", 0))
    index = local_rank % visible if visible else local_rank

    if "RANK" in os.environ:
        if os.environ["RANK"] == "0":
            require_free_port(int(os.environ["MASTER_PORT"]))
        place = {
            "coordinator_address": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            "num_processes": int(os.environ["WORLD_SIZE"]),
            "process_id": int(os.environ["RANK"]),
            "local_device_ids": index,
        }
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        place = {"local_device_ids": index}  # JAX reads the rest from the variables of Slurm
    else:
        return
    seconds = int(os.environ.get("MEETING_SECONDS", 60))
    watch = threading.Timer(seconds, give_up, [seconds])
    watch.daemon = True
    watch.start()
    jax.distributed.initialize(
        **place,
        initialization_timeout=10
        * seconds,  # longer than the timer, because JAX aborts with a stack trace at this timeout
        heartbeat_timeout_seconds=10,  # JAX notices a dead process after 10 s; the default is 100 s
    )
    watch.cancel()
    sys.excepthook = end_at_once


def require_free_port(port: int) -> None:
    """End the program with one sentence if the port is already in use, because JAX would crash."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        print(
            f"port {port} is in use, by default by torchrun itself; bonus_jax/run_jax.sh starts torchrun so that it is free",
            file=sys.stderr,
        )
        sys.exit(2)


def give_up(seconds: int) -> None:
    """Report that not all processes have connected, and end this process, which is waiting inside JAX."""
    print(f"not all processes have connected within {seconds} s", file=sys.stderr, flush=True)
    os._exit(1)


def end_at_once(*error) -> None:
    """Print the error and end this process at once.

    In a normal exit, JAX would wait for the other processes, which wait for this one.
    """
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(1)
