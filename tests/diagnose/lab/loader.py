"""A worker of the DataLoader of rank 1 waits for a queue that nobody fills."""

import queue

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

waiting = queue.Queue()


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40 and dist.get_rank() == 1:
            waiting.get()  # the cause
        return torch.randn(4)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for batch in DataLoader(Samples(), batch_size=8, num_workers=1):
        model(batch).square().mean().backward()


main()
