"""Small transformer language model with FSDP2: bfloat16, gradient accumulation, warm-up and cosine, distributed checkpoints.

A second start continues from the last checkpoint in --out up to --epochs.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LENGTH = 64, 48


def make_text(n, seed=11):
    """n sequences of LENGTH + 1 tokens: the next one depends on the last two, by a fixed table of four choices."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(VOCAB, (VOCAB, 4, 4), generator=torch.Generator().manual_seed(1))
    text = torch.randint(VOCAB, (n, LENGTH + 1), generator=g)
    choice = torch.multinomial(torch.tensor([0.7, 0.2, 0.06, 0.04]), n * LENGTH, True, generator=g).view(n, LENGTH)
    for t in range(1, LENGTH):
        text[:, t + 1] = table[text[:, t], text[:, t - 1] % 4, choice[:, t]]
    return text


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, width=96, depth=2, heads=4):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


@torch.no_grad()
def perplexity(model, text, device, batch=32):
    """Over all tokens of text; the ranks take the batches in turn, and all call the model equally often (it gathers weights)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    batches = text.split(batch)
    nll, count = torch.zeros((), device=device), torch.zeros((), device=device)
    for i in range(0, len(batches), world):
        mine = batches[min(i + rank, len(batches) - 1)].to(device)
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
        if i + rank < len(batches):
            nll += loss
            count += mine[:, 1:].numel()
    dist.all_reduce(nll)
    dist.all_reduce(count)
    model.train()
    return math.exp(nll.item() / count.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=96, help="sequences per optimizer step over all ranks")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    train, val = TensorDataset(make_text(2304)), make_text(11 * 32 - 12, seed=12)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch // (world * args.accumulate), sampler=sampler, drop_last=True, pin_memory=cuda)

    model = LanguageModel().to(device)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)

    steps = len(loader) // args.accumulate
    total = args.epochs * steps

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, total - args.warmup)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    latest, first = os.path.join(args.out, "latest"), 0
    if os.path.exists(latest):
        with open(latest) as file:
            name = file.read()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "epoch": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.out, name))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"] + 1

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        total_loss, norms = torch.zeros((), device=device), 0.0
        for i, (text,) in enumerate(loader):
            text = text.to(device, non_blocking=True)
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            (loss / args.accumulate).backward()
            total_loss += loss.detach() / len(loader)
            if (i + 1) % args.accumulate == 0:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                norms += norm.full_tensor().item() / steps
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        dist.all_reduce(total_loss)
        value = perplexity(model, val, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {total_loss.item() / world:.4f}, gradient norm {norms:.3f}, "
                  f"perplexity {value:.3f}, lr {schedule.get_last_lr()[0]:.2e}", flush=True)

        name = f"epoch-{epoch}"
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "epoch": epoch},
                 checkpoint_id=os.path.join(args.out, name))
        if rank == 0:
            with open(latest + ".tmp", "w") as file:
                file.write(name)
            os.replace(latest + ".tmp", latest)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
