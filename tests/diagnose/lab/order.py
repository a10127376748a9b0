"""Rank 1 calls broadcast and all_reduce in the other order."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values, counts = torch.randn(8), torch.ones(3)
    for _ in range(3):
        dist.all_reduce(values)
    if rank == 0:
        dist.broadcast(values, 1)
        dist.all_reduce(counts)
    else:
        dist.all_reduce(counts)  # the cause
        dist.broadcast(values, 1)
    dist.barrier()


main()
