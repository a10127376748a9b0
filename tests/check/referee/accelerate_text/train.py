"""Topic classification of short texts with Hugging Face Accelerate."""

import argparse
import json
import os
import random
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TOPICS = {
    "sport": ["goal", "match", "team", "league", "coach", "striker", "referee", "stadium"],
    "food": ["butter", "oven", "salt", "recipe", "onion", "flour", "roast", "soup"],
    "travel": ["train", "hotel", "airport", "luggage", "island", "ticket", "border", "map"],
    "money": ["bank", "credit", "profit", "share", "market", "tax", "budget", "loan"],
}
FILLER = [
    "the", "a", "of", "and", "with", "for", "this", "that", "near", "after", "some", "very", "new", "old",
    "big", "small",
]
VOCAB = {word: i + 1 for i, word in enumerate(sorted({w for words in TOPICS.values() for w in words} | set(FILLER)))}


def make_texts(size, seed):
    rng = random.Random(seed)
    examples = []
    for _ in range(size):
        label = rng.randrange(len(TOPICS))
        words = rng.choices(FILLER, k=rng.randint(5, 14)) + rng.choices(list(TOPICS.values())[label], k=2)
        if rng.random() < 0.5:
            words.append(rng.choice(rng.choice(list(TOPICS.values()))))
        rng.shuffle(words)
        examples.append(([VOCAB[w] for w in words], label))
    return examples


def collate(batch):
    ids = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True)
    return {"ids": ids, "labels": torch.tensor([label for _, label in batch])}


class Classifier(nn.Module):
    def __init__(self, dim=32, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB) + 1, dim, padding_idx=0)
        self.score = nn.Linear(dim, 1)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(dim, len(TOPICS)))

    def forward(self, ids):
        x = self.embed(ids)
        weights = self.score(x).squeeze(-1).masked_fill(ids == 0, float("-inf")).softmax(-1)
        return self.head((weights.unsqueeze(-1) * x).sum(1))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    loss_sum = hits = seen = 0.0
    for batch in loader:
        logits = model(batch["ids"])
        loss = F.cross_entropy(logits, batch["labels"], reduction="none")
        correct = (logits.argmax(-1) == batch["labels"]).float()
        loss, correct = accelerator.gather_for_metrics((loss, correct))
        loss_sum, hits, seen = loss_sum + loss.sum().item(), hits + correct.sum().item(), seen + correct.numel()
    return {"eval_loss": loss_sum / seen, "accuracy": hits / seen}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(),
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7))
    set_seed(7, device_specific=True)
    train_loader = DataLoader(make_texts(512, seed=0), args.batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(make_texts(150, seed=1), args.batch_size, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(train_loader)
    warmup = max(1, total // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.0, (total - step) / (total - warmup))))
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule)

    start_epoch = 0
    if args.resume and (args.out / "latest.json").exists():
        name = json.loads((args.out / "latest.json").read_text())["checkpoint"]
        accelerator.load_state(str(args.out / name))
        start_epoch = int(name.split("_")[1])
        accelerator.print(f"resumed from {name}")

    for epoch in range(start_epoch, args.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for step, batch in enumerate(train_loader):
            loss = F.cross_entropy(model(batch["ids"]), batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 4 == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                accelerator.print(f"epoch {epoch} step {step} loss {mean:.4f} lr {schedule.get_last_lr()[0]:.2e}")
        accelerator.print(f"epoch {epoch} {evaluate(accelerator, model, eval_loader)}")
        name = f"epoch_{epoch + 1}"
        accelerator.save_state(str(args.out / name))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            tmp = args.out / "latest.json.tmp"
            tmp.write_text(json.dumps({"checkpoint": name}))
            os.replace(tmp, args.out / "latest.json")
    accelerator.end_training()


if __name__ == "__main__":
    main()
