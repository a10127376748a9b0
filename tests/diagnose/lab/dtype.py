"""Rank 1 reduces a tensor of a different type."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    kind = torch.float64 if dist.get_rank() == 1 else torch.float32
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1 << 20, dtype=kind))  # the cause
    dist.barrier()


main()
