"""Fine-tune the upper layers of a small transformer with FSDP2.

    torchrun --nproc_per_node=2 finetune.py
    torchrun --nproc_per_node=2 finetune.py --resume     goes on after the last finished epoch
"""
import argparse
import math
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from data import IGNORE, WORDS, Texts, collate, make_rules
from model import Transformer


class TrainingState(Stateful):
    """Model and optimizer as DCP wants them (sharded, under the names of the unwrapped model), and the rest."""

    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.epochs_done = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(),
                "epochs_done": self.epochs_done}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epochs_done = state["epochs_done"]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-after", type=int, default=None, help="stop after this epoch, the schedule unchanged")
    parser.add_argument("--batch-size", type=int, default=12, help="texts per rank")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--frozen", type=int, default=1, help="number of lower blocks that are not trained")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--pretrained", default="pretrained.pt", help="made if it does not exist")
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def pretrain(path, device, seed, steps=40):
    """A quick pretraining on the first language, by one process alone."""
    torch.manual_seed(seed)
    model = Transformer(WORDS).to(device)
    texts = Texts(640, make_rules(seed), seed=seed + 10, prompt=False)
    loader = DataLoader(texts, batch_size=32, shuffle=True, collate_fn=collate, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(max(steps // len(loader), 1)):
        for words, labels in loader:
            logits = model(words.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten(), ignore_index=IGNORE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"pretrained, loss {loss.item():.4f}", flush=True)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, path + ".part")
    os.replace(path + ".part", path)


def build_model(args, mesh, device):
    """Shard an empty model, then hand each rank its part of the pretrained weights, which only rank 0 reads."""
    with torch.device("meta"):
        model = Transformer(WORDS)
    model.freeze_lower(args.frozen)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    weights = torch.load(args.pretrained, map_location="cpu", weights_only=True) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def summed_loss(model, words, labels):
    logits = model(words)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(model, texts, batch_size, device):
    """Mean loss per word of all answers. Each rank takes every world-th text. All of them make the same number of
    forward passes, as FSDP gathers the weights in each; a rank that has run out of texts passes an empty batch."""
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(texts), world)
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, words
    for i in range(math.ceil(math.ceil(len(texts) / world) / batch_size)):
        words, labels = collate([texts[j] for j in mine[i * batch_size:(i + 1) * batch_size]])
        words, labels = words.to(device), labels.to(device)
        sums += torch.stack([summed_loss(model, words, labels), (labels != IGNORE).sum()]).double()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train_epoch(model, loader, optimizer, scheduler, clip, device):
    model.train()
    world = dist.get_world_size()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for words, labels in loader:
        words, labels = words.to(device), labels.to(device)
        n_words = (labels != IGNORE).sum()
        dist.all_reduce(n_words)
        loss = summed_loss(model, words, labels)
        # FSDP averages the gradients over the ranks; what we want is the mean over the words of all ranks
        (loss * world / n_words).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sums += torch.stack([loss.detach(), n_words / world]).double()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(state, folder):
    """DCP writes a new folder, which then takes the place of the old one."""
    final = os.path.join(folder, f"epoch_{state.epochs_done}")
    if dist.get_rank() == 0:
        shutil.rmtree(final + ".part", ignore_errors=True)
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dcp.save({"training": state}, checkpoint_id=final + ".part")
    if dist.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(final + ".part", final)
        with open(os.path.join(folder, "latest.part"), "w") as f:
            f.write(os.path.basename(final))
        os.replace(os.path.join(folder, "latest.part"), os.path.join(folder, "latest"))
    dist.barrier()


def main():
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    if rank == 0 and not os.path.exists(args.pretrained):
        pretrain(args.pretrained, device, args.seed)
    dist.barrier()
    rules = make_rules(args.seed, changed_words=15)
    train_texts, val_texts = Texts(480, rules, seed=args.seed + 20), Texts(149, rules, seed=args.seed + 30)
    sampler = DistributedSampler(train_texts, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train_texts, batch_size=args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)

    model = build_model(args, mesh, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    state = TrainingState(model, optimizer, scheduler)
    if args.resume:
        with open(os.path.join(args.checkpoint_dir, "latest")) as f:
            dcp.load({"training": state}, checkpoint_id=os.path.join(args.checkpoint_dir, f.read().strip()))
    val_loss = evaluate(model, val_texts, args.batch_size, device)
    if rank == 0:
        print(f"before epoch {state.epochs_done}: val loss {val_loss:.4f}", flush=True)

    for epoch in range(state.epochs_done, min(args.epochs, args.stop_after or args.epochs)):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 100 * (epoch + 1) + rank)  # dropout masks, the same after a resume
        train_loss = train_epoch(model, loader, optimizer, scheduler, args.clip, device)
        val_loss = evaluate(model, val_texts, args.batch_size, device)
        if rank == 0:
            print(f"epoch {epoch}: train loss {train_loss:.4f}, val loss {val_loss:.4f}, "
                  f"lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
        state.epochs_done = epoch + 1
        save(state, args.checkpoint_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
