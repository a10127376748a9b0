"""REINFORCE on a small game of catch. Every rank plays its own games; gradients are averaged by hand."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Catch:
    """Many boards at once: a ball falls and drifts with the wind, the paddle below has to catch it."""
    rows, cols = 6, 6

    def __init__(self, num_envs, generator):
        self.num_envs, self.g = num_envs, generator

    def reset(self):
        self.row = 0
        self.ball = torch.randint(self.cols, (self.num_envs,), generator=self.g)
        self.wind = torch.randint(3, (self.num_envs,), generator=self.g)
        self.paddle = torch.full((self.num_envs,), self.cols // 2)
        return self.observe()

    def observe(self):
        return torch.cat([F.one_hot(self.ball, self.cols), F.one_hot(self.paddle, self.cols), F.one_hot(self.wind, 3),
                          torch.full((self.num_envs, 1), self.row / self.rows)], dim=1)

    def step(self, action):
        self.row += 1
        gust = torch.rand(self.num_envs, generator=self.g) < 0.3
        self.ball = (self.ball + gust * (self.wind - 1)).clamp(0, self.cols - 1)
        self.paddle = (self.paddle + action - 1).clamp(0, self.cols - 1)
        done = self.row == self.rows
        distance = (self.ball - self.paddle).abs()
        return self.observe(), (distance == 0) * 2.0 - 1 if done else -0.05 * distance, done


@torch.no_grad()
def rollout(env, policy, device, generator):
    obs, done, steps = env.reset(), False, []
    while not done:
        probs = policy(obs.to(device)).softmax(-1).cpu()
        action = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        next_obs, reward, done = env.step(action)
        steps.append((obs, action, reward))
        obs = next_obs
    return [torch.stack(x).to(device) for x in zip(*steps)]


def global_moments(x):
    """Mean and standard deviation over all ranks."""
    x = x.double()
    sums = torch.stack([torch.ones_like(x).sum(), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    count, total, squares = sums.tolist()
    return total / count, max(squares / count - (total / count) ** 2, 0.0) ** 0.5


def save_checkpoint(path, generator, **state):
    rng_states = [None] * dist.get_world_size()
    dist.all_gather_object(rng_states, generator.get_state())
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torch.save({"rng": rng_states, **state}, path + ".tmp")
        os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--num-envs", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--target-return", type=float, default=0.5, help="stop when the mean return is this good")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoints/policy.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    env = Catch(args.num_envs, generator)
    torch.manual_seed(args.seed)
    policy = nn.Sequential(nn.Linear(2 * env.cols + 4, 64), nn.Tanh(), nn.Linear(64, 3)).to(device)
    for p in policy.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    iteration, solved = 0, False
    if args.resume and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["rng"][rank])
        iteration, solved = state["iteration"], state["solved"]

    while iteration < args.iterations and not solved:
        obs, actions, rewards = rollout(env, policy, device, generator)
        returns = rewards.clone()
        for t in reversed(range(len(rewards) - 1)):
            returns[t] += args.gamma * returns[t + 1]
        mean, std = global_moments(returns)
        log_probs = F.log_softmax(policy(obs), dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        loss = -(log_probs * (returns - mean) / (std + 1e-6)).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= world_size
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

        game_scores = rewards.sum(dim=0)
        mean_return, _ = global_moments(game_scores)
        solved = mean_return >= args.target_return
        iteration += 1
        if rank == 0 and (solved or iteration % 5 == 0):
            print(f"iteration {iteration:3d}  loss {loss.item():.4f}  mean return {mean_return:.3f}", flush=True)
        if solved or iteration % 10 == 0 or iteration == args.iterations:
            save_checkpoint(args.checkpoint, generator, policy=policy.state_dict(), solved=solved,
                            optimizer=optimizer.state_dict(), iteration=iteration)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
