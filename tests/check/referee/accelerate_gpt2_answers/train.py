"""Fine-tune a small GPT-2 on question/answer pairs with Accelerate.

Only answer tokens count. Micro-batches are padded to their longest sample, so the loss is a sum that is divided by the number of answer tokens of
the whole step (all micro-batches, all processes). State is saved every --save-every steps; a second start goes on from the newest one.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import contextlib
import math
import os
import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

WORDS = "<pad> <end> ask: answer: reverse sort first last count of the letters a b c d e f g h i j 1 2 3 4 5 6 7 8 9".split()
ID = {word: i for i, word in enumerate(WORDS)}
LETTERS = "abcdefghij"


class Pairs(Dataset):
    def __init__(self, n, seed):
        r, self.items = random.Random(seed), []
        for _ in range(n):
            letters = r.choices(LETTERS, k=r.randint(2, 8))
            task = r.choice(("reverse", "sort", "first", "last", "count"))
            answer = {"reverse": letters[::-1], "sort": sorted(letters), "first": letters[:1], "last": letters[-1:],
                      "count": [str(len(letters))]}[task]
            prompt = ["ask:", task, "the", "letters", *letters, "answer:"]
            self.items.append(([ID[w] for w in prompt], [ID[w] for w in answer] + [ID["<end>"]]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    length = max(len(p) + len(a) for p, a in items)
    ids, labels, mask = [], [], []
    for prompt, answer in items:
        rest = length - len(prompt) - len(answer)
        ids.append(prompt + answer + [ID["<pad>"]] * rest)
        labels.append([-100] * len(prompt) + answer + [-100] * rest)
        mask.append([1] * (length - rest) + [0] * rest)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


def answer_loss(model, batch):
    """Sum of the cross entropy over each sample's answer tokens, and their number."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    target = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.transpose(1, 2).float(), target, ignore_index=-100, reduction="none").sum(1)
    return loss, (target != -100).sum(1)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    losses, counts = [], []
    for batch in loader:
        loss, count = accelerator.gather_for_metrics(answer_loss(model, batch))
        losses.append(loss)
        counts.append(count)
    model.train()
    return (torch.cat(losses).sum() / torch.cat(counts).sum()).item()


def newest(folder):
    if not os.path.isdir(folder):
        return None
    steps = [int(name[5:]) for name in os.listdir(folder) if name.startswith("step-") and name[5:].isdigit()]
    return os.path.join(folder, f"step-{max(steps)}") if steps else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--batch", type=int, default=24, help="samples per micro-batch, all processes together")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accum,
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    world = accelerator.num_processes
    set_seed(3)
    config = GPT2Config(vocab_size=len(WORDS), n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=args.dropout,
                        embd_pdrop=args.dropout, attn_pdrop=args.dropout, bos_token_id=1, eos_token_id=1, use_cache=False)
    model = GPT2LMHeadModel(config)
    train_loader = DataLoader(Pairs(args.samples, 1), batch_size=args.batch // world, shuffle=True, collate_fn=collate, drop_last=True)
    eval_loader = DataLoader(Pairs(101, 2), batch_size=16, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    steps_per_epoch = len(train_loader) // args.accum
    total_steps = args.epochs * steps_per_epoch
    scheduler = get_linear_schedule_with_warmup(optimizer.optimizer, total_steps // 10, total_steps)
    accelerator.register_for_checkpointing(scheduler)

    done, found = 0, newest(args.out)
    if found:
        accelerator.load_state(found)
        done = int(found.rsplit("-", 1)[1])
    first_epoch, skip = divmod(done, steps_per_epoch)

    for epoch in range(first_epoch, args.epochs):
        train_loader.set_epoch(epoch)
        loader = train_loader
        if epoch == first_epoch and skip:
            loader = accelerator.skip_first_batches(train_loader, skip * args.accum)
        batches = iter(loader)
        while group := [b for b in (next(batches, None) for _ in range(args.accum)) if b is not None]:
            set_seed(10_000 * (done + 1), device_specific=True)  # dropout: other masks on every process, the same ones after a restart
            local = sum((b["labels"][:, 1:] != -100).sum() for b in group)
            answer_tokens = accelerator.reduce(local, "sum")
            total = torch.zeros((), device=accelerator.device)
            for i, batch in enumerate(group):
                with accelerator.no_sync(model) if i < len(group) - 1 else contextlib.nullcontext():
                    loss = answer_loss(model, batch)[0].sum()
                    # backward divides by the accumulation steps, DDP by the number of processes: both are undone here
                    accelerator.backward(loss * args.accum * world / answer_tokens)
                total += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % args.save_every == 0 or done == total_steps:
                folder = os.path.join(args.out, f"step-{done}")
                accelerator.save_state(folder + ".tmp")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    os.replace(folder + ".tmp", folder)
                accelerator.wait_for_everyone()
        mean = (accelerator.reduce(total, "sum") / answer_tokens).item()
        value = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: loss of the last step {mean:.4f}, evaluation loss {value:.4f}, perplexity {math.exp(value):.3f}, "
                          f"lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
