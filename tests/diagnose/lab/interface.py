"""A variable names a network interface that does not exist (run with GLOO_SOCKET_IFNAME=nosuch0)."""

import torch.distributed as dist


def main():
    dist.init_process_group("gloo")  # the cause


main()
