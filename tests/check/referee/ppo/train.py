"""Distributed PPO on a 2-D docking task: every rank steps its own batch of environments."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

UPDATES, NUM_ENVS, STEPS = 16, 16, 40
PPO_EPOCHS, MINIBATCH, CLIP, TARGET_KL = 6, 160, 0.2, 0.012
LR, SEED, CKPT = 4e-3, 1, "ppo.pt"
MOVES = torch.tensor([[0.0, 0.0], [0.1, 0.0], [-0.1, 0.0], [0.0, 0.1], [0.0, -0.1]])


class DockingEnv:
    """A batch of vehicles; the reward is minus the distance to the dock."""

    def __init__(self, num_envs, seed, horizon=24):
        self.gen = torch.Generator().manual_seed(seed)
        self.horizon, self.t = horizon, 0
        self.pos = torch.rand(num_envs, 2, generator=self.gen) * 2 - 1

    def step(self, action):
        self.pos = (self.pos + MOVES[action]).clamp(-1.5, 1.5)
        reward, self.t = -self.pos.norm(dim=1), self.t + 1
        if done := self.t == self.horizon:
            self.pos, self.t = torch.rand(self.pos.shape, generator=self.gen) * 2 - 1, 0
        return reward, torch.full_like(reward, done)


class ActorCritic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi, self.v = nn.Linear(hidden, len(MOVES)), nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(agent, env, steps, device, gamma=0.9, lam=0.95):
    buf = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
    for _ in range(steps):
        obs = env.pos
        logits, val = agent.module(obs.to(device))
        policy = Categorical(logits=logits.cpu())
        act = policy.sample()
        rew, done = env.step(act)
        for k, x in zip(buf, (obs, act, policy.log_prob(act), val.cpu(), rew, done)):
            buf[k].append(x)
    buf = {k: torch.stack(x) for k, x in buf.items()}
    next_val, last = agent.module(env.pos.to(device))[1].cpu(), 0.0
    buf["adv"] = torch.zeros_like(buf["rew"])
    for t in reversed(range(steps)):
        alive = 1 - buf["done"][t]
        delta = buf["rew"][t] + gamma * next_val * alive - buf["val"][t]
        buf["adv"][t] = last = delta + gamma * lam * alive * last
        next_val = buf["val"][t]
    buf["ret"] = buf["adv"] + buf["val"]
    return {k: x.flatten(0, 1).to(device) for k, x in buf.items()}


def normalise(adv):
    """Zero mean and unit variance over the advantages of all ranks."""
    stats = torch.stack([adv.sum(), adv.square().sum(), torch.full_like(adv[0], adv.numel())])
    dist.all_reduce(stats)
    mean, square = stats[0] / stats[2], stats[1] / stats[2]
    return (adv - mean) / ((square - mean ** 2).clamp_min(0).sqrt() + 1e-8)


def ppo_update(agent, opt, data, world):
    adv = normalise(data["adv"])
    for epoch in range(PPO_EPOCHS):
        kl = torch.zeros((), device=adv.device)
        batches = torch.randperm(adv.numel()).to(adv.device).split(MINIBATCH)
        for idx in batches:
            logits, value = agent(data["obs"][idx])
            policy = Categorical(logits=logits)
            log_ratio = policy.log_prob(data["act"][idx]) - data["logp"][idx]
            ratio = log_ratio.exp()
            pg_loss = -torch.min(ratio * adv[idx], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[idx]).mean()
            v_loss = 0.5 * (value - data["ret"][idx]).square().mean()
            loss = pg_loss + 0.5 * v_loss - 0.01 * policy.entropy().mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
            kl += ((ratio - 1) - log_ratio).mean().detach() / len(batches)
        dist.all_reduce(kl)
        kl /= world
        if kl > TARGET_KL:
            break
    return epoch + 1, kl.item()


@torch.no_grad()
def evaluate(agent, seed, world, device, num_envs=64):
    """Mean return of the greedy policy from start positions never used in training."""
    env, total = DockingEnv(num_envs, seed), torch.zeros((), device=device)
    for _ in range(env.horizon):
        total += env.step(agent.module(env.pos.to(device))[0].argmax(-1).cpu())[0].sum().to(device)
    dist.all_reduce(total)
    return total.item() / (num_envs * world)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(SEED)
    agent = DDP(ActorCritic().to(device), device_ids=[device.index] if cuda else None)
    opt = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=UPDATES)
    torch.manual_seed(SEED + 1000 * (rank + 1))  # actions and minibatch order
    env, start = DockingEnv(NUM_ENVS, seed=SEED + rank), 0
    if os.path.exists(CKPT):
        ckpt = torch.load(CKPT, map_location="cpu")
        agent.module.load_state_dict(ckpt["agent"])
        opt.load_state_dict(ckpt["opt"]), sched.load_state_dict(ckpt["sched"])
        env.pos, env.t, env_rng, torch_rng = ckpt["ranks"][rank]
        env.gen.set_state(env_rng)
        torch.set_rng_state(torch_rng)
        start = ckpt["update"]

    for update in range(start, UPDATES):
        data = rollout(agent, env, STEPS, device)
        epochs, kl = ppo_update(agent, opt, data, world)
        sched.step()
        if (update + 1) % 2 == 0:
            score = evaluate(agent, 10_000 + rank, world, device)
            ranks = [None] * world
            dist.all_gather_object(ranks, (env.pos, env.t, env.gen.get_state(), torch.get_rng_state()))
            if rank == 0:
                print(f"update {update + 1} epochs {epochs} kl {kl:.4f} eval return {score:.3f}", flush=True)
                torch.save({"agent": agent.module.state_dict(), "opt": opt.state_dict(), "ranks": ranks,
                            "sched": sched.state_dict(), "update": update + 1}, CKPT + ".tmp")
                os.replace(CKPT + ".tmp", CKPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
