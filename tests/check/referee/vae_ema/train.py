"""Train a variational autoencoder on synthetic blob images, with KL annealing and an EMA of the weights.

    python train.py --world-size 2
"""
import argparse
import copy
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIZE = 14


def make_blobs(n, seed):
    """Images of one soft blob whose position, width and brightness vary."""
    g = torch.Generator().manual_seed(seed)
    cx, cy = torch.rand(2, n, 1, 1, generator=g) * (SIZE - 4) + 2
    width = 1.5 + 1.5 * torch.rand(n, 1, 1, generator=g)
    brightness = 0.7 + 0.3 * torch.rand(n, 1, 1, generator=g)
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    return (brightness * torch.exp(-((xs - cx) ** 2 + (ys - cy) ** 2) / (2 * width**2))).flatten(1)


class VAE(nn.Module):
    def __init__(self, hidden=128, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE * SIZE, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, SIZE * SIZE))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for avg, p in zip(self.model.parameters(), model.parameters()):
            avg.lerp_(p, 1 - self.decay)


def elbo_terms(logits, x, mu, logvar):
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(1)
    return recon, kl


@torch.no_grad()
def evaluate(model, loader, device):
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for (x,) in loader:
        x = x.to(device)
        logits, mu, logvar = model(x)
        recon, kl = elbo_terms(logits, x, mu, logvar)
        totals += torch.tensor([recon.sum(), kl.sum(), len(x)], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return (totals[:2] / totals[2]).tolist()


def worker(rank, args, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=args.world_size)
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    train_set = TensorDataset(make_blobs(4096, seed=1))
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(TensorDataset(make_blobs(1000, seed=2)[rank :: args.world_size]), batch_size=250)

    torch.manual_seed(args.seed)
    model = DDP(VAE().to(device), device_ids=[rank] if use_cuda else None)
    ema = EMA(model.module, args.ema_decay)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    total_steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    anneal_steps = args.anneal_epochs * len(train_loader)
    torch.manual_seed(args.seed + rank)  # every rank draws its own latent noise

    step = start_epoch = 0
    if os.path.exists(args.checkpoint):
        ckpt = torch.load(args.checkpoint, map_location="cpu")
        model.module.load_state_dict(ckpt["model"])
        ema.model.load_state_dict(ckpt["ema"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        step, start_epoch = ckpt["step"], ckpt["epoch"] + 1
        torch.set_rng_state(ckpt["cpu_rng"][rank])
        if use_cuda:
            torch.cuda.set_rng_state(ckpt["cuda_rng"][rank])

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in train_loader:
            x = x.to(device)
            beta = min(1.0, step / anneal_steps)
            logits, mu, logvar = model(x)
            recon, kl = elbo_terms(logits, x, mu, logvar)
            loss = (recon + beta * kl).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update(model.module)
            step += 1

        recon, kl = evaluate(ema.model, test_loader, device)
        cpu_rng, cuda_rng = [None] * args.world_size, [None] * args.world_size
        dist.all_gather_object(cpu_rng, torch.get_rng_state())
        dist.all_gather_object(cuda_rng, torch.cuda.get_rng_state() if use_cuda else None)
        if rank == 0:
            print(f"epoch {epoch}  beta {beta:.2f}  held-out recon {recon:.3f}  kl {kl:.3f}", flush=True)
            torch.save({"model": model.module.state_dict(), "ema": ema.model.state_dict(),
                        "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "step": step, "epoch": epoch, "cpu_rng": cpu_rng, "cuda_rng": cuda_rng}, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--anneal-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ema-decay", type=float, default=0.98)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="vae.pt")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(args, port), nprocs=args.world_size)
