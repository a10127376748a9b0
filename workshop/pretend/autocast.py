"""Autocast on pretended GPUs: PyTorch's lists of operations, for the device type of the pretended tensors.

The lists are those of https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior. An operation in no list
computes in the type of its arguments.
"""

import torch
from torch.utils._pytree import tree_map_only

from workshop.pretend import devices
from workshop.pretend.devices import NAME
from workshop.pretend.tensor import PretendTensor

LOWER = """conv1d conv2d conv3d linear matmul mm mv bmm addmm addmv baddbmm addbmm scaled_dot_product_attention"""
FULL = """softmax.int log_softmax.int layer_norm group_norm nll_loss cross_entropy_loss mse_loss l1_loss smooth_l1_loss kl_div
    binary_cross_entropy_with_logits exp log pow.Tensor_Scalar norm.Scalar cumsum rsqrt"""
_libraries: list = []  # PyTorch forgets an implementation when its library is freed


def install() -> None:
    """Let ``torch.autocast("cuda")`` cast the arguments of operations on pretended GPUs."""
    operations = torch.library.Library("aten", "IMPL")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend((operations, others))
    for name in LOWER.split():
        operations.impl(name, _casting(name, None), "AutocastPrivateUse1")
    for name in FULL.split():
        operations.impl(name, _casting(name, torch.float32), "AutocastPrivateUse1")
    autocast = torch.amp.autocast_mode.autocast
    original, is_enabled, get_dtype = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def __init__(self, device_type, dtype=None, *args, **kwargs):
        if device_type == "cuda":
            device_type, dtype = NAME, dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    autocast.__init__ = __init__
    scale = torch.amp.GradScaler.scale

    def noted(self, outputs):
        if self.is_enabled():
            devices.note("scaled")
        return scale(self, outputs)

    torch.amp.GradScaler.scale = noted
    torch.is_autocast_enabled = lambda device_type="cuda": is_enabled(NAME if device_type == "cuda" else device_type)
    torch.get_autocast_dtype = lambda device_type: get_dtype(NAME if device_type == "cuda" else device_type)


def _casting(name: str, to: torch.dtype | None):
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args, **kwargs):
        dtype = to or torch.get_autocast_dtype(NAME)

        def cast(tensor):
            floating = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
            return tensor.to(dtype) if floating else tensor

        with torch._C._ExcludeDispatchKeyGuard(autocast):
            args, kwargs = tree_map_only(PretendTensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return run
