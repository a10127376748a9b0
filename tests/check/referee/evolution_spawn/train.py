"""Evolution strategies (OpenAI-ES) on a pole on a cart that is pushed around by wind, population spread over processes.

    python train.py --procs 2

Every process plays the episodes of its part of the population; only the returns, the statistics of the observations and a vector
as long as the policy travel between them. Ten generations make an epoch; after each the mean policy is evaluated and everything is
saved, and a later start continues from there. Training ends early when the evaluation says that the task is solved.
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OBS, HIDDEN, HORIZON = 4, 12, 100
SHAPES = [(OBS, HIDDEN), (1, HIDDEN), (HIDDEN, 1)]
SIZES = [a * b for a, b in SHAPES]


class Normalizer:
    """Mean and standard deviation of all observations so far."""

    def __init__(self):
        self.count = torch.tensor(1e-2, dtype=torch.float64)
        self.total = torch.zeros(OBS, dtype=torch.float64)
        self.squares = torch.full((OBS,), 1e-2, dtype=torch.float64)

    def add(self, sums):
        self.count += sums[0]
        self.total += sums[1:1 + OBS]
        self.squares += sums[1 + OBS:]

    def mean_and_std(self):
        mean = self.total / self.count
        return mean.float(), (self.squares / self.count - mean ** 2).clamp(min=1e-6).sqrt().float()

    def state_dict(self):
        return {"count": self.count, "total": self.total, "squares": self.squares}

    def load_state_dict(self, state):
        self.count, self.total, self.squares = state["count"], state["total"], state["squares"]


@torch.no_grad()
def play(theta, start, wind, normalizer):
    """Plays start.shape[1] episodes with every member; returns [members, episodes] and the sums of the observations."""
    w1, b1, w2 = (part.view(len(theta), *shape) for part, shape in zip(theta.split(SIZES, 1), SHAPES))
    mean, std = normalizer.mean_and_std()
    s, alive = start.clone(), torch.ones(start.shape[:2])
    states, living = [], []
    for t in range(HORIZON):
        obs = ((s - mean) / std).clamp(-5, 5)
        force = (torch.tanh(obs @ w1 + b1) @ w2)[..., 0].clamp(-1, 1) * 8 + wind
        x, v, a, w = s.unbind(-1)
        sin, cos = a.sin(), a.cos()
        push = (force + 0.05 * w ** 2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos ** 2 / 1.1))
        s = s + 0.03 * torch.stack([v, push - 0.05 * turn * cos / 1.1, w, turn], -1)
        alive = alive * ((s[..., 0].abs() < 2.4) & (s[..., 2].abs() < 0.3))
        s = s * alive[..., None]
        states.append(s)
        living.append(alive)
    states, living = torch.stack(states), torch.stack(living)
    seen = states.double().flatten(0, 2)  # zeros where the episode is over
    sums = torch.cat([living.double().sum().view(1), seen.sum(0), seen.square().sum(0)])
    return (living * (1 - (states[..., 0] / 2.4) ** 2)).sum(0), sums


def draw_episodes(n, g):
    return torch.randn(n, OBS, generator=g) * torch.tensor([0.6, 0.4, 0.06, 0.3]), 4.0 * torch.randn(n, generator=g)


def centred_ranks(returns):
    ties = (returns[:, None] > returns).sum(1) + 0.5 * (returns[:, None] == returns).sum(1)
    return ties / len(returns) - 0.5


def evaluate(theta, normalizer, rank, world, n=64):
    start, wind = draw_episodes(n, torch.Generator().manual_seed(77))
    returns, _ = play(theta[None], start[None, rank::world], wind[None, rank::world], normalizer)
    total = torch.tensor([returns.sum(), returns.numel()], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def work(rank, world, port, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    theta = torch.nn.Parameter(0.1 * torch.randn(sum(SIZES)))
    optimizer = torch.optim.SGD([theta], lr=args.lr, momentum=0.8, weight_decay=args.decay)
    normalizer = Normalizer()
    epoch, solved = 0, False

    path = os.path.join(args.out, "es.pt")
    if os.path.exists(path):
        state = torch.load(path)
        theta.data.copy_(state["theta"])
        optimizer.load_state_dict(state["optimizer"])
        normalizer.load_state_dict(state["normalizer"])
        epoch, solved = state["epoch"], state["solved"]

    while epoch < args.epochs and not solved:
        mean_return = 0.0
        for generation in range(10 * epoch, 10 * epoch + 10):
            g = torch.Generator().manual_seed(1000 * args.seed + generation)
            start, wind = draw_episodes(args.episodes, g)  # the same for all members: they are compared
            noise = torch.randn(args.pairs, len(theta), generator=g)[rank::world]
            members = torch.cat([theta.data + args.sigma * noise, theta.data - args.sigma * noise])
            returns, sums = play(members, start.expand(len(members), -1, -1), wind, normalizer)

            # own returns into their places in a vector of all, which is then summed
            everyone = torch.zeros(2, args.pairs)
            everyone[:, rank::world] = returns.mean(1).view(2, -1)
            dist.all_reduce(everyone)
            score = centred_ranks(everyone.flatten()).view(2, -1)[:, rank::world]
            grad = -(score[0] - score[1]) @ noise / (2 * args.pairs * args.sigma)
            dist.all_reduce(grad)
            theta.grad = grad
            optimizer.param_groups[0]["lr"] = args.lr / (1 + generation / 15)
            optimizer.step()
            dist.all_reduce(sums)
            normalizer.add(sums)
            mean_return += everyone.mean().item() / 10
        epoch += 1
        value = evaluate(theta.data, normalizer, rank, world)
        solved = value > args.solved
        if rank == 0:
            print(f"epoch {epoch - 1}: return of the population {mean_return:.2f}, of the mean policy {value:.2f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"theta": theta.data, "optimizer": optimizer.state_dict(), "normalizer": normalizer.state_dict(),
                        "epoch": epoch, "solved": solved}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    if rank == 0:
        print("solved" if solved else "not solved", flush=True)
    dist.barrier()  # nobody takes the group down while others use it
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=24, help="perturbations, each played with both signs, over all processes")
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument("--solved", type=float, default=88.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="es")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(args.procs, port, args), nprocs=args.procs)


if __name__ == "__main__":
    main()
