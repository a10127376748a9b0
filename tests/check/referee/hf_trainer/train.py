"""Spam filter for short messages: a tiny DistilBERT, trained from scratch with the transformers Trainer."""

import os
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

VOCAB_SIZE, MAX_LENGTH = 120, 16
SPAM_WORDS = range(20, 40)


@dataclass
class Arguments:
    out: str = field(default="checkpoints", metadata={"help": "folder for checkpoints and the final model"})
    epochs: int = 6
    batch_size: int = field(default=8, metadata={"help": "per process"})
    lr: float = 4e-3
    target_f1: float = field(default=0.7, metadata={"help": "stop as soon as validation reaches this"})
    seed: int = 11
    resume: bool = False


def make_messages(size, seed):
    rng = random.Random(seed)
    messages = []
    for _ in range(size):
        spam = rng.random() < 0.15
        words = [rng.randrange(40, VOCAB_SIZE) for _ in range(rng.randint(6, MAX_LENGTH - 3))]
        words += rng.choices(SPAM_WORDS, k=3 if spam else rng.randint(0, 1))
        rng.shuffle(words)
        padding = MAX_LENGTH - len(words)
        messages.append({
            "input_ids": words + [0] * padding,
            "attention_mask": [1] * len(words) + [0] * padding,
            "labels": int(spam),
        })
    return messages


class BalancedSampler(Sampler):
    """Draws both classes equally often; the draw depends only on the seed and the epoch."""

    def __init__(self, labels, seed):
        counts = np.bincount(labels)
        self.weights = torch.tensor([1.0 / counts[label] for label in labels], dtype=torch.double)
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.weights)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.multinomial(self.weights, len(self), replacement=True, generator=generator).tolist())


class BalancedTrainer(Trainer):
    def get_train_dataloader(self):
        sampler = BalancedSampler([m["labels"] for m in self.train_dataset], self.args.seed)
        loader = DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, sampler=sampler,
                            collate_fn=self.data_collator, drop_last=True)
        return self.accelerator.prepare(loader)


class StopAtTarget(TrainerCallback):
    def __init__(self, target):
        self.target = target

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if metrics.get("eval_f1", 0.0) >= self.target:
            control.should_training_stop = True


def message_loss(outputs, labels, num_items_in_batch=None):
    if num_items_in_batch is None:
        return F.cross_entropy(outputs.logits, labels)
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def compute_metrics(prediction):
    guesses, labels = prediction.predictions.argmax(-1), prediction.label_ids
    hits = int(((guesses == 1) & (labels == 1)).sum())
    f1 = 2 * hits / max(1, int((guesses == 1).sum() + (labels == 1).sum()))
    return {"accuracy": float((guesses == labels).mean()), "f1": f1}


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    training_args = TrainingArguments(
        output_dir=args.out, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32, learning_rate=args.lr, warmup_steps=5, lr_scheduler_type="cosine",
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, logging_steps=5, seed=args.seed,
        load_best_model_at_end=True, metric_for_best_model="f1", greater_is_better=True, report_to="none",
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False, disable_tqdm=True,
    )
    model = DistilBertForSequenceClassification(DistilBertConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LENGTH, dim=32, hidden_dim=64, n_layers=1, n_heads=2))
    trainer = BalancedTrainer(
        model=model, args=training_args, data_collator=default_data_collator, compute_metrics=compute_metrics,
        train_dataset=make_messages(480, seed=0), eval_dataset=make_messages(210, seed=1),
        compute_loss_func=message_loss, callbacks=[StopAtTarget(args.target_f1)],
    )
    last = get_last_checkpoint(args.out) if args.resume and os.path.isdir(args.out) else None
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate(make_messages(210, seed=2), metric_key_prefix="test")
    trainer.save_model(os.path.join(args.out, "final"))
    if trainer.is_world_process_zero():
        print({name: round(value, 4) for name, value in metrics.items()})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
