"""MAML with learned inner step sizes (Meta-SGD) on sine waves. Several processes: each draws its own tasks.

    torchrun --nproc-per-node=2 train.py
"""

import os
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


def get_args():
    p = ArgumentParser()
    p.add_argument("--steps", type=int, default=160)
    p.add_argument("--tasks", type=int, default=12, help="tasks per process and meta step")
    p.add_argument("--shots", type=int, default=8)
    p.add_argument("--inner-steps", type=int, default=2)
    p.add_argument("--inner-lr", type=float, default=0.02)
    p.add_argument("--meta-lr", type=float, default=3e-3)
    p.add_argument("--eval-every", type=int, default=40)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--out", type=Path, default=Path("runs/maml"))
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def draw_tasks(n, shots, gen):
    """Sines of random amplitude and phase; support and query points: four tensors of shape (n, shots, 1)."""
    amplitude = 0.1 + 2.9 * torch.rand(n, 1, 1, generator=gen)
    phase = 3.14 * torch.rand(n, 1, 1, generator=gen)
    xs, xq = 10 * torch.rand(2, n, shots, 1, generator=gen) - 5
    return xs, amplitude * torch.sin(xs + phase), xq, amplitude * torch.sin(xq + phase)


class Learner(nn.Module):
    def __init__(self, inner_lr, width=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

        # one learned step size for each parameter, as in Meta-SGD
        self.log_lr = nn.ParameterList([nn.Parameter(torch.full_like(w, inner_lr).log()) for w in self.net.parameters()])

    def adapt(self, x, y, steps):
        fast = dict(self.net.named_parameters())
        for _ in range(steps):
            loss = F.mse_loss(functional_call(self.net, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=self.training)
            fast = {k: w - lr.exp() * g for (k, w), lr, g in zip(fast.items(), self.log_lr, grads)}
        return fast

    def query_loss(self, xs, ys, xq, yq, steps):
        return F.mse_loss(functional_call(self.net, self.adapt(xs, ys, steps), (xq,)), yq)


def average_grads(params):
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(g.view_as(p))


def evaluate(learner, args, device, rank, world_size):
    """Mean query loss over 101 fixed tasks, which the processes share."""
    gen = torch.Generator().manual_seed(12345)
    tasks = [t[rank::world_size].to(device) for t in draw_tasks(101, args.shots, gen)]
    learner.eval()
    total = torch.zeros(2, device=device)
    for task in zip(*tasks):
        total += torch.stack([learner.query_loss(*task, args.inner_steps).detach(), torch.ones((), device=device)])
    learner.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save(path, learner, meta_opt, gen, step, best):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, gen.get_state())
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"learner": learner.state_dict(), "opt": meta_opt.state_dict(), "gen": states, "step": step, "best": best}
        torch.save(state, path)
    dist.barrier()


def main():
    args = get_args()
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)  # the same initial parameters in all processes
    learner = Learner(args.inner_lr).to(device)
    params = list(learner.parameters())
    meta_opt = torch.optim.Adam(params, lr=args.meta_lr)
    gen = torch.Generator().manual_seed(args.seed * 1000 + rank)
    step, best = 0, float("inf")
    if args.resume and (args.out / "last.pt").exists():
        state = torch.load(args.out / "last.pt", map_location="cpu")
        learner.load_state_dict(state["learner"])
        meta_opt.load_state_dict(state["opt"])
        gen.set_state(state["gen"][rank])
        step, best = state["step"], state["best"]
        if rank == 0:
            print(f"resumed at step {step}")

    while step < args.steps:
        tasks = [t.to(device) for t in draw_tasks(args.tasks, args.shots, gen)]
        meta_opt.zero_grad()
        running = 0.0
        for task in zip(*tasks):
            loss = learner.query_loss(*task, args.inner_steps) / args.tasks
            loss.backward()
            running += loss.item()
        average_grads(params)
        nn.utils.clip_grad_norm_(params, 10.0)
        meta_opt.step()
        step += 1

        if step % args.eval_every == 0:
            val = evaluate(learner, args, device, rank, world_size)
            if rank == 0:
                print(f"step {step:4d} | meta loss {running:.3f} | query loss on held-out tasks {val:.3f}", flush=True)
            if val < best:
                best = val
                save(args.out / "best.pt", learner, meta_opt, gen, step, best)
            save(args.out / "last.pt", learner, meta_opt, gen, step, best)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
