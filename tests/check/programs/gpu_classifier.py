"""Trains a small classifier, one process for each GPU: torchrun --nproc-per-node=2 gpu_classifier.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CHECKPOINT = "last.pt"
EPOCHS = 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 64)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(64, 4)

    def forward(self, x):
        x = x * torch.linspace(0.5, 1.5, 16, device=x.device)
        return self.output(self.dropout(self.hidden(x).relu()))


def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    matrix = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ matrix).argmax(1))


def evaluate(model, data, rank, world_size, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.inference_mode():
        for x, y in DataLoader(Subset(data, range(rank, len(data), world_size)), batch_size=32):
            x, y = x.to(device), y.to(device)
            counts[0] += (model(x).argmax(1) == y).sum()
            counts[1] += len(y)
    dist.all_reduce(counts)
    model.train()
    correct, total = counts.tolist()
    return correct / total


def main():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")

    torch.manual_seed(1)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first_epoch = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epochs"]
    ddp_model = DistributedDataParallel(model, device_ids=[local_rank])

    train_set, test_set = points(384, 2), points(100, 3)
    sampler = DistributedSampler(train_set, seed=4)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, pin_memory=True)
    for epoch in range(first_epoch, EPOCHS):
        torch.manual_seed(100 * epoch + rank)
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(ddp_model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        accuracy = evaluate(model, test_set, rank, world_size, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(loader) / world_size:.4f}, accuracy {accuracy:.3f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, CHECKPOINT + ".part")
            os.replace(CHECKPOINT + ".part", CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
