"""Ending after gloo's threads. Every script that trains imports it, by ``workshop.data`` or ``workshop.training.device``.

gloo's threads let go of each tensor a moment after its collective has ended, and need Python's lock for it (``TensorImpl::
decref_pyobject``). A thread that asks for the lock when Python has begun to end is stopped by force, in C++ code that may not be
left so: "terminate called without an active exception", SIGABRT, exit status -6, after the last step of a training that went
well. ``destroy_process_group`` waits for these threads only if nothing else holds on to the group, which a ``DeviceMesh``,
DeepSpeed and, from its first import on, ``torch.distributed.nn.functional`` do. tests/test_process_group.py makes it happen.
"""

import atexit
import time
from pathlib import Path

THREADS = "pt_gloo_runloop"  # named by ProcessGroupGloo::runLoop
SECONDS = 2


def _wait_for_gloo() -> None:
    """Return once gloo's threads have slept for two looks in a row; after ``SECONDS`` in any case."""
    latest, asleep = time.monotonic() + SECONDS, 0
    while asleep < 2 and time.monotonic() < latest:
        if not (states := _thread_states()):
            return
        time.sleep(0.01)  # without Python's lock: a thread that waits for it has it now
        asleep = asleep + 1 if set(states) == {"S"} else 0


def _thread_states() -> list[str]:
    """The state of each of gloo's threads, as in proc(5): S asleep, R running or waiting for a core. Without /proc none."""
    states = []
    for thread in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
        except OSError:  # ended since
            continue
        if name == THREADS:
            states.append(rest.split()[0])
    return states


atexit.register(_wait_for_gloo)  # early, and so called late: after Lightning has ended its group
