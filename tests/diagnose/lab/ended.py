"""Rank 1 has one batch less than rank 0, leaves its loop and ends."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(5 + (dist.get_rank() == 0)):
        model(torch.randn(8, 4)).square().mean().backward()  # the cause


main()
