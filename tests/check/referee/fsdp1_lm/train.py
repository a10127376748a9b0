"""Language model with FullyShardedDataParallel: layers are wrapped by policy, a checkpoint is one full state dict."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, CONTEXT, DIM, HEADS, BATCH = 40, 24, 48, 4, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 6 * DIM, bias=False), nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        x = x + self.out(F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True).transpose(1, 2).flatten(2))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class LanguageModel(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, targets):
        x = self.layers(self.embed(ids) + self.place(torch.arange(CONTEXT, device=ids.device)))
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten(), reduction="sum")


def make_rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(1, limit, (count, 1), generator=generator) for limit in (VOCAB, 4))
    rows = (start + step * torch.arange(CONTEXT + 1)) % VOCAB
    other = torch.randint(VOCAB, rows.shape, generator=generator)
    return torch.where(torch.rand(rows.shape, generator=generator) < 0.05, other, rows)


def full_state(model, rank0_only):
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                                FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
                                FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only))


def save_checkpoint(path, model, optimizer, epoch):
    with full_state(model, rank0_only=True):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "epoch": epoch}
    if dist.get_rank() == 0:
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load_checkpoint(path, model, optimizer):
    state = torch.load(path, map_location="cpu")
    with full_state(model, rank0_only=False):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    return state["epoch"]


@torch.no_grad()
def validate(model, rows, device):
    model.eval()
    mine = rows[dist.get_rank()::dist.get_world_size()]
    missing = -(-len(rows) // dist.get_world_size()) - len(mine)
    ids, targets = F.pad(mine[:, :-1], (0, 0, 0, missing)), F.pad(mine[:, 1:], (0, 0, 0, missing), value=-100)
    loss_sum = model(ids.to(device), targets.to(device))
    dist.all_reduce(loss_sum)
    return loss_sum.item() / rows[:, 1:].numel()


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    os.makedirs(os.path.dirname(args.checkpoint), exist_ok=True)
    train_rows, val_rows = make_rows(256, seed=0), make_rows(50, seed=1)
    sampler = DistributedSampler(train_rows, shuffle=True, drop_last=True)
    loader = DataLoader(train_rows, batch_size=BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = FSDP(
        LanguageModel(depth=2), device_id=device,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    resume = args.resume and os.path.exists(args.checkpoint)
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer) if resume else 0
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, rows in enumerate(loader):
            rows = rows.to(device)
            loss = model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
            optimizer.zero_grad()
            loss.backward()
            norm = model.clip_grad_norm_(0.25)
            optimizer.step()
            if step % 5 == 0:
                dist.all_reduce(mean := loss.detach() / dist.get_world_size())
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item():.4f} gradient norm {norm.item():.3f}")
        val_loss = validate(model, val_rows, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} validation loss {val_loss:.4f}")
        save_checkpoint(args.checkpoint, model, optimizer, epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoints/last.pt")
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
