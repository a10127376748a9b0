"""Speaker embeddings with Lightning Fabric: a small TDNN with an additive angular margin, trained on crops of utterances made
on the spot; equal error rate over all pairs of held-out utterances after every epoch.

    torchrun --nproc-per-node=2 train.py

The run is resumed from <out>/last.ckpt if that is there.
"""
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MELS, CROP = 20, 24


class Utterances(Dataset):
    """Mel-like frames: an envelope that belongs to the speaker, a channel that belongs to the recording, phones, noise.

    A training item is a random crop, drawn anew in each epoch from the epoch and the item's number.
    """

    def __init__(self, speakers, per_speaker, seed, train):
        g = torch.Generator().manual_seed(seed)
        envelope = torch.randn(speakers, 6, generator=g) @ torch.randn(6, MELS, generator=torch.Generator().manual_seed(0)) * 0.5
        phones = torch.randn(12, MELS, generator=g)
        self.items = []
        for speaker in range(speakers):
            for _ in range(per_speaker):
                frames = int(torch.randint(CROP, 2 * CROP, (), generator=g))
                spoken = phones[torch.randint(12, (frames // 4 + 1,), generator=g)].repeat_interleave(4, 0)[:frames]
                channel = 0.2 * torch.randn(MELS, generator=g)
                x = envelope[speaker] * (1 + 0.3 * spoken) + spoken + channel + 0.5 * torch.randn(frames, MELS, generator=g)
                self.items.append((x.t().contiguous(), speaker))
        self.train, self.epoch, self.seed = train, 0, seed

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        x, speaker = self.items[i]
        if not self.train:
            return x[:, :CROP], speaker
        g = torch.Generator().manual_seed((self.seed * 1000 + self.epoch) * 100_003 + i)
        start = int(torch.randint(x.shape[1] - CROP + 1, (), generator=g))
        x = x[:, start:start + CROP]
        lowest = int(torch.randint(MELS - 3, (), generator=g))
        keep = torch.ones(MELS, 1)
        keep[lowest:lowest + 3] = 0  # SpecAugment: a band is masked
        return x * keep, speaker


class TDNN(nn.Module):
    def __init__(self, speakers, width=48, dim=32):
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv1d(MELS, width, 5), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv1d(width, width, 3, dilation=2), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv1d(width, width, 3, dilation=3), nn.GroupNorm(4, width), nn.ReLU())
        self.embed = nn.Linear(2 * width, dim)
        self.centres = nn.Parameter(0.1 * torch.randn(speakers, dim))

    def forward(self, x, speaker=None, margin=0.0, scale=16.0):
        h = self.frames(x)
        e = F.normalize(self.embed(torch.cat([h.mean(2), h.var(2).add(1e-5).sqrt()], 1)), dim=1)
        if speaker is None:
            return e
        cosine = (e @ F.normalize(self.centres, dim=1).t()).clamp(-1 + 1e-6, 1 - 1e-6)
        moved = torch.cos(torch.acos(cosine) + margin)
        logits = scale * torch.where(F.one_hot(speaker, cosine.shape[1]).bool(), moved, cosine)
        return F.cross_entropy(logits, speaker)


def equal_error_rate(embeddings, speakers):
    score = embeddings @ embeddings.t()
    i, j = torch.triu_indices(len(score), len(score), 1)
    score, same = score[i, j], (speakers[i] == speakers[j])
    order = score.argsort(descending=True)
    same = same[order].double()
    accepted = (1 - same).cumsum(0) / (1 - same).sum()
    rejected = 1 - same.cumsum(0) / same.sum()
    at = (accepted - rejected).abs().argmin()
    return (accepted[at] + rejected[at]).item() / 2


@torch.no_grad()
def evaluate(fabric, model, loader, data):
    model.eval()
    mine = torch.cat([model(fabric.to_device(x)) for x, _ in loader])
    model.train()
    # the sampler deals the utterances out in turn: number k of rank r is utterance k * world + r
    embeddings = fabric.all_gather(mine).view(fabric.world_size, *mine.shape)
    embeddings = embeddings.transpose(0, 1).flatten(0, 1)[:len(data)]
    return equal_error_rate(embeddings.cpu(), torch.tensor([speaker for _, speaker in data.items]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=48, help="utterances per forward pass, over all ranks")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--out", default="exp")
    args = parser.parse_args()

    fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(17, verbose=False)
    rank, world = fabric.global_rank, fabric.world_size

    speakers = 80
    train_set = Utterances(speakers, 24, seed=1, train=True)
    test_set = Utterances(25, 10, seed=2, train=False)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=3, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, world, rank, shuffle=False))

    model = TDNN(speakers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    per_epoch = len(train_loader) // args.accumulate
    total, warmup = per_epoch * args.epochs, per_epoch // 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / warmup, 0.02 + 0.49 * (1 + math.cos(math.pi * min(step, total) / total))))

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "best": 1.0}
    path = os.path.join(args.out, "last.ckpt")
    if os.path.exists(path):
        fabric.load(path, state)
        fabric.print(f"resumed after {state['epoch']} epochs")

    for epoch in range(state["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        train_set.set_epoch(epoch)
        margin = 0.2 * min(1.0, epoch / 2)
        sum_loss = torch.zeros((), device=fabric.device)
        for i, (x, speaker) in enumerate(train_loader):
            if i >= per_epoch * args.accumulate:
                break
            x, speaker = fabric.to_device((x, speaker))
            accumulating = (i + 1) % args.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = model(x, speaker, margin)
                fabric.backward(loss / args.accumulate)
            sum_loss += loss.detach()
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=2.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        mean_loss = fabric.all_reduce(sum_loss, reduce_op="mean").item() / (per_epoch * args.accumulate)
        eer = evaluate(fabric, model, test_loader, test_set)
        fabric.print(f"epoch {epoch}: loss {mean_loss:.4f}, EER {100 * eer:.2f}%, lr {scheduler.get_last_lr()[0]:.5f}")
        state["epoch"] = epoch + 1
        state["best"] = min(state["best"], eer)
        fabric.save(path + ".new", state)
        if fabric.is_global_zero:
            os.replace(path + ".new", path)
        fabric.barrier()
    fabric.print(f"best EER {100 * state['best']:.2f}%")


if __name__ == "__main__":
    main()
