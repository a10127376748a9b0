"""Python runs this file at its start if PYTHONPATH contains the folder. The process then answers ``workshop diagnose``.

A thread waits at a Unix socket and uses no time until it is asked. The file imports nothing of the workshop, because the Python
of the program need not have it.
"""

import atexit
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress

FOLDER = os.environ.get("WORKSHOP_DIAGNOSE", "")


def _recorder(name, *arguments):
    """Return what PyTorch's flight recorder says, without importing torch: an import would take seconds and a lock."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    function = getattr(c10d, f"_dump_fr_trace{name}", None) or getattr(c10d, f"_dump_nccl_trace{name}", None)
    return function(*arguments) if function else b""


def _about():
    torch = sys.modules.get("torch")
    distributed = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return {
        "pid": os.getpid(),
        "torch": getattr(torch, "__version__", ""),
        "rank": distributed.get_rank() if ready else int(os.environ.get("RANK", -1)),
        "world": distributed.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", 0)),
        "joined": ready,
    }


def _answer(connection):
    with connection, suppress(OSError):
        connection.settimeout(5)
        question = connection.recv(1)
        # Progress: the number of collectives in each group. Everything: also each collective, with the lines that called it.
        about = _about() if question == b"a" else {}
        trace = _recorder("", True, True, False) if question == b"a" else _recorder("_json", False, False)
        trace = trace.encode() if isinstance(trace, str) else bytes(trace)
        connection.sendall(json.dumps(about).encode() + b"\n" + trace)


def _serve(server):
    while True:
        try:
            connection = server.accept()[0]
        except OSError:
            return
        try:
            _answer(connection)
        except Exception:  # whatever goes wrong here must not reach the program
            connection.close()


def _start():
    with suppress(OSError):
        os.makedirs(FOLDER, exist_ok=True)
        path = os.path.join(FOLDER, f"{os.getpid()}.socket")
        with suppress(FileNotFoundError):
            os.unlink(path)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(path)
        server.listen(4)
        threading.Thread(target=_serve, args=(server,), name="workshop-diagnose", daemon=True).start()


def _allow_tracing():
    """Let other processes of this user read the stacks, where the kernel allows it to parents only (Yama, ptrace_scope 1)."""
    import ctypes

    set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)  # prctl(2)
    ctypes.CDLL(None).prctl(set_ptracer, any_process, 0, 0, 0)


def _note_signals():
    """Let Python write its stacks into the folder if the process aborts, or if the launcher ends it."""
    file = open(os.path.join(FOLDER, f"{os.getpid()}.fault"), "w")  # noqa: SIM115  (open until the process ends)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGTERM, file, chain=True)


def _note_failure(kind, error, trace, before=None):
    """Write the exception that ends this process into the folder, then do what Python would have done."""
    with suppress(Exception):
        text = "".join(traceback.format_exception(kind, error, trace))
        frames = [[frame.filename, frame.lineno, frame.name] for frame in traceback.extract_tb(trace)]
        failure = {**_about(), "kind": kind.__name__, "message": str(error)[:2000], "traceback": text[-20000:]}
        failure |= {"frames": frames, "seconds": time.time()}
        path = os.path.join(FOLDER, f"{os.getpid()}.failure")
        with open(path + ".part", "w") as file:
            json.dump(failure, file)
        os.replace(path + ".part", path)
    (before or sys.__excepthook__)(kind, error, trace)


def _note_end():
    """Write that this process ends by itself; only a rank needs it, and only a rank has imported torch.distributed."""
    with suppress(Exception):
        about = _about()
        if about["rank"] >= 0 and not os.path.exists(os.path.join(FOLDER, f"{os.getpid()}.failure")):
            with open(os.path.join(FOLDER, f"{os.getpid()}.ended"), "w") as file:
                json.dump({**about, "seconds": time.time()}, file)


if FOLDER:
    _start()
    atexit.register(_note_end)
    with suppress(Exception):
        _allow_tracing()
    with suppress(OSError, RuntimeError):
        _note_signals()
    os.register_at_fork(after_in_child=_start)  # a fork has no threads
    sys.excepthook = lambda kind, error, trace, before=sys.excepthook: _note_failure(kind, error, trace, before)

# Python imports only the first sitecustomize that it finds, so this one runs the next, which may be one of the site.
_others = [folder for folder in sys.path if os.path.abspath(folder) != os.path.dirname(os.path.abspath(__file__))]
if _next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others):
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
