"""Rank 1 computes for a long time, and rank 0 waits: slow, not a hang."""

import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    end = time.monotonic() + 60
    while dist.get_rank() == 1 and time.monotonic() < end:
        torch.randn(200, 200) @ torch.randn(200, 200)  # the cause
    dist.all_reduce(torch.ones(1))


main()
