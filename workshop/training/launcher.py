"""End a worker when its launcher has died."""

import os
import threading
import time


def exit_with_launcher() -> None:
    """End this process as soon as the torchrun that started it has died; do nothing if torchrun did not start it.

    After a ``kill -9``, torchrun cannot stop its workers. They would continue to train, and write to the same checkpoint as
    the next run. Call this before the slow imports, so that it also ends a worker that is still importing. A thread checks
    five times per second whether the parent process is still the same, which works on every POSIX system.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()  # not at import: a process that has imported this may be forked

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
