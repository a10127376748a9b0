"""Soft actor-critic on a cart that must stop at the origin, with one actor (and its replay memory) per process.

    python sac.py              # two processes
    python sac.py --resume     # go on from cart/latest.pt
"""
import argparse
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

CONFIG = {
    "processes": 2, "seed": 3, "folder": "cart", "iterations": 360, "evaluate_every": 60, "save_every": 120,
    "envs": 8, "memory": 6000, "random_steps": 20, "sync_statistics_every": 10,
    "batch": 64, "gamma": 0.95, "tau": 0.02, "lr": 4e-3, "hidden": 48, "target_entropy": -1.5,
}


class Carts:
    """A row of carts. Observed are the position in mm, the speed in m/s and the wind, which also pushes."""
    LENGTH = 40

    def __init__(self, number, seed):
        self.rng = torch.Generator().manual_seed(seed)
        self.state, self.age = self.fresh(number), torch.randint(self.LENGTH, (number,), generator=self.rng)

    def fresh(self, number):
        return torch.randn(number, 3, generator=self.rng) * torch.tensor([1.5, 0.3, 0.3])

    def observe(self):
        return self.state * torch.tensor([1000.0, 1.0, 1.0])

    def step(self, action):
        x, v, wind = self.state.unbind(1)
        reward = -(x.abs() + 0.1 * v ** 2 + 0.05 * action.squeeze(1) ** 2)
        v = 0.95 * v + 0.25 * (action.squeeze(1) + wind)
        self.state, self.age = torch.stack([x + 0.25 * v, v, wind], dim=1), self.age + 1
        after, over = self.observe(), self.age >= self.LENGTH  # a time limit: the value goes on behind it
        self.state = torch.where(over.unsqueeze(1), self.fresh(len(over)), self.state)
        self.age[over] = 0
        return reward.unsqueeze(1), after


class Memory:
    def __init__(self, capacity):
        self.rows, self.capacity, self.written = torch.zeros(capacity, 3 + 1 + 1 + 3), capacity, 0

    def add(self, *columns):
        rows = torch.cat(columns, dim=1)
        self.rows[(self.written + torch.arange(len(rows))) % self.capacity] = rows
        self.written += len(rows)

    def sample(self, n):
        picked = torch.randint(min(self.written, self.capacity), (n,))
        return self.rows[picked].split([3, 1, 1, 3], dim=1)


class Normalizer:
    """Mean and deviation of the observations of all processes."""

    def __init__(self, size):
        self.totals = torch.zeros(1 + 2 * size, dtype=torch.float64)  # count, sums, sums of squares
        self.unsent = torch.zeros_like(self.totals)

    def observe(self, obs):
        obs = obs.double()
        self.unsent += torch.cat([torch.tensor([len(obs)]), obs.sum(0), (obs ** 2).sum(0)])

    def synchronize(self, device):
        news = self.unsent.to(device)
        dist.all_reduce(news)
        self.totals += news.cpu()
        self.unsent.zero_()

    def __call__(self, obs):
        mean, square = (self.totals[1:] / self.totals[0].clamp(min=1)).float().chunk(2)
        return ((obs - mean) / (square - mean ** 2).clamp(min=1e-6).sqrt()).clamp(-5, 5)


def mlp(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                         nn.Linear(hidden, outputs))


class Agent:
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.policy = mlp(3, cfg["hidden"], 2).to(device)
        self.critics = nn.ModuleList(mlp(4, cfg["hidden"], 1) for _ in range(2)).to(device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.tensor(-1.0, device=device, requires_grad=True)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), cfg["lr"])
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), cfg["lr"])
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], cfg["lr"])

    def act(self, obs, noisy=True):
        mean, log_std = self.policy(obs).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-4, 1).exp())
        raw = mean + normal.stddev * torch.randn(mean.shape).to(self.device) if noisy else mean
        action = raw.tanh()
        return action, normal.log_prob(raw) - torch.log(1 - action ** 2 + 1e-6)

    def descend(self, optimizer, loss):
        """One step with the mean of the gradients of all processes."""
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            flat = torch.cat([p.grad.flatten() for p in group["params"]])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, mean in zip(group["params"], flat.split([p.numel() for p in group["params"]])):
                p.grad.copy_(mean.view_as(p))
        optimizer.step()

    def update(self, obs, action, reward, after):
        with torch.no_grad():
            next_action, log_p = self.act(after)
            value = torch.min(*(q(torch.cat([after, next_action], 1)) for q in self.targets))
            goal = reward + self.cfg["gamma"] * (value - self.log_alpha.exp() * log_p)
        taken = torch.cat([obs, action], 1)
        self.descend(self.critic_optimizer, sum((q(taken) - goal).square().mean() for q in self.critics))
        chosen, log_p = self.act(obs)
        value = torch.min(*(q(torch.cat([obs, chosen], 1)) for q in self.critics))
        self.descend(self.policy_optimizer, (self.log_alpha.exp().detach() * log_p - value).mean())
        surplus = log_p.detach() + self.cfg["target_entropy"]
        self.descend(self.alpha_optimizer, -(self.log_alpha * surplus).mean())
        with torch.no_grad():
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters()):
                slow.lerp_(fast, self.cfg["tau"])

    def parts(self):
        return {name: part for name, part in vars(self).items() if hasattr(part, "load_state_dict")}


@torch.no_grad()
def evaluate(agent, normalizer, rank):
    """Mean return of an episode with the mean action; every process drives carts of its own."""
    carts = Carts(16, seed=10_000 + rank)
    total = torch.zeros((), device=agent.device)
    for _ in range(Carts.LENGTH):
        action, _ = agent.act(normalizer(carts.observe()).to(agent.device), noisy=False)
        total += carts.step(action.cpu())[0].mean().item()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save(path, iteration, agent, normalizer, carts, memory, rank):
    actor = {"random": torch.get_rng_state(), "cart_random": carts.rng.get_state(), "state": carts.state,
             "age": carts.age, "rows": memory.rows, "written": memory.written, "unsent": normalizer.unsent}
    actors = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(actor, actors)
    if rank == 0:
        torch.save({"iteration": iteration, "totals": normalizer.totals, "log_alpha": agent.log_alpha.detach(),
                    "agent": {k: v.state_dict() for k, v in agent.parts().items()}, "actors": actors}, path + ".new")
        os.replace(path + ".new", path)


def load(path, agent, normalizer, carts, memory, rank):
    saved = torch.load(path, map_location="cpu")
    for name, part in agent.parts().items():
        part.load_state_dict(saved["agent"][name])
    agent.log_alpha.data.copy_(saved["log_alpha"])
    actor = saved["actors"][rank]
    torch.set_rng_state(actor["random"])
    carts.rng.set_state(actor["cart_random"])
    carts.state, carts.age, memory.rows, memory.written = (actor[k] for k in ("state", "age", "rows", "written"))
    normalizer.totals, normalizer.unsent = saved["totals"], actor["unsent"]
    return saved["iteration"]


def worker(rank, cfg, rendezvous, resume):
    cuda = torch.cuda.device_count() >= cfg["processes"]
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{rendezvous}", rank=rank,
                            world_size=cfg["processes"])
    torch.manual_seed(cfg["seed"])  # the same networks everywhere,
    agent, normalizer = Agent(cfg, device), Normalizer(3)
    torch.manual_seed(cfg["seed"] + 1 + rank)  # but every actor has its own noise
    carts, memory = Carts(cfg["envs"], seed=cfg["seed"] + 100 + rank), Memory(cfg["memory"])
    path, start = os.path.join(cfg["folder"], "latest.pt"), 0
    if resume:
        start = load(path, agent, normalizer, carts, memory, rank)

    for iteration in range(start + 1, cfg["iterations"] + 1):
        obs = carts.observe()
        normalizer.observe(obs)
        if iteration % cfg["sync_statistics_every"] == 0:
            normalizer.synchronize(device)
        if iteration <= cfg["random_steps"]:
            action = 2 * torch.rand(cfg["envs"], 1) - 1
        else:
            with torch.no_grad():
                action = agent.act(normalizer(obs).to(device))[0].cpu()
        memory.add(obs, action, *carts.step(action))
        if iteration > cfg["random_steps"]:
            obs, action, reward, after = memory.sample(cfg["batch"])
            agent.update(*(x.to(device) for x in (normalizer(obs), action, reward, normalizer(after))))
        if iteration % cfg["evaluate_every"] == 0:
            score = evaluate(agent, normalizer, rank)
            if rank == 0:
                print(f"{iteration:5d}  return {score:8.3f}  alpha {agent.log_alpha.exp().item():.3f}", flush=True)
        if iteration % cfg["save_every"] == 0:
            save(path, iteration, agent, normalizer, carts, memory, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    os.makedirs(CONFIG["folder"], exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(worker, (CONFIG, os.path.join(scratch, "rendezvous"), args.resume), nprocs=CONFIG["processes"])
