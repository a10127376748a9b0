"""LoRA fine-tuning of a small causal language model on question/answer pairs, data parallel with DDP."""

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

PAD, BOS, ANSWER, EOS, IGNORE = 0, 1, 2, 3, -100
INTENTS, WORDS = range(4, 12), range(12, 64)


def make_pairs(count, seed):
    """The answer to a question depends on its one intent token; some answers are much longer than others."""
    replies = random.Random(0)
    answers = {intent: replies.sample(WORDS, 1 + i) for i, intent in enumerate(INTENTS)}
    rng, pairs = random.Random(seed), []
    for _ in range(count):
        intent, question = rng.choice(INTENTS), rng.choices(WORDS, k=rng.randint(3, 9))
        question.insert(rng.randrange(len(question)), intent)
        pairs.append(([BOS] + question + [ANSWER], answers[intent] + [EOS]))
    return pairs


def collate(pairs):
    length = max(len(question) + len(answer) for question, answer in pairs)
    ids = torch.full((len(pairs), length), PAD)
    labels = torch.full_like(ids, IGNORE)
    for row, (question, answer) in enumerate(pairs):
        start, end = len(question), len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        labels[row, start:end] = ids[row, start:end]
    return ids, (ids != PAD).long(), labels[:, 1:]


def load_base_model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, initializer_range=0.1, pad_token_id=PAD))


def token_losses(model, batch, device):
    ids, mask, labels = (tensor.to(device) for tensor in batch)
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    loss_sum = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss_sum, (labels != IGNORE).sum()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = sum(torch.stack(token_losses(model, batch, device)) for batch in loader)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(folder, model, optimizer, schedule, epoch):
    name = f"epoch-{epoch}"
    model.save_pretrained(folder / name)
    state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "epoch": epoch}
    torch.save(state, folder / name / "trainer.pt")
    (folder / "latest.tmp").write_text(name)
    os.replace(folder / "latest.tmp", folder / "latest")


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device, rank, world = torch.device("cuda", local_rank), dist.get_rank(), dist.get_world_size()
    base, latest = load_base_model(seed=0), args.out / "latest"
    checkpoint = args.out / latest.read_text() if args.resume and latest.exists() else None
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
    if checkpoint:
        model = PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
    else:
        model = get_peft_model(base, lora)
    ddp = DDP(model.to(device), device_ids=[local_rank])
    trainable = [p for p in model.parameters() if p.requires_grad]

    train_set, val_set = make_pairs(256, seed=1), make_pairs(90, seed=2)
    sampler = DistributedSampler(train_set, seed=5, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    val_loader = DataLoader(val_set[rank::world], 16, collate_fn=collate)
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, args.epochs * len(loader))
    first_epoch = 0
    if checkpoint:
        state = torch.load(checkpoint / "trainer.pt", map_location=device)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for batch in loader:
            loss_sum, tokens = token_losses(ddp, batch, device)
            dist.all_reduce(tokens)
            loss = loss_sum * world / tokens  # DDP averages over the ranks
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        dist.all_reduce(train_loss := loss.detach() / world)
        val_loss = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} last training loss {train_loss.item():.4f} validation loss {val_loss:.4f}")
            save(args.out, model, optimizer, schedule, epoch + 1)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in ("epochs", 3), ("batch_size", 8), ("lr", 1e-2):
        parser.add_argument("--" + name, type=type(default), default=default)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
