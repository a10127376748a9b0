"""Train a signal classifier from a yaml file: torchrun --nproc-per-node=2 -m trainer.train --config config.yaml"""
import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.data import build_loaders
from trainer.model import SignalNet


def setup_logging(rank, output_dir):
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s [rank {rank}] %(message)s", datefmt="%H:%M:%S")


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for signals, labels in loader:
        loss = F.cross_entropy(model(signals.to(device)), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for signals, labels in loader:
        signals, labels = signals.to(device), labels.to(device)
        logits = model(signals)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--resume", action="store_true", help="continue from last.pt in the output folder")
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    os.makedirs(cfg["output_dir"], exist_ok=True)
    setup_logging(rank, cfg["output_dir"])
    torch.manual_seed(cfg["seed"] + rank)  # dropout differs between ranks; DDP equalizes the parameters

    train_loader, val_loader = build_loaders(cfg["data"], cfg["seed"], rank, world_size)
    model = SignalNet(cfg["data"]["classes"], **cfg["model"]).to(device)
    model = DDP(model, device_ids=[device.index] if use_cuda else None)
    opt = cfg["optim"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=opt["lr"], weight_decay=opt["weight_decay"])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=opt["lr_factor"],
                                                           patience=opt["lr_patience"])
    path, start_epoch = os.path.join(cfg["output_dir"], "last.pt"), 0
    if args.resume and os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, opt["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        torch.manual_seed(cfg["seed"] + 1000 * (epoch + 1) + rank)
        train_one_epoch(model, train_loader, optimizer, device)
        val_loss, val_acc = evaluate(model.module, val_loader, device)
        scheduler.step(val_loss)
        lr = optimizer.param_groups[0]["lr"]
        logging.info("epoch %d  val loss %.4f  val acc %.3f  next lr %.2e", epoch, val_loss, val_acc, lr)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch, "config": cfg}, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
