"""Double DQN on a little grid world. Every process has its own environments and its own replay buffer,
the gradients are averaged (so one big batch of transitions per update).

    torchrun --nproc-per-node=2 train.py [--resume]
"""
import argparse
import copy
import os
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SIZE = 6
MOVES = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])


class GridWorld:
    """Walk to the goal, avoid the pit. The agent, the goal and the pit start at random places."""

    def __init__(self, rng, max_steps=25):
        self.rng, self.max_steps = rng, max_steps

    def reset(self):
        cells = self.rng.choice(SIZE * SIZE, 3, replace=False)
        self.agent, self.goal, self.pit = (np.array(divmod(c, SIZE)) for c in cells)
        self.t = 0
        return self.obs()

    def obs(self):
        out = np.concatenate([self.agent, self.goal - self.agent, self.pit - self.agent]).astype(np.float32)
        return out / SIZE

    def step(self, action):
        self.agent = np.clip(self.agent + MOVES[action], 0, SIZE - 1)
        self.t += 1
        if (self.agent == self.goal).all():
            return self.obs(), 1.0, True, True
        if (self.agent == self.pit).all():
            return self.obs(), -1.0, True, True
        return self.obs(), -0.02, False, self.t >= self.max_steps  # truncation is not termination


class Replay:
    def __init__(self, capacity):
        self.data = deque(maxlen=capacity)

    def push(self, *transition):
        self.data.append(transition)

    def sample(self, n, rng, device):
        rows = [self.data[i] for i in rng.integers(len(self.data), size=n)]
        s, a, r, s2, end = (np.array(col) for col in zip(*rows))
        to = lambda x, t: torch.as_tensor(x, dtype=t, device=device)
        return to(s, torch.float32), to(a, torch.long), to(r, torch.float32), to(s2, torch.float32), to(end, torch.float32)


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.value, self.advantage = nn.Linear(96, 1), nn.Linear(96, 4)

    def forward(self, x):
        h = self.body(x)
        adv = self.advantage(h)
        return self.value(h) + adv - adv.mean(1, keepdim=True)


def td_loss(model, target, batch, gamma):
    s, a, r, s2, end = batch
    with torch.no_grad():
        best = model.module(s2).argmax(1, keepdim=True)
        goal = r + gamma * (1 - end) * target(s2).gather(1, best).squeeze(1)
    return F.smooth_l1_loss(model(s).gather(1, a[:, None]).squeeze(1), goal)


@torch.no_grad()
def play(net, episodes, rng, device):
    """Greedy episodes of this process: number of successes."""
    wins = 0
    env = GridWorld(rng)
    for _ in range(episodes):
        s, stop = env.reset(), False
        while not stop:
            s, r, _, stop = env.step(net(torch.from_numpy(s)[None].to(device)).argmax().item())
        wins += r > 0.5
    return wins


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=2400, help="environment steps per process")
    ap.add_argument("--warmup", type=int, default=200)
    ap.add_argument("--learn-every", type=int, default=2)
    ap.add_argument("--target-every", type=int, default=100, help="in updates")
    ap.add_argument("--report-every", type=int, default=600)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--gamma", type=float, default=0.93)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--dir", default="dqn_run")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    net = Dueling().to(device)
    target = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net, device_ids=[device.index] if gpu else None)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    rng = np.random.default_rng([args.seed, rank])  # exploration, starts and replay: own to the process
    replay, start, updates = Replay(4000), 0, 0
    os.makedirs(args.dir, exist_ok=True)
    if args.resume:
        shared = torch.load(f"{args.dir}/net.pt", map_location=device)
        net.load_state_dict(shared["net"])
        target.load_state_dict(shared["target"])
        opt.load_state_dict(shared["opt"])
        start, updates = shared["step"], shared["updates"]
        own = torch.load(f"{args.dir}/replay_{rank}.pt", weights_only=False)
        replay.data.extend(own["data"])
        rng.bit_generator.state = own["rng"]

    env = GridWorld(rng)
    s = env.reset()
    episodes, td = 0, torch.zeros((), device=device)
    for step in range(start + 1, args.steps + 1):
        eps = max(0.05, 1 - step / (0.6 * args.steps))
        if rng.random() < eps:
            a = int(rng.integers(4))
        else:
            with torch.no_grad():
                a = net(torch.from_numpy(s)[None].to(device)).argmax().item()
        s2, r, end, stop = env.step(a)
        replay.push(s, a, r, s2, end)
        if stop:
            episodes += 1
        s = env.reset() if stop else s2

        if step > args.warmup and step % args.learn_every == 0:
            loss = td_loss(model, target, replay.sample(args.batch_size, rng, device), args.gamma)
            opt.zero_grad()
            loss.backward()
            opt.step()
            td = 0.98 * td + 0.02 * loss.detach()
            updates += 1
            if updates % args.target_every == 0:
                target.load_state_dict(net.state_dict())

        if step % args.report_every == 0:
            wins = torch.tensor(float(play(net, 50, np.random.default_rng([77, rank]), device)), device=device)
            dist.all_reduce(wins)
            dist.all_reduce(td, op=dist.ReduceOp.SUM)
            td /= world
            if rank == 0:
                print(f"step {step}: td error {td:.4f}, wins {wins / (50 * world):.2%}, eps {eps:.2f}", flush=True)
                shared = {"net": net.state_dict(), "target": target.state_dict(), "opt": opt.state_dict()}
                torch.save(shared | {"step": step, "updates": updates}, f"{args.dir}/net.pt")
            torch.save({"data": list(replay.data), "rng": rng.bit_generator.state}, f"{args.dir}/replay_{rank}.pt")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
