"""Instruction tuning with LoRA: a tiny Llama learns to carry out orders (copy, reverse, sort ...) with the Trainer of transformers.

torchrun --nproc-per-node=2 train.py; the same command goes on from the last checkpoint in --out.
"""
import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

PAD, EOS, ANSWER, ORDERS, FIRST, VOCAB = 0, 1, 2, (3, 4, 5, 6), 8, 40


class Orders(Dataset):
    """Order, a few items, ANSWER, the items as ordered, EOS; only the answer has labels. The number of items differs a lot."""

    def __init__(self, n, seed):
        g = np.random.default_rng(seed)
        self.items = []
        for _ in range(n):
            order = int(g.choice(ORDERS))
            given = g.integers(FIRST, VOCAB, 1 + int(g.integers(0, 3) if g.random() < 0.6 else g.integers(5, 12))).tolist()
            answer = {3: given, 4: [given[0]] * len(given), 5: [given[-1]] * len(given), 6: [ANSWER] * len(given)}[order] + [EOS]
            prompt = [order, *given, ANSWER]
            self.items.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    longest = max(len(item["input_ids"]) for item in items)
    fill = lambda name, value: torch.tensor([item[name] + [value] * (longest - len(item[name])) for item in items])
    ids = fill("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": fill("labels", -100)}


class OrderTrainer(Trainer):
    """Cross entropy with label smoothing on the answers, as a mean over all answer tokens of the step (all micro-batches and ranks)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100,
                                 label_smoothing=0.05, reduction="sum")
        if num_items_in_batch is None:  # in evaluation
            loss = losses / (labels[:, 1:] != -100).sum().clamp(min=1)
        else:
            loss = losses / num_items_in_batch * self.accelerator.num_processes  # DDP divides by the number of processes
        return (loss, outputs) if return_outputs else loss


class Report(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            print(f"epoch {state.epoch:.2f} step {state.global_step} token accuracy {metrics['eval_tokens']:.4f} "
                  f"whole answers {metrics['eval_whole']:.4f}", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f} norm {float(logs['grad_norm']):.4f} lr {float(logs['learning_rate']):.6f}", flush=True)


def choose(logits, labels):
    """Only the best token of each place is kept and gathered, not all logits."""
    return logits.argmax(-1)


def compute_metrics(result):
    predicted, labels = result.predictions[:, :-1], result.label_ids[:, 1:]
    there = labels != -100
    right = (predicted == labels) & there
    return {"tokens": right.sum() / there.sum(), "whole": (right.sum(1) == there.sum(1)).mean()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=48, help="examples per step over all processes")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", 1))
    set_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
                                        pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS, use_cache=False))
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
                                            modules_to_save=["lm_head"], task_type="CAUSAL_LM"))
    train, valid = Orders(816, 1), Orders(160, 2)

    arguments = TrainingArguments(
        output_dir=args.out, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch // (args.accum * world),
        gradient_accumulation_steps=args.accum, per_device_eval_batch_size=16, learning_rate=args.lr, warmup_steps=5,
        lr_scheduler_type="cosine", weight_decay=0.01, max_grad_norm=1.0, logging_steps=5, eval_strategy="epoch", save_strategy="steps",
        save_steps=9, save_total_limit=2, ddp_find_unused_parameters=False, remove_unused_columns=False, label_names=["labels"],
        use_cpu=not torch.cuda.is_available(), seed=0, data_seed=5, disable_tqdm=True, report_to=[])
    trainer = OrderTrainer(model=model, args=arguments, train_dataset=train, eval_dataset=valid, data_collator=collate,
                           compute_metrics=compute_metrics, preprocess_logits_for_metrics=choose, callbacks=[Report()])
    last = get_last_checkpoint(args.out) if os.path.isdir(args.out) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(os.path.join(args.out, "final"))
    trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"finished at step {trainer.state.global_step}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
