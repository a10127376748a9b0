"""Train a small model that labels each token of sequences of different lengths. It has a data loader and epochs.

N processes:  torchrun --standalone --nproc-per-node=2 tests/check/programs/tagger.py --epochs 2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

SEED, TOKENS, TAGS, IGNORED = 7, 20, 4, -100


class Sequences(Dataset):
    """Sequences of 2 to 24 tokens; the tag of a token depends on it and on the one before."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 25, (count,), generator=generator).tolist()
        self.sequences = [torch.randint(1, TOKENS, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        tokens = self.sequences[index]
        return tokens, (tokens + tokens.roll(1)) % TAGS


def padded(samples):
    tokens, tags = zip(*samples, strict=True)
    return pad_sequence(tokens, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=IGNORED)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, TAGS)

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step and process")
    parser.add_argument("--checkpoint", default="run.pt")
    args = parser.parse_args()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_epoch = load(args.checkpoint, model, optimizer)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    train_set, test_set = Sequences(96, seed=1), Sequences(31, seed=2)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=padded, drop_last=True)
    part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(part, args.batch_size, collate_fn=padded)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for tokens, tags in loader:
            optimizer.zero_grad()
            logits = ddp_model(tokens)
            count = (tags != IGNORED).sum()
            dist.all_reduce(count)
            # DDP divides the gradients by the number of processes, which would make the mean too small.
            loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum") * world_size / count
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch + 1} | accuracy {accuracy:.2%}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for tokens, tags in loader:
        counted = tags != IGNORED
        counts += torch.stack([(model(tokens).argmax(-1) == tags)[counted].sum(), counted.sum()])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


if __name__ == "__main__":
    main()
