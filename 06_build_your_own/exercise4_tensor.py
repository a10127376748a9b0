"""Exercise 4: build tensor and sequence parallelism. Each process computes a part of each layer, for the whole batch.
This program works as delivered, but all processes compute the whole model.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise4_run_tensor.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise4_tensor.py
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
    # TODO 1: Return the sum of x over the ranks of the group in a new tensor, because autograd may still need x.
    # Look up: torch.distributed.all_reduce.
    return x


# TODO 1: Write a class that applies the first function of a pair to a tensor and, in the backward pass, the second one to its
# gradient. None means that nothing changes. Look up: torch.autograd.Function.


def communicate(x, group, pair):
    return x  # TODO 1: use the class, whose method apply() autograd provides


KEEP = (None, None)
# TODO 1: Choose the function of the forward pass and the function of the backward pass. COPY: all ranks have the same tensor, and
# each rank computes its part of the features from it. SUM: each rank has computed one term of a sum that all ranks need.
COPY = (None, None)
SUM = (None, None)


# TODO 3: Write reduce_scatter(x, group), which is like all_reduce() but returns only this rank's part of dimension 1. Write a
# function that sums the gradients of some parameters over the ranks, during the backward pass. Then choose four more pairs.
# GATHER and SCATTER replace COPY and SUM if each rank has a part of the sequence outside of the linear layers. SPLIT and JOIN
# are for the first and the last tensor, which all ranks compute in full. Look up: Tensor.register_hook.
GATHER = SCATTER = None


def shard(parameter, group, dimension):
    """Return this rank's part of a parameter as a new parameter, or None for None."""
    # TODO 1: Return only this rank's part of the parameter. If the parameter is frozen, its part is too. Look up: own_part().
    return parameter


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
        # TODO 3: With SCATTER, each rank adds the bias only to its part of the sequence. Sum its gradients too.

    def forward(self, x):
        # TODO 1: With a part of the weight, each rank computes one term of a sum here. Add the bias only once.
        return communicate(F.linear(x, self.weight, self.bias), self.group, self.on_output)


def parallelize(model, group=None, sequence_parallel=True):
    """Replace the linear layers in the blocks of a Transformer, in place, and return the model.

    Args:
        model: equal on all ranks of ``group`` (None: all ranks). All of them must then train on the same batches.
        sequence_parallel: compute norms and residual additions only for this rank's part of each sequence.

    Raises:
        ValueError: the number of ranks does not divide the heads or, in the forward pass, the length of the sequence.
    """
    on_input, on_output = COPY, SUM  # TODO 3: or GATHER and SCATTER, with sequence parallelism
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        heads, ranks = attention.query.out_features // attention.head_size, dist.get_world_size(group)
        if heads % ranks:
            raise ValueError(f"{ranks} ranks cannot share the {heads} heads of the attention equally")
        # TODO 2: Query, key and value have the same input, and each of them communicates it. Communicate it only once.
        # Look up: nn.Module.register_forward_pre_hook.
        for name in ("query", "key", "value"):
            # TODO 2: not again
            setattr(attention, name, ColumnParallelLinear(getattr(attention, name), group, on_input))
        attention.output = RowParallelLinear(attention.output, group, on_output)
        mlp.up, mlp.down = ColumnParallelLinear(mlp.up, group, on_input), RowParallelLinear(mlp.down, group, on_output)
    # TODO 3: With sequence_parallel, the first block gets only this rank's part of the sequence, and the output of the last norm
    # (model.norm) is gathered. Then each rank computes norms and residual additions for its part. Sum the gradients of norms.
    # Look up: nn.Module.register_forward_hook.
    return model


def full_state_dict(model):
    """Return the state_dict of the model before it was divided: all names and shapes. Call it on all ranks."""
    # TODO 4: After TODO 1, each rank has only its part of some parameters. Gather these parameters, and keep their names. The
    # attribute "divided" of the two classes contains the dimensions. Look up: nn.Module.named_modules.
    return model.state_dict()


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
