"""Rank 1 alone skips a step whose loss is not finite."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(8):
        loss = model(torch.randn(8, 4)).square().mean()
        if step == 5 and dist.get_rank() == 1:
            loss = loss * float("nan")
        if not torch.isfinite(loss):  # the cause
            continue
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)


main()
