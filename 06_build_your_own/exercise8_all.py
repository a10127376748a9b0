"""Exercise 8: combine pipeline, data, context and tensor parallelism. Each process has a place in a mesh with four axes.
This program works as delivered, but its ranks communicate more than they must, and each of them saves whole tensors.
It imports your exercises 4, 5 and 6. Complete them first, or copy their solutions to this folder.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    NPROC=4 06_build_your_own/exercise8_run_all.sh --pp 2 --tp 2 --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise8_all.py
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
from workshop.training.tensor_parallel import all_gather, own_part  # TODO 4: remove this line

# TODO 1: Along the last axis of a mesh, the ranks of a group follow each other, so they share a node. Choose the order in which
# the axis that communicates most comes last. Look up: init_device_mesh.
AXES = ("pp", "tp", "dp", "cp")


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
        # TODO 2: Create the group self.samples, for average_gradients(). Look up: DeviceMesh, and _flatten in the notebook.
        self.pp, self.dp, self.cp, self.tp = (self.mesh.get_group(axis) for axis in ("pp", "dp", "cp", "tp"))
        # TODO 3: Create the group self.parameters in the same way, for clip_gradients().

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
    # TODO 2: Each gradient is sent alone, first along dp, then along cp. Send all of them in one call, over both axes at once.
    for group in (layout.dp, layout.cp):
        for parameter in stage.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size(group)
                dist.all_reduce(parameter.grad, group=group)


def clip_gradients(stage, layout, most):
    """Scale the gradients so that their norm over the whole model is at most ``most``; return the norm before that."""
    trained = {name: each for name, each in stage.named_parameters() if each.grad is not None}
    # TODO 3: All ranks send all of their gradients to all others, but the norm is one number. Let each rank compute the sum of
    # the squares of its gradients, and add these sums over the ranks that together hold one model. Some parameters are
    # divided along tp. Each rank of tp has a copy of the others, whose squares must count only once.
    own, everyone = {}, [None] * dist.get_world_size()
    for name, each in trained.items():
        part = 0 if layout.divided(name, each) is None else dist.get_rank(layout.tp)
        own[name, part] = each.grad.cpu()
    dist.all_gather_object(everyone, own)
    different = {place: gradient for each in everyone for place, gradient in each.items()}
    norm = sum(each.double().square().sum() for each in different.values()).sqrt().to(next(stage.parameters()).device)
    for parameter in trained.values():
        parameter.grad.mul_((most / (norm + 1e-6)).clamp(max=1).to(parameter.dtype))
    return norm


def checkpoint_state(stage, optimizer, layout):
    """Return the parameters and the optimizer state of this rank, for a checkpoint that any mesh can load."""
    state = {}
    for name, parameter in stage.named_parameters():
        dimension = layout.divided(name, parameter)
        # TODO 4: Each rank gathers and writes whole tensors. Store tensors that know which part of the whole one they are. Then
        # each rank writes its part, and any mesh can load the parts that it needs. Look up: DTensor.from_local, Shard, Replicate.
        for kind, tensor in (("parameter", parameter.detach()), *sorted(optimizer.state[parameter].items())):
            whole = dimension is None or not tensor.dim()  # TODO 4: "step" is a number, which has no parts
            state[f"{name}.{kind}"] = tensor if whole else all_gather(tensor, layout.tp, dimension)
    return state


def resume(stage, optimizer, layout, folder):
    """Load a checkpoint, which any mesh may have written, and return its number of steps."""
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the state that the checkpoint then replaces
    state = checkpoint_state(stage, optimizer, layout)
    dcp.load(state, checkpoint_id=folder)  # into these tensors
    # TODO 4: The tensors of the state are then those of this rank, and nothing is left to copy.
    for name, parameter in stage.named_parameters():
        dimension = layout.divided(name, parameter)
        for kind, tensor in (("parameter", parameter.detach()), *optimizer.state[parameter].items()):
            loaded = state[f"{name}.{kind}"]
            tensor.copy_(loaded if loaded.shape == tensor.shape else own_part(loaded, layout.tp, dimension))
    return int(next(value for name, value in state.items() if name.endswith(".step")))


def options(parser):
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=positive_int, help="the number of ranks along this axis of the mesh")
    parser.add_argument("--microbatches", type=positive_int, default=2, help="equal parts of the batch of a rank")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --folder, on any mesh")
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's classes; then --cp must be 1")


def train(device, args):
    if args.pytorch:
        from workshop.training.mesh_pytorch import train_with_pytorch  # these imports need a second

        return train_with_pytorch(device, args)
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
