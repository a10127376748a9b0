"""Recognize patterns in small pictures with an MLP-Mixer, trained by a DeepSpeed engine (ZeRO-2)."""

import argparse
import json
from itertools import islice

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIZE, PATCH = 12, 3
PATTERNS = ("rows", "columns", "diagonals", "rings")


def draw_pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(PATTERNS), (count,), generator=generator)
    shift = 6.28 * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    radius = ((x - SIZE / 2) ** 2 + (y - SIZE / 2) ** 2).sqrt()
    waves = torch.stack([1.5 * y, 1.5 * x, 1.1 * (x + y), 1.5 * radius])[labels]
    pictures = torch.sin(waves + shift) + 1.6 * torch.randn(count, SIZE, SIZE, generator=generator)
    return pictures, labels


class MixerBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.within = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=48, depth=2):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, dim)
        self.blocks = nn.Sequential(*(MixerBlock((SIZE // PATCH) ** 2, dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, len(PATTERNS))

    def forward(self, pictures):
        patches = pictures.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(1, 2).flatten(2)
        return self.head(self.norm(self.blocks(self.embed(patches))).mean(1))


def prepare(batch, device):
    pictures, labels = batch
    return pictures.to(device, torch.bfloat16), labels.to(device)


@torch.no_grad()
def evaluate(engine, pictures, labels):
    rank, world = dist.get_rank(), dist.get_world_size()
    engine.eval()
    x, y = prepare((pictures[rank::world], labels[rank::world]), engine.device)
    logits = engine(x).float()
    sums = torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum().float()])
    dist.all_reduce(sums)
    engine.train()
    return (sums / len(labels)).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by the deepspeed launcher")
    parser.add_argument("--config", default="ds_config.json")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    deepspeed.init_distributed()
    with open(args.config) as file:
        config = json.load(file)
    train_set, val_set = TensorDataset(*draw_pictures(768, seed=0)), draw_pictures(230, seed=1)
    sampler = DistributedSampler(train_set, seed=3, drop_last=True)
    loader = DataLoader(train_set, config["train_micro_batch_size_per_gpu"], sampler=sampler, drop_last=True)
    updates = len(loader) // config["gradient_accumulation_steps"]
    config["scheduler"]["params"]["total_num_steps"] = updates * args.epochs

    torch.manual_seed(0)
    model = Mixer()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    first_epoch = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(args.out)
        if path is not None:
            first_epoch = client_state["epoch"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(islice(loader, updates * engine.gradient_accumulation_steps())):
            pictures, labels = prepare(batch, engine.device)
            loss = F.cross_entropy(engine(pictures).float(), labels)
            engine.backward(loss)
            engine.step()
            if i % 12 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} update {engine.global_steps} loss {mean.item() / dist.get_world_size():.4f} "
                          f"lr {engine.get_lr()[0]:.2e}", flush=True)
        val_loss, accuracy = evaluate(engine, *val_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} validation loss {val_loss:.4f} accuracy {accuracy:.3f}", flush=True)
        tag = f"epoch{epoch + 1}-loss{val_loss:.3f}"
        engine.save_checkpoint(args.out, tag=tag, client_state={"epoch": epoch + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
