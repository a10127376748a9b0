"""Build data parallelism: every process has the whole model and a part of each batch, and their gradients are averaged.

N processes:  torchrun --standalone --nproc-per-node=2 06_build_your_own/exercise1_ddp.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=32 06_build_your_own/exercise1_run_ddp.sh
"""

import torch
import torch.distributed as dist
from torch import nn

from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer


class DDP(nn.Module):
    """Keep a module equal on all ranks: average its gradients over the ranks.

    Args:
        module: any module, already on its device. All ranks must run equally many backward passes through it.
        bucket_bytes: gradients are communicated together until they have this number of bytes.
        group: the ranks that share the module; None: all.
    """

    def __init__(self, module, bucket_bytes=1 << 18, group=None):
        super().__init__()
        self.module, self.group = module, group
        # TODO 1: All ranks start with the parameters and buffers of the first rank of the group, whatever they have created.
        # Then remove the common seed in train(). Look up: torch.distributed.broadcast.

        # TODO 2: Start to average each gradient during the backward pass, as soon as it is ready, and continue to compute. Wait
        # for all of them at the end of the backward pass. Then remove average_gradients() and its call. Parameters that need
        # no gradient, or that the backward pass did not use, must not make the ranks wait for each other forever.
        # Look up: Tensor.register_post_accumulate_grad_hook, async_op. queue_callback is explained in the notebook.

        # TODO 3: Average many small gradients in one call: collect them in buckets of bucket_bytes. All ranks must send the
        # buckets in the same order. The gradients of the last layers are ready first.

    def forward(self, *args, **kwargs):
        # TODO 4: Raise a ValueError that names the parameter, if one was replaced, moved, frozen or unfrozen since the module
        # was wrapped: its gradient would not be averaged, and the ranks would train different models without an error.
        return self.module(*args, **kwargs)

    def average_gradients(self):
        """Average the gradients after the backward pass: one call for each parameter, while nothing is computed."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                users = torch.tensor(float(parameter.grad is not None), device=parameter.device)
                dist.all_reduce(users, group=self.group)
                if users > 0:  # otherwise the gradient stays None
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(gradient, group=self.group)
                    parameter.grad = gradient / dist.get_world_size(self.group)


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's DDP")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # TODO 1: the same random parameters on all ranks; use SEED + rank when DDP does not need this
    model = Transformer(args.config).to(device, args.dtype)
    model = nn.parallel.DistributedDataParallel(model) if args.pytorch else DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log = Log(args, device)
    for inputs, targets in batches(args):
        inputs, targets = inputs[rank::world_size].to(device), targets[rank::world_size].to(device)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if not args.pytorch:
            model.average_gradients()  # TODO 2: remove this
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.end()


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options))
