"""Rank 1 saves for longer than the time-out of the process group."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def save():
    time.sleep(60)  # the cause


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        save()
    dist.barrier()


main()
