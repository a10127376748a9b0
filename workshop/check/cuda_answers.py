"""``torch.cuda`` and ``torch.accelerator`` as a program sees them that runs on the CPU (see ``cuda_on_cpu.py``)."""

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.profiler
import torch.distributed as dist

# What functions of torch.cuda return here, apart from those that do nothing.
NOTHING = """synchronize empty_cache init ipc_collect reset_peak_memory_stats reset_max_memory_allocated
    reset_max_memory_cached set_stream set_per_process_memory_fraction reset_accumulated_memory_stats set_sync_debug_mode
    _sleep"""
ZERO = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
    utilization get_sync_debug_mode is_current_stream_capturing"""
MEMORY = 80 << 30  # bytes
PROPERTIES = SimpleNamespace(
    name="CPU", total_memory=MEMORY, major=9, minor=0, multi_processor_count=1, warp_size=32, uuid="", gcnArchName=""
)
ANSWERS = {
    "get_device_properties": PROPERTIES, "get_device_name": "CPU", "get_device_capability": (9, 0),
    "is_bf16_supported": True, "can_device_access_peer": True, "mem_get_info": (MEMORY, MEMORY),
    "get_per_process_memory_fraction": 1.0, "memory_summary": "",
}  # fmt: skip
# The same of torch.accelerator.
ACCELERATOR_NOTHING = "synchronize empty_cache reset_peak_memory_stats reset_accumulated_memory_stats set_stream"
ACCELERATOR_ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
LIBRARY = os.path.dirname(torch.__file__)


class Event:
    """In place of ``torch.cuda.Event``: the time of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter()

    def record(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        return 1000 * (end_event.seconds - self.seconds)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    wait = record


class Stream:
    """In place of ``torch.cuda.Stream``: everything runs at once."""

    stream_id = cuda_stream = device_index = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


class NoContext(contextlib.nullcontext[None]):
    """In place of a context manager of ``torch.cuda``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class ChosenDevice(NoContext):
    """In place of ``torch.cuda.device``: the device stays the CPU, but it must exist."""

    choose: Callable[..., None]

    def __init__(self, device: Any = None, *_: Any) -> None:
        super().__init__()
        self.device = device

    def __enter__(self) -> None:
        type(self).choose(self.device)


def install(count: int) -> None:
    """Let ``torch.cuda`` and ``torch.accelerator`` answer as with ``count`` GPUs; torch itself gets the true answer."""
    cuda, accelerator = torch.cuda, torch.accelerator
    current = [0]

    def choose(device: Any = 0, *_: Any) -> None:
        if isinstance(device, str):  # "cuda" or "cuda:1"
            device = int(device.partition(":")[2] or 0)
        index = device if isinstance(device, int) else getattr(device, "index", None)
        if count and index is not None and not 0 <= index < count:
            raise RuntimeError(f"CUDA error: invalid device ordinal: device {index} of {count}")
        current[0] = index or 0

    if count:
        for module in (cuda, accelerator):
            _answer(module, "is_available", lambda *_, **__: True)
            _answer(module, "device_count", lambda: count)
        _answer(accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
        _answer(dist, "get_default_backend_for_device", lambda *_: "nccl")
    cuda.set_device = accelerator.set_device_index = accelerator.set_device_idx = choose
    _answer(cuda, "current_device", lambda: current[0])
    for name in ("current_device_index", "current_device_idx"):
        _answer(accelerator, name, lambda: current[0])
    for name, value in ANSWERS.items():
        _answer(cuda, name, lambda *_, value=value, **__: value)
    for module, nothing, zero in ((cuda, NOTHING, ZERO), (accelerator, ACCELERATOR_NOTHING, ACCELERATOR_ZERO)):
        for name in nothing.split():
            _answer(module, name, lambda *_, **__: None)
        for name in zero.split():
            _answer(module, name, lambda *_, **__: 0)
        _answer(module, "memory_stats", lambda *_, **__: defaultdict(int))
        _answer(module, "current_stream", Stream)
    _answer(accelerator, "get_memory_info", lambda *_: (MEMORY, MEMORY))
    ChosenDevice.choose = choose
    _classes(cuda, accelerator)
    _profiling(cuda)
    _random_states(count)
    for name in (*ANSWERS, *NOTHING.split(), *ZERO.split(), "memory_stats"):  # the program may import them from there
        if name in vars(cuda.memory):
            setattr(cuda.memory, name, getattr(cuda, name))


def _answer(module: Any, name: str, value: Any) -> None:
    """Let a function of torch return something else to the program, or to a library other than torch."""
    original = getattr(module, name, None)

    def called(*args: Any, **kwargs: Any) -> Any:
        inside = sys._getframe(1).f_code.co_filename.startswith(LIBRARY)
        return original(*args, **kwargs) if inside and original else value(*args, **kwargs)

    vars(called)["cache_clear"] = lambda: None  # of device_count()
    setattr(module, name, called)


def _classes(cuda: Any, accelerator: Any) -> None:
    _answer(cuda, "default_stream", Stream)
    _answer(cuda, "stream", NoContext)
    cuda.Event, cuda.Stream, cuda.StreamContext = Event, Stream, NoContext
    cuda.device, accelerator.device_index, cuda.device_of = ChosenDevice, ChosenDevice, NoContext
    torch.Tensor.record_stream = lambda self, stream: None
    for name, value in list(vars(cuda).items()):  # torch.cuda.FloatTensor
        if name.endswith("Tensor") and isinstance(value, type) and hasattr(torch, name):
            setattr(cuda, name, getattr(torch, name))


def _profiling(cuda: Any) -> None:
    """Profilers of GPUs have nothing to record."""
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    for name in ("start", "stop"):
        setattr(cuda.profiler, name, lambda: None)
    for name in ("_record_memory_history", "_dump_snapshot"):
        setattr(cuda.memory, name, lambda *_, **__: None)
    runtime = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    _answer(cuda, "cudart", lambda: runtime)


def _random_states(count: int) -> None:
    """Let the states of the generators of GPUs, and of "devices" on the CPU, be that of the CPU."""
    # Not through _answer(), because torch.random.fork_rng() calls them.
    for module in (torch.cuda, torch.cuda.random, torch.cpu):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda *_, **__: None
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state_all = lambda: [torch.get_rng_state()]
        module.set_rng_state_all = lambda *_, **__: None
        module.initial_seed = torch.initial_seed
        module.default_generators = (torch.default_generator,) * max(count, 1)
