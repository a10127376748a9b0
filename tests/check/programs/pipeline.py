"""Trains a pipeline of two stages by hand: torchrun --nproc-per-node=2 pipeline.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "last.pt"
EPOCHS, BATCH, WIDTH = 3, 16, 32


def points(count, seed):
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    matrix = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ matrix).argmax(1))


def stage_of(rank):
    first = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    return (first, last)[rank]


def forward(stage, rank, x):
    if rank == 0:
        hidden = stage(x)
        dist.send(hidden.detach(), 1)
        return hidden, None
    received = torch.empty(len(x), WIDTH)
    dist.recv(received, 0)
    received.requires_grad_(torch.is_grad_enabled())
    return stage(received), received


def train_batch(stage, rank, optimizer, x, y):
    output, received = forward(stage, rank, x)
    optimizer.zero_grad()
    if rank == 0:
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)
    else:
        nn.functional.cross_entropy(output, y).backward()
        dist.send(received.grad, 0)
    optimizer.step()


def evaluate(stage, rank, data):
    correct = torch.zeros(1)
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=BATCH):
            output, _ = forward(stage, rank, x)
            if rank == 1:
                correct += (output.argmax(1) == y).sum()
    dist.broadcast(correct, 1)
    return correct.item() / len(data)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = stage_of(rank)
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    first_epoch = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        stage.load_state_dict(saved["stages"][rank])
        optimizer.load_state_dict(saved["optimizers"][rank])
        first_epoch = saved["epochs"]
    train_set, test_set = points(192, 2), points(64, 3)
    for epoch in range(first_epoch, EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for x, y in DataLoader(train_set, batch_size=BATCH, shuffle=True, generator=order):
            train_batch(stage, rank, optimizer, x, y)
        accuracy = evaluate(stage, rank, test_set)
        parts = [None, None] if rank == 0 else None
        dist.gather_object((stage.state_dict(), optimizer.state_dict()), parts)
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}")
            stages, optimizers = zip(*parts, strict=True)
            torch.save({"stages": stages, "optimizers": optimizers, "epochs": epoch + 1}, CHECKPOINT + ".part")
            os.replace(CHECKPOINT + ".part", CHECKPOINT)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
