"""Language model on packed documents, streamed from shards by several workers per rank; a checkpoint holds the place in the data.

A second start continues from the last checkpoint in --out, also within an epoch, up to --epochs, with as many ranks.
"""
import argparse
import itertools
import json
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB, LENGTH, END = 48, 64, 0


def make_documents(n, rng):
    """Documents of 10 to 90 tokens, each with one of two tables of likely next tokens, put in a row with END after each."""
    table, out = np.random.RandomState(4).randint(1, VOCAB, (2, VOCAB, 3)), []
    for _ in range(n):
        kind, token = rng.randint(2), rng.randint(1, VOCAB)
        for pick in rng.choice(3, rng.randint(10, 91), p=[0.75, 0.2, 0.05]):
            out.append(token)
            token = table[kind, token, pick]
        out.append(END)
    return np.array(out, dtype=np.uint8)


def write_shards(folder, shards=24):
    rng, lengths = np.random.RandomState(8), []
    os.makedirs(folder, exist_ok=True)
    for i in range(shards):
        tokens = make_documents(rng.randint(150, 320), rng)
        np.save(os.path.join(folder, f"shard-{i:03d}.npy"), tokens)
        lengths.append(len(tokens))
    with open(os.path.join(folder, "index.json.tmp"), "w") as file:
        json.dump(lengths, file)
    os.replace(os.path.join(folder, "index.json.tmp"), os.path.join(folder, "index.json"))


class PackedShards(IterableDataset):
    """Every worker of every rank has a part: shards of its own, new ones in each epoch, read as one row of tokens."""

    def __init__(self, folder, rank, world, workers, seed=0):
        with open(os.path.join(folder, "index.json")) as file:
            self.lengths = json.load(file)
        self.folder, self.rank, self.parts, self.workers, self.seed = folder, rank, world * workers, workers, seed

    def start(self, epoch, places, turn=0):
        """Sets where the next pass begins: places has shard and offset for each worker, turn says whose batch comes first."""
        self.epoch, self.places, self.turn = epoch, places.tolist(), turn

    def shards(self, epoch, part):
        return np.random.RandomState(1000 * self.seed + epoch).permutation(len(self.lengths))[part::self.parts].tolist()

    def batches(self, epoch, part, size):
        return (sum(self.lengths[s] for s in self.shards(epoch, part)) - 1) // LENGTH // size

    def __iter__(self):
        worker = (get_worker_info().id + self.turn) % self.workers
        mine, (shard, offset) = self.shards(self.epoch, self.rank * self.workers + worker), self.places[worker]
        files = [np.load(os.path.join(self.folder, f"shard-{s:03d}.npy")) for s in mine[shard:]]
        row = torch.from_numpy(np.concatenate(files).astype(np.int64))[offset:]
        for at in range(0, len(row) - LENGTH, LENGTH):
            offset += LENGTH
            while offset >= self.lengths[mine[shard]]:
                offset, shard = offset - self.lengths[mine[shard]], shard + 1
            yield row[at:at + LENGTH + 1], worker, torch.tensor([shard, offset])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, width=64, depth=2, heads=4):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, width), nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, row):
        """Sum of the losses within documents, and their number; no token sees another document's."""
        tokens, target = row[:, :-1], row[:, 1:]
        document = (tokens == END).cumsum(1) - (tokens == END).long()
        mask = (document[:, :, None] == document[:, None]).tril()[:, None]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        inside = tokens != END
        losses = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten(), reduction="none")
        return (losses * inside.flatten()).sum(), inside.sum()


@torch.no_grad()
def evaluate(model, rows, device):
    sums = torch.zeros(2, device=device)
    for row in rows[dist.get_rank()::dist.get_world_size()].split(64):
        sums += torch.stack(model(row.to(device)))
    dist.all_reduce(sums)
    return math.exp(sums[0].item() / sums[1].item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="rows per step over all ranks")
    parser.add_argument("--workers", type=int, default=2, help="per rank")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    folder = os.path.join(args.out, "shards")
    if rank == 0 and not os.path.exists(os.path.join(folder, "index.json")):
        write_shards(folder)
    dist.barrier()
    data, size = PackedShards(folder, rank, world, args.workers), args.batch // world
    loader = DataLoader(data, batch_size=size, num_workers=args.workers, drop_last=True, pin_memory=cuda)
    val = torch.from_numpy(make_documents(400, np.random.RandomState(9)).astype(np.int64)).unfold(0, LENGTH + 1, LENGTH)

    model = LanguageModel().to(device)
    ddp = DDP(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    path = os.path.join(args.out, "checkpoint.pt")
    first, done, places, sums = 0, 0, torch.zeros(args.workers, 2, dtype=torch.long), torch.zeros(2, device=device)
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done, places, sums = state["epoch"], state["done"], state["places"][rank], state["sums"].to(device)

    def save(epoch, done):
        everyone = [torch.zeros_like(places, device=device) for _ in range(world)]
        dist.all_gather(everyone, places.to(device))
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "done": done,
                        "places": torch.stack(everyone).cpu(), "sums": sums.cpu()}, path + ".tmp")
            os.replace(path + ".tmp", path)

    for epoch in range(first, args.epochs):
        # as many steps as the part with the fewest full batches allows
        steps = args.workers * min(data.batches(epoch, part, size) for part in range(world * args.workers))
        data.start(epoch, places, turn=done)
        for row, worker, place in itertools.islice(loader, steps - done):
            loss, count = ddp(row.to(device, non_blocking=True))
            both = torch.stack([loss.detach(), count])
            dist.all_reduce(both)
            loss = loss * world / both[1]  # mean over the tokens of all ranks; DDP divides by world
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += both
            places[worker[-1]], done = place[-1], done + 1
            if done % args.save_every == 0:
                save(epoch, done)
        perplexity = evaluate(model, val, device)
        if rank == 0:
            print(f"epoch {epoch}: {done} steps, loss {(sums[0] / sums[1]).item():.4f}, perplexity {perplexity:.3f}", flush=True)
        places, done, sums = torch.zeros_like(places), 0, torch.zeros_like(sums)
        save(epoch + 1, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
