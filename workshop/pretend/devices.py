"""The pretended GPUs of a process: which one is current, the bytes on each, and what the program did with them."""

import os
import struct
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType

import torch

from workshop import gloo

NAME = "pretend"  # the name that PyTorch's device type PrivateUse1 gets
_TORCH = os.path.dirname(torch.__file__)
# What PyTorch runs between a call of the program and the code of this package.
_BETWEEN = tuple(
    os.path.join(_TORCH, name) for name in ("_compile.py", "_dynamo", "overrides.py", "utils/_python_dispatch.py")
)
PIECE = 512  # PyTorch gives out the memory of a GPU in pieces of this number of bytes
LIBRARIES = (
    os.path.dirname(_TORCH),
    os.path.dirname(os.__file__),
    os.path.dirname(__file__),
    gloo.__file__,
)

total = 0  # pretended GPUs of this node
_visible: list[int] = []  # the GPUs of the node that this process sees, once it has used one
used = False  # whether the program has used one; a process that forks then has broken children, as with CUDA
forked = False  # whether this process was forked after its parent had used a GPU
chosen = False  # whether the program has chosen a GPU
_main = 0  # the current GPU of the main thread and of the threads of the backward pass
_operation: int | None = None  # the GPU of the operation that they do
_threads = threading.local()  # both of each other thread, which starts with GPU 0

allocated: Counter[int] = Counter()  # bytes on each GPU now
peak: Counter[int] = Counter()  # the most bytes that were on each GPU at a time
notes: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # kind and detail -> line -> how often
listeners: list[Callable[[str, str], None]] = []  # called with each kind and its detail
states: dict[
    int, tuple[int, int]
] = {}  # the generator of each GPU: its seed, and the place in the sequence of its numbers
seeded: set[int] = set()  # the GPUs whose generator the program has seeded
generators: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # address -> a generator for GPUs
_storages: dict[int, list] = {}  # address of a storage -> [weak reference, GPU, bytes]


def visible() -> list[int]:
    """Return the GPUs of the node that this process sees: all, or those in CUDA_VISIBLE_DEVICES before it uses one."""
    if used:
        return _visible
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(total))
    found = []
    for word in chosen.split(","):
        if not word.strip().isdigit() or int(word) >= total:
            break  # CUDA ignores all devices after an invalid one
        found.append(int(word))
    return found


def count() -> int:
    """Return the number of GPUs that this process sees."""
    return len(visible())


def place() -> str | None:
    """Return the line of the innermost frame of the program, or None in a thread that runs only code of libraries."""
    frame = sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def note(kind: str, detail: str = "") -> None:
    """Count something that the program does, with its line. ``workshop.measure.pretended_table`` explains the kinds."""
    if line := place():
        notes[kind, detail][line] += 1
        for listener in listeners:
            listener(kind, detail)


def note_wait() -> None:
    """Count that the CPU waits for the GPU, because of the program or inside of a library: an optimizer, or another function."""
    if called_by_program():
        note("wait")
    elif frame := _caller():
        while frame.f_back and frame.f_code.co_name.startswith("<"):  # of a generator or a lambda: it has no name
            frame = frame.f_back
        of_optimizer = f"{os.sep}optim{os.sep}" in frame.f_code.co_filename
        note("wait-inside", "" if of_optimizer else f"in {frame.f_code.co_name}()")


def note_synchronize() -> None:
    """Count that the CPU waits for all work of the GPU, but not if FSDP does, which limits how much it gathers ahead."""
    frame = _caller()
    if frame is None or f"{os.sep}fsdp{os.sep}" not in frame.f_code.co_filename:
        note("synchronize")


def called_by_program() -> bool:
    """Return whether the program made this call itself, and not a library such as DDP."""
    frame = _caller()
    return frame is not None and not frame.f_code.co_filename.startswith(LIBRARIES)


def _caller() -> FrameType | None:
    """The function that called an operation, without those of the pretended GPUs and of the dispatch of PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((os.path.dirname(__file__), gloo.__file__, *_BETWEEN)):
        frame = frame.f_back
    return frame


def is_gpu(device: object) -> bool:
    """Return whether a device, in any form that PyTorch accepts, is a GPU."""
    if isinstance(device, str):
        return device.partition(":")[0] in ("cuda", NAME)
    if isinstance(device, torch.device):
        return device.type in ("cuda", NAME)
    return isinstance(device, int) and not isinstance(device, bool)


def current() -> int:
    """Return the index of the current GPU of this thread."""
    return getattr(_threads, "index", _main)


def set_current(index: int) -> None:
    """Make a GPU the current one of this thread."""
    global _main
    if hasattr(_threads, "index"):
        _threads.index = index
    else:
        _main = index


def new_thread() -> None:
    """Start a thread of the program: its current GPU is GPU 0, as in CUDA."""
    _threads.index, _threads.operation = 0, None


class operation_on:
    """A context for an operation with tensors on a GPU; ``None``: it has none, or is part of one that has.

    C++ creates further tensors on the GPU of the first ones. It does not see the number of a pretended GPU.
    """

    def __init__(self, index: int | None):
        self.index = index

    def __enter__(self) -> None:
        self.outside = _of_operation()
        _set_operation(self.outside if self.index is None else self.index)

    def __exit__(self, *_: object) -> None:
        _set_operation(self.outside)


def _of_operation() -> int | None:
    return getattr(_threads, "operation", _operation)


def _set_operation(index: int | None) -> None:
    global _operation
    if hasattr(_threads, "operation"):
        _threads.operation = index
    else:
        _operation = index


def use() -> None:
    """Note that the program uses a GPU; raise what CUDA raises if it cannot."""
    global used, _visible
    if forked:
        note("forked")
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
            "start method"
        )
    if used:
        return
    _visible = visible()
    if not _visible:
        raise RuntimeError("No CUDA GPUs are available")
    used = True


def index_of(device: object = None) -> int:
    """Return the index of a GPU, which is the current one if the device has no index.

    Raises:
        torch.AcceleratorError: this GPU does not exist.
    """
    use()
    if device is None:
        return current()
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        index = current() if device.index is None or device.type == NAME else device.index
        if device.type == NAME and (of_operation := _of_operation()) is not None:
            index = of_operation
    if not 0 <= index < count():
        hidden = f", with CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}" if count() < total else ""
        note("no-such-gpu", f"GPU {index}{hidden}")
        raise torch.AcceleratorError(
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
        )
    return index


def hold(storage: torch.UntypedStorage, index: int) -> None:
    """Count the bytes of a storage as bytes of a GPU, until the storage is freed."""
    key = storage._cdata
    if key in _storages:
        return

    def freed(_: object) -> None:
        _, index, size = _storages.pop(key)
        allocated[index] -= size

    _storages[key] = [weakref.ref(storage, freed), index, 0]
    resized(storage)


def resized(storage: torch.UntypedStorage) -> None:
    """Count the bytes of a storage again. FSDP frees its gathered parameters by resizing their storage to 0."""
    if entry := _storages.get(storage._cdata):
        size = -(-storage.nbytes() // PIECE) * PIECE
        allocated[entry[1]] += size - entry[2]
        entry[2] = size
        peak[entry[1]] = max(peak[entry[1]], allocated[entry[1]])


class random_state:
    """A context in which random numbers come from the generator of a GPU: each GPU has its own."""

    def __init__(self, index: int):
        self.index = index

    def __enter__(self) -> None:
        if seeded and self.index not in seeded:
            note("not-seeded", f"GPU {self.index}")
        self.outside = torch.get_rng_state()
        torch.set_rng_state(torch.Generator().manual_seed(hash(states[self.index])).get_state())

    def __exit__(self, *_: object) -> None:
        number, place = states[self.index]
        states[self.index] = number, place + 4  # CUDA adds a multiple of 4
        torch.set_rng_state(self.outside)


def seed(number: int, index: int) -> None:
    """Seed the generator of a GPU."""
    states[index] = number % 2**64, 0
    seeded.add(index)


def get_state(index: int) -> torch.Tensor:
    """Return the state of the generator of a GPU as CUDA does, in 16 bytes: DTensor changes the place in them."""
    return torch.tensor(list(struct.pack("<QQ", *states[index])), dtype=torch.uint8, device="cpu")


def set_state(state: torch.Tensor, index: int) -> None:
    """Set the state of the generator of a GPU."""
    states[index] = struct.unpack("<QQ", bytes(state.tolist()))


def after_fork() -> None:
    """In a forked process: its own figures, and no GPU if the parent has used one."""
    global forked
    broken = forked or used
    renew()
    forked = broken


def renew() -> None:
    """Forget what this process has done with its GPUs."""
    global forked, used, chosen, _main
    forked = used = chosen = False
    _main = 0
    notes.clear()
