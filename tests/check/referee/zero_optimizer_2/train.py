"""Click prediction with embedding tables: DDP, gradient accumulation, and AdamW states sharded by ZeRO."""

import argparse
import logging
import os
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

TABLE_SIZES = (300, 120, 40, 7)
NUM_DENSE = 6


class ClickModel(nn.Module):
    def __init__(self, dim=16, hidden=64):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in TABLE_SIZES)
        self.dense = nn.Sequential(nn.Linear(NUM_DENSE, dim), nn.ReLU())
        pairs = (len(TABLE_SIZES) + 1) * len(TABLE_SIZES) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense, ids):
        x = self.dense(dense)
        fields = torch.stack([x] + [table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        row, column = torch.triu_indices(fields.shape[1], fields.shape[1], offset=1)
        products = (fields @ fields.transpose(1, 2))[:, row, column]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def make_clicks(count, seed):
    world = torch.Generator().manual_seed(0)
    taste = [torch.randn(size, generator=world) for size in TABLE_SIZES]
    weight = torch.randn(NUM_DENSE, generator=world)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(size, (count,), generator=draw) for size in TABLE_SIZES], dim=1)
    dense = torch.randn(count, NUM_DENSE, generator=draw)
    score = dense @ weight / 2 + 1.5 * sum(t[ids[:, i]] for i, t in enumerate(taste)) - 1
    return TensorDataset(dense, ids, torch.bernoulli(torch.sigmoid(score), generator=draw))


def save(path, model, optimizer, scheduler, epoch):
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "epoch": epoch}, path + ".tmp")
        os.replace(path + ".tmp", path)


def resume(path, model, optimizer, scheduler, device):
    state = torch.load(path, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["epoch"]


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    totals = torch.zeros(3, device=device)
    for batch in loader:
        dense, ids, clicked = (t.to(device, non_blocking=True) for t in batch)
        logits = model(dense, ids)
        totals[0] += nn.functional.binary_cross_entropy_with_logits(logits, clicked, reduction="sum")
        totals[1] += ((logits > 0) == clicked.bool()).sum()
        totals[2] += len(clicked)
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")

    train_set, val_set = make_clicks(3072, seed=1), make_clicks(500, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True, pin_memory=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=128)
    updates = len(train_loader) // args.accumulate

    torch.manual_seed(args.seed)
    model = DDP(ClickModel().to(device), device_ids=[local_rank])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * updates, cycle_momentum=False)
    criterion = nn.BCEWithLogitsLoss()
    first_epoch = resume(args.resume, model, optimizer, scheduler, device) if args.resume else 0

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for i, batch in enumerate(islice(train_loader, updates * args.accumulate)):
            dense, ids, clicked = (t.to(device, non_blocking=True) for t in batch)
            update = (i + 1) % args.accumulate == 0
            with nullcontext() if update else model.no_sync():
                loss = criterion(model(dense, ids), clicked)
                (loss / args.accumulate).backward()
            running += loss.detach()
            if update:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        dist.all_reduce(running)
        train_loss = running.item() / (world_size * updates * args.accumulate)
        val_loss, accuracy = evaluate(model.module, val_loader, device)
        logging.info("epoch %d train %.4f val %.4f accuracy %.3f", epoch, train_loss, val_loss, accuracy)
        save(args.checkpoint, model, optimizer, scheduler, epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in dict(epochs=4, batch_size=64, accumulate=2, lr=1e-2, clip=1.0, seed=3).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--checkpoint", default="checkpoints/clicks.pt")
    parser.add_argument("--resume", default="", help="checkpoint to continue from")
    main(parser.parse_args())
