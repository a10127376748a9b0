"""Names in sentences: a BiGRU tags tokens with B/I/O under DDP, with gradient accumulation, an EMA of the weights and checkpoints within the epoch.

torchrun --nproc-per-node=2 train.py [--epochs 3]; start it again to go on from the last checkpoint.
"""
import argparse
import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

VOCAB, PAD, UNK, O, B, I = 300, 0, 1, 0, 1, 2


class Sentences(Dataset):
    """Names are runs of words 200..299 after a title (2..11); such words elsewhere are no names. Some words are replaced by UNK for training."""

    def __init__(self, n, seed, drop=0.0):
        self.drop, self.seed, self.epoch, self.items = drop, seed, 0, []
        g = torch.Generator().manual_seed(seed)
        r = lambda lo, hi: int(torch.randint(lo, hi, (), generator=g))
        for _ in range(n):
            words, tags = [], []
            for _ in range(r(1, 9) if r(0, 3) else r(9, 16)):
                kind = r(0, 4)
                if kind == 0:
                    k = r(1, 4)
                    words += [r(2, 12)] + [r(200, 300) for _ in range(k)]
                    tags += [O, B] + [I] * (k - 1)
                elif kind == 1:
                    words.append(r(200, 300))
                    tags.append(tags[-1] and I if tags else O)
                else:
                    words.append(r(12, 200))
                    tags.append(O)
            self.items.append((torch.tensor(words), torch.tensor(tags)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        words, tags = self.items[i]
        if self.drop:
            g = torch.Generator().manual_seed((self.seed * 1000 + self.epoch) * 100_003 + i)  # the same in any process
            words = words.masked_fill(torch.rand(len(words), generator=g) < self.drop, UNK)
        return words, tags


def collate(items):
    words, tags = zip(*items)
    return (pad_sequence(words, batch_first=True, padding_value=PAD), pad_sequence(tags, batch_first=True, padding_value=-100),
            torch.tensor([len(w) for w in words]))


class Tagger(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 3)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.out(hidden)


def spans(tags):
    found, start = set(), None
    for i, t in enumerate(tags + [O]):
        if start is not None and t != I:
            found.add((start, i))
            start = None
        if t == B:
            start = i
    return found


@torch.no_grad()
def evaluate(model, loader, device):
    """F1 of whole names over the validation sentences of all ranks."""
    model.eval()
    counts = torch.zeros(3, dtype=torch.float64, device=device)  # right, predicted, true
    for words, tags, lengths in loader:
        predicted = model(words.to(device), lengths).argmax(-1).cpu()
        for p, t, n in zip(predicted.tolist(), tags.tolist(), lengths.tolist()):
            p, t = spans(p[:n]), spans(t[:n])
            counts += torch.tensor([len(p & t), len(p), len(t)], device=device)
    dist.all_reduce(counts)
    right, predicted, true = counts.tolist()
    return 2 * right / max(predicted + true, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="sentences per optimizer step over all ranks")
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--save-every", type=int, default=8, help="optimizer steps")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    train, valid = Sentences(960, seed=1, drop=0.1), Sentences(151, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=3, drop_last=True)
    micro = args.batch // (args.accum * world)
    mine = Subset(valid, range(rank, len(valid), world))  # no sentence twice, so the ranks may have one more or less
    valid_loader = DataLoader(mine, batch_size=32, collate_fn=collate)

    model = Tagger().to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    ddp = DDP(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    per_epoch = len(sampler) // (micro * args.accum)
    total = per_epoch * args.epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 6, max(0.0, (total - s) / max(total - 6, 1))))

    path, step = os.path.join(args.out, "last.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]

    def save():
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "step": step}, path + ".tmp")
            os.replace(path + ".tmp", path)

    while step < total:
        epoch, done = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        train.epoch = epoch
        order = list(sampler)[done * micro * args.accum:]  # without what was seen before the restart
        loader = iter(DataLoader(Subset(train, order), batch_size=micro, collate_fn=collate, drop_last=True))
        ddp.train()
        for _ in range(done, per_epoch):
            batches = [next(loader) for _ in range(args.accum)]
            tokens = torch.stack([lengths.sum() for _, _, lengths in batches]).sum().to(device)
            dist.all_reduce(tokens)  # the loss is a mean over all tokens of the step, not a mean of means
            log = torch.zeros((), device=device)
            for k, (words, tags, lengths) in enumerate(batches):
                last = k == args.accum - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    logits = ddp(words.to(device), lengths)
                    loss = F.cross_entropy(logits.flatten(0, 1), tags.to(device).flatten(), ignore_index=-100, reduction="sum")
                    loss = loss * world / tokens  # DDP divides by world
                    loss.backward()
                log += loss.detach() / world
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters()):
                    slow.lerp_(fast, 0.05)
            step += 1
            if step % args.save_every == 0 or step == total:
                save()
            if step % 5 == 0:
                dist.all_reduce(log)
                if rank == 0:
                    print(f"step {step} loss {log.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
        f1 = evaluate(ema, valid_loader, device)
        if rank == 0:
            print(f"epoch {epoch} f1 {f1:.4f}", flush=True)
    f1 = evaluate(ema, valid_loader, device)
    if rank == 0:
        print(f"finished at step {step}, f1 {f1:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
