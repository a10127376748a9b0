"""Direct preference optimisation of a tiny GPT-2 with Accelerate: a frozen reference, gradient accumulation, cosine schedule, save_state within the epoch.

accelerate launch --multi_gpu --num_processes=2 train.py; the same command goes on from the newest state in --out.
"""
import argparse
import copy
import math
import os
import re
import shutil

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, PROMPT, ANSWER, PAD = 48, 6, 8, 0


class Pairs(Dataset):
    """The better answer goes on counting from the last token of the prompt (with some slips), the worse one repeats or jumps about."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            prompt = torch.randint(1, VOCAB, (PROMPT,), generator=g)
            better = (prompt[-1] + torch.arange(ANSWER)) % (VOCAB - 1) + 1
            worse = torch.randint(1, VOCAB, (ANSWER,), generator=g) if torch.rand((), generator=g) < 0.5 else prompt[torch.arange(ANSWER) % PROMPT].clone()
            slip = torch.rand(ANSWER, generator=g) < 0.15
            better = torch.where(slip, torch.randint(1, VOCAB, (ANSWER,), generator=g), better)
            for answer in (better, worse):
                answer[int(torch.randint(4, ANSWER + 1, (), generator=g)):] = PAD
            self.items.append({"chosen": torch.cat([prompt, better]), "rejected": torch.cat([prompt, worse])})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return {"index": i, **self.items[i]}


def answer_logps(model, batch):
    """Summed log-probabilities of the answers: two vectors, for the chosen and for the rejected."""
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    logps = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, :-1].float().log_softmax(-1)
    logps = logps.gather(2, tokens[:, 1:, None]).squeeze(2)
    mask = tokens[:, 1:] != PAD
    mask[:, :PROMPT - 1] = False
    return (logps * mask).sum(1).chunk(2)


def preference(policy, reference, batch, beta):
    """Loss and margin of every pair."""
    chosen, rejected = answer_logps(policy, batch)
    with torch.no_grad():
        ref_chosen, ref_rejected = answer_logps(reference, batch)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return -F.logsigmoid(margin), margin


def evaluate(accelerator, policy, reference, loader, beta):
    policy.eval()
    losses, right = [], []
    with torch.no_grad():
        for batch in loader:
            loss, margin = accelerator.gather_for_metrics(preference(policy, reference, batch, beta))
            losses.append(loss)
            right.append(margin > 0)
    policy.train()
    return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=48, help="pairs per step over all processes")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=7)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accum,
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=11))
    set_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=PROMPT + ANSWER, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=args.dropout, embd_pdrop=args.dropout, attn_pdrop=args.dropout)
    policy = GPT2LMHeadModel(config)
    reference = copy.deepcopy(policy).requires_grad_(False).eval().to(accelerator.device)

    micro = args.batch // (args.accum * accelerator.num_processes)
    train_loader = DataLoader(Pairs(720, 1), batch_size=micro, shuffle=True, drop_last=True)
    valid_loader = DataLoader(Pairs(133, 2), batch_size=16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)
    policy, optimizer, train_loader, valid_loader = accelerator.prepare(policy, optimizer, train_loader, valid_loader)
    per_epoch = len(train_loader) // args.accum
    total, warmup = per_epoch * args.epochs, 6
    # not prepared: it is called once per step, and would be advanced once per process otherwise
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda s: (s + 1) / warmup if s < warmup else
                                                  0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup))))
    accelerator.register_for_checkpointing(scheduler)

    os.makedirs(args.out, exist_ok=True)
    states = sorted(int(m[1]) for m in map(re.compile(r"step_(\d+)$").match, os.listdir(args.out)) if m)
    step = 0
    if states:
        step = states[-1]
        accelerator.load_state(os.path.join(args.out, f"step_{step}"))
        accelerator.print(f"goes on at step {step}", flush=True)

    def save():
        """Into a folder with another name first, so that a state is whole when it is found."""
        folder = os.path.join(args.out, f"step_{step}")
        if accelerator.is_main_process:
            shutil.rmtree(folder + ".part", ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(folder + ".part")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.rename(folder + ".part", folder)
            for old in states[:-1]:
                shutil.rmtree(os.path.join(args.out, f"step_{old}"), ignore_errors=True)
        states.append(step)

    policy.train()
    while step < total:
        epoch, done = divmod(step, per_epoch)
        train_loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(train_loader, done * args.accum) if done else train_loader
        log = torch.zeros(2, device=accelerator.device)
        for i, batch in enumerate(batches):
            if i % args.accum == 0:  # dropout: other numbers in every step and process, the same after a restart
                set_seed(1000 * (step + 1), device_specific=True)
            with accelerator.accumulate(policy):
                losses, margin = preference(policy, reference, batch, args.beta)
                accelerator.backward(losses.mean())
                log += torch.stack([losses.detach().mean(), (margin > 0).float().mean()]) / args.accum
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                step += 1
                if step % 5 == 0:
                    loss, accuracy = accelerator.reduce(log, "mean").tolist()
                    accelerator.print(f"step {step} loss {loss:.4f} accuracy {accuracy:.4f} lr {scheduler.get_last_lr()[0]:.6f}", flush=True)
                if step % args.save_every == 0 or step == total:
                    save()
                log.zero_()
        loss, accuracy = evaluate(accelerator, policy, reference, valid_loader, args.beta)
        accelerator.print(f"epoch {epoch} validation loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)
    loss, accuracy = evaluate(accelerator, policy, reference, valid_loader, args.beta)
    accelerator.print(f"finished at step {step}, validation loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
