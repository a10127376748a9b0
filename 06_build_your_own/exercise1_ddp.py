"""Exercise 1: build data parallelism. Each process has the whole model and a part of each batch; gradients are averaged.
This program works as delivered, but it communicates only when nothing is left to compute.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise1_run_ddp.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise1_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn

from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer
from workshop.training.modules import describe, require_same


class DDP(nn.Module):
    """Keep a module equal on all ranks: average its gradients over the ranks, while the backward pass still runs.

    All ranks start with the parameters and buffers of the first rank. Later changes of buffers, for example by BatchNorm, stay
    on their rank. Parameters that no rank has used in a backward pass keep the gradient None.

    Args:
        module: any module, already on its device. All ranks must run the same number of backward passes through it.
        bucket_bytes: gradients are communicated together until they have this number of bytes.
        group: the ranks that share the module; None: all.

    Raises:
        ValueError: the modules of the ranks differ, or (in ``forward``) a parameter was replaced, moved, frozen or unfrozen.
    """

    def __init__(self, module, bucket_bytes=1 << 18, group=None):
        super().__init__()
        self.module, self.group = module, group
        require_same([*module.parameters(), *module.buffers()], group)
        # TODO 1: All ranks start with the parameters and buffers of the first rank of the group. Then change the seed in train().
        # Look up: torch.distributed.broadcast and its argument group_src.
        self.wrapped = describe(module)
        # The backward pass computes the gradients of the last layers first, so the buckets go from the end to the beginning.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [Bucket(parameters, group) for parameters in divide(reversed(trained), bucket_bytes)]
        # TODO 2: Start each bucket during the backward pass, as soon as its gradients are ready, and wait at the end of the
        # backward pass. All ranks must start the same buckets in the same order, also if the backward pass does not use some
        # parameters. Look up: Tensor.register_post_accumulate_grad_hook. The notebook explains queue_callback.

    def forward(self, *args, **kwargs):
        # TODO 4: Raise a ValueError that names the parameter if one was replaced, moved, frozen or unfrozen after the module was
        # wrapped. Its gradient would not be averaged, and the ranks would train different models. Look up: describe.
        return self.module(*args, **kwargs)

    def average_gradients(self):
        """Average all gradients. train() calls this after the backward pass, when nothing is left to compute."""
        # TODO 2: Replace this method with the hook of a parameter and a function for the end of the backward pass.
        for bucket in self.buckets:
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()


class Bucket:
    """Gradients of one data type that are averaged together."""

    def __init__(self, parameters, group):
        self.parameters, self.group = parameters, group
        self.missing = set(parameters)  # their gradients are not ready yet

    def start(self):
        flags = torch.cat([each.new_full((1,), each.grad is not None) for each in self.parameters])
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in self.parameters]
        # TODO 3: Join the gradients and the flags into one tensor, and average it in one call. Look up: torch.cat.
        self.buffer = [each / dist.get_world_size(self.group) for each in (*gradients, flags)]
        self.work = [dist.all_reduce(each, group=self.group, async_op=True) for each in self.buffer]

    def finish(self):
        # TODO 3: Wait for the one call, and divide the tensor again. Look up: Tensor.split.
        for work in self.work:
            work.wait()
        *pieces, flags = self.buffer
        for parameter, piece, flag in zip(self.parameters, pieces, flags, strict=True):
            if parameter.grad is not None or flag > 0:  # reading the flag waits for the device, but it is needed rarely
                parameter.grad = piece.view_as(parameter)
        self.missing = set(self.parameters)
        del self.buffer, self.work


def divide(parameters, bucket_bytes):
    """Divide parameters into lists of at most ``bucket_bytes`` (or one parameter), each of one device and data type."""
    # TODO 3: Fill each list up to bucket_bytes, so that few calls are needed.
    return [[parameter] for parameter in parameters]


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's DDP")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # TODO 1: change this to SEED + rank, so that each rank creates different parameters
    model = Transformer(args.config).to(device, args.dtype)
    model = nn.parallel.DistributedDataParallel(model) if args.pytorch else DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log = Log(args, device)
    for inputs, targets in batches(args):
        inputs, targets = inputs[rank::world_size].to(device), targets[rank::world_size].to(device)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if not args.pytorch:
            model.average_gradients()  # TODO 2: remove these two lines
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.end()


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options))
