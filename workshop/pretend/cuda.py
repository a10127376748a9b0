"""``torch.cuda`` and ``torch.accelerator`` as a program on a machine with pretended GPUs sees them."""

import random
import threading
import time
from collections import defaultdict, namedtuple
from types import ModuleType

import torch
import torch.cuda.profiler

from workshop.pretend import devices
from workshop.pretend.devices import index_of

MEMORY = 80 << 30  # bytes of a pretended GPU; the program never runs out of them
Properties = namedtuple("Properties", "name major minor total_memory multi_processor_count warp_size uuid gcnArchName")
TITLE = "Pretended GPU"


class Stream:
    """In place of ``torch.cuda.Stream``: all work is done at once, so a stream has nothing to wait for."""

    stream_id = cuda_stream = device_index = priority = 0
    device_type = int(torch._C._autograd.DeviceType.PrivateUse1)

    def __init__(self, device=None, priority=0, **_):
        self.device = torch.device("cuda", index_of(device))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def synchronize(self):
        devices.note_synchronize()

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def query(self):
        return True

    def is_capturing(self):
        return False


class Event:
    """In place of ``torch.cuda.Event``: it records the time of the CPU."""

    def __init__(self, *_, **__):
        self.time = 0.0

    def record(self, stream=None):
        self.time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        devices.note_synchronize()

    def elapsed_time(self, end_event):
        return 1e3 * (end_event.time - self.time)


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_, **__):
        raise NotImplementedError(
            "Pretended GPUs cannot record kernels (torch.cuda.CUDAGraph). Switch CUDA graphs off."
        )


class CurrentDevice:
    """In place of ``torch.cuda.device``: a context in which another GPU is the current one."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.outside = devices.current()
        set_device(self.device, chosen=False)

    def __exit__(self, *_):
        devices.set_current(self.outside)


class DeviceOf(CurrentDevice):
    """In place of ``torch.cuda.device_of``."""

    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.is_cuda else -1)


class PrivateUse1Module:
    """What PyTorch's C++ side asks about the device type of the pretended tensors. It knows one device."""

    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def manual_seed_all(seed):  # torch.manual_seed() calls this
        for index in range(devices.total):
            devices.seed(seed, index)


class Generator(torch.Generator):
    """``torch.Generator("cuda")``: a generator of the CPU that may be used for tensors on a GPU."""

    def __new__(cls, device="cpu"):
        new = super().__new__(cls, "cpu")
        new.index = index_of(device) if devices.is_gpu(device) else None
        if new.index is not None:
            devices.generators[new._cdata] = new  # operations get another Python object for the same generator
        return new

    @property
    def device(self):
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)


def set_device(device, chosen=True) -> None:
    if not isinstance(device, int) or device >= 0:
        devices.set_current(index_of(device))
        devices.chosen |= chosen


def _memory(counter):
    return lambda device=None: counter[index_of(device)]


def _reset_peak(device=None) -> None:
    devices.peak[index_of(device)] = devices.allocated[index_of(device)]


def _memory_stats(device=None) -> defaultdict[str, int]:
    now, most = devices.allocated[index_of(device)], devices.peak[index_of(device)]
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")
    sizes = {f"{kind}.all.{when}": size for kind in kinds for when, size in (("current", now), ("peak", most))}
    return defaultdict(int, sizes)


def _synchronize(*_, **__) -> None:
    devices.note_synchronize()


def _empty_cache() -> None:
    devices.note("empty-cache")


def _seed_current(seed) -> None:
    devices.seed(seed, devices.current())


def _set_states(new_states) -> None:
    for index, state in enumerate(new_states):
        devices.set_state(state, index)


def install() -> None:
    """Replace what the program asks ``torch.cuda`` and ``torch.accelerator``."""
    current_stream = Stream.__new__(Stream)
    current_stream.device = torch.device("cuda", 0)
    streams = {name: lambda device=None: current_stream for name in ("current_stream", "default_stream")}
    streams |= {"Stream": Stream, "Event": Event, "set_stream": lambda stream: None}
    memory = {
        "memory_allocated": _memory(devices.allocated), "max_memory_allocated": _memory(devices.peak),
        "memory_reserved": _memory(devices.allocated), "max_memory_reserved": _memory(devices.peak),
        "reset_peak_memory_stats": _reset_peak, "memory_stats": _memory_stats, "empty_cache": _empty_cache,
        "reset_accumulated_memory_stats": lambda device=None: None,
    }  # fmt: skip
    both = streams | memory | {"is_available": lambda *_, **__: devices.count() > 0, "device_count": devices.count}
    both["synchronize"] = _synchronize
    cuda = {
        "_lazy_init": devices.use, "init": devices.use, "is_initialized": lambda: devices.used,
        "_is_in_bad_fork": lambda: devices.forked, "set_device": set_device, "current_device": index_of,
        "device": CurrentDevice, "stream": lambda stream: stream or current_stream,
        "get_device_name": lambda device=None: TITLE, "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: Properties(TITLE, 9, 0, MEMORY, 132, 32, "", ""),
        "device_of": DeviceOf, "_sleep": lambda cycles: None,
        "mem_get_info": lambda device=None: (MEMORY - devices.allocated[index_of(device)], MEMORY),
        "is_bf16_supported": lambda *_, **__: True, "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer_device: True, "ipc_collect": lambda: None,
        "reset_max_memory_allocated": _reset_peak, "reset_max_memory_cached": _reset_peak,
        "memory_summary": lambda device=None, abbreviated=False: f"{devices.allocated[index_of(device)]:,} bytes allocated",
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "initial_seed": lambda: devices.states[devices.current()][0],
        "seed": lambda: _seed_current(random.getrandbits(32)),
        "seed_all": lambda: PrivateUse1Module.manual_seed_all(random.getrandbits(32)),
        "CUDAGraph": Graph, "graph_pool_handle": lambda: (0, 0),
        "manual_seed": _seed_current, "manual_seed_all": PrivateUse1Module.manual_seed_all,
        "get_rng_state": lambda device="cuda": devices.get_state(index_of(device)),
        "set_rng_state": lambda new_state, device="cuda": devices.set_state(new_state, index_of(device)),
        "get_rng_state_all": lambda: list(map(devices.get_state, range(devices.count()))),
        "set_rng_state_all": _set_states,
    }  # fmt: skip
    accelerator = {
        "current_accelerator": lambda *_, **__: torch.device("cuda"), "device_index": CurrentDevice,
        "set_device_index": set_device, "set_device_idx": set_device,
        "current_device_index": index_of, "current_device_idx": index_of,
        "get_memory_info": lambda device=None: (MEMORY - devices.allocated[index_of(device)], MEMORY),
    }  # fmt: skip
    cuda["default_generators"] = (torch.default_generator,) * devices.total
    devices.count.cache_clear = nothing = lambda *_, **__: None
    _replace(torch.cuda, both | cuda)
    for module in (torch.cuda.random, torch.cuda.memory):  # a program may import a function from there
        _replace(module, {name: value for name, value in (both | cuda).items() if name in vars(module)})
    _replace(torch.cuda.memory, {"_record_memory_history": nothing, "_dump_snapshot": nothing})
    _replace(torch.cuda.profiler, {"start": nothing, "stop": nothing})
    _replace(torch.accelerator, both | accelerator)
    torch._C._get_accelerator = lambda check=None: torch.device("cuda")  # fully_shard without a mesh asks this
    torch.Generator = Generator
    PrivateUse1Module.manual_seed_all(random.getrandbits(32))
    devices.seeded.clear()  # only what the program does counts
    _start_threads_on_gpu_0()


def _replace(module: ModuleType, names: dict) -> None:
    for name, value in names.items():
        setattr(module, name, value)


def _start_threads_on_gpu_0() -> None:
    from workshop.pretend.tensor import Dispatch, NameDevice

    original = threading.Thread.run

    def run(self):
        devices.new_thread()
        torch._C._set_only_lift_cpu_tensors(True)  # PyTorch keeps this and the modes of each thread separately
        with Dispatch(), NameDevice():
            original(self)

    threading.Thread.run = run
