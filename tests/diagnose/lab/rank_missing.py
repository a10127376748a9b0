"""Rank 1 prepares data before it joins, and the other waits in init_process_group."""

import os
import threading

import torch.distributed as dist


def prepare():
    threading.Event().wait()  # the cause


def main():
    if os.environ["RANK"] == "1":
        prepare()
    dist.init_process_group("gloo")


main()
