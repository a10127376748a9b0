"""Train a small optical flow network, stage by stage:

    torchrun --nproc_per_node=2 train.py --config configs/default.yaml [--resume]
"""
import argparse
import os

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tinyraft import FlowPairs, TinyRAFT, endpoint_sums, sequence_loss


def save(state, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def autocast(cfg, device):
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=cfg["mixed_precision"])


def build_data(cfg, stage, index, rank, world_size):
    seed = cfg["seed"] + 1000 * index
    train_set = FlowPairs(stage["motion"], stage["train_pairs"], cfg["image_size"], seed, augment=True)
    val_set = FlowPairs(stage["motion"], stage["val_pairs"], cfg["image_size"], seed + 500, augment=False)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=stage["batch_size"], sampler=sampler, drop_last=True,
                              num_workers=cfg["num_workers"], pin_memory=torch.cuda.is_available())
    shard = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(shard, batch_size=stage["batch_size"], num_workers=cfg["num_workers"])
    return train_set, sampler, train_loader, val_loader


def train_epoch(model, loader, optimizer, scheduler, scaler, cfg, device):
    model.train()
    totals = torch.zeros(2, device=device)
    for batch in loader:
        image1, image2, flow, valid = (x.to(device, non_blocking=True) for x in batch)
        optimizer.zero_grad(set_to_none=True)
        with autocast(cfg, device):
            predictions = model(image1, image2, iters=cfg["iters"])
        loss = sequence_loss(predictions, flow, valid, cfg["gamma"], cfg["max_flow"])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        totals += torch.stack([loss.detach(), torch.ones_like(loss)])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def validate(model, loader, cfg, device):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in loader:
        image1, image2, flow, valid = (x.to(device) for x in batch)
        with autocast(cfg, device):
            prediction = model(image1, image2, iters=cfg["iters"])[-1]
        sums += endpoint_sums(prediction, flow, valid)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def run_stage(cfg, index, resumed, rank, world_size, device):
    stage = cfg["stages"][index]
    latest = os.path.join(cfg["output"], "latest.pth")
    train_set, sampler, train_loader, val_loader = build_data(cfg, stage, index, rank, world_size)

    model = TinyRAFT(**cfg["model"]).to(device)
    if resumed:
        model.load_state_dict(resumed["model"])
    elif stage.get("restore"):
        weights = os.path.join(cfg["output"], stage["restore"] + ".pth")
        model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)

    optimizer = torch.optim.AdamW(model.parameters(), lr=stage["lr"], weight_decay=cfg["weight_decay"])
    num_steps = stage["epochs"] * len(train_loader)
    scheduler = OneCycleLR(optimizer, max_lr=stage["lr"], total_steps=num_steps, pct_start=0.1, cycle_momentum=False)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg["mixed_precision"] and device.type == "cuda")
    first = 0
    if resumed:
        optimizer.load_state_dict(resumed["optimizer"])
        scheduler.load_state_dict(resumed["scheduler"])
        scaler.load_state_dict(resumed["scaler"])
        first = resumed["epoch"] + 1

    for epoch in range(first, stage["epochs"]):
        sampler.set_epoch(epoch)
        train_set.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer, scheduler, scaler, cfg, device)
        epe, within = validate(model.module, val_loader, cfg, device)
        if rank == 0:
            print(f"[{stage['name']}] epoch {epoch + 1}/{stage['epochs']}  loss {loss:.4f}  epe {epe:.3f}  "
                  f"1px {within:.1%}", flush=True)
            if epoch + 1 == stage["epochs"]:
                save(model.module.state_dict(), os.path.join(cfg["output"], stage["name"] + ".pth"))
            save({"stage": index, "epoch": epoch, "model": model.module.state_dict(),
                  "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                  "scaler": scaler.state_dict()}, latest)
    dist.barrier()  # the next stage reads what rank 0 has written


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "configs/default.yaml"))
    parser.add_argument("--output", help="folder of the checkpoints")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    cfg["output"] = args.output or cfg["output"]
    cfg["mixed_precision"] = args.mixed_precision or cfg["mixed_precision"]

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg["seed"])

    resumed, first_stage = None, 0
    if args.resume:
        resumed = torch.load(os.path.join(cfg["output"], "latest.pth"), map_location="cpu", weights_only=True)
        first_stage = resumed["stage"]
    for index in range(first_stage, len(cfg["stages"])):
        run_stage(cfg, index, resumed if index == first_stage else None, rank, world_size, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
