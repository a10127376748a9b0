"""Instruction tuning with LoRA adapters (peft) and DDP; the loss counts the reply's tokens only."""

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, EOS, IGNORE = 64, 1, -100


def make_dialogs(count, seed):
    """A prompt holds one command among other words; the reply is that command's phrase, once or several times."""
    rng = random.Random(seed)
    phrases = {command: [10 + 4 * command + i for i in range(2 + command)] for command in range(2, 7)}
    dialogs = []
    for _ in range(count):
        command, repeat = rng.randrange(2, 7), rng.choice([1, 1, 2, 4])
        prompt = [rng.randrange(40, VOCAB) for _ in range(rng.randint(2, 9))] + [command, 6 + repeat]
        dialogs.append((prompt, phrases[command] * repeat + [EOS]))
    return dialogs


def collate(dialogs):
    ids = [torch.tensor(prompt + reply) for prompt, reply in dialogs]
    labels = [torch.tensor([IGNORE] * len(prompt) + reply) for prompt, reply in dialogs]
    mask = [torch.ones_like(row) for row in ids]
    return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(mask, True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE)}


def build_model(adapter=None):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=EOS))
    if adapter is not None:
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def reply_loss(model, batch, device):
    labels = batch["labels"][:, 1:].to(device)
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        logits = model(batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device)).logits[:, :-1]
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss, (labels != IGNORE).sum()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)
    for batch in loader:
        sums += torch.stack(reply_loss(model, batch, device))
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def save_checkpoint(out, model, optimizer, epoch):
    if dist.get_rank() == 0:
        folder = out / f"epoch{epoch}"
        model.save_pretrained(folder)
        torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch}, folder / "trainer.pt")
        (out / "latest.tmp").write_text(folder.name)
        os.replace(out / "latest.tmp", out / "latest")
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="per GPU")
    parser.add_argument("--max-length", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device, rank, world = torch.device("cuda", local_rank), dist.get_rank(), dist.get_world_size()
    dialogs = [dialog for dialog in make_dialogs(420, seed=0) if len(dialog[0] + dialog[1]) <= args.max_length]
    mine = dialogs[:len(dialogs) // world * world][rank::world]
    shuffle = torch.Generator()
    loader = DataLoader(mine, args.batch_size, shuffle=True, generator=shuffle, collate_fn=collate, drop_last=True)
    held_out = DataLoader(make_dialogs(100, seed=1)[rank::world], args.batch_size, collate_fn=collate)
    latest, first_epoch, state = args.out / "latest", 0, None
    if args.resume and latest.exists():
        folder = args.out / latest.read_text()
        state = torch.load(folder / "trainer.pt", map_location="cpu")
        first_epoch = state["epoch"]
    peft_model = build_model(adapter=folder if state else None).to(device)
    model = DDP(peft_model, device_ids=[local_rank])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    if state:
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(first_epoch, args.epochs):
        shuffle.manual_seed(1000 * epoch + rank)
        for step, batch in enumerate(loader):
            loss_sum, count = reply_loss(model, batch, device)
            dist.all_reduce(count)
            (loss_sum * world / count).backward()
            nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 6 == 0:
                dist.all_reduce(total := loss_sum.detach())
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {(total / count).item():.4f}")
        val_loss = validate(peft_model, held_out, device)
        if rank == 0:
            print(f"epoch {epoch} validation loss {val_loss:.4f}")
        save_checkpoint(args.out, peft_model, optimizer, epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
