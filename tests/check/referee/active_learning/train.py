"""Pool-based active learning with MC dropout (BALD). The pool is scored by all ranks, then the model is trained from scratch
on the labels bought so far. Run with torchrun --nproc-per-node=2 train.py
"""
import json
import math
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@dataclass
class Config:
    rounds: int = 5
    first: int = 60
    buy: int = 60
    epochs: int = 25
    batch_size: int = 15
    mc_samples: int = 8
    lr: float = 4e-3
    seed: int = 1
    state: str = "rounds.json"


cfg = Config()


def spirals(n, seed):
    """Four spiral arms with unequal frequency; arm 3 is rare."""
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.4, 0.3, 0.22, 0.08]), n, replacement=True, generator=g)
    t = 3.2 * torch.rand(n, generator=g).sqrt()
    angle = t * 1.5 + y * math.pi / 2 + 0.12 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([t * angle.cos(), t * angle.sin()], 1), y)


def build(device):
    torch.manual_seed(cfg.seed)
    return nn.Sequential(
        nn.Linear(2, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 4)
    ).to(device)


def train(dataset, labelled, device):
    """A new model on the labelled part of the pool. Returns the model and the loss of the first and the last epoch."""
    net = build(device)
    model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    torch.manual_seed(cfg.seed + 31 * dist.get_rank() + 7)  # own dropout masks
    subset = Subset(dataset, labelled)
    sampler = DistributedSampler(subset, shuffle=True, seed=cfg.seed)
    loader = DataLoader(subset, cfg.batch_size, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, epochs=cfg.epochs, steps_per_epoch=len(loader))
    history = []
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        history.append(total.item() / dist.get_world_size())
    return net, history[0], history[-1]


@torch.no_grad()
def bald(net, x):
    """Mutual information of prediction and parameters, from several passes with dropout: (n,)."""
    net.train()
    probs = torch.stack([net(x).softmax(-1) for _ in range(cfg.mc_samples)])
    entropy = lambda p: -(p * p.clamp_min(1e-9).log()).sum(-1)
    return entropy(probs.mean(0)) - entropy(probs).mean(0)


def score_pool(net, dataset, unlabelled, device):
    """Scores of all unlabelled samples, on all ranks, with the index of each in the pool."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = unlabelled[rank::world]
    scores = torch.cat([bald(net, dataset.tensors[0][mine[i : i + 256]].to(device)) for i in range(0, len(mine), 256)])
    # the shares may differ by one sample: pad to the longest, and score the padding below all others
    rows = -(-len(unlabelled) // world)
    table = torch.full((rows, 2), -1.0, dtype=torch.float64, device=device)
    table[: len(mine), 0] = scores.double()
    table[: len(mine), 1] = torch.tensor(mine, dtype=torch.float64, device=device)
    tables = [torch.empty_like(table) for _ in range(world)]
    dist.all_gather(tables, table)
    table = torch.cat(tables)
    table = table[table[:, 1] >= 0]
    return table[:, 0], table[:, 1].long()


@torch.no_grad()
def evaluate(net, dataset, device):
    """Balanced accuracy: mean of the recall of the classes, from counts over all ranks."""
    net.eval()
    x, y = (t[dist.get_rank() :: dist.get_world_size()].to(device) for t in dataset.tensors)
    hit = net(x).argmax(1) == y
    counts = torch.stack([torch.bincount(y[hit], minlength=4), torch.bincount(y, minlength=4)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).mean().item()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    pool, test = spirals(3001, 10), spirals(1001, 11)

    start, labelled = 0, []
    if os.path.exists(cfg.state):  # go on after the last complete round
        with open(cfg.state) as f:
            saved = json.load(f)
        start, labelled = saved["round"] + 1, saved["labelled"]
    dist.barrier()
    if not labelled:
        labelled = torch.randperm(len(pool), generator=torch.Generator().manual_seed(cfg.seed))[: cfg.first].tolist()

    for rnd in range(start, cfg.rounds):
        net, before, after = train(pool, labelled, device)
        score = evaluate(net, test, device)
        known = set(labelled)
        unlabelled = [i for i in range(len(pool)) if i not in known]
        values, indices = score_pool(net, pool, unlabelled, device)
        # not simply the best: a sample is drawn in proportion to its score, which avoids buying the same thing many times
        noise = torch.rand(len(values), generator=torch.Generator().manual_seed(cfg.seed + rnd)).log().neg().log().neg()
        keys = values.clamp_min(1e-9).log() + noise.to(device)
        bought = indices[keys.topk(cfg.buy).indices].tolist()
        if dist.get_rank() == 0:
            rare = (pool.tensors[1][bought] == 3).float().mean()
            print(f"round {rnd}: {len(labelled)} labels, loss {before:.3f} -> {after:.3f}, "
                  f"balanced accuracy {score:.3f}, {rare:.0%} of the new samples are of the rare class", flush=True)
        labelled = labelled + bought
        if dist.get_rank() == 0:
            with open(cfg.state, "w") as f:
                json.dump({"round": rnd, "labelled": labelled, "config": asdict(cfg)}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
