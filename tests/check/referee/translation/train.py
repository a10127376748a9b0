"""Small sequence-to-sequence transformer with length buckets.  torchrun --nproc-per-node=2 train.py"""
import argparse
import os
import random
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

PAD, BOS, EOS, FIRST, VOCAB = 0, 1, 2, 3, 33


def make_pairs(n, seed):
    """Made-up language: words are replaced by a fixed dictionary, and every word above 25 is said twice."""
    dictionary, rng, pairs = random.Random(42).sample(range(FIRST, VOCAB), VOCAB - FIRST), random.Random(seed), []
    for _ in range(n):
        source = [rng.randrange(FIRST, VOCAB) for _ in range(rng.randint(3, 12))]
        target = [dictionary[w - FIRST] for w in source for _ in range(2 if w > 25 else 1)]
        pairs.append((source, [BOS] + target + [EOS]))
    return pairs


def collate(pairs):
    return [nn.utils.rnn.pad_sequence([torch.tensor(x) for x in side], batch_first=True) for side in zip(*pairs)]


class BucketBatchSampler:
    """Batches of similar length, at most max_tokens after padding; every rank gets the same number of batches."""
    def __init__(self, lengths, max_tokens, rank, world_size, seed):
        self.lengths, self.max_tokens, self.seed, self.epoch = lengths, max_tokens, seed, 0
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        batches, order = [[]], rng.sample(range(len(self.lengths)), len(self.lengths))
        for i in sorted(order, key=lambda i: self.lengths[i]):
            if (len(batches[-1]) + 1) * self.lengths[i] > self.max_tokens:
                batches.append([])
            batches[-1].append(i)
        rng.shuffle(batches)
        usable = len(batches) // self.world_size * self.world_size
        return iter(batches[self.rank:usable:self.world_size])


class Translator(nn.Module):
    def __init__(self, dim=64, dropout=0.1):
        super().__init__()
        self.embed, self.pos, self.out = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim), nn.Linear(dim, VOCAB)
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoderLayer(dim, 4, 2 * dim, dropout, batch_first=True, norm_first=True)

    def forward(self, source, target):
        s, t = (self.embed(x) + self.pos(torch.arange(x.shape[1], device=x.device)) for x in (source, target))
        causal = torch.ones(t.shape[1], t.shape[1], dtype=torch.bool, device=t.device).triu(1)
        memory = self.encoder(s, src_key_padding_mask=source == PAD)
        return self.out(self.decoder(t, memory, tgt_mask=causal, memory_key_padding_mask=source == PAD))


@torch.no_grad()
def bleu_score(model, pairs, rank, world_size):
    model.eval()
    mine = pairs[rank::world_size]
    source = collate(mine)[0].cuda()
    output = torch.full((len(source), 1), BOS).cuda()
    for _ in range(25):
        output = torch.cat([output, model(source, output)[:, -1:].argmax(-1)], dim=1)
    matches, guessed, expected = torch.zeros(3, 1).cuda()
    for words, (_, reference) in zip(output.tolist(), mine):
        guess = words[1:words.index(EOS) if EOS in words else None]
        found, wanted = (Counter(w) + Counter(zip(w, w[1:])) for w in (guess, reference[1:-1]))
        matches += (found & wanted).total()
        guessed += found.total()
        expected += wanted.total()
    for count in (matches, guessed, expected):
        dist.all_reduce(count)
    return 100 * (matches / guessed.clamp(min=1) * (1 - expected / guessed.clamp(min=1)).clamp(max=0).exp()).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400, help="per batch and GPU")
    parser.add_argument("--checkpoint", default="checkpoints/last.pt")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = make_pairs(600, 1), make_pairs(60, 2)
    sampler = BucketBatchSampler([len(t) for _, t in train_set], args.max_tokens, rank, world_size, seed=7)
    loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
    torch.manual_seed(7)
    model = DDP(Translator().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    os.makedirs(os.path.dirname(args.checkpoint) or ".", exist_ok=True)
    start_epoch = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        sampler.epoch = epoch
        torch.manual_seed(epoch * world_size + rank)  # dropout
        model.train()
        for source, target in loader:
            source, target, labels = source.cuda(), target[:, :-1].cuda(), target[:, 1:].cuda()
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                logits = model(source, target).float().transpose(1, 2)
            loss = F.cross_entropy(logits, labels, ignore_index=PAD, label_smoothing=0.1, reduction="sum")
            stats = torch.stack([loss.detach(), (labels != PAD).sum()])
            dist.all_reduce(stats)
            optimizer.zero_grad()
            (loss * world_size / stats[1]).backward()  # mean over the words of all ranks
            optimizer.step()
        bleu = bleu_score(model.module, val_set, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}  loss {stats[0] / stats[1]:.4f}  bleu {bleu:.1f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
