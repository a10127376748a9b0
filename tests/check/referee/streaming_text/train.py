"""Character language model on an endless stream of documents; continues by itself if there is a checkpoint."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ALPHABET = "abcdefghijklmnopqrstuvwxyz .\n"
WORDS = ["the", "river", "carries", "old", "stones", "past", "quiet", "mills", "while", "slow", "herons", "watch",
         "from", "reeds", "near", "wide", "green", "banks"]


def read_document(index):
    rng = random.Random(index)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(3, 8))) + "." for _ in range(rng.randint(1, 4))]
    return [ALPHABET.index(c) for c in " ".join(sentences) + "\n"]


class TextStream(IterableDataset):
    """Blocks of characters; every worker of every rank reads its own documents in an order that changes per pass."""

    def __init__(self, documents, block_size, rank, world_size, seed):
        self.documents, self.block_size, self.seed = documents, block_size, seed
        self.rank, self.world_size, self.positions = rank, world_size, {}

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        shard, num_shards = self.rank * num_workers + worker, self.world_size * num_workers
        epoch, done, rest = self.positions.get(worker, (0, 0, []))
        while True:
            order = random.Random(self.seed + epoch).sample(self.documents, len(self.documents))
            mine = order[shard::num_shards]
            while done < len(mine):
                rest = rest + read_document(mine[done])
                done += 1
                while len(rest) > self.block_size:
                    block, rest = rest[:self.block_size + 1], rest[self.block_size:]
                    yield torch.tensor(block), worker, (epoch, done, rest)
            epoch, done = epoch + 1, 0


def collate(samples):
    blocks, workers, positions = zip(*samples)
    return torch.stack(blocks), workers[-1], positions[-1]


class CharModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(ALPHABET))

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


@torch.no_grad()
def evaluate(model, documents, device):
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for index in documents:
        text = torch.tensor([read_document(index)], device=device)
        totals[0] += F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="sum")
        totals[1] += text.shape[1] - 1
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--block-size", type=int, default=48)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoint", default="checkpoints/last.pt")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    model = DDP(CharModel().to(device), device_ids=[device.index] if use_cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    stream = TextStream(range(400), args.block_size, rank, world_size, seed=1)
    loader = DataLoader(stream, args.batch_size, num_workers=args.num_workers, collate_fn=collate)
    step, positions = 0, {}
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        if state["readers"] != (world_size, args.num_workers):
            raise SystemExit(f"the checkpoint has positions for {state['readers']} ranks and workers")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, positions = state["step"], state["positions"][rank]
        stream.positions = positions
    batches = iter(loader)
    while step < args.steps:
        blocks, worker, positions[worker] = next(batches)
        blocks = blocks.to(device)
        loss = F.cross_entropy(model(blocks[:, :-1]).transpose(1, 2), blocks[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.save_every == 0 or step == args.steps:
            val_loss = evaluate(model.module, range(1000 + rank, 1060, world_size), device)
            all_positions = [None] * world_size
            dist.all_gather_object(all_positions, positions)
            if rank == 0:
                print(f"step {step}  loss {loss.item():.4f}  val loss {val_loss:.4f}", flush=True)
                os.makedirs(os.path.dirname(args.checkpoint) or ".", exist_ok=True)
                state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                         "positions": all_positions, "readers": (world_size, args.num_workers)}
                torch.save(state, args.checkpoint + ".tmp")
                os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
