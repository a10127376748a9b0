"""How the processes of a JAX program find each other: ``meet()``, before JAX is asked for its devices.

JAX needs an address at which process 0 listens, the number of processes, and each one's own number. torchrun tells them by the
names that PyTorch has for them; in a step of srun's JAX finds them itself; without a launcher one process has nobody to meet.
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
    print("JAX is not installed here, an extra: pip install -e '.[jax]' in the workshop's folder", file=sys.stderr)
    sys.exit(2)
import jax

# JAX catches SIGTERM, for programs that save before their job's end. A launcher's SIGTERM would then end nobody.
jax.config.update("jax_enable_preemption_service", False)


def meet() -> None:
    """Wait until all processes are there, and take a device for each: a GPU where there are enough, else the CPU.

    ``$MEETING_SECONDS`` (60) is how long a process waits for the others: then it says so in one sentence, and ends with status 1.
    """
    if os.environ.get(PREFLIGHT):  # the runner wants to know whether the options are right, and nothing else
        sys.exit(0)
    # torchrun's number of processes on this machine, or srun's: "2(x3)" is 2 on each of 3 nodes.
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # A PyTorch for CPUs says nothing about GPUs. Where there are none JAX is not to look: its part for CUDA can crash then.
    built_for_gpus = torch.accelerator.current_accelerator() is not None
    if built_for_gpus and torch.accelerator.device_count() < int(here.split("(")[0].split(",")[0]):
        jax.config.update("jax_platforms", "cpu")

    if "RANK" in os.environ:
        if os.environ["RANK"] == "0":
            require_free_port(int(os.environ["MASTER_PORT"]))
        place = {
            "coordinator_address": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            "num_processes": int(os.environ["WORLD_SIZE"]),
            "process_id": int(os.environ["RANK"]),
            "local_device_ids": int(os.environ["LOCAL_RANK"]),  # of this machine's GPUs one for each process
        }
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        place = {}  # JAX reads Slurm's variables
    else:
        return
    seconds = int(os.environ.get("MEETING_SECONDS", 60))
    watch = threading.Timer(seconds, give_up, [seconds])
    watch.daemon = True
    watch.start()
    jax.distributed.initialize(
        **place,
        initialization_timeout=10 * seconds,  # at its end JAX would abort, with its own stack instead of a sentence
        heartbeat_timeout_seconds=10,  # a process that has died is missed after 10 s; by default after 100
    )
    watch.cancel()
    sys.excepthook = end_at_once


def require_free_port(port: int) -> None:
    """End the program with one sentence if somebody listens at the port already. (JAX would crash.)"""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        print(
            f"port {port} is taken, by torchrun itself if it has started this: bonus_jax/run_jax.sh starts it so that it is not",
            file=sys.stderr,
        )
        sys.exit(2)


def give_up(seconds: int) -> None:
    """Say that not all processes have come, and end this one, which hangs in JAX."""
    print(f"not all processes have come to the meeting within {seconds} s", file=sys.stderr, flush=True)
    os._exit(1)


def end_at_once(*error) -> None:
    """Show the error that ends this process. On a usual way out JAX would wait for the others, which wait for this one."""
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(1)
