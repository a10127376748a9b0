"""Tags for support tickets: several labels per ticket, some of them unknown, with the Trainer of transformers and two callbacks.

    torchrun --nproc-per-node=2 train.py --output_dir run
"""
import copy
import os
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (DistilBertConfig, DistilBertForSequenceClassification, HfArgumentParser, Trainer, TrainerCallback,
                          TrainingArguments, set_seed)
from transformers.trainer_utils import get_last_checkpoint

TAGS, VOCABULARY = 6, 150


@dataclass
class ScriptArguments:
    output_dir: str = field(default="run")
    epochs: int = field(default=5)
    total_batch_size: int = field(default=48, metadata={"help": "tickets per forward pass on all processes"})
    learning_rate: float = field(default=6e-3)
    ema_decay: float = field(default=0.9)
    dropout: float = field(default=0.1)
    seed: int = field(default=13)


class Tickets(Dataset):
    """Every tag has eight words of its own; old tickets come first and have fewer tags that somebody filled in."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            tags = [int(rng.random() < 0.35) for _ in range(TAGS)]
            words = rng.choices(range(60, VOCABULARY), k=rng.randint(3, 16))
            for tag, present in enumerate(tags):
                if present:
                    words += rng.choices(range(4 + 8 * tag, 12 + 8 * tag), k=rng.randint(1, 3))
            rng.shuffle(words)
            known = rng.choice([0.3, 0.7, 1.0])
            labels = [tag if rng.random() < known else -100 for tag in tags]
            self.rows.append({"input_ids": [1] + words + [2], "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(),
            "labels": torch.tensor([row["labels"] for row in rows])}


def summed_loss(logits, labels):
    known = labels != -100
    return F.binary_cross_entropy_with_logits(logits[known], labels[known].float(), reduction="sum"), known.sum()


class TagTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss, count = summed_loss(outputs.logits, inputs["labels"])
        if model.training:
            # the labels known in all batches of this step on all processes; DDP takes the mean over the processes
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        else:
            loss = loss / count.clamp(min=1)
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction):
    logits, labels = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
    loss, count = summed_loss(logits, labels)
    known = labels != -100
    guess, truth = (logits > 0)[known], labels[known] == 1
    tp = (guess & truth).sum().item()
    return {"bce": (loss / count).item(), "micro_f1": 2 * tp / max(1, guess.sum().item() + truth.sum().item())}


class EmaCallback(TrainerCallback):
    """Exponential moving average of the weights, kept in every checkpoint folder as ema.pt."""

    def __init__(self, decay):
        self.decay, self.shadow = decay, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.shadow = copy.deepcopy(model.state_dict())
        if state.global_step > 0:
            path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "ema.pt")
            self.shadow = torch.load(path, map_location=args.device.type)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    self.shadow[name].lerp_(value, 1 - self.decay)

    def on_save(self, args, state, control, **kwargs):
        if args.world_size > 1:
            torch.distributed.barrier()  # all processes have written their part of the checkpoint
        if state.is_world_process_zero:
            path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "ema.pt")
            torch.save(self.shadow, path + ".tmp")
            os.replace(path + ".tmp", path)


class TrainMetricsCallback(TrainerCallback):
    """Evaluate on a part of the training set at the end of every epoch."""

    def __init__(self, trainer, dataset):
        self.trainer, self.dataset = trainer, dataset

    def on_epoch_end(self, args, state, control, **kwargs):
        before = copy.deepcopy(control)
        metrics = self.trainer.evaluate(eval_dataset=self.dataset, metric_key_prefix="train")
        if state.is_world_process_zero:
            print(f"epoch {state.epoch:.0f}: train bce {metrics['train_bce']:.4f} micro f1 {metrics['train_micro_f1']:.4f}",
                  flush=True)
        return before


def last_complete_checkpoint(folder):
    """The last checkpoint that has its ema.pt, which is written last."""
    if not os.path.isdir(folder):
        return None
    names = [n for n in os.listdir(folder) if n.startswith("checkpoint-") and os.path.exists(os.path.join(folder, n, "ema.pt"))]
    return os.path.join(folder, max(names, key=lambda n: int(n.split("-")[1]))) if names else None


def main():
    script, = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    world = int(os.environ.get("WORLD_SIZE", 1))
    args = TrainingArguments(
        output_dir=script.output_dir, num_train_epochs=script.epochs, learning_rate=script.learning_rate,
        per_device_train_batch_size=script.total_batch_size // world, per_device_eval_batch_size=64,
        gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=6, weight_decay=0.01, max_grad_norm=1.0,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, logging_strategy="epoch", report_to=[],
        seed=script.seed, dataloader_num_workers=0, disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, ddp_find_unused_parameters=False)
    set_seed(script.seed)
    config = DistilBertConfig(vocab_size=VOCABULARY, dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=48,
                              initializer_range=0.1, num_labels=TAGS, problem_type="multi_label_classification", dropout=script.dropout,
                              attention_dropout=script.dropout, seq_classif_dropout=script.dropout)
    model = DistilBertForSequenceClassification(config)
    train_set, eval_set = Tickets(1152, seed=1), Tickets(250, seed=2)
    ema = EmaCallback(script.ema_decay)
    trainer = TagTrainer(model=model, args=args, train_dataset=train_set, eval_dataset=eval_set, data_collator=collate,
                         compute_metrics=compute_metrics, callbacks=[ema])
    trainer.add_callback(TrainMetricsCallback(trainer, torch.utils.data.Subset(train_set, range(200))))
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(script.output_dir))

    model.load_state_dict(ema.shadow)
    metrics = trainer.evaluate(metric_key_prefix="ema")
    if trainer.is_world_process_zero():
        print(f"average of the weights: bce {metrics['ema_bce']:.4f} micro f1 {metrics['ema_micro_f1']:.4f}", flush=True)
    trainer.save_model(os.path.join(script.output_dir, "final"))
    trainer.save_state()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
