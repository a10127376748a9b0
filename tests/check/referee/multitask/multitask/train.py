"""torchrun --nproc-per-node=2 -m multitask.train --config configs/base.yaml"""
import argparse
import os
import random

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

from .data import build_loaders
from .model import MultiTaskNet, WeightedLoss


def task_order(loaders, seed, epoch):
    """Every batch of every task once, in a random order which is the same on all ranks."""
    order = [task for task, loader in loaders.items() for _ in range(len(loader))]
    random.Random(seed * 1000 + epoch).shuffle(order)
    return order


@torch.no_grad()
def evaluate(net, held_out, device):
    net.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # correct, documents, squared error, documents
    for words, topics in held_out["topic"]:
        predicted = net("topic", words.to(device)).argmax(1)
        sums[0] += (predicted == topics.to(device)).sum()
        sums[1] += len(topics)
    for words, ratings in held_out["rating"]:
        sums[2] += (net("rating", words.to(device)).squeeze(1) - ratings.to(device)).square().sum()
        sums[3] += len(ratings)
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[1]).item(), (sums[2] / sums[3]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/base.yaml")
    with open(parser.parse_args().config) as f:
        cfg = yaml.safe_load(f)

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    loaders, held_out = build_loaders(cfg, rank, world_size)
    torch.manual_seed(cfg["seed"])
    net = MultiTaskNet(**cfg["model"]).to(device)
    criterion = WeightedLoss(net, tasks=list(loaders)).to(device)
    # a batch uses one head only, so the parameters of the other head get no gradient
    model = DDP(criterion, device_ids=[local_rank] if use_cuda else None, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"])
    total_steps = cfg["epochs"] * sum(len(loader) for loader in loaders.values())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    torch.manual_seed(cfg["seed"] + 1 + rank)  # dropout differs between the ranks

    start_epoch = 0
    if os.path.exists(cfg["checkpoint"]):
        state = torch.load(cfg["checkpoint"], map_location="cpu")
        criterion.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch = state["epoch"] + 1
        torch.set_rng_state(state["cpu_rng"][rank])
        if use_cuda:
            torch.cuda.set_rng_state(state["cuda_rng"][rank])

    for epoch in range(start_epoch, cfg["epochs"]):
        for loader in loaders.values():
            loader.sampler.set_epoch(epoch)
        batches = {task: iter(loader) for task, loader in loaders.items()}
        for task in task_order(loaders, cfg["seed"], epoch):
            words, target = (t.to(device) for t in next(batches[task]))
            loss = model(task, words, target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg["clip_norm"])
            optimizer.step()
            scheduler.step()

        accuracy, mse = evaluate(net, held_out, device)
        cpu_rng, cuda_rng = [None] * world_size, [None] * world_size
        dist.all_gather_object(cpu_rng, torch.get_rng_state())
        dist.all_gather_object(cuda_rng, torch.cuda.get_rng_state() if use_cuda else None)
        if rank == 0:
            weights = {task: round(torch.exp(-v).item(), 3) for task, v in criterion.log_var.items()}
            print(f"epoch {epoch}  topic accuracy {accuracy:.4f}  rating MSE {mse:.4f}  weights {weights}", flush=True)
            torch.save({"model": criterion.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch,
                        "cpu_rng": cpu_rng, "cuda_rng": cuda_rng}, cfg["checkpoint"])

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
