"""Rank 0 calls a barrier in each epoch, rank 1 in the first epoch only."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for epoch in range(3):
        for _ in range(4):
            model(torch.randn(8, 4)).square().mean().backward()
        if dist.get_rank() == 0 or epoch == 0:
            dist.barrier()  # the cause
    dist.destroy_process_group()


main()
