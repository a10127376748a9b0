"""Exercise 8 of stage 06 with PyTorch's own classes: the same training on the same mesh, and the same checkpoint.

``parallelize_module`` divides the layers along tp, ``torch.distributed.pipelining`` runs the stages of pp, and ``fully_shard``
averages the gradients along dp. Unlike the exercise, ``fully_shard`` also divides parameters, gradients and optimizer state along
dp, and ``parallelize_module`` also divides the embeddings and the output layer along tp.
"""

import argparse
import warnings
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from workshop.training.building import SEED, Log, batches, loss_of
from workshop.training.decoder import Transformer
from workshop.training.mesh import mesh_sizes, report_mesh, save
from workshop.training.pipeline import Stage, split

GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
SCATTER = RowwiseParallel(output_layouts=Shard(1))
# Between these modules, each rank of tp has its part of each sequence (dimension 1 of the activations).
PLAN = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm1": SequenceParallel(),
    "blocks.*.attention": GATHER,
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.output": SCATTER,
    "blocks.*.norm2": SequenceParallel(),
    "blocks.*.mlp": GATHER,
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": SCATTER,
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def train_with_pytorch(device: torch.device, args: argparse.Namespace) -> None:
    """Train as the solution of exercise 8 does, with the same options, and write the same checkpoint.

    ``--cp`` must be 1, which ``check_combination`` of ``building.py`` has seen: PyTorch's ``context_parallel`` refuses the CPU.
    """
    from torch.distributed import pipelining  # this import needs a second

    sizes = mesh_sizes(args)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(SEED)
    stage = build(Transformer(replace(args.config, tied=False)).to(device, args.dtype), mesh)
    rank, stages = mesh.get_local_rank("pp"), sizes["pp"]
    place = pipelining.PipelineStage(stage, rank, stages, device, group=mesh.get_group("pp"))
    schedule = pipelining.Schedule1F1B(place, args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3, foreach=False)
    checkpoint = f"{args.folder}/checkpoint"
    done = resume(stage, optimizer, checkpoint) if args.resume else 0
    log = Log(args, device, done)
    for batch in islice(batches(args), done, None):
        inputs, targets = (each[mesh.get_local_rank("dp") :: sizes["dp"]].to(device) for each in batch)
        losses: list[torch.Tensor] = []
        schedule.step(*((inputs,) if rank == 0 else ()), target=targets, losses=losses, return_outputs=False)
        clip_gradients(stage, mesh.get_group("pp"), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.step(torch.stack(losses).mean().detach() if losses else None)
    save(checkpoint_state(stage, optimizer), checkpoint)
    log.end()
    report_mesh(mesh)


def build(model: Transformer, mesh: DeviceMesh) -> Stage:
    """Divide a model, which is equal on all ranks, and return this rank's stage of the pipeline."""
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], PLAN)
    stage = split(model, mesh["pp"].size())[mesh.get_local_rank("pp")]
    if mesh["dp"].size() > 1:
        if mesh["tp"].size() > 1:
            mesh["dp", "tp"]._flatten("parts")  # so that PyTorch adds the norms of all parts in one call
        # The output of ``head`` is a view, and a warning says that it must not be changed in place. loss_of() does not.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
    return stage


def clip_gradients(stage: nn.Module, stages: dist.ProcessGroup, most: float) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``most``; return the norm before that."""
    parameters = list(stage.parameters())
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # over the parts of dp and tp, but not over the stages of the pipeline
    square = norm.double() ** 2
    dist.all_reduce(square, group=stages)
    nn.utils.clip_grads_with_norm_(parameters, most, square.sqrt().to(norm.dtype))
    return square.sqrt()


def checkpoint_state(stage: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters and the optimizer state with the names of the exercise. Divided tensors are DTensors already."""
    state = {}
    for name, parameter in stage.named_parameters():
        for kind, tensor in (("parameter", parameter.detach()), *sorted(optimizer.state[parameter].items())):
            state[f"{name}.{kind}"] = tensor
    return state


def resume(stage: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
    """Load a checkpoint of any mesh, of the exercise or of this program, and return its number of steps."""
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the state that the checkpoint then replaces
    optimizer.zero_grad()
    state = checkpoint_state(stage, optimizer)
    dcp.load(state, checkpoint_id=folder)
    return int(next(value for name, value in state.items() if name.endswith(".step")))
