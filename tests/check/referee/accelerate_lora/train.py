"""LoRA, written by hand, on a tiny causal language model of transformers, with Accelerate.

    torchrun --nproc-per-node=2 train.py        (or accelerate launch)

One start makes at most --steps-per-start optimizer steps (our queue has short time slots), saves the state also in the middle of an
epoch, and the next start goes on there. Reports the perplexity of the adapted model on the whole evaluation set.
"""
import argparse
import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

VOCAB = 32


def make_text(n, length, rule, seed):
    """Token sequences: mostly next = (a * token + b) % VOCAB, sometimes any token."""
    g = torch.Generator().manual_seed(seed)
    a, b = rule
    text = torch.randint(0, VOCAB, (n, length), generator=g)
    jump = torch.rand(n, length, generator=g) < 0.08
    for t in range(1, length):
        text[:, t] = torch.where(jump[:, t], text[:, t], (a * text[:, t - 1] + b) % VOCAB)
    return text


class LoRALinear(nn.Module):
    def __init__(self, linear, r, alpha):
        super().__init__()
        self.linear, self.scale = linear, alpha / r
        self.down = nn.Parameter(torch.randn(r, linear.in_features) / r)
        self.up = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


def add_lora(model, r, alpha, names=("q_proj", "v_proj", "up_proj", "down_proj", "gate_proj")):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, LoRALinear(child, r, alpha))
    return model


def tokens_loss(model, text):
    """Mean loss of each sequence."""
    logits = model(input_ids=text[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(1)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    for text, in loader:
        losses.append(accelerator.gather_for_metrics(tokens_loss(model, text)))
    losses = torch.cat(losses)
    return math.exp(losses.mean().item()), len(losses)


def pretrained(args):
    """In place of from_pretrained: the same tiny model on all processes."""
    set_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
    text = make_text(512, 20, (5, 3), args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for k in range(48):
        tokens_loss(model, text[k % 16 * 32:][:32]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps-per-start", type=int, default=28)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in one micro-batch of one process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    cpu = torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)  # the order depends on seed and epoch only
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=args.accumulate, dataloader_config=order)
    model = add_lora(pretrained(args), args.rank, alpha=16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    train_set, eval_set = (TensorDataset(make_text(n, 20, (7, 1), args.seed + k)) for k, n in enumerate((640, 74), 1))
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(eval_set, batch_size=16)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    steps_per_epoch = math.ceil(len(train_loader) / args.accumulate)
    total_steps = args.epochs * steps_per_epoch
    # the prepared scheduler makes num_processes steps for each step of the optimizer
    scheduler = accelerator.prepare(get_cosine_schedule_with_warmup(
        optimizer, 4 * accelerator.num_processes, total_steps * accelerator.num_processes))

    first_epoch, skip, step = 0, 0, 0
    checkpoint = args.out / "checkpoint"
    if (checkpoint / "progress.json").exists():
        accelerator.load_state(checkpoint)
        step = json.loads((checkpoint / "progress.json").read_text())["step"]
        first_epoch, skip = step // steps_per_epoch, step % steps_per_epoch * args.accumulate
    accelerator.wait_for_everyone()
    accelerator.print(f"start at step {step} of {total_steps}  perplexity {evaluate(accelerator, model, eval_loader)[0]:.3f}")

    last_step = min(total_steps, step + args.steps_per_start)
    for epoch in range(first_epoch, args.epochs):
        train_loader.set_epoch(epoch)
        loader = accelerator.skip_first_batches(train_loader, skip) if epoch == first_epoch and skip else train_loader
        model.train()
        loss_sum, n = torch.zeros((), device=accelerator.device), 0
        for text, in loader:
            with accelerator.accumulate(model):
                loss = tokens_loss(model, text).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss_sum, n = loss_sum + loss.detach(), n + 1
            step += accelerator.sync_gradients
            if step == last_step and accelerator.sync_gradients:
                break
        if n:
            loss = accelerator.reduce(loss_sum / n, "mean").item()
            perplexity, n_eval = evaluate(accelerator, model, eval_loader)
            accelerator.print(f"epoch {epoch}  step {step}  train loss {loss:.4f}  perplexity {perplexity:.3f} of {n_eval}"
                              f" sequences  lr {scheduler.get_last_lr()[0]:.5f}")
        if step >= last_step:
            break
    accelerator.save_state(checkpoint)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (checkpoint / "progress.json").write_text(json.dumps({"step": step}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
