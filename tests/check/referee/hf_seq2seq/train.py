"""Teach a tiny T5, initialised at random, to write down spoken numbers.

    torchrun --nproc_per_node 2 train.py
    torchrun --nproc_per_node 2 train.py --resume        # goes on from the last checkpoint in --output-dir
"""
import argparse
import json
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from numbers_data import EOS, MAX_DIGITS, PAD, TOKENS, NumberCollator, SpokenNumbers, split_numbers


def build_model():
    return T5ForConditionalGeneration(T5Config(
        vocab_size=len(TOKENS), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.05,
        feed_forward_proj="gated-gelu",
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
    ))


class SmoothedLoss:
    """Cross-entropy with label smoothing, averaged over the tokens of the whole optimizer step.

    num_items_in_batch counts the labels of all accumulated batches of all ranks. The Trainer multiplies the result by
    the number of ranks, because DDP averages the gradients over them.
    """

    def __init__(self, smoothing):
        self.smoothing = smoothing

    def __call__(self, outputs, labels, num_items_in_batch=None):
        total = F.cross_entropy(outputs["logits"].flatten(0, 1).float(), labels.flatten(), ignore_index=-100,
                                label_smoothing=self.smoothing, reduction="sum")
        count = num_items_in_batch if num_items_in_batch is not None else labels.ne(-100).sum()
        return total / count


class NumberTrainer(Seq2SeqTrainer):
    """Evaluates by free generation and by the likelihood of the labels, with each sample counted once."""

    def evaluation_loop(self, *args, **kwargs):
        # Seq2SeqTrainer gathers everything, with the samples repeated to fill up the last batches
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        with torch.no_grad():
            generated = self.accelerator.unwrap_model(model).generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_DIGITS + 1, do_sample=False)
            logits = model(**inputs).logits
        # no mean over the batch: compute_metrics divides once, by the number of labels in the whole set
        nll = F.cross_entropy(logits.transpose(1, 2).float(), labels, ignore_index=-100, reduction="none").sum(1)
        return None, (generated[:, 1:].contiguous(), nll), labels


def compute_metrics(prediction):
    generated, nll = prediction.predictions
    labels = prediction.label_ids

    def digits(row):
        row = row.tolist()
        return row[:row.index(EOS)] if EOS in row else row

    right = [digits(guess) == digits(label) for guess, label in zip(generated, labels)]
    return {
        "loss": float(nll.astype(np.float64).sum() / (labels != -100).sum()),
        "exact_match": float(np.mean(right)),
        "samples": len(labels),
    }


class EpochCallback(TrainerCallback):
    """Tells the training set which epoch it is, and reports the logs on rank 0."""

    def __init__(self, dataset):
        self.dataset = dataset

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.dataset.set_epoch(round(state.epoch))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        values = {k: round(v, 4) for k, v in logs.items()
                  if k in ("loss", "grad_norm", "eval_loss", "eval_exact_match", "eval_samples")}
        if values:
            print(f"step {state.global_step}, epoch {state.epoch:.2f}: {values}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--smoothing", type=float, default=0.05)
    parser.add_argument("--hesitation", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--output-dir", default="outputs")
    parser.add_argument("--resume", action="store_true")
    cli = parser.parse_args()

    logging.set_verbosity_error()
    use_cuda = torch.cuda.is_available()
    args = Seq2SeqTrainingArguments(
        output_dir=cli.output_dir,
        use_cpu=not use_cuda,  # without it, processes that have no GPU would not be joined into a group
        num_train_epochs=cli.epochs,
        per_device_train_batch_size=cli.batch_size,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=cli.accumulate,
        learning_rate=cli.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=use_cuda,
        ddp_backend="nccl" if use_cuda else "gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        seed=cli.seed,
    )

    set_seed(args.seed)
    model = build_model()
    train_numbers, eval_numbers = split_numbers(1280, 240, cli.seed)
    train_set = SpokenNumbers(train_numbers, cli.hesitation, cli.seed)
    eval_set = SpokenNumbers(eval_numbers)

    trainer = NumberTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=NumberCollator(model.config.decoder_start_token_id),
        compute_loss_func=SmoothedLoss(cli.smoothing),
        compute_metrics=compute_metrics,
        callbacks=[EpochCallback(train_set)],
    )
    trainer.remove_callback(PrinterCallback)

    last = get_last_checkpoint(cli.output_dir) if cli.resume and os.path.isdir(cli.output_dir) else None
    if cli.resume and last is None:
        raise SystemExit(f"no checkpoint in {cli.output_dir}")
    trainer.train(resume_from_checkpoint=last)

    metrics = trainer.evaluate(metric_key_prefix="final")
    trainer.save_model(os.path.join(cli.output_dir, "final"))
    if trainer.is_world_process_zero():
        path = os.path.join(cli.output_dir, "metrics.json")
        with open(path + ".part", "w") as f:
            json.dump({k: metrics[k] for k in ("final_loss", "final_exact_match", "final_samples")}, f, indent=1)
        os.replace(path + ".part", path)
        print(f"exact match {metrics['final_exact_match']:.1%} of {metrics['final_samples']} numbers", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
