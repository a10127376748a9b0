"""Ending with the launcher: no worker trains on by itself."""

import os
import threading
import time


def exit_with_launcher() -> None:
    """End this process as soon as the torchrun that started it has died. Does nothing in a process that torchrun did not start.

    After a ``kill -9`` torchrun cannot stop its workers: they would go on training, and saving to the checkpoint that the
    next start writes too. Call it before the slow imports, so that a worker that is still importing notices as well.
    A thread looks five times a second whether the parent is still the one it was, which works on every POSIX system.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()  # not when imported: a process that has imported this may be forked

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
