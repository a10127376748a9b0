"""Rectified flow on scikit-learn's digits with a DiT sharded by FSDP2 and an EMA of the sharded parameters.

    torchrun --nproc_per_node 2 train.py
    torchrun --nproc_per_node 2 train.py --epochs 6 --resume
"""
import argparse
import contextlib
import math
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dit import DiT


def local(tensor):
    """This rank's shard of a DTensor (it shares the memory)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedEMA:
    """Exponential moving average of an FSDP2 model; every rank averages its own shards, without communication."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model, step):
        decay = min(self.decay, (1 + step) / (4 + step))
        for name, p in model.named_parameters():
            local(self.shadow[name]).lerp_(local(p), 1 - decay)

    @contextlib.contextmanager
    def applied_to(self, model):
        """Run the model with the averaged weights, then put the trained ones back."""
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._copy(self.shadow, model)
        try:
            yield
        finally:
            self._copy(trained, model)

    @staticmethod
    @torch.no_grad()
    def _copy(source, model):
        for name, p in model.named_parameters():
            local(p).copy_(local(source[name]))

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        for name, value in state.items():
            local(self.shadow[name]).copy_(local(value))


class TrainState:
    """What dcp.save and dcp.load see: each rank reads and writes its shards only."""

    def __init__(self, model, optimizer, scheduler, ema):
        self.model, self.optimizer, self.scheduler, self.ema = model, optimizer, scheduler, ema
        self.epoch = self.step = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "ema": self.ema.state_dict(),
                "scheduler": self.scheduler.state_dict(), "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.ema.load_state_dict(state["ema"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["epoch"], state["step"]


def save_checkpoint(folder, state, rank):
    """All ranks write into a temporary folder; it gets its name once it is complete, and only then is pointed to."""
    name = f"epoch_{state.epoch:03d}"
    target, part = os.path.join(folder, name), os.path.join(folder, name + ".part")
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dcp.save({"train": state}, checkpoint_id=part)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        os.rename(part, target)
        pointer = os.path.join(folder, "latest")
        with open(pointer + ".part", "w") as f:
            f.write(name)
        os.replace(pointer + ".part", pointer)
    dist.barrier()


def load_checkpoint(folder, state, rank):
    name = [None]
    if rank == 0 and os.path.exists(os.path.join(folder, "latest")):
        with open(os.path.join(folder, "latest")) as f:
            name = [f.read().strip()]
    dist.broadcast_object_list(name, src=0)
    if name[0] is None:
        raise SystemExit(f"no checkpoint in {folder}")
    dcp.load({"train": state}, checkpoint_id=os.path.join(folder, name[0]))


def load_data(seed, n_val=261):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # from 0..16 to -1..1
    labels = torch.tensor(digits.target)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=g)
    val, train = order[:n_val], order[n_val:]
    # the validation loss has the same noise and times in every epoch and for any number of ranks
    noise, times = torch.randn(n_val, 1, 8, 8, generator=g), (torch.arange(n_val) + 0.5) / n_val
    return (TensorDataset(images[train], labels[train]),
            TensorDataset(images[val], labels[val], noise, times))


def flow_loss(model, images, labels, noise, t, keep_label=None):
    """Squared error of the velocity, one number for each image."""
    at = t[:, None, None, None]
    velocity = model((1 - at) * images + at * noise, t, labels, keep_label)
    return (velocity - (noise - images)).square().mean(dim=(1, 2, 3))


@torch.no_grad()
def validate(model, dataset, batch_size, rank, world_size, device):
    """Mean over the validation set. The forward pass of a sharded model is collective, so all ranks take the same
    number of batches: the short ones are filled up with images of weight zero."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, images
    stride = batch_size * world_size
    for start in range(0, len(dataset), stride):
        index = torch.arange(start + rank * batch_size, start + (rank + 1) * batch_size)
        weight = (index < len(dataset)).to(device, torch.float64)
        batch = [x.to(device) for x in dataset[index.clamp(max=len(dataset) - 1)]]
        loss = flow_loss(model, *batch).double()
        total += torch.stack([(loss * weight).sum(), weight.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def clip_gradients(model, max_norm):
    """Clip by the norm of all gradients on all ranks; returns that norm."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--schedule-epochs", type=int, default=6, help="the learning rate reaches zero here")
    parser.add_argument("--batch-size", type=int, default=48, help="per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--ema-decay", type=float, default=0.95)
    parser.add_argument("--label-dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    train_set, val_set = load_data(args.seed)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)  # fully_shard does not broadcast: all ranks start from the same weights
    model = DiT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # also the outermost parameters are resharded after each forward, so that validation leaves no gathered copies
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total_steps = args.schedule_epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / args.warmup, 0.5 * (1 + math.cos(math.pi * min(step / total_steps, 1.0)))))
    ema = ShardedEMA(model, args.ema_decay)
    state = TrainState(model, optimizer, scheduler, ema)
    if args.resume:
        load_checkpoint(args.checkpoint_dir, state, rank)

    while state.epoch < args.epochs:
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        noise_rng = torch.Generator().manual_seed((args.seed * 1000 + state.epoch) * world_size + rank)
        model.train()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, images, norms
        for images, labels in loader:
            noise = torch.randn(images.shape, generator=noise_rng).to(device)
            t = torch.sigmoid(torch.randn(len(images), generator=noise_rng)).to(device)
            keep = (torch.rand(len(images), generator=noise_rng) >= args.label_dropout).float().to(device)
            losses = flow_loss(model, images.to(device), labels.to(device), noise, t, keep)
            losses.mean().backward()
            norm = clip_gradients(model, args.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state.step += 1
            ema.update(model, state.step)
            sums += torch.stack([losses.detach().sum(), torch.tensor(len(images), device=device), norm]).double()
        dist.all_reduce(sums)
        with ema.applied_to(model):
            val_loss = validate(model, val_set, args.batch_size, rank, world_size, device)
        if rank == 0:
            print(f"epoch {state.epoch}: train loss {sums[0] / sums[1]:.4f}, gradient norm "
                  f"{sums[2] / world_size / len(loader):.3f}, validation loss (EMA) {val_loss:.4f}", flush=True)
        save_checkpoint(args.checkpoint_dir, state, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
