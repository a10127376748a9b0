"""Train a small mixture-of-experts language model with data parallelism.

    torchrun --standalone --nproc_per_node=2 train.py
    torchrun --standalone --nproc_per_node=2 train.py --resume      # go on from out/last.pt
"""
import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import DialectCorpus
from model import MoELanguageModel


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int, default=0, help="leave after this epoch (time limits); 0: never")
    parser.add_argument("--train-docs", type=int, default=640)
    parser.add_argument("--val-docs", type=int, default=151)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=16, help="documents per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup-ratio", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def setup():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def cosine_with_warmup(total_steps, warmup_steps, min_ratio=0.05):
    def factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return factor


def make_optimizer(net, lr, weight_decay=0.01):
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def save_checkpoint(path, rank, world_size, device, epoch, net, optimizer, scheduler):
    """Called by all the processes, because each has random states of its own. Rank 0 writes."""
    states = [None] * world_size
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    dist.all_gather_object(states, mine)
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "rng": states}, path + ".tmp")
        os.replace(path + ".tmp", path)


def load_checkpoint(path, rank, world_size, device, net, optimizer, scheduler):
    state = torch.load(path, map_location="cpu", weights_only=True)
    if len(state["rng"]) != world_size:
        raise SystemExit(f"{path} is from {len(state['rng'])} processes, this run has {world_size}")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    mine = state["rng"][rank]
    torch.set_rng_state(mine["cpu"])
    if device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"], device)
    return state["epoch"] + 1


def train_epoch(model, loader, steps, optimizer, scheduler, device, args):
    """`steps` optimizer steps; returns the mean loss and the mean load-balancing loss over all processes."""
    model.train()
    totals = torch.zeros(2, device=device)
    batches = iter(loader)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(args.accumulate):
            inputs, targets = (t.to(device) for t in next(batches))
            last = micro == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
                    logits, balance = model(inputs)
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                ((loss + args.balance * balance) / args.accumulate).backward()
            totals += torch.stack([loss.detach(), balance.detach()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    dist.all_reduce(totals)
    return (totals / (steps * args.accumulate * dist.get_world_size())).tolist()


@torch.no_grad()
def evaluate(net, loader, device, args):
    """Perplexity and accuracy over every token of the validation set."""
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # negative log-likelihood, hits, tokens
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
            logits, _ = net(inputs)
        sums[0] += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        sums[1] += (logits.argmax(dim=-1) == targets).sum()
        sums[2] += targets.numel()
    dist.all_reduce(sums)
    nll, hits, tokens = sums.tolist()
    return math.exp(nll / tokens), hits / tokens


def main():
    args = get_args()
    rank, world_size, device = setup()

    train_set = DialectCorpus(args.train_docs, args.length, seed=args.seed, split="train")
    val_set = DialectCorpus(args.val_docs, args.length, seed=args.seed, split="val")
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    mine = Subset(val_set, range(rank, len(val_set), world_size))  # every document once, no padding
    val_loader = DataLoader(mine, 2 * args.batch_size)

    torch.manual_seed(args.seed)
    net = MoELanguageModel(train_set.num_tokens, args.length, num_experts=args.experts).to(device)
    optimizer = make_optimizer(net, args.lr)
    steps_per_epoch = len(train_loader) // args.accumulate
    total_steps = args.epochs * steps_per_epoch
    warmup_steps = max(1, int(args.warmup_ratio * total_steps))
    scheduler = LambdaLR(optimizer, cosine_with_warmup(total_steps, warmup_steps))

    torch.manual_seed(args.seed + 1 + rank)  # from here on: the noise of the router, different in each process
    path, first_epoch = os.path.join(args.out, "last.pt"), 1
    if args.resume:
        first_epoch = load_checkpoint(path, rank, world_size, device, net, optimizer, scheduler)
    model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)

    if rank == 0:
        weights = sum(p.numel() for p in net.parameters())
        print(f"{weights / 1e3:.0f}k weights, {world_size} processes on {device.type}, {total_steps} steps", flush=True)
    for epoch in range(first_epoch, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss, balance = train_epoch(model, train_loader, steps_per_epoch, optimizer, scheduler, device, args)
        perplexity, accuracy = evaluate(net, val_loader, device, args)
        save_checkpoint(path, rank, world_size, device, epoch, net, optimizer, scheduler)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}  balance {balance:.3f}  lr {scheduler.get_last_lr()[0]:.2e}  "
                  f"val perplexity {perplexity:.3f}  accuracy {accuracy:.1%}", flush=True)
        if epoch == args.stop_after:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
