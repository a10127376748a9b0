"""DiLoCo: every worker takes H local AdamW steps, then an outer Nesterov step is made on the
averaged change of the parameters (https://arxiv.org/abs/2311.08105), here for a small char-level LM."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

VOCAB, SEQ = 24, 32


def make_corpus(num_seqs, seed):
    """Sequences of a fixed noisy second-order Markov chain."""
    table = torch.randint(0, VOCAB, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(7))
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(0, VOCAB, (num_seqs, SEQ + 1), generator=gen)
    noise = torch.rand(num_seqs, SEQ + 1, generator=gen) < 0.1
    for t in range(2, SEQ + 1):
        x[:, t] = torch.where(noise[:, t], x[:, t], table[x[:, t - 1], x[:, t - 2] % 4])
    return x


class CharLM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.05)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, x):
        return self.head(self.drop(self.rnn(self.embed(x))[0]))


def lm_loss(model, x, reduction="mean"):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, data, rank, world, device):
    model.eval()
    total = torch.zeros(2, device=device)
    for x in data[rank::world].split(64):
        total[0] += lm_loss(model, x.to(device), reduction="sum")
        total[1] += x[:, 1:].numel()
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def outer_step(model, outer_params, outer_opt, world):
    """Average the workers' changes, use them as the outer gradient and restart from the result."""
    for p, q in zip(model.parameters(), outer_params):
        q.grad = q.data - p.data
        dist.all_reduce(q.grad, op=dist.ReduceOp.SUM)
        q.grad.div_(world)
    outer_opt.step()
    outer_opt.zero_grad()
    with torch.no_grad():
        for p, q in zip(model.parameters(), outer_params):
            p.copy_(q)


def worker(rank, world, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(args.port))
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=world)

    torch.manual_seed(args.seed)  # every worker starts from the same parameters
    model = CharLM().to(device)
    outer_params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    inner_opt = torch.optim.AdamW(model.parameters(), lr=args.inner_lr, weight_decay=0.01)
    outer_opt = torch.optim.SGD(outer_params, lr=args.outer_lr, momentum=0.8, nesterov=True)
    warmup = torch.optim.lr_scheduler.LinearLR(inner_opt, 0.1, 1.0, total_iters=20)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(inner_opt, args.rounds * args.inner_steps - 20)
    sched = torch.optim.lr_scheduler.SequentialLR(inner_opt, [warmup, decay], milestones=[20])

    train_data = make_corpus(4096, seed=1)[rank::world]  # this worker's shard
    valid_data = make_corpus(500, seed=2)
    torch.manual_seed(args.seed + 1 + rank)  # batches and dropout differ from worker to worker

    path = os.path.join(args.out, f"worker{rank}.pt")
    start = 0
    if os.path.exists(path):
        ckpt = torch.load(path, map_location=device)
        model.load_state_dict(ckpt["model"])
        inner_opt.load_state_dict(ckpt["inner_opt"])
        outer_opt.load_state_dict(ckpt["outer_opt"])
        sched.load_state_dict(ckpt["sched"])
        with torch.no_grad():
            for q, saved in zip(outer_params, ckpt["outer_params"]):
                q.copy_(saved)
        torch.set_rng_state(ckpt["rng"].cpu())
        if use_cuda:
            torch.cuda.set_rng_state(ckpt["cuda_rng"].cpu())
        start = ckpt["round"]
        if rank == 0:
            print(f"resumed after round {start}", flush=True)

    for rnd in range(start, args.rounds):
        running = torch.zeros((), device=device)
        for _ in range(args.inner_steps):
            idx = torch.randint(0, len(train_data), (args.batch_size,))
            loss = lm_loss(model, train_data[idx].to(device))
            inner_opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner_opt.step()
            sched.step()
            running += loss.detach() / args.inner_steps

        outer_step(model, outer_params, outer_opt, world)

        dist.all_reduce(running)
        valid_loss = evaluate(model, valid_data, rank, world, device)
        if rank == 0:
            print(f"round {rnd + 1} train {running.item() / world:.4f} valid {valid_loss:.4f}", flush=True)

        # the inner optimizer state belongs to the worker, so each one keeps its own file
        torch.save({"model": model.state_dict(), "inner_opt": inner_opt.state_dict(),
                    "outer_params": [q.detach() for q in outer_params], "outer_opt": outer_opt.state_dict(),
                    "sched": sched.state_dict(), "rng": torch.get_rng_state(),
                    "cuda_rng": torch.cuda.get_rng_state() if use_cuda else None, "round": rnd + 1}, path + ".tmp")
        dist.barrier()  # replace the old files only when all the new ones are complete
        os.replace(path + ".tmp", path)

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--inner-steps", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--inner-lr", type=float, default=1e-2)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--out", default="checkpoints")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    mp.spawn(worker, args=(args.workers, args), nprocs=args.workers)
