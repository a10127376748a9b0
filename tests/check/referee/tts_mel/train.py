"""Text to mel spectrogram with durations (a tiny FastSpeech without attention), DistributedDataParallel.

    torchrun --nproc-per-node=2 train.py [--resume last.pt]

Utterances have different lengths: batches are made of utterances of about the same length, padding is masked, and all losses are
means over the phones or frames of the *whole* step (all micro-batches of all processes).
"""
import argparse
import contextlib
import itertools
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

N_PHONES, N_MEL, MEAN, STD = 24, 20, -4.0, 1.5


class Utterances(Dataset):
    """Utterance i: phones, their durations in frames, and the mel frames of a synthetic voice."""
    def __init__(self, size, seed):
        voice = torch.Generator().manual_seed(7)
        self.sound = torch.randn(N_PHONES, N_MEL, generator=voice) * STD + MEAN
        self.length, self.seed = torch.randint(1, 6, (N_PHONES,), generator=voice), seed
        self.n_phones = torch.randint(4, 33, (size,), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self):
        return len(self.n_phones)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        phones = torch.randint(0, N_PHONES, (self.n_phones[i],), generator=g)
        durations = self.length[phones] + (phones.roll(1) % 3 == 0).long()  # the phone before makes it longer
        mel = self.sound[phones.repeat_interleave(durations)]
        mel = 0.75 * mel + 0.25 * mel.roll(1, 0)
        return phones + 1, durations, mel + 0.1 * torch.randn(mel.shape, generator=g)


def collate(items):
    return [pad_sequence(list(x), batch_first=True) for x in zip(*items)]  # phone 0 and duration 0: padding


class BucketBatchSampler:
    """Batches of utterances of similar length; each process gets the same number of batches."""
    def __init__(self, lengths, batch_size, rank, world, seed=0):
        self.lengths, self.batch_size, self.rank, self.world = lengths, batch_size, rank, world
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.lengths) // (self.batch_size * self.world)

    def __iter__(self):
        rng = random.Random(self.seed * 1000 + self.epoch)  # the same on all processes
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], rng.random()))
        skip = rng.randrange(len(order) % (self.batch_size * self.world) + 1)  # the rest is left out: not always the same ones
        batches = [order[skip + k * self.batch_size:][:self.batch_size] for k in range(len(self) * self.world)]
        rng.shuffle(batches)
        return iter(batches[self.rank::self.world])


class TextToMel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(N_PHONES + 1, width, padding_idx=0)
        self.encoder = nn.Conv1d(width, width, 3, padding=1)
        self.duration = nn.Linear(width, 1)
        self.decoder = nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, N_MEL, 1))

    def forward(self, phones, durations):
        h = self.embed(phones)
        h = h + self.encoder(h.transpose(1, 2)).transpose(1, 2).relu()
        frames = pad_sequence([x.repeat_interleave(d, 0) for x, d in zip(h, durations)], batch_first=True)
        return self.duration(h).squeeze(-1), self.decoder(frames.transpose(1, 2)).transpose(1, 2)


def summed_losses(model, batch):
    """Sums (not means) of the squared errors of log durations and normalized mel frames, and what they are sums over."""
    phones, durations, mel = batch
    log_duration, mel_out = model(phones, durations)
    frame_mask = torch.arange(mel.shape[1], device=mel.device) < durations.sum(1, keepdim=True)
    duration_loss = ((log_duration - durations.clamp(min=1).log()) ** 2)[phones > 0].sum()
    mel_loss = ((mel_out - (mel - MEAN) / STD) ** 2)[frame_mask].mean(-1).sum()
    return torch.stack([duration_loss, mel_loss])


def counts(batches):
    return torch.tensor([sum((p > 0).sum().item() for p, _, _ in batches), sum(d.sum().item() for _, d, _ in batches)],
                        dtype=torch.float64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=6, help="utterances in one micro-batch of one process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    local_rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    train_set, val_set = Utterances(400, args.seed + 1), Utterances(50, args.seed + 2)
    sampler = BucketBatchSampler(train_set.n_phones, args.batch_size, rank, world, args.seed)
    train_loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=10, collate_fn=collate)
    torch.manual_seed(args.seed)
    net = TextToMel().to(device)
    model = DDP(net, device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps_per_epoch = -(-len(train_loader) // args.accumulate)  # the last step of an epoch may have fewer micro-batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * steps_per_epoch)
    first_epoch = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, args.epochs):
        sampler.epoch = epoch
        model.train()
        loss_sum, steps = torch.zeros(2, dtype=torch.float64, device=device), 0
        batches = iter(train_loader)
        while micro := list(itertools.islice(batches, args.accumulate)):
            micro = [[x.to(device) for x in batch] for batch in micro]
            n = counts(micro).to(device)
            dist.all_reduce(n)  # phones and frames in this step, over all processes
            for k, batch in enumerate(micro, 1):
                with contextlib.nullcontext() if k == len(micro) else model.no_sync():
                    losses = summed_losses(model, batch) / n
                    (losses.sum() * world).backward()  # DDP takes the mean over the processes, this has to be a sum
                loss_sum += losses.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
        dist.all_reduce(loss_sum)
        model.eval()
        val = torch.zeros(2, 2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in val_loader:
                batch = [x.to(device) for x in batch]
                val += torch.stack([summed_losses(net, batch).double(), counts([batch]).to(device)])
        dist.all_reduce(val)
        if rank == 0:
            print(f"epoch {epoch}  [duration, mel] loss:  training {[round(v, 4) for v in (loss_sum / steps).tolist()]}"
                  f"  validation {[round(v, 4) for v in (val[0] / val[1]).tolist()]}", flush=True)
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch}, args.out / "last.tmp")
            os.replace(args.out / "last.tmp", args.out / "last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
