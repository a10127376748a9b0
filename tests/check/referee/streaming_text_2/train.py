"""Train a small language model on an endless stream of documents: steps instead of epochs, resume where it stopped."""
import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB = 50


def fetch_document(number):
    """Stands for a download: a text in which a word mostly decides the next one. Word 0 ends it."""
    rng = random.Random(number)
    words = [rng.randrange(1, VOCAB)]
    for _ in range(rng.randrange(40, 120)):
        words.append((words[-1] * 7 + rng.choice((3, 3, 3, 11))) % (VOCAB - 1) + 1)
    return words + [0]


class TextStream(IterableDataset):
    """Cuts documents into blocks. Each worker of each process reads documents of its own."""
    def __init__(self, block_size, rank, world_size):
        self.block_size, self.rank, self.world_size = block_size, rank, world_size
        self.position = {}  # worker: (document, offset of its next word)

    def __iter__(self):
        info = get_worker_info()
        first = self.rank * info.num_workers + info.id
        stride = self.world_size * info.num_workers
        document, offset = self.position.get(info.id, (first, 0))
        block, words = [], fetch_document(document)
        while True:
            taken = words[offset:offset + self.block_size + 1 - len(block)]
            block, offset = block + taken, offset + len(taken)
            if offset == len(words):
                document, offset = document + stride, 0
                words = fetch_document(document)
            if len(block) == self.block_size + 1:
                yield torch.tensor(block), torch.tensor([info.id, document, offset])
                block = []


class TinyLM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.rnn = nn.GRU(dim, dim, batch_first=True)

    def forward(self, words):
        return self.head(self.rnn(self.words(words))[0])


def next_word_loss(model, blocks, reduction="mean"):
    return F.cross_entropy(model(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def validate(model, blocks):
    totals = torch.stack([next_word_loss(model, blocks, reduction="sum"), blocks.new_tensor(blocks[:, 1:].numel())])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def save_checkpoint(path, step, model, optimizer, stream):
    positions = [None] * dist.get_world_size()
    dist.all_gather_object(positions, stream.position)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "positions": positions}, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=20, help="steps between validations and checkpoints")
    parser.add_argument("--batch-size", type=int, default=8, help="blocks, of one process")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--checkpoint", type=Path, default="checkpoints/lm.pt", help="goes on from it if it exists")
    args = parser.parse_args()
    local_rank, use_cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = TinyLM().to(device)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    stream = TextStream(args.block_size, rank, world_size)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=2)
    held_out = range(10**9 + rank, 10**9 + 60, world_size)
    val_blocks = torch.tensor([fetch_document(number)[:args.block_size + 1] for number in held_out], device=device)
    step, losses = 0, []
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, stream.position = state["step"], state["positions"][rank]
    batches = iter(loader)
    while step < args.steps:
        blocks, read = next(batches)
        worker, document, offset = read[-1].tolist()
        stream.position[worker] = (document, offset)
        loss = next_word_loss(model, blocks.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        losses.append(loss.detach())
        if step % args.every == 0 or step == args.steps:
            train_loss = torch.stack(losses[-args.every:]).mean() / world_size
            dist.all_reduce(train_loss)
            val_loss = validate(net, val_blocks)
            if rank == 0:
                print(f"step {step}: train {train_loss.item():.3f}, validation {val_loss:.3f}", flush=True)
            save_checkpoint(args.checkpoint, step, net, optimizer, stream)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
