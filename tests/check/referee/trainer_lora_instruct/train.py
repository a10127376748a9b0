"""Instruction tuning with LoRA by transformers' Trainer: answers only in the loss, gradient accumulation, exact-match evaluation, resume from the last checkpoint."""
import argparse
import os
import random

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

PAD, BOS, EOS, ASK = 0, 1, 2, 3
COPY, REVERSE, REPEAT = 4, 5, 6
FIRST, VOCAB = 7, 32


class Instructions(Dataset):
    """Prompts 'do COPY/REVERSE/REPEAT with these symbols' and their answers (answers have different lengths)."""

    def __init__(self, n, seed):
        draw = random.Random(seed)
        self.items = []
        for _ in range(n):
            task = draw.choice([COPY, REVERSE, REPEAT])
            symbols = [draw.randrange(FIRST, VOCAB) for _ in range(draw.randint(1, 6))]
            answer = {COPY: symbols, REVERSE: symbols[::-1], REPEAT: [symbols[0]] * (2 * len(symbols))}[task]
            prompt = [BOS, task, *symbols, ASK]
            self.items.append({"input_ids": prompt + answer + [EOS], "labels": [-100] * len(prompt) + answer + [EOS]})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.full((len(items), longest), PAD)
    labels = torch.full((len(items), longest), -100)
    for row, item in enumerate(items):
        ids[row, :len(item["input_ids"])] = torch.tensor(item["input_ids"])
        labels[row, :len(item["labels"])] = torch.tensor(item["labels"])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def best_tokens(logits, labels):
    """For evaluation only the best token of every place is kept."""
    return logits.argmax(-1)


def compute_metrics(result):
    guess, labels = result.predictions[:, :-1], result.label_ids[:, 1:]
    wanted = labels != -100
    return {"token_accuracy": float((guess == labels)[wanted].mean()), "exact_match": float(((guess == labels) | ~wanted).all(1).mean())}


class PrintNumbers(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.is_world_process_zero:
            print(f"epoch {state.epoch:.0f}, step {state.global_step}: token accuracy {metrics['eval_token_accuracy']:.4f}, exact match {metrics['eval_exact_match']:.4f}", flush=True)


def make_model():
    """A small model that stands for the pretrained one (the same on all processes), with adapters."""
    torch.manual_seed(1234)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS))
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", modules_to_save=["lm_head", "embed_tokens"],
                                           task_type="CAUSAL_LM"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=48, help="examples per optimizer step over all processes")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", 1))
    training_args = TrainingArguments(
        output_dir=args.out, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch // world // args.accum,
        per_device_eval_batch_size=32, gradient_accumulation_steps=args.accum, learning_rate=args.lr, lr_scheduler_type="cosine", warmup_steps=5,
        weight_decay=0.0, eval_strategy="epoch", save_strategy="steps", save_steps=7, save_total_limit=2, logging_strategy="no", report_to=[],
        disable_tqdm=True, seed=17, use_cpu=not torch.cuda.is_available(), ddp_find_unused_parameters=False)
    set_seed(training_args.seed)
    train, valid = Instructions(576, seed=1), Instructions(150, seed=2)
    model = make_model()
    trainer = Trainer(model=model, args=training_args, train_dataset=train, eval_dataset=valid, data_collator=collate,
                      compute_metrics=compute_metrics, preprocess_logits_for_metrics=best_tokens, callbacks=[PrintNumbers()])
    last = get_last_checkpoint(args.out) if os.path.isdir(args.out) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(os.path.join(args.out, "final"))


if __name__ == "__main__":
    main()
