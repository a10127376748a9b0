"""Run a program that is written for CUDA GPUs on the CPU: its tensors stay on the CPU, and NCCL is replaced by gloo.

Nearly all public programs say "cuda" and "nccl". What depends on a real GPU (speed, memory, kernels) is not imitated.
"""

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.jit import _builtins
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

from workshop.tensors import attend_locally, give_futures, in_its_mode, is_dtensor

GPU = ("cuda", "hip", "xpu", "mps")
# Functions of torch.cuda that do nothing here, those that return a number, and those that return what the CPU returns.
NOTHING = """synchronize empty_cache init ipc_collect reset_peak_memory_stats reset_max_memory_allocated set_stream
    set_per_process_memory_fraction reset_accumulated_memory_stats set_sync_debug_mode"""
ZERO = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
    utilization"""
LIBRARY = os.path.dirname(torch.__file__)


def is_gpu(device: object) -> bool:
    """Whether a device, in any form that torch accepts, is a GPU."""
    if isinstance(device, str):
        return device.partition(":")[0] in GPU
    return isinstance(device, int) and not isinstance(device, bool)


def _marked(cls: type, module: nn.Module, process_group: Any = None) -> nn.Module:
    """Leave a model as it is, because SyncBatchNorm needs a GPU, and remember which layers would exchange their statistics."""
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            layer.synchronized = True
    return module


class _OnCpu(type):
    """The type of the replacement of a class that gets a device: its instances are those of the original."""

    original: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = args[0] if args else kwargs.get("type", kwargs.get("device"))
        return cls.original("cpu") if is_gpu(kind) else cls.original(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.original)


class Device(metaclass=_OnCpu):
    """In place of ``torch.device``."""

    original = torch.device


class Generator(metaclass=_OnCpu):
    """In place of ``torch.Generator``."""

    original = torch.Generator


def _without_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function with "cpu" for each argument that is a GPU."""

    def called(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(each, str) and is_gpu(each) else each for each in args)
        for name in ("device", "map_location", "device_type"):
            if is_gpu(kwargs.get(name)):
                kwargs[name] = "cpu"
        if isinstance(kwargs.get("map_location"), dict):
            kwargs["map_location"] = "cpu"
        return function(*args, **kwargs)

    if operation := _builtins._find_builtin(function):
        # TorchScript knows the functions of torch by their ids.
        _builtins._register_builtin(called, operation)
    called.__name__, called.__doc__ = getattr(function, "__name__", ""), function.__doc__
    return called


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and (is_gpu(args[0])):
            args = ("cpu", *args[1:])
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    return to


class Event:
    """In place of ``torch.cuda.Event``: the time of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter()

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.seconds - self.seconds)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    wait = record


class Stream:
    """In place of ``torch.cuda.Stream``: everything runs at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def synchronize(self, *_: Any) -> None:
        return None

    wait_stream = wait_event = record_event = synchronize


def install(count: int) -> None:
    """Let this process run code for GPUs on the CPU.

    Args:
        count: the number of GPUs that the program sees; with 0, ``torch.cuda.is_available()`` is False.
    """
    # For `with torch.device("meta")`, torch makes a set of its functions once; it must contain the original ones.
    _device_constructors()
    torch.device, torch.Generator = Device, Generator
    for owner in (torch.Tensor, nn.Module):
        owner.to = _tensor_to(owner.to)
        owner.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_: self
    factories = (
        "tensor as_tensor zeros ones empty full rand randn randint randperm arange linspace eye zeros_like ones_like"
    )
    for name in (
        *factories.split(),
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "load",
        "set_default_device",
    ):
        setattr(torch, name, _without_gpu(getattr(torch, name)))
    _autocast()
    _groups()
    _cuda(count)
    _accelerate()
    _deepspeed()
    if count:
        _lightning(count)
    functional: Any = nn.functional
    functional.scaled_dot_product_attention = _also_of_parts(functional.scaled_dot_product_attention)
    nn.SyncBatchNorm.convert_sync_batchnorm = classmethod(_marked)
    nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None
    wrap = DistributedDataParallel.__init__

    def without_devices(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        wrap(self, module, None, None, *args, **kwargs)

    DistributedDataParallel.__init__ = without_devices


def _also_of_parts(attention: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(attention)
    def attend(query: Any, *args: Any, **kwargs: Any) -> Any:
        return (partial(attend_locally, attention) if is_dtensor(query) else attention)(query, *args, **kwargs)

    return attend


def _autocast() -> None:
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        if is_gpu(device_type) and dtype is torch.float16:
            dtype, enabled = None, False  # the CPU computes in float16 a hundred times slower than in float32
        original(self, "cpu" if is_gpu(device_type) else device_type, dtype, enabled, *args, **kwargs)

    torch.autocast.__init__ = init
    scaler = torch.amp.GradScaler.__init__

    def on_cpu(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, "cpu" if is_gpu(device) else device, *args, **kwargs)

    torch.amp.GradScaler.__init__ = on_cpu


def _groups() -> None:
    """NCCL needs a GPU for each rank, so use gloo."""

    def on_gloo(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], _gloo(args[place]), *args[place + 1 :])
            elif "backend" in kwargs:
                kwargs["backend"] = _gloo(kwargs["backend"])
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            return original(*args, **kwargs)

        return called

    changed = {
        "init_process_group": on_gloo(c10d.init_process_group, 0),
        "new_group": on_gloo(c10d.new_group, 2),
        "barrier": partial(_barrier, c10d.barrier),
        "all_reduce": partial(in_its_mode, c10d.all_reduce),
    }
    for name, function in changed.items():
        for owner in (dist, c10d, device_mesh):  # the same object in all, as before
            if hasattr(owner, name):
                setattr(owner, name, function)
    dist.is_nccl_available = lambda: True
    for owner in (device_mesh, dist):
        owner.init_device_mesh = _without_gpu(owner.init_device_mesh)


def _barrier(original: Callable[..., Any], group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return original(group, async_op)


def _gloo(backend: Any) -> Any:
    name = backend.lower() if isinstance(backend, str) else ""
    if "nccl" not in name and "cuda" not in name:
        return backend
    give_futures()
    return "gloo"


def _accelerate() -> None:
    """Started by torchrun without a GPU, Accelerate would form a group whose processes do not train together."""
    if state := sys.modules.get("accelerate.state"):
        original = state.PartialState.__init__

        @wraps(original)
        def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
            original(self, True, **{name: value for name, value in kwargs.items() if name != "backend"})

        state.PartialState.__init__ = init
        _shard_on_cpu(state)


def _shard_on_cpu(state: Any) -> None:
    """Without a GPU, Accelerate ignores a plugin for FSDP."""
    original = state.AcceleratorState.__init__

    @wraps(original)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            from torch.distributed.fsdp import _init_utils

            _init_utils._get_device_from_device_id = lambda *args, **kwargs: torch.device("cpu")  # without an index

    state.AcceleratorState.__init__ = init


def _deepspeed() -> None:
    """DeepSpeed refuses float16 on the CPU, so let it compute in bfloat16."""
    config = sys.modules.get("deepspeed.runtime.config")
    if original := getattr(getattr(config, "DeepSpeedConfig", None), "_initialize_params", None):

        @wraps(original)
        def initialize(self: Any, settings: dict[str, Any]) -> None:
            half = settings.get("fp16")
            if isinstance(half, dict) and half.get("enabled"):
                half["enabled"] = False
                settings["bf16"] = {"enabled": True}
                _half_as_bfloat16()
            original(self, settings)

        config.DeepSpeedConfig._initialize_params = initialize  # type: ignore[union-attr]


def _half_as_bfloat16() -> None:
    """Tell a program that its DeepSpeed engine computes in float16, and give it bfloat16 for it."""
    engine: Any = sys.modules["deepspeed.runtime.engine"]
    enabled = engine.DeepSpeedEngine.fp16_enabled
    if hasattr(enabled, "__wrapped__"):
        return  # a second engine

    @wraps(enabled)
    def fp16_enabled(self: Any) -> bool:
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        return bool(enabled(self)) if asks.partition(".")[0] == "deepspeed" else True

    engine.DeepSpeedEngine.fp16_enabled = fp16_enabled
    torch.Tensor.half = torch.Tensor.bfloat16


def _lightning(count: int) -> None:
    """Lightning finds no GPU, so let it start a process on the CPU for each GPU that the program asks for."""
    for name, kind in (
        ("lightning.pytorch", "Trainer"),
        ("pytorch_lightning", "Trainer"),
        ("lightning.fabric", "Fabric"),
    ):
        if name in sys.modules:
            owner = getattr(sys.modules[name], kind)
            owner.__init__ = _on_cpu_processes(owner.__init__, count)


def _on_cpu_processes(original: Callable[..., None], count: int) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        chosen, devices = kwargs.get("accelerator", "auto"), kwargs.get("devices", "auto")
        if chosen in ("gpu", "cuda") or (chosen == "auto" and devices in ("auto", -1, "-1")):
            kwargs |= {"accelerator": "cpu", "devices": _number(kwargs.get("devices"), count)}
        if str(kwargs.get("precision", "")).startswith("16"):
            kwargs["precision"] = "bf16-mixed"  # the CPU has no float16
        original(self, *args, **kwargs)

    return init


def _number(devices: Any, count: int) -> int:
    """How many GPUs Lightning would use, of ``count``: ``devices`` is a number, "0,1", [0, 1], "auto", -1 or None."""
    if isinstance(devices, str) and "," in devices:
        devices = devices.split(",")
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return count if devices in (None, "auto", -1, "-1") else int(devices)


def _cuda(count: int) -> None:
    """Let ``torch.cuda`` and ``torch.accelerator`` answer as with ``count`` GPUs; torch itself gets the true answer."""
    cuda, accelerator = torch.cuda, torch.accelerator

    def answer(module: Any, name: str, value: Any) -> None:
        original = getattr(module, name, None)

        def called(*args: Any, **kwargs: Any) -> Any:
            inside = sys._getframe(1).f_code.co_filename.startswith(LIBRARY)
            return original(*args, **kwargs) if inside and original else value(*args, **kwargs)

        setattr(module, name, called)

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
            answer(module, "is_available", lambda: True)
            answer(module, "device_count", lambda: count)
        answer(accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
        answer(dist, "get_default_backend_for_device", lambda *_: "nccl")
    cuda.set_device = accelerator.set_device_index = accelerator.set_device_idx = choose
    for module, name in ((cuda, "current_device"), (accelerator, "current_device_index")):
        answer(module, name, lambda: current[0])
    for name in NOTHING.split():
        answer(cuda, name, lambda *_, **__: None)
    for name in ZERO.split():
        answer(cuda, name, lambda *_, **__: 0)
    accelerator.synchronize = lambda *_: None
    properties = SimpleNamespace(name="CPU", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=1)
    answer(cuda, "get_device_properties", lambda *_: properties)
    answer(cuda, "get_device_name", lambda *_: "CPU")
    answer(cuda, "get_device_capability", lambda *_: (9, 0))
    answer(cuda, "is_bf16_supported", lambda *_, **__: True)
    answer(cuda, "mem_get_info", lambda *_: (80 * 2**30, 80 * 2**30))
    answer(cuda, "memory_stats", lambda *_: defaultdict(int))
    answer(cuda, "memory_summary", lambda *_, **__: "")
    _random_states()
    _devices_of_fsdp()
    answer(cuda, "current_stream", Stream)
    answer(cuda, "default_stream", Stream)
    answer(cuda, "stream", lambda *_: contextlib.nullcontext())
    answer(cuda, "device", lambda device=0, *_: _chosen(choose, device))
    cuda.Event, cuda.Stream = Event, Stream
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_: None)


def _random_states() -> None:
    """Let the states of the generators of GPUs, and of "devices" on the CPU, be that of the CPU."""
    for module in (torch.cuda, torch.cpu):  # not through answer(): torch.random.fork_rng() calls them too
        module.get_rng_state = lambda *_: torch.get_rng_state()
        module.set_rng_state = lambda *_, **__: None
    torch.cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    torch.cuda.set_rng_state_all = lambda *_: None


def _devices_of_fsdp() -> None:
    """Let FSDP count one device for each process of the node, to form the groups of HYBRID_SHARD."""
    cores = torch.cpu.device_count

    def per_node() -> int:
        of_fsdp = sys._getframe(1).f_code.co_filename.endswith("fsdp/_init_utils.py")
        return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if of_fsdp else cores()

    torch.cpu.device_count = per_node


@contextlib.contextmanager
def _chosen(choose: Callable[..., None], device: Any) -> Any:
    choose(device)
    yield
