"""Trains a model whose layers are divided between two ranks, by hand: torchrun --nproc-per-node=2 divided_layers.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, WIDTH = 2, 16, 64


class Summed(torch.autograd.Function):
    """Sums over the ranks in the forward pass; the gradient of each term is that of the sum."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copied(torch.autograd.Function):
    """Leaves a tensor as it is; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Block(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, WIDTH // parts)
        self.down = nn.Linear(WIDTH // parts, 12, bias=False)

    def forward(self, x):
        return x + Summed.apply(self.down(self.up(Copied.apply(self.norm(x))).relu()))


class Model(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.blocks = nn.ModuleList(Block(parts) for _ in range(2))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def points(count, seed):
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    matrix = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ matrix).argmax(1))


def main():
    dist.init_process_group("gloo")
    rank, parts = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Model(parts)
    for parameter in (*model.head.parameters(), *(each for block in model.blocks for each in block.norm.parameters())):
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_set = points(192, 2)
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=4)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    torch.save(model.state_dict(), f"part-{rank}-of-{parts}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
