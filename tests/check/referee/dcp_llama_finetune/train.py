"""Fine-tune a small llama with FSDP2:  torchrun --standalone --nproc-per-node 2 train.py
Started again, it goes on from its last complete checkpoint."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from checkpoint import Checkpointer, TrainState
from data import IGNORE, VOCAB_SIZE, GlobalBatchSampler, blank, packed_sequences, validation_batches
from model import Transformer


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


def to_device(batch, device):
    return {key: value.to(device) for key, value in batch.items()}


def build_model(seed, device):
    torch.manual_seed(seed)
    model = Transformer(VOCAB_SIZE).to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def build_optimizer(model, args, total_steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup, decay = max(1, args.warmup_steps), max(1, total_steps - args.warmup_steps)
    schedule = lambda step: min((step + 1) / warmup, (total_steps - step) / decay)  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)


def clip_gradients(parameters, max_norm):
    grads = [p.grad for p in parameters]
    total_norm = torch.nn.utils.get_total_norm(grads).full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


def summed_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def train_step(model, optimizer, scheduler, micro_batches, max_norm):
    """One optimizer step on the mean loss over all answer tokens of the global batch"""
    n_tokens = sum((batch["labels"] != IGNORE).sum() for batch in micro_batches)
    dist.all_reduce(n_tokens)
    loss_sum = torch.zeros((), device=n_tokens.device)
    for i, batch in enumerate(micro_batches):
        model.set_requires_gradient_sync(i == len(micro_batches) - 1)
        loss = summed_loss(model(batch["tokens"], batch["positions"], batch["documents"]), batch["labels"])
        # FSDP averages the gradients over the ranks; the sum is wanted here
        (loss * dist.get_world_size() / n_tokens).backward()
        loss_sum += loss.detach()
    grad_norm = clip_gradients(list(model.parameters()), max_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    dist.all_reduce(loss_sum)
    return (loss_sum / n_tokens).item(), grad_norm.item()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right tokens, tokens
    for batch in loader:
        batch = to_device(batch, device)
        logits, labels = model(batch["tokens"], batch["positions"], batch["documents"]), batch["labels"]
        right, counted = (logits.argmax(-1) == labels).sum(), (labels != IGNORE).sum()
        sums += torch.stack([summed_loss(logits, labels), right, counted])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main(args):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulate, rest = divmod(args.global_batch_size, args.micro_batch_size * world_size)
    assert rest == 0, "the global batch must be a multiple of the micro-batch times the number of processes"

    train_set = packed_sequences("train", 384, args.seed)
    val_set = packed_sequences("val", 45, args.seed)
    sampler = GlobalBatchSampler(len(train_set), args, rank, world_size)
    train_loader = DataLoader(train_set, batch_sampler=sampler)
    val_loader = DataLoader(val_set + [blank()], batch_sampler=validation_batches(len(val_set), 8, rank, world_size))
    total_steps = args.epochs * sampler.steps_per_epoch
    model = build_model(args.seed, device)
    optimizer, scheduler = build_optimizer(model, args, total_steps)
    state = TrainState(model, optimizer, scheduler)
    checkpointer = Checkpointer(args.checkpoint_dir, state)
    if checkpointer.load_latest():
        log(f"going on after step {state.step} of {total_steps}")

    for epoch in range(state.step // sampler.steps_per_epoch, args.epochs):
        sampler.epoch, sampler.first_step = epoch, state.step % sampler.steps_per_epoch
        batches = iter(train_loader)
        for _ in range(sampler.first_step, sampler.steps_per_epoch):
            micro_batches = [to_device(next(batches), device) for _ in range(accumulate)]
            lr = scheduler.get_last_lr()[0]
            loss, grad_norm = train_step(model, optimizer, scheduler, micro_batches, max_norm=1.0)
            state.step += 1
            if state.step % 4 == 0:
                log(f"step {state.step}: loss {loss:.4f}, gradient norm {grad_norm:.3f}, lr {lr:.2e}")
            if state.step % args.save_every == 0 or state.step == total_steps:
                checkpointer.save()
        val_loss, val_accuracy = validate(model, val_loader, device)
        log(f"epoch {epoch + 1}: validation loss {val_loss:.4f}, token accuracy {val_accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=16, help="sequences per optimizer step, all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--warmup-steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=16, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    main(parser.parse_args())
