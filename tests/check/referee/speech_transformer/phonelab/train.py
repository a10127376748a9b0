"""Frame-level phone tagging.   torchrun --standalone --nproc-per-node=2 -m phonelab.train --config config.yaml"""
import argparse
import contextlib
import itertools
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .data import FEATS, PAD, PHONES, BucketSampler, collate, synthesize
from .model import FrameTagger


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


def warmup_then_inverse_sqrt(warmup):
    return lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def train_epoch(model, loader, optimizer, scheduler, cfg, device):
    model.train()
    stats = torch.zeros(2, dtype=torch.float64, device=device)
    batches = iter(loader)
    while window := list(itertools.islice(batches, cfg.accumulate)):
        # One mean over all the frames of the step, however they fell to the micro-batches and the ranks.
        frames = sum((labels != PAD).sum() for _, labels in window).to(device)
        dist.all_reduce(frames)
        for i, (feats, labels) in enumerate(window):
            feats, labels = feats.to(device), labels.to(device)
            last = i == len(window) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(feats, labels == PAD)
                loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PAD, reduction="sum",
                                       label_smoothing=cfg.label_smoothing)
                (loss * dist.get_world_size() / frames).backward()
            stats += torch.stack([loss.detach(), (labels != PAD).sum()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


@torch.no_grad()
def evaluate(net, utts, batch_size, device):
    """Cross-entropy and frame error rate. Every rank takes its part of the utterances, the sums are over all of them."""
    net.eval()
    mine = sorted(utts[dist.get_rank()::dist.get_world_size()], key=lambda utt: len(utt[1]))
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for start in range(0, len(mine), batch_size):
        feats, labels = (x.to(device) for x in collate(mine[start:start + batch_size]))
        logits = net(feats, labels == PAD)
        loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PAD, reduction="sum")
        valid = labels != PAD
        totals += torch.stack([loss, (logits.argmax(-1) != labels)[valid].sum(), valid.sum()])
    dist.all_reduce(totals)
    loss, errors, frames = totals.tolist()
    return loss / frames, errors / frames


def save(state, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    with open(parser.parse_args().config) as f:
        cfg = SimpleNamespace(**yaml.safe_load(f))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train, dev = synthesize(cfg.train_utts, cfg.seed), synthesize(cfg.dev_utts, cfg.seed + 1)
    sampler = BucketSampler([len(labels) for _, labels in train], cfg.batch_size, rank, world_size, cfg.seed)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)

    torch.manual_seed(cfg.seed)
    net = FrameTagger(FEATS, PHONES, cfg.dim, cfg.layers, cfg.heads, cfg.dropout).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_inverse_sqrt(cfg.warmup_steps))

    last_path, best_path = os.path.join(cfg.out_dir, "last.pt"), os.path.join(cfg.out_dir, "best.pt")
    progress = {"epoch": 0, "best_loss": float("inf"), "stale": 0}
    if cfg.resume and os.path.exists(last_path):
        state = torch.load(last_path, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        progress = state["progress"]
        log(f"going on after epoch {progress['epoch']}")

    while progress["epoch"] < cfg.max_epochs and progress["stale"] < cfg.patience:
        epoch = progress["epoch"]
        sampler.epoch = epoch
        torch.manual_seed(cfg.seed + 100 * epoch + rank)  # dropout
        train_loss = train_epoch(model, loader, optimizer, scheduler, cfg, device)
        dev_loss, dev_fer = evaluate(net, dev, cfg.batch_size, device)

        improved = dev_loss < progress["best_loss"] - cfg.min_delta
        progress["epoch"] += 1
        progress["stale"] = 0 if improved else progress["stale"] + 1
        if improved:
            progress["best_loss"] = dev_loss
        log(f"epoch {epoch + 1}: train {train_loss:.3f}  dev {dev_loss:.3f}  FER {100 * dev_fer:.1f}%"
            f"  lr {scheduler.get_last_lr()[0]:.2e}{'  *' if improved else ''}")
        if rank == 0:
            save({"net": net.state_dict(), "optimizer": optimizer.state_dict(),
                  "scheduler": scheduler.state_dict(), "progress": progress}, last_path)
            if improved:
                save(net.state_dict(), best_path)

    dist.barrier()  # best.pt is complete
    net.load_state_dict(torch.load(best_path, map_location=device))
    test_loss, test_fer = evaluate(net, synthesize(cfg.dev_utts, cfg.seed + 2), cfg.batch_size, device)
    log(f"best: dev {progress['best_loss']:.3f}, test {test_loss:.3f}, test FER {100 * test_fer:.1f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
