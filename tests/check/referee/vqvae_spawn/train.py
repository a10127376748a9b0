"""Trains a VQ-VAE on small pictures of shapes, one process for each GPU (or --world-size processes on the CPU):

    python train.py
    python train.py --resume --epochs 8
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from quantizer import EMAQuantizer


def make_shapes(n, seed, size=16):
    """Discs, squares and crosses in three colours on backgrounds with a gradient."""
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    palette = torch.tensor([[0.9, 0.2, 0.2], [0.2, 0.8, 0.3], [0.25, 0.35, 0.95]])
    kind, colour = torch.randint(3, (n,), generator=g), torch.randint(3, (n,), generator=g)
    centre = 5 + 6 * torch.rand(n, 2, generator=g)
    radius = 2.5 + 2 * torch.rand(n, generator=g)
    slope = 0.3 * torch.rand(n, generator=g)

    dy = (ys - centre[:, 0].view(-1, 1, 1)).abs()
    dx = (xs - centre[:, 1].view(-1, 1, 1)).abs()
    r = radius.view(-1, 1, 1)
    disc, square = dy ** 2 + dx ** 2 <= r ** 2, torch.maximum(dy, dx) <= r
    cross = square & (torch.minimum(dy, dx) <= 1)
    mask = torch.stack([disc, square, cross])[kind, torch.arange(n)].float().unsqueeze(1)
    background = (0.1 + slope.view(-1, 1, 1) * ys / size).unsqueeze(1)
    images = mask * palette[colour].view(n, 3, 1, 1) + (1 - mask) * background
    return TensorDataset(images + 0.02 * torch.randn(images.shape, generator=g))


class VQVAE(nn.Module):
    def __init__(self, num_codes, dim=8, width=16, seed=0):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, dim, 1),
        )
        self.quantizer = EMAQuantizer(num_codes, dim, seed=seed)
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, 2 * width, 3, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
        )

    def forward(self, images):
        quantized, codes, commitment_loss = self.quantizer(self.encoder(images))
        return self.decoder(quantized), codes, commitment_loss


@torch.no_grad()
def evaluate(net, loader, device):
    """Squared error per pixel, and the codebook perplexity, over the validation pictures of all ranks."""
    net.eval()
    num_codes = net.quantizer.num_codes
    totals = torch.zeros(2 + num_codes, dtype=torch.float64, device=device)  # squared error, pixel values, code counts
    for (images,) in loader:
        images = images.to(device)
        reconstruction, codes, _ = net(images)
        totals[0] += F.mse_loss(reconstruction, images, reduction="sum")
        totals[1] += images.numel()
        totals[2:] += torch.bincount(codes.flatten(), minlength=num_codes)
    dist.all_reduce(totals)
    usage = totals[2:] / totals[2:].sum()
    perplexity = torch.exp(-torch.special.xlogy(usage, usage).sum())
    return (totals[0] / totals[1]).item(), perplexity.item()


def save(path, epoch, best, net, optimizer, scheduler, generator):
    """Called by every rank, as the generators of all ranks are collected; rank 0 writes."""
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, generator.get_state())
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({
            "epoch": epoch,
            "best": best,
            "net": net.state_dict(),  # with the codebook and its averages, which are buffers
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "generators": states,
        }, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def worker(rank, world_size, args):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if use_cuda else "gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=rank, world_size=world_size,
    )
    torch.manual_seed(args.seed)

    train_set, val_set = make_shapes(args.train_size, args.seed), make_shapes(args.val_size, args.seed + 1)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    # a strided share for each rank: no picture is missing and none is counted twice
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    variance = train_set.tensors[0].var().item()  # puts the reconstruction loss on the scale of the commitment loss

    net = VQVAE(args.num_codes, seed=args.seed).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    picker = torch.Generator().manual_seed(args.seed + 1000 + rank)  # for dead codes: other draws on each rank
    path, first_epoch, best = os.path.join(args.checkpoint_dir, "last.pt"), 0, float("inf")
    if args.resume:
        state = torch.load(path, map_location="cpu", weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        if len(state["generators"]) == world_size:
            picker.set_state(state["generators"][rank])
        first_epoch, best = state["epoch"] + 1, state["best"]
    # the quantizer keeps its buffers equal on all ranks by itself
    model = DDP(net, device_ids=[rank] if use_cuda else None, broadcast_buffers=False)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(3, device=device)  # reconstruction loss, commitment loss, batches
        revived = 0
        for (images,) in train_loader:
            images = images.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            reconstruction, _, commitment_loss = model(images)
            reconstruction_loss = F.mse_loss(reconstruction, images)
            (reconstruction_loss / variance + commitment_loss).backward()
            optimizer.step()
            revived += net.quantizer.update_codebook(picker)
            sums += torch.stack([reconstruction_loss, commitment_loss, torch.ones_like(commitment_loss)]).detach()
        lr = scheduler.get_last_lr()[0]
        scheduler.step()
        dist.all_reduce(sums)
        val_loss, perplexity = evaluate(net, val_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch}: lr {lr:.1e}, train mse {sums[0] / sums[2]:.5f}, commitment {sums[1] / sums[2]:.5f}, "
                f"val mse {val_loss:.5f}, perplexity {perplexity:.1f} of {args.num_codes}, revived {revived}",
                flush=True,
            )
        improved, best = val_loss < best, min(val_loss, best)
        save(path, epoch, best, net, optimizer, scheduler, picker)
        if improved:  # the same on every rank: the loss is that of all ranks
            save(os.path.join(args.checkpoint_dir, "best.pt"), epoch, best, net, optimizer, scheduler, picker)
    dist.destroy_process_group()


def find_free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="for each process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--num-codes", type=int, default=64)
    parser.add_argument("--train-size", type=int, default=1280)
    parser.add_argument("--val-size", type=int, default=301)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.port = args.port or find_free_port()
    mp.spawn(worker, args=(args.world_size, args), nprocs=args.world_size, join=True)


if __name__ == "__main__":
    main()
