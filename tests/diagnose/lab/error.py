"""Rank 1 raises an exception; rank 0 then loses its connection."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for step in range(10):
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1 and step == 5:
            raise ValueError("label 12 is out of range")  # the cause


main()
