"""Rank 1 waits for a key of the store that nobody sets."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().wait(["ready"])  # the cause
    dist.barrier()


main()
