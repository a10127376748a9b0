"""Build tensor and sequence parallelism: every process computes a part of each layer, for the whole batch.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/06_build_your_own/exercise4_tensor.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 solutions/06_build_your_own/exercise4_run_tensor.sh
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer
from workshop.training.tensor_parallel import all_gather, divide, own_part, parallelize_with_pytorch, pytorch_state_dict


def all_reduce(x, group):
    x = x.clone(memory_format=torch.contiguous_format)  # autograd may still need the original
    dist.all_reduce(x, group=group)
    return x


class Communicate(torch.autograd.Function):
    """Apply the first function of a pair to a tensor and, in the backward pass, the second one to its gradient."""

    @staticmethod
    def forward(ctx, x, group, pair):
        ctx.group, ctx.pair = group, pair
        return pair[0](x, group) if pair[0] else x

    @staticmethod
    def backward(ctx, gradient):
        return communicate(gradient, ctx.group, ctx.pair[::-1]), None, None


def communicate(x, group, pair):
    return Communicate.apply(x, group, pair)


KEEP = (None, None)
COPY = (None, all_reduce)  # each rank uses the tensor for a part of the features, so it has only a term of the gradient
SUM = (all_reduce, None)  # each rank has computed a term, and the gradient of a term is the gradient of the sum


def reduce_scatter(x, group):
    parts = [part.contiguous() for part in divide(x, group)]  # of the sequence, which is dimension 1
    output = torch.empty_like(parts[0])
    dist.reduce_scatter(output, parts, group=group)
    return output


def sum_gradients(parameters, group):
    """Sum the gradients of parameters that each rank uses only for its part of the sequence."""
    for parameter in parameters:
        if parameter is not None and parameter.requires_grad:
            parameter.register_hook(lambda gradient: all_reduce(gradient, group))


# Sequence parallelism replaces each all-reduce with its two halves. Between them, each rank has a part of the sequence.
GATHER, SCATTER = (all_gather, reduce_scatter), (reduce_scatter, all_gather)
# Before SPLIT and after JOIN, all ranks compute the same, so each rank already has the whole gradient.
SPLIT, JOIN = (own_part, all_gather), (all_gather, own_part)


def shard(parameter, group, dimension):
    """Return this rank's part of a parameter as a new parameter, or None for None."""
    if parameter is None:
        return None
    return nn.Parameter(own_part(parameter.detach(), group, dimension), parameter.requires_grad)


class ColumnParallelLinear(nn.Module):
    """Compute this rank's part of the output features of a linear layer. Each rank has some rows of the weight.

    Args:
        linear: the layer, equal on all ranks of ``group`` (None: all ranks).
        on_input: COPY if all ranks have the same input, GATHER if each rank has its part of the sequence (dimension 1), KEEP
            if the caller has already communicated the input, for example once for several layers.

    Raises:
        ValueError: the number of ranks does not divide the output features.
    """

    divided = {"weight": 0, "bias": 0}  # noqa: RUF012

    def __init__(self, linear, group=None, on_input=COPY):
        super().__init__()
        self.group, self.on_input = group, on_input
        self.weight, self.bias = shard(linear.weight, group, 0), shard(linear.bias, group, 0)

    def forward(self, x):
        return F.linear(communicate(x, self.group, self.on_input), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Compute a linear layer from input features that are divided among the ranks. Each rank has some columns of the weight.

    Args:
        linear: the layer, equal on all ranks of ``group`` (None: all ranks).
        on_output: SUM if all ranks need the output, SCATTER if each rank needs its part of the sequence (dimension 1).

    Raises:
        ValueError: the number of ranks does not divide the input features or, in ``forward`` with SCATTER, the sequence.
    """

    divided = {"weight": 1}  # noqa: RUF012

    def __init__(self, linear, group=None, on_output=SUM):
        super().__init__()
        self.group, self.on_output = group, on_output
        self.weight, self.bias = shard(linear.weight, group, 1), linear.bias
        if on_output is SCATTER:
            sum_gradients([self.bias], group)

    def forward(self, x):
        x = communicate(F.linear(x, self.weight), self.group, self.on_output)
        return x if self.bias is None else x + self.bias  # once, so after the sum


def parallelize(model, group=None, sequence_parallel=True):
    """Replace the linear layers in the blocks of a Transformer, in place, and return the model.

    Args:
        model: equal on all ranks of ``group`` (None: all ranks). All of them must then train on the same batches.
        sequence_parallel: compute norms and residual additions only for this rank's part of each sequence.

    Raises:
        ValueError: the number of ranks does not divide the heads or, in the forward pass, the length of the sequence.
    """
    on_input, on_output = (GATHER, SCATTER) if sequence_parallel else (COPY, SUM)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        heads, ranks = attention.query.out_features // attention.head_size, dist.get_world_size(group)
        if heads % ranks:
            raise ValueError(f"{ranks} ranks cannot share the {heads} heads of the attention equally")
        # Query, key and value have the same input, so one communication is enough for the three.
        attention.register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, on_input))
        for name in ("query", "key", "value"):
            setattr(attention, name, ColumnParallelLinear(getattr(attention, name), group, KEEP))
        attention.output = RowParallelLinear(attention.output, group, on_output)
        mlp.up, mlp.down = ColumnParallelLinear(mlp.up, group, on_input), RowParallelLinear(mlp.down, group, on_output)
    if sequence_parallel:
        model.blocks[0].register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, SPLIT))
        model.norm.register_forward_hook(lambda _, inputs, output: communicate(output, group, JOIN))
        for norm in (model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))):
            sum_gradients(norm.parameters(), group)
    return model


def full_state_dict(model):
    """Return the state_dict of the model before it was divided: all names and shapes. Call it on all ranks."""
    state = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            for name, dimension in module.divided.items():
                if (key := f"{path}.{name}".lstrip(".")) in state:  # there may be no bias
                    state[key] = all_gather(state[key], module.group, dimension)
    return state


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's parallelize_module")


def train(device, args):
    torch.manual_seed(SEED)  # each rank keeps its part of the parameters, so all ranks must create the same
    model = Transformer(args.config).to(device, args.dtype)
    model = parallelize_with_pytorch(model, device) if args.pytorch else parallelize(model)
    # On GPUs, foreach=True is the default, and does not accept the DTensors of PyTorch's version together with other tensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    log = Log(args, device)
    for inputs, targets in batches(args):  # the same whole batches on all ranks
        loss = loss_of(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.end()
    # On all ranks, because they communicate.
    state = pytorch_state_dict(model) if args.pytorch else full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save(state, f"{args.folder}/model.pt.tmp")
        os.replace(f"{args.folder}/model.pt.tmp", f"{args.folder}/model.pt")


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options, divides="heads"))
