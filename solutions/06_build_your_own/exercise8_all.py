"""Combine pipeline, data, context and tensor parallelism: each process has a place in a mesh with four axes.

8 processes:  torchrun --standalone --nproc-per-node=8 solutions/06_build_your_own/exercise8_all.py --pp 2 --dp 1 --cp 2 --tp 2
Slurm:        sbatch solutions/06_build_your_own/launch_all_2N4G.sh
"""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exercise4_tensor import ColumnParallelLinear, RowParallelLinear, parallelize
from exercise5_pipeline import Pipeline
from exercise6_ring import ring_attention, shard_sequence
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from workshop.training.arguments import positive_int
from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer
from workshop.training.pipeline import split

AXES = ("pp", "dp", "cp", "tp")  # neighbours in tp communicate most: their ranks follow each other, on one node


class Layout:
    """The mesh of a training: the group of this rank along each axis, and along two of them together.

    Raises:
        ValueError: the sizes do not multiply to the number of processes.
    """

    def __init__(self, device, sizes):
        product, world_size = sizes[0] * sizes[1] * sizes[2] * sizes[3], dist.get_world_size()
        if product != world_size:
            raise ValueError(f"a mesh of {' x '.join(map(str, sizes))} has {product} places for {world_size} processes")
        self.mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=AXES)
        self.pp, self.dp, self.cp, self.tp = (self.mesh.get_group(axis) for axis in AXES)
        self.samples = self.mesh["dp", "cp"]._flatten("samples").get_group()  # ranks with the same parameters, other tokens
        self.parameters = self.mesh["pp", "tp"]._flatten("parameters").get_group()  # ranks that share one model

    def own_batch(self, inputs, targets):
        """Return this rank's sequences, and of each of them its pieces."""
        size, rank = dist.get_world_size(self.dp), dist.get_rank(self.dp)
        if len(inputs) % size:
            raise ValueError(f"dp = {size} does not divide the {len(inputs)} sequences of a global batch")
        return [shard_sequence(each[rank::size], 1, self.cp) for each in (inputs, targets)]

    def build(self, model, length, device):
        """Divide a Transformer, which is equal on all ranks, and return the stage of this rank."""
        if length % (2 * dist.get_world_size(self.cp) * dist.get_world_size(self.tp)):
            raise ValueError(f"2 cp tp = {2 * self.mesh['cp'].size() * self.mesh['tp'].size()} does not divide {length} tokens")
        parallelize(model, self.tp)
        for block in model.blocks:
            block.attention.attend = lambda query, key, value: ring_attention(query, key, value, self.cp)
        stage = split(model, dist.get_world_size(self.pp))[dist.get_rank(self.pp)].to(device)
        stage.own_positions = shard_sequence(torch.arange(length, device=device), 0, self.cp)
        return stage


def divided_parameters(stage):
    """Return the dimension along which the ranks of tp divide a parameter, for each divided parameter."""
    layers = [each for each in stage.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    found = {getattr(layer, name): dimension for layer in layers for name, dimension in layer.divided.items()}
    return {parameter: dimension for parameter, dimension in found.items() if parameter is not None}


def average_gradients(stage, group):
    """Average the gradients over the ranks with other tokens: all in one call."""
    gradients = [each.grad for each in stage.parameters() if each.grad is not None]
    together = torch.cat([each.flatten() for each in gradients]) / dist.get_world_size(group)
    dist.all_reduce(together, group=group)
    for gradient, values in zip(gradients, together.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(values.view_as(gradient))


def clip_gradients(stage, layout, most):
    """Scale the gradients so that their norm over the whole model is at most ``most``; return the norm before that."""
    divided, copies = divided_parameters(stage), dist.get_world_size(layout.tp)
    total = torch.zeros((), dtype=torch.float64, device=next(stage.parameters()).device)
    for parameter in stage.parameters():
        if parameter.grad is not None:
            square = parameter.grad.double().square().sum()
            total += square if parameter in divided else square / copies  # all ranks of tp have the others
    dist.all_reduce(total, group=layout.parameters)
    norm = total.sqrt()
    for parameter in stage.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_((most / (norm + 1e-6)).clamp(max=1).to(parameter.dtype))
    return norm


def checkpoint_state(stage, optimizer, layout):
    """Return what a checkpoint contains. A divided tensor becomes a DTensor, so that another mesh can load other parts of it."""
    divided, state = divided_parameters(stage), {}
    for name, parameter in stage.named_parameters():
        placement = [Shard(divided[parameter])] if parameter in divided else [Replicate()]
        for kind, tensor in (("parameter", parameter.detach()), *sorted(optimizer.state[parameter].items())):
            whole = kind == "step"  # a number
            state[f"{name}.{kind}"] = tensor if whole else DTensor.from_local(tensor, layout.mesh["tp"], placement)
    return state


def options(parser):
    for axis, what in zip(AXES, ("stages", "parts of the batch", "parts of each sequence", "parts of each layer"), strict=True):
        parser.add_argument(f"--{axis}", type=positive_int, default=1, help=what)
    parser.add_argument("--microbatches", type=positive_int, default=2)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --folder, on any mesh")


def train(device, args):
    layout = Layout(device, [getattr(args, axis) for axis in AXES])
    torch.manual_seed(SEED)
    model = Transformer(replace(args.config, tied=False)).to(args.dtype)
    stage = layout.build(model, args.length, device)
    pipeline = Pipeline(stage, loss_of, args.microbatches, group=layout.pp)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3, foreach=False)
    done = resume(stage, optimizer, layout, args) if args.resume else 0
    log = Log(args, device)
    for step, (inputs, targets) in enumerate(batches(args), 1):
        if step <= done:
            continue
        loss = pipeline.step(*(each.to(device) for each in layout.own_batch(inputs, targets)))
        average_gradients(stage, layout.samples)
        clip_gradients(stage, layout, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    dcp.save(checkpoint_state(stage, optimizer, layout), checkpoint_id=f"{args.folder}/checkpoint")
    log.end()


def resume(stage, optimizer, layout, args):
    """Load the checkpoint into the parameters and the state of the optimizer, and return the number of steps."""
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the state that the checkpoint then replaces
    optimizer.zero_grad()
    state = checkpoint_state(stage, optimizer, layout)
    dcp.load(state, checkpoint_id=f"{args.folder}/checkpoint")
    return int(next(value for name, value in state.items() if name.endswith(".step")))


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options, divides=""))
