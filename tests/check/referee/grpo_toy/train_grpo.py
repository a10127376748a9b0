"""GRPO on a toy language model.

A tiny transformer is first shown sloppy demonstrations of a small task (write the different digits of the prompt in
ascending order, "3 1 3 7 =" -> "1 3 7 <eos>") and is then improved by reinforcement learning.

    torchrun --standalone --nproc_per_node=2 train_grpo.py [--resume]
"""
import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler

DIGITS, PROMPT_DIGITS = 6, 4
EQUALS, EOS, PAD, VOCAB = 6, 7, 8, 9
PROMPT_LEN, ANSWER_LEN = PROMPT_DIGITS + 1, PROMPT_DIGITS + 1


class TinyLM(nn.Module):
    def __init__(self, dim=32, heads=2, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(PROMPT_LEN + ANSWER_LEN, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, ids):
        length = ids.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=ids.device), diagonal=1)
        x = self.tokens(ids) + self.positions[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------------------------------- the task
def make_prompts(seed, n_train, n_val):
    every = torch.tensor(list(itertools.product(range(DIGITS), repeat=PROMPT_DIGITS)))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:n_train + n_val]
    prompts = torch.cat([every[order], torch.full((len(order), 1), EQUALS)], dim=1)
    return prompts[:n_train], prompts[n_train:]


def answers(prompts):
    rows = []
    for prompt in prompts.tolist():
        row = sorted(set(prompt[:PROMPT_DIGITS])) + [EOS]
        rows.append(row + [PAD] * (ANSWER_LEN - len(row)))
    return torch.tensor(rows, device=prompts.device)


def completion_mask(completions):
    """1 up to and including the first end token."""
    ended = (completions == EOS).cumsum(dim=1) - (completions == EOS).long()
    return (ended == 0).float()


def reward_fn(prompts, completions):
    """One for the right answer, otherwise up to a half for the right tokens at the right places."""
    wanted, mask = answers(prompts), completion_mask(completions)
    shown = torch.where(mask.bool(), completions, PAD)
    hits = ((shown == wanted) & (wanted != PAD)).sum(1) / (wanted != PAD).sum(1)
    return torch.where((shown == wanted).all(1), 1.0, 0.5 * hits)


# ------------------------------------------------------------------------------------------------- sampling, log-probs
@torch.no_grad()
def generate(model, prompts, rng=None):
    ids = prompts
    for _ in range(ANSWER_LEN):
        logits = model(ids)[:, -1]
        if rng is None:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=rng)
        ids = torch.cat([ids, token], dim=1)
    return ids[:, PROMPT_LEN:]


def token_logprobs(model, prompts, completions):
    logits = model(torch.cat([prompts, completions[:, :-1]], dim=1))[:, PROMPT_LEN - 1:]
    return logits.log_softmax(-1).gather(-1, completions[..., None]).squeeze(-1)


def per_completion_mean(values, mask):
    return (values * mask).sum(1) / mask.sum(1)


# ----------------------------------------------------------------------------------------------------------- learning
class KLController:
    """Raises the weight of the KL term while the policy is further from the reference than wanted, lowers it otherwise."""

    def __init__(self, coef, target, speed):
        self.coef, self.target, self.speed = coef, target, speed

    def update(self, kl):
        error = min(max(kl / self.target - 1.0, -0.5), 0.5)
        self.coef *= 1.0 + self.speed * error


def group_advantages(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)


def grpo_loss(policy, prompts, completions, mask, old_logp, ref_logp, advantages, kl_coef, clip):
    logp = token_logprobs(policy, prompts, completions)
    ratio = (logp - old_logp).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1.0
    loss = per_completion_mean(kl_coef * kl - gain, mask).mean()
    clipped = per_completion_mean(((ratio - 1).abs() > clip).float(), mask).mean()
    return loss, per_completion_mean(kl.detach(), mask).mean(), clipped


def pretrain(policy, prompts, args, rank, world_size, device):
    """Supervised start: in a part of the demonstrations the digits are in the order of the prompt."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.sft_lr)
    for step in range(args.sft_steps):
        g = torch.Generator().manual_seed(args.seed + 1 + step * world_size + rank)
        batch = prompts[torch.randint(len(prompts), (args.sft_batch,), generator=g)]
        target = answers(batch)
        sloppy = torch.rand(len(batch), generator=g) < args.sloppy
        target[sloppy, :PROMPT_DIGITS], target[sloppy, PROMPT_DIGITS] = batch[sloppy, :PROMPT_DIGITS], EOS
        batch, target = batch.to(device), target.to(device)
        logp = token_logprobs(policy, batch, target)
        loss = -per_completion_mean(logp, (target != PAD).float()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, prompts, rank, world_size, device):
    counts = torch.zeros(2, dtype=torch.long, device=device)  # right answers, prompts
    for batch in prompts[rank::world_size].to(device).split(64):
        right = reward_fn(batch, generate(model, batch)) == 1.0
        counts += torch.stack([right.sum(), torch.tensor(len(batch), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train_epoch(policy, reference, loader, optimizer, scheduler, kl_ctl, epoch, args, rank, world_size, device):
    history = []
    for i, prompts in enumerate(loader):
        step = epoch * len(loader) + i
        rng = torch.Generator(device).manual_seed(args.seed + 1_000_000 + step * world_size + rank)
        prompts = prompts.to(device).repeat_interleave(args.group_size, dim=0)
        completions = generate(policy.module, prompts, rng)
        mask = completion_mask(completions)
        rewards = reward_fn(prompts, completions)
        advantages = group_advantages(rewards, args.group_size)
        with torch.no_grad():
            old_logp = token_logprobs(policy.module, prompts, completions)
            ref_logp = token_logprobs(reference, prompts, completions)

        for update in range(args.inner_updates):
            optimizer.zero_grad()
            loss, kl, clipped = grpo_loss(policy, prompts, completions, mask, old_logp, ref_logp, advantages,
                                          kl_ctl.coef, args.clip)
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), args.max_norm)
            optimizer.step()
        scheduler.step()

        stats = torch.stack([rewards.mean(), kl, clipped, mask.sum(1).mean()])
        dist.all_reduce(stats)
        stats /= world_size
        kl_ctl.update(stats[1].item())
        history.append(stats)
    return torch.stack(history).mean(0).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train-prompts", type=int, default=240)
    parser.add_argument("--val-prompts", type=int, default=90)
    parser.add_argument("--prompts-per-rank", type=int, default=6)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--inner-updates", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--kl-coef", type=float, default=0.05)
    parser.add_argument("--kl-target", type=float, default=0.3)
    parser.add_argument("--kl-speed", type=float, default=0.1)
    parser.add_argument("--sft-steps", type=int, default=50)
    parser.add_argument("--sft-batch", type=int, default=32)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--sloppy", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--checkpoint", default="checkpoints/grpo.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_prompts, val_prompts = make_prompts(args.seed, args.train_prompts, args.val_prompts)
    sampler = DistributedSampler(train_prompts, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train_prompts, batch_size=args.prompts_per_rank, sampler=sampler, drop_last=True)

    model, reference = TinyLM().to(device), TinyLM().to(device)
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True) if args.resume else None
    if state:
        model.load_state_dict(state["policy"])
    policy = DDP(model, device_ids=[device.index] if use_cuda else None)
    if state:
        reference.load_state_dict(state["reference"])
    else:
        pretrain(policy, train_prompts, args, rank, world_size, device)
        reference.load_state_dict(policy.module.state_dict())
    reference.eval().requires_grad_(False)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs * len(loader))
    kl_ctl, first = KLController(args.kl_coef, args.kl_target, args.kl_speed), 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        kl_ctl.coef, first = state["kl_coef"], state["epoch"] + 1

    start_accuracy = evaluate(policy.module, val_prompts, rank, world_size, device)
    if rank == 0:
        print(f"epoch {first}: greedy accuracy {start_accuracy:.1%} at the start", flush=True)
    for epoch in range(first, args.epochs):
        began = time.time()
        sampler.set_epoch(epoch)
        reward, kl, clipped, length = train_epoch(policy, reference, loader, optimizer, scheduler, kl_ctl, epoch, args,
                                                  rank, world_size, device)
        accuracy = evaluate(policy.module, val_prompts, rank, world_size, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: reward {reward:.3f}, kl {kl:.3f} (weight {kl_ctl.coef:.3f}), clipped {clipped:.1%}, "
                  f"length {length:.2f}, greedy accuracy {accuracy:.1%}, {time.time() - began:.1f} s", flush=True)
            os.makedirs(os.path.dirname(args.checkpoint) or ".", exist_ok=True)
            torch.save({"epoch": epoch, "policy": policy.module.state_dict(), "reference": reference.state_dict(),
                        "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "kl_coef": kl_ctl.coef}, args.checkpoint + ".part")
            os.replace(args.checkpoint + ".part", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
