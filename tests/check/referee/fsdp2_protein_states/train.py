"""Per-residue labelling (helix, strand, coil) of made-up protein chains: a small bidirectional transformer under FSDP2 with bf16 compute,
two micro-batches per step, sharded checkpoints (torch.distributed.checkpoint) every few steps."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RESIDUES, STATES, PAD, IGNORE = 20, 3, 20, -100


def make_chains(n, seed):
    """Hidden Markov chains: long runs of a state, each state with its own preference for residues."""
    g = torch.Generator().manual_seed(1234)
    emit = torch.softmax(1.3 * torch.randn(STATES, RESIDUES, generator=g), 1)
    move = torch.full((STATES, STATES), 0.08) + 0.76 * torch.eye(STATES)
    g = torch.Generator().manual_seed(seed)
    chains = []
    for length in torch.randint(8, 49, (n,), generator=g).tolist():
        state, states = int(torch.randint(STATES, (1,), generator=g)), []
        for _ in range(length):
            state = int(torch.multinomial(move[state], 1, generator=g))
            states.append(state)
        states = torch.tensor(states)
        chains.append((torch.multinomial(emit[states], 1, generator=g)[:, 0], states))
    return chains


def collate(chains):
    x = nn.utils.rnn.pad_sequence([c[0] for c in chains], batch_first=True, padding_value=PAD)
    y = nn.utils.rnn.pad_sequence([c[1] for c in chains], batch_first=True, padding_value=IGNORE)
    return x, y


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tagger(nn.Module):
    def __init__(self, dim=48, depth=2, heads=4, longest=48):
        super().__init__()
        self.residue, self.place = nn.Embedding(RESIDUES + 1, dim), nn.Embedding(longest, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, STATES)

    def forward(self, x):
        mask = (x != PAD)[:, None, None, :]
        h = self.residue(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))


class Training(Stateful):
    """All that a restart needs, in the form that torch.distributed.checkpoint asks for."""

    def __init__(self, model, optimizer, scheduler, device):
        self.model, self.optimizer, self.scheduler, self.step = model, optimizer, scheduler, 0
        self.losses = torch.zeros(2, device=device)  # of this rank in this epoch: sum over residues, residues

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


def save(training, folder):
    name = f"step_{training.step}"
    losses = training.losses.clone()
    dist.all_reduce(losses)
    dcp.save({"training": training, "losses": losses}, checkpoint_id=os.path.join(folder, name))
    if dist.get_rank() == 0:  # dcp.save returns when all ranks have written
        with open(os.path.join(folder, "latest.tmp"), "w") as f:
            f.write(name)
        os.replace(os.path.join(folder, "latest.tmp"), os.path.join(folder, "latest"))
    dist.barrier()


def load(training, folder):
    latest = os.path.join(folder, "latest")
    if os.path.exists(latest):
        with open(latest) as f:
            name = f.read()
        losses = torch.zeros_like(training.losses)
        dcp.load({"training": training, "losses": losses}, checkpoint_id=os.path.join(folder, name))
        training.losses.copy_(losses / dist.get_world_size())  # what the ranks had together, in equal parts


@torch.no_grad()
def evaluate(model, chains, device):
    model.eval()
    x, y = (t.to(device) for t in collate(chains[dist.get_rank()::dist.get_world_size()]))
    logits = model(x).float()
    known = y != IGNORE
    sums = torch.stack([F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum"),
                        (logits.argmax(-1) == y)[known].sum().float(), known.sum().float()])
    dist.all_reduce(sums)
    model.train()
    return (sums[:2] / sums[2]).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="chains per step over all ranks and micro-batches")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--save-every", type=int, default=7)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.makedirs(args.out, exist_ok=True)

    train, held_out = make_chains(480, 1), make_chains(144, 2)
    torch.manual_seed(0)
    model = Tagger().to(device)

    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.precision == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    steps_per_epoch = len(train) // args.batch
    total = args.epochs * steps_per_epoch
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 6, max(0.05, (total - s) / (total - 6))))
    training = Training(model, optimizer, scheduler, device)
    load(training, args.out)

    losses = training.losses
    while training.step < total:
        epoch, at = divmod(training.step, steps_per_epoch)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 + epoch))  # depends on the step only: a restart goes on here
        chosen = order[at * args.batch:(at + 1) * args.batch].view(args.micro, -1)[:, rank::world]
        micros = [tuple(t.to(device) for t in collate([train[i] for i in part.tolist()])) for part in chosen]

        tokens = sum((y != IGNORE).sum() for _, y in micros).float()
        dist.all_reduce(tokens)
        for i, (x, y) in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            logits = model(x).float()
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
            (loss * world / tokens).backward()  # FSDP takes the mean over ranks
            losses += torch.stack([loss.detach(), (y != IGNORE).sum()])
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        training.step += 1

        if training.step % 4 == 0:
            norm = norm.full_tensor().item()
            if rank == 0:
                print(f"step {training.step}: gradient norm {norm:.4f}", flush=True)
        if training.step % steps_per_epoch == 0:
            dist.all_reduce(losses)
            held_out_loss, accuracy = evaluate(model, held_out, device)
            if rank == 0:
                print(f"epoch {epoch}: loss {losses[0] / losses[1]:.4f}, held-out loss {held_out_loss:.4f}, accuracy {accuracy:.4f}", flush=True)
            losses.zero_()
        if training.step % args.save_every == 0 or training.step == total:
            save(training, args.out)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(weights, os.path.join(args.out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
