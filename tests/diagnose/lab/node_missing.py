"""Run with torchrun --nnodes=2 on one node only: the other node never comes."""

import torch.distributed as dist

dist.init_process_group("gloo")
