"""Delay the exit until the threads of gloo are idle. Training scripts import this through ``workshop.data`` or ``.device``.

Otherwise a run that succeeded can end with SIGABRT after its last step: "terminate called without an active exception", exit
status -6. A thread of gloo releases each tensor shortly after its collective, and needs the GIL for this
(``TensorImpl::decref_pyobject``). If Python has begun to exit, it forces a thread that asks for the GIL to end, in C++ code that
does not allow this. ``destroy_process_group`` waits for these threads only if nothing else refers to the group, but a
``DeviceMesh``, DeepSpeed and an imported ``torch.distributed.nn.functional`` do. tests/test_process_group.py reproduces it.
"""

import atexit
import time
from pathlib import Path

THREADS = "pt_gloo_runloop"  # named by ProcessGroupGloo::runLoop
SECONDS = 2


def _wait_for_gloo() -> None:
    """Wait until the threads of gloo are asleep in two consecutive checks, at most for ``SECONDS``."""
    latest, asleep = time.monotonic() + SECONDS, 0
    while asleep < 2 and time.monotonic() < latest:
        if not (states := _thread_states()):
            return
        time.sleep(0.01)  # this releases the GIL, so that a waiting thread gets it
        asleep = asleep + 1 if set(states) == {"S"} else 0


def _thread_states() -> list[str]:
    """Return the state of each thread of gloo, as in proc(5): S asleep, R running or waiting for a core; without /proc, []."""
    states = []
    for thread in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if name == THREADS:
            states.append(rest.split()[0])
    return states


atexit.register(_wait_for_gloo)  # registered early, so it runs late: after Lightning has destroyed its group
