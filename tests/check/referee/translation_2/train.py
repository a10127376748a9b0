"""Transformer for translation: batches of similar length, label smoothing, F1 of word pairs after greedy decoding."""
import argparse
import os
import random
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

PAD, BOS, EOS, VOCAB = 0, 1, 2, 25


def make_corpus(n, seed):
    rng = random.Random(seed)  # invented languages, translated word for word
    sources = [rng.choices(range(3, VOCAB), k=min(20, 2 + int(rng.expovariate(0.25)))) for _ in range(n)]
    targets = [[3 + (word * 5) % (VOCAB - 3) for word in source] for source in sources]
    return [(torch.tensor([*s, EOS]), torch.tensor([BOS, *t, EOS])) for s, t in zip(sources, targets)]


def collate(pairs):
    return [nn.utils.rnn.pad_sequence(side, batch_first=True, padding_value=PAD) for side in zip(*pairs)]


class BucketBatchSampler:
    """Batches of similar lengths, others in each epoch; the ranks take turns in one common list of batches."""
    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size, self.epoch = lengths, batch_size, 0

    def __iter__(self):
        rng, per_step = random.Random(self.epoch), self.batch_size * dist.get_world_size()
        order = rng.sample(range(len(self.lengths)), len(self.lengths) // per_step * per_step)
        order.sort(key=lambda i: self.lengths[i])
        batches = [order[i:i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rng.shuffle(batches)
        return iter(batches[dist.get_rank()::dist.get_world_size()])


class Translator(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(VOCAB, dim), nn.Embedding(40, dim), nn.Linear(dim, VOCAB)
        self.net = nn.Transformer(dim, 4, 1, 1, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, source, target):
        x, y = (self.words(t) + self.places(torch.arange(t.size(1), device=t.device)) for t in (source, target))
        future = torch.ones(target.size(1), target.size(1), dtype=torch.bool, device=target.device).triu(1)
        hidden = source == PAD
        return self.head(self.net(x, y, tgt_mask=future, src_key_padding_mask=hidden, memory_key_padding_mask=hidden))


@torch.no_grad()
def greedy(net, source):
    net.eval()
    output = torch.full((len(source), 1), BOS, device=source.device)
    while output.size(1) < source.size(1) + 3 and not (output == EOS).any(dim=1).all():
        output = torch.cat([output, net(source, output)[:, -1:].argmax(dim=-1)], dim=1)
    return output


def gather_sentences(rows):
    """The sentences of all processes; where one has fewer or shorter rows than another, they are filled up."""
    size = torch.tensor(rows.shape).cuda()
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    number, width = size.tolist()
    rows = F.pad(rows, (0, width - rows.size(1), 0, number - rows.size(0)), value=PAD)
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return [row[1:(row + [EOS]).index(EOS)] for row in torch.cat(parts).tolist() if row[0] == BOS]


def pair_f1(outputs, targets):
    grams = [[Counter(zip(row, row[1:])) for row in pair] for pair in zip(outputs, targets)]
    return 2 * sum((o & t).total() for o, t in grams) / sum(o.total() + t.total() for o, t in grams)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="sentences, of one process")
    parser.add_argument("--checkpoint", default="checkpoints/last.pt", help="goes on from it if it exists")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    corpus, held_out = make_corpus(1024, seed=1), make_corpus(50, seed=2)
    sampler = BucketBatchSampler([len(source) for source, _ in corpus], args.batch_size)
    loader = DataLoader(corpus, batch_sampler=sampler, collate_fn=collate)
    net = Translator().cuda()
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, betas=(0.9, 0.98))
    start_epoch = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
    val_source, val_target = (side.cuda() for side in collate(held_out[rank::world_size]))
    for sampler.epoch in range(start_epoch, args.epochs):
        net.train()
        stats = torch.zeros(2).cuda()  # loss, words
        for source, target in loader:
            source, target = source.cuda(), target.cuda()
            logits = model(source, target[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD,
                                   label_smoothing=0.1, reduction="sum")
            total = torch.stack([loss.detach(), (target[:, 1:] != PAD).sum()])
            dist.all_reduce(total)
            optimizer.zero_grad()
            (loss * world_size / total[1]).backward()
            optimizer.step()
            stats += total
        score = pair_f1(gather_sentences(greedy(net, val_source)), gather_sentences(val_target))
        if rank == 0:
            print(f"epoch {sampler.epoch}: loss {(stats[0] / stats[1]).item():.3f}, pair F1 {score:.3f}", flush=True)
            os.makedirs(os.path.dirname(args.checkpoint), exist_ok=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": sampler.epoch}
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
