"""Run a program that is written for CUDA GPUs on the CPU: its tensors stay on the CPU, and NCCL is replaced by gloo.

Nearly all public programs say "cuda" and "nccl". What depends on a real GPU (speed, memory, kernels) is not imitated.
"""

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.jit import _builtins
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

from workshop.check import cuda_answers, nccl_on_gloo
from workshop.tensors import attend_locally, is_dtensor

GPU = ("cuda", "hip", "xpu", "mps")
# Functions that get a device, beside those that torch knows as constructors.
OTHERS = """zeros_like ones_like empty_like full_like rand_like randn_like randint_like normal load set_default_device
    set_default_tensor_type"""
CAPTURABLE = "_get_capturable_supported_devices"
CUDA_TENSOR = "torch.cuda."  # "torch.cuda.FloatTensor" names a type of tensors


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


def _off_gpu(value: Any) -> Any:
    """The CPU in place of a device; torch.load() refuses "cpu:0"."""
    if isinstance(value, Device):
        return "cpu" if getattr(value, "type", "") == "cpu" else value
    if not isinstance(value, str):
        return value
    if value.startswith("cpu:"):  # f"{torch.accelerator.current_accelerator().type}:{index}"
        return "cpu"
    return "cpu" if is_gpu(value) else value.replace(CUDA_TENSOR, "torch.") if value.startswith(CUDA_TENSOR) else value


def _without_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function with "cpu" for each argument that is a GPU."""

    def called(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_off_gpu, args))
        kwargs.pop("pin_memory", None)
        for name in ("device", "map_location", "device_type"):
            if is_gpu(kwargs.get(name)):
                kwargs[name] = "cpu"
        if "map_location" in kwargs:
            location = kwargs["map_location"]
            kwargs["map_location"] = "cpu" if isinstance(location, dict) else _off_gpu(location)
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


def install(count: int) -> None:
    """Let this process run code for GPUs on the CPU.

    Args:
        count: the number of GPUs that the program sees; with 0, ``torch.cuda.is_available()`` is False.
    """
    # For `with torch.device("meta")`, torch makes a set of its functions once; it must contain the original ones.
    constructors = _device_constructors()
    torch.device, torch.Generator = Device, Generator
    for owner in (torch.Tensor, nn.Module):
        owner.to = _tensor_to(owner.to)
    for owner in (torch.Tensor, nn.Module, torch.UntypedStorage):  # the last one in functions that torch.load() gets
        owner.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided", "type"):
        setattr(torch.Tensor, name, _without_gpu(getattr(torch.Tensor, name)))
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if (callable(function) and function in constructors) or (owner is torch and name in OTHERS.split()):
                setattr(owner, name, _without_gpu(function))
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, CAPTURABLE):  # the devices that allow capturable=True
            setattr(module, CAPTURABLE, lambda *_, **__: ["cpu"])
    _autocast()
    nccl_on_gloo.install()
    for owner in (device_mesh, dist):
        owner.init_device_mesh = _without_gpu(owner.init_device_mesh)
    cuda_answers.install(count)
    _devices_of_fsdp()
    if utilities := sys.modules.get("torch.distributed.fsdp._init_utils"):
        _shard_without_gpu(utilities)
    if collecting := sys.modules.get("torch.distributed.fsdp._optim_utils"):
        _copies_of_states(collecting)
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
        if dtype is torch.float16:  # also for "cpu": the type of a device that was "cuda" in the program
            dtype, enabled = None, False  # the CPU computes in float16 a hundred times slower than in float32
        original(self, "cpu" if is_gpu(device_type) else device_type, dtype, enabled, *args, **kwargs)

    torch.autocast.__init__ = init
    scaler = torch.amp.GradScaler.__init__

    def on_cpu(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, "cpu" if is_gpu(device) else device, *args, **kwargs)

    torch.amp.GradScaler.__init__ = on_cpu


def _shard_without_gpu(utilities: Any) -> None:
    """FullyShardedDataParallel refuses a model on the CPU, unless its device_id says so."""
    sharding: Any = torch.distributed.fsdp.FullyShardedDataParallel
    original = sharding.__init__
    utilities._get_device_from_device_id = lambda *args, **kwargs: torch.device("cpu")  # without an index
    utilities._check_module_states_for_sync_module_states = lambda states: None

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is None:
            kwargs["device_id"] = torch.device("cpu")
        original(self, *args, **kwargs)

    sharding.__init__ = init


def _accelerate() -> None:
    """Started by torchrun without a GPU, Accelerate would form a group whose processes do not train together."""
    if state := sys.modules.get("accelerate.state"):
        original = state.PartialState.__init__

        @wraps(original)
        def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
            original(self, True, **{name: value for name, value in kwargs.items() if name != "backend"})
            if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # on a GPU, DeepSpeed makes the process group
                from deepspeed import comm

                comm.init_distributed(dist_backend=self.backend, auto_mpi_discovery=False)

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
            # A further AcceleratorState() reads it.
            state.PartialState._shared_state["distributed_type"] = self.distributed_type
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            from torch.distributed.fsdp import _init_utils

            _shard_without_gpu(_init_utils)

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


def _copies_of_states(collecting: Any) -> None:
    """FSDP1 gathers one state of the optimizer after the other into the same memory, and copies each only from a GPU."""
    original = collecting._unflatten_orig_param_states

    def unflatten(parameters: Any, states: Any, name: str, *args: Any) -> None:
        original(parameters, states, name, *args)
        for state in states.values():
            state[name] = state[name].clone()

    collecting._unflatten_orig_param_states = unflatten


def _devices_of_fsdp() -> None:
    """Let FSDP count one device for each process of the node, to form the groups of HYBRID_SHARD."""
    cores = torch.cpu.device_count

    def per_node() -> int:
        of_fsdp = sys._getframe(1).f_code.co_filename.endswith("fsdp/_init_utils.py")
        return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if of_fsdp else cores()

    torch.cpu.device_count = per_node
