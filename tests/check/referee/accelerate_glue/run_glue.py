"""Sentence classification in the manner of GLUE with Accelerate, without a Trainer.

    torchrun --nproc-per-node=2 run_glue.py --checkpointing_steps 10
    torchrun --nproc-per-node=2 run_glue.py --resume_from_checkpoint output/step_20
"""
import argparse
import json
import math
import os
import shutil

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from data import VOCAB_SIZE, Reviews, collate
from model import SentenceClassifier


class Progress:
    """Where the training is. Registered with the accelerator, so that save_state and load_state carry it along."""

    def __init__(self):
        self.epoch = 0
        self.batches_done = 0  # batches of this epoch that each process has used
        self.completed_steps = 0  # optimizer steps since the beginning
        self.loss_sum = 0.0  # of this epoch, over all processes, up to the checkpoint

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--num_warmup_steps", type=int, default=6, help="in optimizer steps")
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--checkpointing_steps", default="epoch", help="a number of optimizer steps, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint", default=None, help="folder of a checkpoint")
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--train_size", type=int, default=1280)
    parser.add_argument("--eval_size", type=int, default=301)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def build_optimizer(model, args):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]  # biases and layer norms
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.learning_rate)


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


def save_checkpoint(accelerator, args, name):
    """Every process writes its own random states and the main process all the rest, into a folder that gets its
    name when it is complete."""
    final = os.path.join(args.output_dir, name)
    partial = final + ".partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(partial)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
    accelerator.wait_for_everyone()


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    losses, predictions, references = [], [], []
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
        loss = F.cross_entropy(logits, batch["labels"], reduction="none")
        # leaves out the reviews that were repeated to fill the last batch
        loss, prediction, reference = accelerator.gather_for_metrics((loss, logits.argmax(dim=-1), batch["labels"]))
        losses.append(loss)
        predictions.append(prediction)
        references.append(reference)
    losses, predictions, references = torch.cat(losses), torch.cat(predictions), torch.cat(references)
    hits = ((predictions == 1) & (references == 1)).sum().item()
    claimed, present = (predictions == 1).sum().item(), (references == 1).sum().item()
    return {
        "samples": len(references),
        "eval_loss": losses.mean().item(),
        "accuracy": (predictions == references).float().mean().item(),
        "f1": 2 * hits / max(claimed + present, 1),
    }


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    # the loader's own generator keeps the shuffling away from the global random state (dropout)
    train_loader = DataLoader(
        Reviews(args.train_size, seed=args.seed), batch_size=args.per_device_train_batch_size, shuffle=True,
        collate_fn=collate, generator=torch.Generator(),
    )
    eval_loader = DataLoader(
        Reviews(args.eval_size, seed=args.seed + 1), batch_size=args.per_device_eval_batch_size, collate_fn=collate,
    )
    classifier = SentenceClassifier(VOCAB_SIZE)
    optimizer = build_optimizer(classifier, args)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        classifier, optimizer, train_loader, eval_loader
    )

    steps_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * steps_per_epoch
    # the prepared scheduler moves on by num_processes at each optimizer step
    lr_scheduler = accelerator.prepare(get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    ))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(args.seed, device_specific=True)  # from here on only dropout draws: other masks on each process

    if args.resume_from_checkpoint:
        accelerator.print(f"resuming from {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)

    total_batch = args.per_device_train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    accelerator.print(f"{max_train_steps} optimizer steps, {total_batch} reviews in each")

    metrics = {}
    for epoch in range(progress.epoch, args.num_train_epochs):
        train_loader.set_epoch(epoch)
        if progress.batches_done > 0:
            epoch_loader = accelerator.skip_first_batches(train_loader, progress.batches_done)
        else:
            epoch_loader = train_loader
        model.train()
        loss_sum = torch.zeros((), device=accelerator.device)
        for step, batch in enumerate(epoch_loader, start=progress.batches_done):
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            loss_sum += loss.detach()
            progress.batches_done = step + 1

            if accelerator.sync_gradients:
                progress.completed_steps += 1
                if args.checkpointing_steps.isdigit() and progress.completed_steps % int(args.checkpointing_steps) == 0:
                    progress.loss_sum += accelerator.reduce(loss_sum, reduction="sum").item()
                    loss_sum.zero_()
                    save_checkpoint(accelerator, args, f"step_{progress.completed_steps}")

        progress.loss_sum += accelerator.reduce(loss_sum, reduction="sum").item()
        train_loss = progress.loss_sum / (progress.batches_done * accelerator.num_processes)
        metrics = evaluate(accelerator, model, eval_loader)
        accelerator.print(
            f"epoch {epoch}: lr {lr_scheduler.get_last_lr()[0]:.2e}, train loss {train_loss:.4f}, "
            f"eval loss {metrics['eval_loss']:.4f}, accuracy {metrics['accuracy']:.4f}, f1 {metrics['f1']:.4f} "
            f"on {metrics['samples']} reviews"
        )
        progress.epoch, progress.batches_done, progress.loss_sum = epoch + 1, 0, 0.0
        if args.checkpointing_steps == "epoch":
            save_checkpoint(accelerator, args, f"epoch_{epoch}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process and metrics:
        weights = os.path.join(args.output_dir, "pytorch_model.bin")
        torch.save(classifier.state_dict(), weights + ".partial")
        os.replace(weights + ".partial", weights)
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
            json.dump(metrics, f, indent=2)
    accelerator.end_training()


if __name__ == "__main__":
    main()
