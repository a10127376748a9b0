"""Preference optimisation (DPO) of a small language model under FSDP2: sharded policy and sharded frozen reference, warm-up, clipping, DCP checkpoints."""
import argparse
import copy
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, PROMPT, ANSWER = 24, 6, 6
LENGTH = PROMPT + ANSWER


def make_pairs(n, seed):
    """Prompts with a chosen answer (rising symbols) and a rejected one (any), each of its own length; mask of the answer's tokens."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, VOCAB, (n, PROMPT), generator=g)
    lengths = torch.randint(3, ANSWER + 1, (n, 2), generator=g)
    start = torch.randint(1, VOCAB, (n, 1), generator=g)
    chosen = (start + torch.arange(ANSWER)) % (VOCAB - 1) + 1
    rejected = torch.randint(1, VOCAB, (n, ANSWER), generator=g)
    mask = torch.arange(ANSWER) < lengths[..., None]
    tokens = torch.stack([torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)], 1)
    return tokens, torch.cat([torch.zeros(n, 2, PROMPT, dtype=torch.bool), mask], 2)


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyLM(nn.Module):
    def __init__(self, width=48, layers=2, heads=4, dropout=0.1):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList([Layer(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[:tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def answer_logps(model, tokens, mask):
    """Sum of the log-probabilities of the answers' tokens: one number per answer, first the chosen ones, then the rejected."""
    tokens, mask = tokens.transpose(0, 1).flatten(0, 1), mask.transpose(0, 1).flatten(0, 1)
    logps = model(tokens[:, :-1]).float().log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return (logps * mask[:, 1:]).sum(1).chunk(2)


def dpo(policy, reference, tokens, mask, beta):
    """Loss of every pair and whether the policy has the preference right."""
    chosen, rejected = answer_logps(policy, tokens, mask)
    with torch.no_grad():
        ref_chosen, ref_rejected = answer_logps(reference, tokens, mask)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return -F.logsigmoid(margin), margin.detach()


def shard(model, mesh):
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


@torch.no_grad()
def evaluate(policy, reference, tokens, mask, beta, rank, world):
    """Loss, accuracy and margin over all validation pairs; each rank does a part of them."""
    policy.eval()
    loss, margin = dpo(policy, reference, tokens[rank::world], mask[rank::world], beta)
    policy.train()
    sums = torch.stack([loss.sum(), (margin > 0).float().sum(), margin.sum(), torch.full_like(loss.sum(), len(loss))])
    dist.all_reduce(sums)
    return (sums[:3] / sums[3]).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=48, help="pairs per step over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if cuda else "cpu")
    mesh = init_device_mesh(device.type, (world,))

    tokens, mask = (t.to(device) for t in make_pairs(480, seed=1))
    valid_tokens, valid_mask = (t.to(device) for t in make_pairs(250, seed=2))

    torch.manual_seed(8)  # the same weights on all ranks: they stand for those of the supervised model
    policy = TinyLM(dropout=args.dropout).to(device)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    shard(policy, mesh)
    shard(reference, mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    steps, first = len(tokens) // args.batch, 0
    done = sorted(int(name[6:]) for name in os.listdir(args.out) if name.startswith("epoch-")) if os.path.isdir(args.out) else []
    if done:
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict()}
        dcp.load(state, checkpoint_id=f"{args.out}/epoch-{done[-1]}")
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = done[-1] + 1

    for epoch in range(first, args.epochs):
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(epoch)).to(device)
        torch.manual_seed(1000 * (epoch + 1) + rank)  # dropout: other masks on every rank, the same after a resume
        running = torch.zeros((), device=device)
        for step in range(steps):
            mine = order[step * args.batch:(step + 1) * args.batch][rank::world]
            losses, _ = dpo(policy, reference, tokens[mine], mask[mine], args.beta)
            loss = losses.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            running += loss.detach() / steps
        dist.all_reduce(running)
        loss, accuracy, margin = evaluate(policy, reference, valid_tokens, valid_mask, args.beta, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: train {running.item() / world:.4f}, validation loss {loss:.4f}, accuracy {accuracy:.4f}, margin {margin:.4f}", flush=True)
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict()}, checkpoint_id=f"{args.out}/part")
        if rank == 0:
            os.rename(f"{args.out}/part", f"{args.out}/epoch-{epoch}")
            shutil.rmtree(f"{args.out}/epoch-{epoch - 2}", ignore_errors=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
