"""A signal kills rank 1."""

import os
import signal
import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for step in range(100):
        if dist.get_rank() == 1 and step == 20:
            time.sleep(4)
            os.kill(os.getpid(), signal.SIGKILL)  # the cause
        dist.all_reduce(torch.ones(1))


main()
