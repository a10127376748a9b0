"""A thread holds a lock while the DataLoader forks its worker, which then waits for the lock forever."""

import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

lock = threading.Lock()


def refresh():
    while True:
        with lock:
            time.sleep(0.5)
        # It is free for an instant only, so the fork almost certainly meets it held.


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if dist.get_rank() == 1:
            with lock:  # the cause
                return torch.randn(4)
        return torch.randn(4)


def main():
    dist.init_process_group("gloo")
    threading.Thread(target=refresh, daemon=True).start()
    time.sleep(0.2)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for batch in DataLoader(Samples(), batch_size=8, num_workers=1):
        model(batch).square().mean().backward()


main()
