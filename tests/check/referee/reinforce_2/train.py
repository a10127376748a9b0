"""REINFORCE with a small vectorized environment of our own, several processes, gradients averaged by hand."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn


class Gliders:
    """Many gliders on a line: push left, wait or push right, to come to rest at the origin."""

    def __init__(self, num_envs, gen, device):
        self.pos = 4 * torch.rand(num_envs, generator=gen, device=device) - 2
        self.vel = 2 * torch.rand(num_envs, generator=gen, device=device) - 1

    def observe(self):
        return torch.stack([10 * self.pos + 5, self.vel], dim=1)

    def step(self, action):
        self.vel = 0.95 * self.vel + 0.3 * (action - 1)
        self.pos = self.pos + 0.2 * self.vel
        return -(self.pos.abs() + 0.2 * self.vel.abs())


class RunningNorm(nn.Module):
    """Scales observations with the mean and variance of all that any process has seen."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))
        self.register_buffer("moments", torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64))

    def update(self, obs):
        moments = torch.stack([obs.sum(dim=0), obs.square().sum(dim=0)]).double()
        dist.all_reduce(moments)
        self.moments += moments
        self.count += len(obs) * dist.get_world_size()

    def forward(self, obs):
        mean, square = self.moments / self.count
        return ((obs - mean) / (square - mean.square()).clamp(min=1e-6).sqrt()).float()


@torch.no_grad()
def rollout(policy, env, horizon, gen):
    steps = []
    for _ in range(horizon):
        obs = env.observe()
        action = torch.multinomial(policy(obs).exp(), 1, generator=gen).squeeze(1)
        steps.append((obs, action, env.step(action)))
    return [torch.stack(column) for column in zip(*steps)]


def global_mean(x, dim):
    mean = x.mean(dim=dim)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def advantages(rewards, gamma):
    """Rewards to go, less their mean at each time step, over their standard deviation: both over all processes."""
    returns = rewards.clone()
    for t in reversed(range(len(rewards) - 1)):
        returns[t] += gamma * returns[t + 1]
    returns -= global_mean(returns, dim=1).unsqueeze(1)
    return returns / (global_mean(returns.square(), dim=(0, 1)).sqrt() + 1e-6)


def average_gradients(policy):
    for p in policy.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--num-envs", type=int, default=32, help="per process")
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default="checkpoints/policy.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    policy = nn.Sequential(RunningNorm(2), nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3), nn.LogSoftmax(-1))
    policy = policy.to(device)
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    start = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location=device)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["iteration"]

    gen = torch.Generator(device=device)
    for iteration in range(start + 1, args.iterations + 1):
        gen.manual_seed(args.seed + 1000 * iteration + rank)
        obs, actions, rewards = rollout(policy, Gliders(args.num_envs, gen, device), args.horizon, gen)
        logp = policy(obs.flatten(0, 1)).gather(1, actions.flatten().unsqueeze(1)).squeeze(1)
        loss = -(logp * advantages(rewards, args.gamma).flatten()).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(policy)
        optimizer.step()
        policy[0].update(obs.flatten(0, 1))
        mean_return = global_mean(rewards.sum(dim=0), dim=0).item()
        if rank == 0 and (iteration % 10 == 0 or iteration == args.iterations):
            print(f"iteration {iteration:3d}  mean return over all gliders {mean_return:.2f}")
            state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, args.checkpoint.with_suffix(".tmp"))
            os.replace(args.checkpoint.with_suffix(".tmp"), args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
