"""What exercise 4 of stage 06 uses besides the lesson: parts of tensors, and PyTorch's own tensor parallelism."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from workshop.training.decoder import Transformer


def divide(tensor: torch.Tensor, group=None, dimension: int = 1) -> tuple[torch.Tensor, ...]:
    """Return equal parts of a tensor, as views, one for each rank of the group (None: all ranks).

    Raises:
        ValueError: the number of ranks does not divide the size of this dimension.
    """
    size, ranks = tensor.shape[dimension], dist.get_world_size(group)
    if size % ranks:
        raise ValueError(f"{ranks} ranks cannot share the {size} elements of dimension {dimension} of a tensor equally")
    return tensor.chunk(ranks, dimension)


def own_part(tensor: torch.Tensor, group=None, dimension: int = 1) -> torch.Tensor:
    """Return a copy of this rank's part, so that the part does not keep the whole tensor in memory."""
    return divide(tensor, group, dimension)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)


def all_gather(tensor: torch.Tensor, group=None, dimension: int = 1) -> torch.Tensor:
    """Return the parts of all ranks in one tensor. The parts must have the same shape."""
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dimension)


def parallelize_with_pytorch(model: Transformer, device: torch.device) -> Transformer:
    """Divide the layers in the blocks of a model among all ranks, in place, with tensor and sequence parallelism."""
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    row = RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "blocks.0": split,
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention": gather,
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": row,
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.mlp": gather,
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": row,
        "norm": SequenceParallel(),
        "head": gather,
    }
    return parallelize_module(model, init_device_mesh(device.type, (dist.get_world_size(),)), plan)


def pytorch_state_dict(model: Transformer) -> dict[str, torch.Tensor]:
    """Return the whole parameters of a model from ``parallelize_with_pytorch``. Call it on all ranks."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
