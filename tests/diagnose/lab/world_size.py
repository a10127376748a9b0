"""The program says that there are three ranks, and two run."""

import torch.distributed as dist


def main():
    dist.init_process_group("gloo", world_size=3, init_method="env://")  # the cause


main()
