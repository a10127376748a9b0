"""Named entities in short sentences: a tiny BERT and a Trainer of our own, whose loss gives rare tags more weight.

    python -m torch.distributed.run --nproc-per-node=2 train.py
"""
import os
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
VOCAB_SIZE, MAX_LENGTH, IGNORE = 150, 32, -100


@dataclass
class ScriptArguments:
    output_dir: str = "output"
    epochs: int = 4
    batch_size: int = field(default=8, metadata={"help": "sentences per process and micro-batch"})
    lr: float = 0.15
    seed: int = 3
    resume: bool = field(default=False, metadata={"help": "go on from the last checkpoint in output_dir"})


def make_sentences(n, seed):
    """A name follows a title (10, 11), a place a preposition (12, 13); many words can be either, or neither."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(n):
        words, tags = [], []
        for _ in range(rng.randint(1, 4)):
            filler = rng.randint(1, 4)
            words += [rng.randrange(60, VOCAB_SIZE) for _ in range(filler)]
            tags += [0] * filler
            if rng.random() < 0.5:
                kind, length = rng.choice([1, 3]), rng.randint(1, 2)
                first_word = 20 if kind == 1 else 40
                words += [9 + kind + rng.randrange(2)]
                words += [rng.randrange(first_word, first_word + 40) for _ in range(length)]
                tags += [0, kind] + [kind + 1] * (length - 1)
        sentences.append({"input_ids": words[:MAX_LENGTH], "labels": tags[:MAX_LENGTH]})
    return sentences


def collate(sentences):
    length = max(len(s["input_ids"]) for s in sentences)
    pad = lambda key, value: torch.tensor([s[key] + [value] * (length - len(s[key])) for s in sentences])
    words = pad("input_ids", 0)
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": pad("labels", IGNORE)}


class TaggingTrainer(Trainer):
    def __init__(self, *args, tag_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.tag_weights = tag_weights.to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=self.tag_weights,
                               ignore_index=IGNORE, reduction="sum")
        if num_items_in_batch is None:
            loss = loss / (labels != IGNORE).sum()
        else:  # the tokens of all micro-batches and all processes; DDP takes the mean of the processes
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def entity_counts(guesses, labels):
    """Correct, guessed and true entity tokens."""
    guesses, labels = guesses[labels != IGNORE], labels[labels != IGNORE]
    return ((guesses == labels) & (labels > 0)).sum(), (guesses > 0).sum(), (labels > 0).sum()


def compute_metrics(prediction):
    hits, guessed, true = entity_counts(prediction.predictions.argmax(-1), prediction.label_ids)
    return {"f1": float(2 * hits / max(1, guessed + true))}


def main():
    (args,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    train, valid, test = make_sentences(384, 1), make_sentences(90, 2), make_sentences(151, 3)
    counts = np.bincount([tag for sentence in train for tag in sentence["labels"]], minlength=len(TAGS))
    tag_weights = torch.tensor(np.sqrt(counts.max() / counts), dtype=torch.float)

    model = BertForTokenClassification(BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=MAX_LENGTH, num_labels=len(TAGS), id2label=dict(enumerate(TAGS)),
        label2id={tag: i for i, tag in enumerate(TAGS)}))
    training_args = TrainingArguments(
        output_dir=args.output_dir, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32, gradient_accumulation_steps=2, learning_rate=args.lr, max_grad_norm=1.0,
        lr_scheduler_type="linear", warmup_steps=10, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
        logging_steps=8, seed=args.seed, report_to="none", disable_tqdm=True, remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = TaggingTrainer(
        model=model, args=training_args, train_dataset=train, eval_dataset=valid, data_collator=collate,
        compute_metrics=compute_metrics, tag_weights=tag_weights,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": args.lr, "momentum": 0.9}),
    )
    last = get_last_checkpoint(args.output_dir) if args.resume and os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate(test, metric_key_prefix="test")
    trainer.save_model(os.path.join(args.output_dir, "final"))
    if trainer.is_world_process_zero():
        print(f"test f1 {metrics['test_f1']:.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
