"""A signal has stopped rank 1."""

import os
import signal

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for step in range(100):
        if dist.get_rank() == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGSTOP)  # the cause
        dist.all_reduce(torch.ones(1))


main()
