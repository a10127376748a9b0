"""A different program uses the port of the rendezvous (started with python, MASTER_PORT is taken)."""

import os
import socket

import torch.distributed as dist


def main():
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(taken.getsockname()[1]),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    dist.init_process_group("gloo")  # the cause


main()
