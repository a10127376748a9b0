"""Summarisation of synthetic reports with a small encoder-decoder transformer, trained with HF Accelerate.

A report is a row of words; some follow a "mark" word, and the summary is the list of the marked words in alphabetical order.
A second start with the same arguments loads --out/checkpoint and trains what is left up to --epochs.
"""
import argparse
import os
import shutil

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

PAD, BOS, EOS, MARK, WORDS = 0, 1, 2, 3, 28  # words are numbered from 4
SOURCE, TARGET = 24, 7


def make_reports(n, seed, most=5):
    """Reports with one to `most` marked words (few in most of them), and their summaries, both padded."""
    g = torch.Generator().manual_seed(seed)
    source = torch.randint(4, 4 + WORDS, (n, SOURCE), generator=g)
    length = torch.randint(14, SOURCE + 1, (n,), generator=g)
    count = 1 + (most * torch.rand(n, generator=g) ** 2).long()
    target = torch.full((n, TARGET), PAD)
    for i in range(n):
        places = 2 * torch.randperm(int(length[i]) // 2, generator=g)[: count[i]]
        source[i, places] = MARK
        source[i, length[i]:] = PAD
        summary = [BOS, *source[i, places + 1].sort().values.tolist(), EOS]
        target[i, : len(summary)] = torch.tensor(summary)
    return TensorDataset(source, target)


class Summarizer(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.words, self.places = nn.Embedding(4 + WORDS, width, padding_idx=PAD), nn.Embedding(SOURCE + 1, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        kwargs = dict(d_model=width, nhead=heads, dim_feedforward=2 * width, dropout=0.05, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**kwargs), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**kwargs), 2)
        self.head = nn.Linear(width, 4 + WORDS)

    def encode(self, source):
        x = self.words(source)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.encoder(x, src_key_padding_mask=source == PAD)

    def decode(self, memory, source, prefix):
        x = self.words(prefix) + self.places(torch.arange(prefix.shape[1], device=prefix.device))
        causal = nn.Transformer.generate_square_subsequent_mask(prefix.shape[1], device=prefix.device) < 0
        return self.head(self.decoder(x, memory, tgt_mask=causal, memory_key_padding_mask=source == PAD))

    def forward(self, source, prefix):
        return self.decode(self.encode(source), source, prefix)

    @torch.no_grad()
    def generate(self, source):
        """Greedy decoding until every summary of the batch has ended."""
        memory, out = self.encode(source), torch.full((len(source), 1), BOS, device=source.device)
        ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        while out.shape[1] < TARGET + 2 and not ended.all():
            word = self.decode(memory, source, out)[:, -1].argmax(1).masked_fill(ended, PAD)
            out, ended = torch.cat([out, word[:, None]], 1), ended | (word == EOS)
        return out


def sequence_loss(logits, target):
    """Cross-entropy per summary over a fixed length, so that every summary has the same weight on any number of processes."""
    return F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD, reduction="sum") / (len(target) * (TARGET - 1))


class Progress:
    """Number of finished epochs, saved with the rest of the state."""

    def __init__(self):
        self.epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def evaluate(accelerator, model, loader):
    """Loss, share of exact summaries and words per summary on the whole validation set."""
    model.eval()
    summarizer = accelerator.unwrap_model(model)
    losses, exact, words, n = 0.0, 0, 0, 0
    for source, target in loader:
        with torch.no_grad():
            logits = summarizer(source, target[:, :-1]).transpose(1, 2)
            loss = F.cross_entropy(logits, target[:, 1:], ignore_index=PAD, reduction="none")
        guess = accelerator.pad_across_processes(summarizer.generate(source), dim=1, pad_index=PAD)
        loss, guess, target = accelerator.gather_for_metrics((loss.sum(1), guess, target))
        width = max(guess.shape[1], TARGET)
        same = (F.pad(guess, (0, width - guess.shape[1])) == F.pad(target, (0, width - TARGET))).all(1)
        losses += loss.sum().item() / (TARGET - 1)
        exact, words, n = exact + same.sum().item(), words + (guess > MARK).sum().item(), n + len(guess)
    model.train()
    return losses / n, exact / n, words / n


def save(accelerator, out):
    """Write to a new folder and swap it in, so that a kill in between leaves a complete one behind."""
    new, path, old = (os.path.join(out, name) for name in ("new", "checkpoint", "old"))
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(new)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(path):
            os.rename(path, old)
        os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def find_checkpoint(out):
    return next((path for path in (os.path.join(out, name) for name in ("checkpoint", "old")) if os.path.isdir(path)), None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="reports per optimizer step over all processes")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=15, help="optimizer steps")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate,
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=11))
    world = accelerator.num_processes
    set_seed(11)
    model = Summarizer()
    set_seed(11, device_specific=True)  # other dropout on every process
    micro = args.batch // (world * args.accumulate)
    train_loader = DataLoader(make_reports(2880, seed=1), batch_size=micro, shuffle=True, drop_last=True,
                              generator=torch.Generator().manual_seed(11))
    val_loader = DataLoader(make_reports(333, seed=2), batch_size=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    total = args.epochs * (len(train_loader) // world // args.accumulate)  # optimizer steps
    # a prepared scheduler makes one step for each process whenever the optimizer makes one
    warmup, last = args.warmup * world, total * world
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.0, (last - s) / (last - warmup))))

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler)
    path = find_checkpoint(args.out)
    if path:
        accelerator.load_state(path)
        accelerator.print(f"resumed after {progress.epochs} epochs from {path}")

    for epoch in range(progress.epochs, args.epochs):
        train_loader.set_epoch(epoch)
        seen = torch.zeros((), device=accelerator.device)
        for source, target in train_loader:
            with accelerator.accumulate(model):
                loss = sequence_loss(model(source, target[:, :-1]), target[:, 1:])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += loss.detach() / len(train_loader)
        train_loss = accelerator.reduce(seen, reduction="mean").item()
        rate = scheduler.get_last_lr()[0]
        val_loss, exact, words = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: train loss {train_loss:.4f}, val loss {val_loss:.4f}, exact {exact:.4f}, "
                          f"words {words:.3f}, lr {rate:.2e}", flush=True)
        progress.epochs = epoch + 1
        save(accelerator, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
