"""What the recorder notes of programs with transformers: how the model is spread, what it keeps, how it is saved."""

from contextlib import contextmanager
from functools import partial

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
from torch import nn

from workshop.check.recorder import _wrap
from workshop.tensors import kept_for_backward, own_part
from workshop.training.finetuning import TrainingLog


def install(r) -> None:
    """Replace what is to be noted; ``r``: the recorder."""
    _wrap(fsdp, "fully_shard", partial(_fully_shard, r))
    for name in ("save", "async_save", "load"):
        _wrap(dcp, name, partial(_checkpoint, r, name))
    _wrap(safetensors.torch, "load_file", partial(_load_file, r))
    for module in (nn.utils, nn.utils.clip_grad):
        _wrap(module, "clip_grad_norm_", partial(_clip, r))
    _wrap(TrainingLog, "begin", partial(_begin, r))
    _wrap(TrainingLog, "write", partial(_write, r))
    nn.Module.compile = lambda self, *args, **kwargs: _compile(r, self)
    torch.compile = lambda model=None, *args, **kwargs: _compile(r, model) or model
    r.around, r.spread = partial(_around, r), partial(_spread, r)


def is_group(module) -> bool:
    """Whether fully_shard has made a group of this module."""
    return isinstance(module, fsdp.FSDPModule)


def decoder_layers(model) -> list:
    """The layers of a model: what its longest list of modules holds."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _fully_shard(r, original):
    def fully_shard(module, *args, **kwargs):
        modules = module if isinstance(module, (list, tuple)) else [module]
        plain = [
            p for each in modules for p in each.parameters() if not hasattr(p, "to_local") and p.device.type != "meta"
        ]
        policy = kwargs.get("mp_policy")
        r.note(
            "fully_shard",
            module=type(modules[0]).__name__,
            held=sum(parameter.nbytes for parameter in plain),
            offload=type(kwargs.get("offload_policy")).__name__,
            policy=[str(getattr(policy, name, None)) for name in ("param_dtype", "reduce_dtype")],
            where=r.where(),
        )
        return original(module, *args, **kwargs)

    return fully_shard


def _checkpoint(r, name, original):
    def checkpoint(*args, **kwargs):
        writer = kwargs.get("storage_writer")
        r.note("dcp", name=name, writer=type(writer).__name__ if writer is not None else "", where=r.where())
        r.quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            r.quiet -= 1

    return checkpoint


def _load_file(r, original):
    def load_file(filename, *args, **kwargs):
        tensors = original(filename, *args, **kwargs)
        r.note("loaded_whole", bytes=sum(tensor.nbytes for tensor in tensors.values()), where=r.where())
        return tensors

    return load_file


def _clip(r, original):
    def clip_grad_norm_(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        parts = [own_part(parameter.grad).detach().float() for parameter in parameters if parameter.grad is not None]
        r.note("clip", norms=[torch.linalg.vector_norm(part).item() for part in parts], where=r.where())
        return original(parameters, *args, **kwargs)

    return clip_grad_norm_


def _begin(r, original):
    def begin(self, validation_loss, completion, step=0):
        r.note("begin", validation_loss=float(validation_loss), step=step, where=r.where())
        return original(self, validation_loss, completion, step)

    return begin


def _write(r, original):
    def write(self, step, losses, validation_loss, seconds):
        r.note(
            "tokens",
            step=step,
            losses=[float(loss) for loss in losses],
            validation_loss=float(validation_loss),
            where=r.where(),
        )
        return original(self, step, losses, validation_loss, seconds)

    return write


def _compile(r, module):
    """Note it, and compile nothing: that takes half a minute."""
    r.note("compile", module=type(module).__name__)


@contextmanager
def _around(r, _):
    """Count what a training forward keeps for the backward."""
    if r.quiet or not torch.is_grad_enabled():
        yield
        return
    with kept_for_backward() as kept:
        yield
    r.note("kept", bytes=kept.bytes)


def _spread(r, model) -> None:
    """Note how the model is spread, in the first step: no layer is gathered then."""
    named = dict(model.named_parameters())
    layers = decoder_layers(model)
    r.note(
        "layout",
        own=sum(own_part(parameter).nbytes for parameter in named.values()),
        whole=sum(parameter.numel() * parameter.element_size() for parameter in named.values()),
        whole_here=[name for name, parameter in named.items() if own_part(parameter).numel() == parameter.numel()],
        dtypes=sorted({str(parameter.dtype) for parameter in named.values()}),
        groups=sum(is_group(each) for each in model.modules()),
        layers=len(layers),
        layer_groups=sum(is_group(layer) for layer in layers),
        buffers=[name for name, buffer in model.named_buffers() if not _right(name, buffer, model)],
        where=r.where(),
    )


def _right(name: str, buffer, model) -> bool:
    """Whether a buffer of the rotary embedding holds what it should: theta ** -(2 i / d), from 1 downwards."""
    if not name.endswith("inv_freq"):
        return True
    theta = model.config.rope_parameters["rope_theta"]
    exponents = torch.arange(len(buffer), dtype=torch.float32) / len(buffer)
    return torch.allclose(buffer.detach().float().cpu(), theta**-exponents, rtol=1e-2)
