"""Dense retriever with in-batch negatives over all processes: Accelerate, one shared encoder, warm-up + linear decay, save_state in the middle of epochs."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import get_linear_schedule_with_warmup

VOCAB, LENGTH = 400, 12


class Pairs(Dataset):
    """A passage is words of one topic in an order; its question has some of these words and some stop words."""

    def __init__(self, n, seed):
        draw = random.Random(seed)
        self.items = []
        for _ in range(n):
            topic = draw.randrange(30)
            passage = [20 + (topic * 12 + draw.randrange(40)) % (VOCAB - 20) for _ in range(LENGTH)]
            question = draw.sample(passage, 4) + [draw.randrange(20) for _ in range(LENGTH - 4)]
            draw.shuffle(question)
            self.items.append((torch.tensor(question), torch.tensor(passage)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Encoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.words = nn.Embedding(VOCAB, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 32)
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, tokens):
        return F.normalize(self.head(self.layer(self.words(tokens)).mean(1)), dim=-1), self.log_scale.exp()


def gather_with_gradient(x):
    return torch.cat(dist_nn.all_gather(x)) if dist.is_initialized() else x


def contrastive_loss(questions, passages, scale, rank):
    """Every question of this process against the passages of all processes."""
    everything = gather_with_gradient(passages)
    labels = torch.arange(len(questions), device=questions.device) + rank * len(questions)
    return F.cross_entropy(scale * questions @ everything.t(), labels)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Recall@1 over all passages of the validation set."""
    model.eval()
    questions, passages = [], []
    for question, passage in loader:
        q, p = model(torch.cat([question, passage]))[0].chunk(2)
        q, p = accelerator.gather_for_metrics((q.contiguous(), p.contiguous()))
        questions.append(q)
        passages.append(p)
    questions, passages = torch.cat(questions), torch.cat(passages)
    best = (questions @ passages.t()).argmax(1)
    model.train()
    return (best == torch.arange(len(best), device=best.device)).float().mean().item(), len(best)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96, help="pairs per step over all processes")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--save-every", type=int, default=6)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    accelerator = Accelerator(step_scheduler_with_optimizer=False, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    rank, world = accelerator.process_index, accelerator.num_processes
    set_seed(21)

    train, valid = Pairs(960, seed=1), Pairs(230, seed=2)
    loader = DataLoader(train, batch_size=args.batch // world, shuffle=True, drop_last=True)
    valid_loader = DataLoader(valid, batch_size=25)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, loader, valid_loader = accelerator.prepare(model, optimizer, loader, valid_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, args.epochs * len(loader))
    accelerator.register_for_checkpointing(scheduler)

    folder, done = os.path.join(args.out, "state"), 0
    marker = os.path.join(args.out, "last.txt")
    if os.path.exists(marker):
        done = int(open(marker).read())
        accelerator.load_state(f"{folder}-{done}")

    accelerator.print(f"starts at step {done}")
    while done < args.epochs * len(loader):
        epoch, skip = divmod(done, len(loader))
        batches = accelerator.skip_first_batches(loader, skip) if skip else loader
        batches.set_epoch(epoch)
        total = torch.zeros((), device=accelerator.device)
        count = 0
        for question, passage in batches:
            vectors, scale = model(torch.cat([question, passage]))
            q, p = vectors.chunk(2)
            loss = contrastive_loss(q, p, scale, rank)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
            count += 1
            done += 1
            if done % args.save_every == 0 or done == args.epochs * len(loader):
                accelerator.save_state(f"{folder}-{done}")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    with open(marker + ".tmp", "w") as file:
                        file.write(str(done))
                    os.replace(marker + ".tmp", marker)
        mean = accelerator.reduce(total, "mean") / count
        recall, n = evaluate(accelerator, model, valid_loader)
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}, recall@1 {recall:.4f} of {n}, lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
