"""Rank 1 runs out of memory."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        torch.empty(1 << 50)  # the cause
    dist.barrier()


main()
