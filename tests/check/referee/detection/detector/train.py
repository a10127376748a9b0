"""Usage: torchrun --nproc-per-node=N -m detector.train [config.yaml]"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from .data import Scenes, collate
from .evaluate import evaluate
from .model import Detector, detection_loss


def hflip(images, targets):
    """Mirror every image with probability one half."""
    images, width = images.clone(), images.shape[-1]
    for i, target in enumerate(targets):
        if torch.rand(()) < 0.5:
            images[i] = images[i].flip(-1)
            target["boxes"] = target["boxes"][:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1]) \
                + torch.tensor([width, 0, width, 0])
    return images, targets


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else "config.yaml") as f:
        cfg = yaml.safe_load(f)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(cfg["seed"])
    model = DDP(Detector().to(device), device_ids=[device.index] if use_cuda else None)
    opt = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=cfg["momentum"],
                          weight_decay=cfg["weight_decay"])
    train_set, test_set = Scenes(cfg["train_images"], seed=1), Scenes(cfg["test_images"], seed=2)
    sampler = DistributedSampler(train_set, seed=cfg["seed"], drop_last=True)
    train_loader = DataLoader(train_set, cfg["batch_size"], sampler=sampler, drop_last=True, collate_fn=collate)
    test_loader = DataLoader(test_set, 32, sampler=DistributedSampler(test_set, shuffle=False), collate_fn=collate)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg["lr"], total_steps=cfg["epochs"] * len(train_loader))
    torch.manual_seed(cfg["seed"] + 1 + rank)  # flips differ between ranks

    start, path = 0, cfg["output"]
    if os.path.exists(path):
        ckpt = torch.load(path, map_location="cpu")
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        sched.load_state_dict(ckpt["sched"])
        torch.set_rng_state(ckpt["rng"][rank])
        start = ckpt["epoch"]

    for epoch in range(start, cfg["epochs"]):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for images, targets in train_loader:
            images, targets = hflip(images, targets)
            logits, boxes = model(images.to(device))
            loss = detection_loss(logits, boxes, targets, cfg["box_weight"])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg["clip_grad"])
            opt.step()
            sched.step()
            running += loss.detach() / len(train_loader)

        dist.all_reduce(running)
        mean_ap = evaluate(model.module, test_loader, cfg, device)
        rng = [None] * world
        dist.all_gather_object(rng, torch.get_rng_state())
        if rank == 0:
            print(f"epoch {epoch + 1} loss {running.item() / world:.4f} mAP {mean_ap:.4f}", flush=True)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                        "rng": rng, "epoch": epoch + 1}, path + ".tmp")
            os.replace(path + ".tmp", path)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
