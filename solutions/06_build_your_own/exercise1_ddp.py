"""Build data parallelism: every process has the whole model and a part of each batch, and their gradients are averaged.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/06_build_your_own/exercise1_ddp.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 solutions/06_build_your_own/exercise1_run_ddp.sh
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
        for tensor in (*module.parameters(), *module.buffers()):  # a tied parameter is listed once
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        self.wrapped = describe(module)
        # The backward pass computes the gradients of the last layers first, so the buckets go from the end to the beginning.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [Bucket(parameters, group) for parameters in divide(reversed(trained), bucket_bytes)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.started = None  # the number of buckets that this backward pass has started; None outside of one
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.register_forward_pre_hook(DDP.forget_failed_pass)

    def forward(self, *args, **kwargs):
        if changed := self.wrapped ^ describe(self.module):
            name = min(changed, key=str)[0]
            raise ValueError(f"{name} was replaced, moved, frozen or unfrozen after DDP() wrapped the module")
        return self.module(*args, **kwargs)

    def forget_failed_pass(self, _):
        """If an exception has ended the last backward pass, forget the buckets that it has started."""
        if self.started is not None and torch._C._current_graph_task_id() < 0:
            self.started = None
            for bucket in self.buckets:
                bucket.missing = set(bucket.parameters)

    def gradient_is_ready(self, parameter):
        if self.started is None:  # the first gradient of this backward pass
            self.started = 0
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # PyTorch's DDP does the same
        self.bucket_of[parameter].missing.discard(parameter)
        self.start_buckets()

    def start_buckets(self, all_of_them=False):
        """Start the complete buckets, all ranks in the same order: otherwise one rank would add up different buckets."""
        while self.started < len(self.buckets) and (all_of_them or not self.buckets[self.started].missing):
            self.buckets[self.started].start()
            self.started += 1

    def finish(self):
        """At the end of the backward pass: start the buckets with parameters that had no part in it, and wait for all."""
        self.start_buckets(all_of_them=True)
        self.started = None
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
        self.buffer = torch.cat([*(each.flatten() for each in gradients), flags])
        self.buffer /= dist.get_world_size(self.group)  # before the sum, which could be too large for float16
        self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)

    def finish(self):
        self.work.wait()
        *pieces, flags = self.buffer.split([*(each.numel() for each in self.parameters), len(self.parameters)])
        for parameter, piece, flag in zip(self.parameters, pieces, flags, strict=True):
            if parameter.grad is not None or flag > 0:  # reading the flag waits for the device, but it is needed rarely
                parameter.grad = piece.view_as(parameter)
        self.missing = set(self.parameters)
        del self.buffer, self.work


def divide(parameters, bucket_bytes):
    """Divide parameters into lists of at most ``bucket_bytes`` (or one parameter), each of one device and data type."""
    full, open_lists = [], {}
    for parameter in parameters:
        kind = (parameter.device, parameter.dtype)
        size = sum(each.nbytes for each in open_lists.get(kind, []))
        if size and size + parameter.nbytes > bucket_bytes:
            full.append(open_lists.pop(kind))
        open_lists.setdefault(kind, []).append(parameter)
    return [*full, *open_lists.values()]


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's DDP")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)  # DDP replaces the random parameters of all ranks by those of rank 0
    model = Transformer(args.config).to(device, args.dtype)
    model = nn.parallel.DistributedDataParallel(model) if args.pytorch else DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log = Log(args, device)
    for inputs, targets in batches(args):
        inputs, targets = inputs[rank::world_size].to(device), targets[rank::world_size].to(device)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.end()


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options))
