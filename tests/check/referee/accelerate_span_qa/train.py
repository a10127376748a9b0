"""Extractive question answering with a small BERT and Hugging Face Accelerate.

    torchrun --nproc-per-node=2 train.py --output_dir run

The state is saved every --checkpointing_steps optimizer steps; the newest one is taken up at the next start.
"""
import argparse
import math
import os
import random
import shutil

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForQuestionAnswering, get_scheduler

PAD, CLS, SEP = 0, 1, 2
KINDS = ("who", "where", "when")
QUESTION = {kind: 3 + i for i, kind in enumerate(KINDS)}
WORDS = {kind: range(10 + 20 * i, 30 + 20 * i) for i, kind in enumerate(KINDS)}
FILLER = range(70, 120)
LENGTH = 48


class Questions(Dataset):
    """A question word and a text of other words with the phrase asked for (one to three words), sometimes also one of another kind."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = [self.make(rng) for _ in range(n)]

    @staticmethod
    def make(rng):
        asked = rng.choice(KINDS)
        ids, start, end = [CLS, QUESTION[asked], SEP], 0, 0
        for kind in rng.sample(KINDS, k=len(KINDS)):
            if kind != asked and rng.random() < 0.8:
                continue
            ids += rng.choices(FILLER, k=rng.randint(1, 8))
            phrase = rng.choices(WORDS[kind], k=rng.randint(1, 3))
            if kind == asked:
                start, end = len(ids), len(ids) + len(phrase) - 1
            ids += phrase
        return ids + rng.choices(FILLER, k=rng.randint(1, 8)) + [SEP], start, end

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    # always the same length, since the loss of the model is a softmax over all positions, padding too
    input_ids = torch.tensor([ids + [PAD] * (LENGTH - len(ids)) for ids, _, _ in rows])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(),
            "token_type_ids": (torch.arange(LENGTH) > 2).long().expand(len(rows), -1).contiguous(),
            "start_positions": torch.tensor([start for _, start, _ in rows]),
            "end_positions": torch.tensor([end for _, _, end in rows])}


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    exact, overlap, seen = 0, 0.0, 0
    for batch in loader:
        outputs = model(**batch)
        start, end = outputs.start_logits.argmax(-1), outputs.end_logits.argmax(-1)
        spans = torch.stack([start, end, batch["start_positions"], batch["end_positions"]], dim=1)
        spans = accelerator.gather_for_metrics(spans)
        s, e, true_s, true_e = spans.unbind(1)
        exact += ((s == true_s) & (e == true_e)).sum().item()
        common = (torch.minimum(e, true_e) - torch.maximum(s, true_s) + 1).clamp(min=0)
        lengths = (e - s + 1).clamp(min=0) + true_e - true_s + 1
        overlap += (2 * common / lengths).sum().item()
        seen += len(spans)
    return {"exact_match": 100 * exact / seen, "f1": 100 * overlap / seen, "questions": seen}


def newest_checkpoint(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit())
    return (os.path.join(folder, f"step_{steps[-1]}"), steps[-1]) if steps else (None, 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=5)
    parser.add_argument("--total_batch_size", type=int, default=48, help="rows of one forward pass on all processes")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--num_warmup_steps", type=int, default=10)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--checkpointing_steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", default="run")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=not torch.cuda.is_available(),
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
                              project_config=ProjectConfiguration(project_dir=args.output_dir))
    set_seed(args.seed)
    config = BertConfig(vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                        max_position_embeddings=LENGTH, initializer_range=0.1, hidden_dropout_prob=args.dropout,
                        attention_probs_dropout_prob=args.dropout)
    model = BertForQuestionAnswering(config)
    batch_size = args.total_batch_size // accelerator.num_processes
    train_loader = DataLoader(Questions(1152, seed=1), shuffle=True, batch_size=batch_size, collate_fn=collate,
                              generator=torch.Generator().manual_seed(args.seed))
    eval_loader = DataLoader(Questions(250, seed=2), batch_size=batch_size, collate_fn=collate,
                             generator=torch.Generator().manual_seed(args.seed))  # takes nothing from dropout's generator
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    steps_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * steps_per_epoch
    scheduler = get_scheduler("linear", optimizer=optimizer,
                              num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
                              num_training_steps=max_train_steps * accelerator.num_processes)
    scheduler = accelerator.prepare(scheduler)

    checkpoint, completed_steps = newest_checkpoint(args.output_dir)
    if checkpoint is not None:
        accelerator.print(f"resuming from {checkpoint}")
        accelerator.load_state(checkpoint)
    starting_epoch = completed_steps // steps_per_epoch
    batches_done = completed_steps % steps_per_epoch * args.gradient_accumulation_steps

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        train_loader.set_epoch(epoch)
        if epoch == starting_epoch and batches_done > 0:
            active_loader = accelerator.skip_first_batches(train_loader, batches_done)
        else:
            active_loader = train_loader
        losses = []
        for batch in active_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                completed_steps += 1
                if completed_steps % args.checkpointing_steps == 0:
                    save(accelerator, args.output_dir, completed_steps)
        train_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        metrics = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch} step {completed_steps} loss {train_loss:.4f} lr {scheduler.get_last_lr()[0]:.2e} "
                          + " ".join(f"{k} {v:.2f}" for k, v in metrics.items()), flush=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(os.path.join(args.output_dir, "model"))
    accelerator.end_training()


def save(accelerator, folder, step):
    """Save into a folder with another name first, so that an interrupted save is never taken for a checkpoint."""
    final = os.path.join(folder, f"step_{step}")
    accelerator.save_state(final + "_part")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(final + "_part", final)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
