"""Train the activity classifier: torchrun --nproc-per-node=2 -m trainer.train --config config.yaml"""
import argparse
import logging
import math
import os
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.data import make_loaders
from trainer.model import activity_net


def make_run_dir(root):
    name = [f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"]
    dist.broadcast_object_list(name, src=0)
    run_dir = Path(root) / name[0]
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def save(state, path):
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = torch.zeros(2, device=device)  # correct, all
    for x, y in loader:
        correct = (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        hits += torch.stack([correct, torch.full_like(correct, len(y))])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def train_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    total = torch.zeros((), device=device)
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / (len(loader) * dist.get_world_size())


def run(cfg, run_dir, resume, device):
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    torch.manual_seed(cfg["seed"])
    train_loader, val_loader = make_loaders(cfg["data"], cfg["batch_size"], cfg["seed"])
    net = activity_net(cfg["data"]["channels"], cfg["data"]["classes"], cfg["width"]).to(device)
    model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg["lr"])
    total_steps = cfg["epochs"] * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / cfg["warmup_steps"], 0.5 * (1 + math.cos(math.pi * step / total_steps))))
    start_epoch, best = 0, -1.0
    if resume:
        state = torch.load(run_dir / "last.pt", map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch, best = state["epoch"] + 1, state["best"]

    for epoch in range(start_epoch, cfg["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer, scheduler, device)
        accuracy, lr = evaluate(net, val_loader, device), scheduler.get_last_lr()[0]
        logging.info("epoch %d: lr %.1e, loss %.3f, accuracy %.3f", epoch, lr, loss, accuracy)
        if rank == 0:
            if accuracy > best:
                save({"model": net.state_dict(), "config": cfg}, run_dir / "best.pt")
            save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                  "scheduler": scheduler.state_dict(), "best": max(accuracy, best)}, run_dir / "last.pt")
        best = max(accuracy, best)

    dist.barrier()
    net.load_state_dict(torch.load(run_dir / "best.pt", map_location=device)["model"])
    logging.info("best model of %s: accuracy %.3f", run_dir, evaluate(net, val_loader, device))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="config.yaml")
    parser.add_argument("--resume", help="folder of an earlier run")
    args = parser.parse_args()
    cfg = yaml.safe_load(Path(args.config).read_text())
    use_cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    run_dir = Path(args.resume) if args.resume else make_run_dir(cfg["run_root"])
    run(cfg, run_dir, args.resume, torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"))
    dist.destroy_process_group()
