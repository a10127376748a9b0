"""Policy gradient with two groups of ranks: generators roll out the policy, trainers improve it (PPO) from the last rollouts.

The first world // 2 ranks generate, the others train, both at the same time; then rollouts go to the trainers and new weights to
the generators. The trainers average their gradients by hand. A second start with the same arguments loads --out/checkpoint.pt and
trains what is left up to --epochs.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

DIM, ACTIONS, LENGTH = 12, 6, 4


class World:
    """LENGTH steps, in each the right one of ACTIONS keys has to be pressed; what is seen has very different units."""

    def __init__(self, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.rule = torch.randn(DIM, ACTIONS, generator=g)
        self.push = 0.5 * torch.randn(ACTIONS, DIM, generator=g)
        self.unit = 10 ** (3 * torch.rand(DIM, generator=g) - 1)
        self.offset = 4 * self.unit * torch.randn(DIM, generator=g)

    def see(self, state):
        return state * self.unit + self.offset

    def step(self, state, action, g):
        """Reward (1 for the best key, less for the others) and next state."""
        value = state @ self.rule
        rank = (value > value.gather(1, action[:, None])).sum(1)
        return 0.25 ** rank.float(), 0.6 * state + self.push[action] + 0.8 * torch.randn(state.shape, generator=g)


class Policy(nn.Module):
    """Scales what it sees by the mean and variance of all that the trainers have got so far."""

    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("var", torch.ones(DIM))
        self.register_buffer("count", torch.zeros(()))
        self.body = nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, seen):
        x = self.body(((seen - self.mean) / (self.var + 1e-6).sqrt()).clamp(-5, 5))
        return self.actor(x), self.critic(x)[:, 0]

    @torch.no_grad()
    def update_scale(self, seen):
        n, mean, var = len(seen), seen.mean(0), seen.var(0, unbiased=False)
        total, gap = self.count + n, mean - self.mean
        self.var = (self.count * self.var + n * var + gap ** 2 * self.count * n / total) / total
        self.mean, self.count = self.mean + gap * n / total, total


@torch.no_grad()
def rollout(policy, world, n, g, device, greedy=False):
    """A tensor with a row for each step: what is seen, action, its log-probability, sum of the rewards from there on."""
    state, rows, rewards = torch.randn(n, DIM, generator=g), [], []
    for _ in range(LENGTH):
        seen = world.see(state)
        log_prob = F.log_softmax(policy(seen.to(device))[0], 1).cpu()
        action = log_prob.argmax(1) if greedy else torch.multinomial(log_prob.exp(), 1, generator=g)[:, 0]
        reward, state = world.step(state, action, g)
        rows.append(torch.cat([seen, action[:, None].float(), log_prob.gather(1, action[:, None])], 1))
        rewards.append(reward)
    to_go = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.cat([torch.cat([r, t[:, None]], 1) for r, t in zip(rows, to_go)]).to(device)


class Groups:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.generators, self.trainers = list(range(self.size // 2)), list(range(self.size // 2, self.size))
        self.generator_group = dist.new_group(self.generators)
        self.trainer_group = dist.new_group(self.trainers)
        self.generates = self.rank in self.generators
        self.chief = self.trainers[0]  # sends the weights and writes the checkpoints


def exchange_rollouts(groups, mine, shape, device):
    """Every rank gets the rollouts of all generators."""
    parts = []
    for source in groups.generators:
        part = mine if groups.rank == source else torch.empty(shape, device=device)
        dist.broadcast(part, src=source)
        parts.append(part)
    return torch.cat(parts)


def publish(policy, groups):
    """The chief trainer's weights and buffers go to all ranks."""
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor, src=groups.chief)


def improve(policy, optimizer, scheduler, rows, groups, shuffle, passes=3, minibatches=4):
    """PPO passes over the rollouts; each trainer works on its part of every minibatch."""
    policy.update_scale(rows[:, :DIM])
    me, n = groups.trainers.index(groups.rank), len(groups.trainers)
    for _ in range(passes):
        for batch in torch.randperm(len(rows), generator=shuffle).chunk(minibatches):
            part = rows[batch[: len(batch) // n * n][me::n].to(rows.device)]
            seen, action, old, gain = part[:, :DIM], part[:, DIM].long(), part[:, DIM + 1], part[:, DIM + 2]
            logits, value = policy(seen)
            log_prob = F.log_softmax(logits, 1)
            ratio = (log_prob.gather(1, action[:, None])[:, 0] - old).exp()
            edge = gain - value.detach()
            actor_loss = -torch.minimum(ratio * edge, ratio.clamp(0.8, 1.2) * edge).mean()
            entropy = -(log_prob.exp() * log_prob).sum(1).mean()
            loss = actor_loss + 0.5 * F.mse_loss(value, gain) - 0.003 * entropy
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
            dist.all_reduce(flat, group=groups.trainer_group)
            for p, mean in zip(policy.parameters(), (flat / n).split([p.numel() for p in policy.parameters()])):
                p.grad.copy_(mean.view_as(p))
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        scheduler.step()


def evaluate(policy, world, groups, device, games=1200):
    """Mean return of the greedy policy; the generators share the games and all ranks get the result."""
    total = torch.zeros((), dtype=torch.double, device=device)
    if groups.generates:
        n, g = len(groups.generators), torch.Generator().manual_seed(999 + groups.rank)
        total += rollout(policy, world, games // n, g, device, greedy=True)[: games // n, -1].double().sum()
        dist.all_reduce(total, group=groups.generator_group)
    dist.broadcast(total, src=groups.generators[0])
    return total.item() / (games // len(groups.generators) * len(groups.generators))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=14, help="rollouts per epoch")
    parser.add_argument("--games", type=int, default=360, help="games per rollout over all generators")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    groups, world = Groups(), World()

    torch.manual_seed(0)
    policy = Policy().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    total = 3 * args.iterations * args.epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - 0.9 * s / total)
    path, first = os.path.join(args.out, "checkpoint.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    publish(policy, groups)

    games = args.games // len(groups.generators)
    shape = (games * LENGTH, DIM + 3)
    for epoch in range(first, args.epochs):
        play = torch.Generator().manual_seed(10_000 * (epoch + 1) + groups.rank)  # other games on every generator
        shuffle = torch.Generator().manual_seed(epoch)  # one order for all trainers
        mine, rows, loss = None, None, 0.0
        for i in range(args.iterations + 1):
            if groups.generates and i < args.iterations:
                mine = rollout(policy, world, games, play, device)
            if not groups.generates and rows is not None:
                improve(policy, optimizer, scheduler, rows, groups, shuffle)
            if i < args.iterations:
                rows = exchange_rollouts(groups, mine, shape, device)
                reward_to_go = rows.view(len(groups.generators), LENGTH, games, -1)[..., -1]
                loss += (LENGTH - reward_to_go[:, 0].mean().item()) / args.iterations  # what the games have missed
            publish(policy, groups)
        score = evaluate(policy, world, groups, device)
        if groups.rank == groups.chief:
            rate = scheduler.get_last_lr()[0]
            print(f"epoch {epoch}: loss {loss:.4f}, greedy return {score:.4f} of {LENGTH}, lr {rate:.2e}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
