"""Rank 1 has fewer samples in the last batch, and gathers a smaller tensor."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(4):
        scores = torch.randn(3 if rank == 1 and step == 3 else 4)
        gathered = [torch.empty(len(scores)) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, scores)  # the cause
    dist.barrier()


main()
