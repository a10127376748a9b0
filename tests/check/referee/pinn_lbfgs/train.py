"""A physics-informed network for the heat equation, with L-BFGS over the collocation points of all processes.

u_t = k u_xx on 0 < x < 1, u = 0 at both ends, u(x, 0) = sin(pi x) + 0.5 sin(3 pi x). Each process has points of its
own. After every round the places where the network does worst become new points.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn

CONDUCTIVITY = 0.08


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))

    def forward(self, x, t):
        return x * (1 - x) * self.net(torch.stack([2 * x - 1, 2 * t - 1], dim=-1)).squeeze(-1)  # 0 at both ends


def exact(x, t):
    mode = lambda n: torch.sin(n * math.pi * x) * torch.exp(-CONDUCTIVITY * (n * math.pi) ** 2 * t)
    return mode(1) + 0.5 * mode(3)


def residual(net, points):
    x, t = points.unbind(dim=1)
    x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
    u = net(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return u_t - CONDUCTIVITY * u_xx


def total_count(points):
    count = torch.tensor(len(points), device=points.device)
    dist.all_reduce(count)
    return count.item()


def solve(net, points, start_points, weight, max_iter):
    """One run of L-BFGS on the loss over all points of all processes. Returns the loss at its end."""
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=max_iter, history_size=30, line_search_fn="strong_wolfe")
    n_points, n_start = total_count(points), total_count(start_points)
    parameters = list(net.parameters())

    def closure():
        optimizer.zero_grad()
        zero = torch.zeros_like(start_points)
        at_start = (net(start_points, zero) - exact(start_points, zero)).square().sum() / n_start
        loss = residual(net, points).square().sum() / n_points + weight * at_start  # this process's part of the loss
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in parameters] + [loss.detach().view(1)])
        dist.all_reduce(flat)
        for p, g in zip(parameters, flat[:-1].split([p.numel() for p in parameters])):
            p.grad.copy_(g.view_as(p))
        return flat[-1]

    optimizer.step(closure)
    return closure().item()


def refine(net, points, candidates, keep):
    """Those of the candidates that are among the worst of all processes become points of the process they came from."""
    size = residual(net, candidates).detach().abs()
    everyone = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, size)
    threshold = torch.cat(everyone).topk(keep).values.min()
    return torch.cat([points, candidates[size >= threshold]])


@torch.no_grad()
def error(net, device):
    """Relative L2 error on a grid whose rows are divided over the processes."""
    grid = torch.linspace(0, 1, 101, dtype=torch.float64, device=device)
    x, t = torch.meshgrid(grid, grid[dist.get_rank()::dist.get_world_size()], indexing="ij")
    sums = torch.stack([(net(x, t) - exact(x, t)).square().sum(), exact(x, t).square().sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30, help="of L-BFGS in a round")
    parser.add_argument("--points", type=int, default=1200, help="collocation points of all processes, at first")
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--weight", type=float, default=10.0, help="of the starting condition")
    parser.add_argument("--checkpoint", default="pinn.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = Network(args.width).to(device, torch.float64)
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    draws = torch.Generator().manual_seed(1 + rank)
    points = torch.rand(args.points // world_size, 2, generator=draws, dtype=torch.float64).to(device)
    start_points = torch.linspace(0, 1, 101, dtype=torch.float64, device=device)[rank::world_size]
    first_round = 0
    if args.resume and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device)
        net.load_state_dict(state["net"])
        points = state["points"][rank]
        first_round = state["round"] + 1

    for number in range(first_round, args.rounds):
        loss = solve(net, points, start_points, args.weight, args.iterations)
        draws = torch.Generator().manual_seed(1000 * (number + 1) + rank)
        candidates = torch.rand(1000, 2, generator=draws, dtype=torch.float64).to(device)
        points = refine(net, points, candidates, keep=100)
        wrong = error(net, device)
        of_all = [None] * world_size
        dist.all_gather_object(of_all, points.cpu())
        if rank == 0:
            print(f"round {number}: loss {loss:.2e}, relative error {wrong:.4f}, "
                  f"{' + '.join(str(len(p)) for p in of_all)} points", flush=True)
            torch.save({"net": net.state_dict(), "points": of_all, "round": number}, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
