"""Train on a mesh, with gradients that are clipped by the norm of the whole model.

N processes:  torchrun --standalone --nproc-per-node=4 solutions/06_build_your_own/exercise9_find_the_bug_norm.py --pp 2 --tp 2
"""

import math
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exercise4_tensor import parallelize
from exercise5_pipeline import Pipeline
from exercise6_ring import ring_attention, shard_sequence
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from workshop.training.arguments import positive_int
from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer
from workshop.training.mesh import mesh_sizes, report_mesh, save
from workshop.training.pipeline import split

# The ranks of tp communicate most. Along the last axis of a mesh they follow each other, so they share a node.
AXES = ("pp", "dp", "cp", "tp")


class Layout:
    """The place of this rank in a mesh, and the part of the model and of the data that belongs to this place.

    Attributes:
        mesh: the DeviceMesh with the axes pp, dp, cp and tp.
        pp, dp, cp, tp: the group of this rank along each axis.
        samples: the group of the ranks that have the same parameters and different tokens.
        parameters: the group of the ranks that have one whole model together.

    Raises:
        ValueError: the sizes of the axes do not multiply to the number of processes.
    """

    def __init__(self, device, **sizes):
        if (places := math.prod(sizes.values())) != dist.get_world_size():
            raise ValueError(f"a mesh of {sizes} has {places} places for {dist.get_world_size()} processes")
        self.mesh = init_device_mesh(device.type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
        self.samples = self.mesh["dp", "cp"]._flatten("samples").get_group()
        self.pp, self.dp, self.cp, self.tp = (self.mesh.get_group(axis) for axis in ("pp", "dp", "cp", "tp"))
        self.parameters = self.mesh["pp", "tp"]._flatten("parameters").get_group()

    def own_batch(self, inputs, targets):
        """Return this rank's sequences of a global batch, and of each of them this rank's tokens."""
        size, rank = dist.get_world_size(self.dp), dist.get_rank(self.dp)
        if len(inputs) % size:
            raise ValueError(f"dp = {size} does not divide the {len(inputs)} sequences of a global batch")
        return [shard_sequence(each[rank::size], 1, self.cp) for each in (inputs, targets)]

    def build(self, model, length, device):
        """Divide a Transformer, which is equal on all ranks, and return this rank's part: one stage of the pipeline."""
        if length % (parts := 2 * dist.get_world_size(self.cp) * dist.get_world_size(self.tp)):
            raise ValueError(f"2 cp tp = {parts} does not divide {length} tokens")
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        parallelize(model, self.tp)
        for block in model.blocks:
            block.attention.attend = lambda query, key, value: ring_attention(query, key, value, self.cp)
        stage = split(model, dist.get_world_size(self.pp))[dist.get_rank(self.pp)].to(device)
        stage.own_positions = shard_sequence(torch.arange(length, device=device), 0, self.cp)
        return stage

    def divided(self, name, parameter):
        """Return the dimension along which the ranks of tp divide a parameter of the stage; None: each has all of it."""
        sizes = zip(parameter.shape, self.shapes[name], strict=True)
        return next((dimension for dimension, (own, whole) in enumerate(sizes) if own != whole), None)


def average_gradients(stage, layout):
    """Average the gradients over the ranks that have the same parameters and different tokens."""
    gradients = [each.grad for each in stage.parameters() if each.grad is not None]
    together = torch.cat([each.flatten() for each in gradients]) / dist.get_world_size(layout.samples)
    dist.all_reduce(together, group=layout.samples)
    for gradient, values in zip(gradients, together.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(values.view_as(gradient))


def clip_gradients(stage, layout, most):
    """Scale the gradients so that their norm over the whole model is at most ``most``; return the norm before that."""
    trained = {name: each for name, each in stage.named_parameters() if each.grad is not None}
    total = torch.zeros((), dtype=torch.float64, device=next(stage.parameters()).device)
    for name, parameter in trained.items():
        copies = dist.get_world_size(layout.tp) if layout.divided(name, parameter) is None else 1
        total += parameter.grad.double().square().sum() / copies  # otherwise, each of them would be added
    dist.all_reduce(total, group=layout.parameters)
    norm = total.sqrt()
    for parameter in trained.values():
        parameter.grad.mul_((most / (norm + 1e-6)).clamp(max=1).to(parameter.dtype))
    return norm


def checkpoint_state(stage, optimizer, layout):
    """Return the parameters and the optimizer state of this rank, for a checkpoint that any mesh can load."""
    state = {}
    for name, parameter in stage.named_parameters():
        dimension = layout.divided(name, parameter)
        placement = Replicate() if dimension is None else Shard(dimension)
        for kind, tensor in (("parameter", parameter.detach()), *sorted(optimizer.state[parameter].items())):
            # A DTensor knows its place in the whole tensor: each rank writes its part, and another mesh can load other parts.
            whole = not tensor.dim()  # "step" is a number
            state[f"{name}.{kind}"] = tensor if whole else DTensor.from_local(tensor, layout.mesh["tp"], [placement])
    return state


def resume(stage, optimizer, layout, folder):
    """Load a checkpoint, which any mesh may have written, and return its number of steps."""
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the state that the checkpoint then replaces
    state = checkpoint_state(stage, optimizer, layout)
    dcp.load(state, checkpoint_id=folder)  # into these tensors
    return int(next(value for name, value in state.items() if name.endswith(".step")))


def options(parser):
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=positive_int, help="the number of ranks along this axis of the mesh")
    parser.add_argument("--microbatches", type=positive_int, default=2, help="equal parts of the batch of a rank")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --folder, on any mesh")


def train(device, args):
    layout, checkpoint = Layout(device, **mesh_sizes(args)), f"{args.folder}/checkpoint"
    torch.manual_seed(SEED)
    stage = layout.build(Transformer(replace(args.config, tied=False)).to(args.dtype), args.length, device)
    pipeline = Pipeline(stage, loss_of, args.microbatches, group=layout.pp)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3, foreach=False)
    done = resume(stage, optimizer, layout, checkpoint) if args.resume else 0
    log = Log(args, device, done)
    for inputs, targets in islice(batches(args), done, None):
        loss = pipeline.step(*(each.to(device) for each in layout.own_batch(inputs, targets)))
        average_gradients(stage, layout)
        clip_gradients(stage, layout, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    save(checkpoint_state(stage, optimizer, layout), checkpoint)
    log.end()
    report_mesh(layout.mesh)


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options, divides=""))
