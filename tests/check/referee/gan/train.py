"""A small DCGAN that learns to draw rings:  torchrun --nproc-per-node=2 train.py [--resume]"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

LATENT = 16


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    centre = 8 + 2 * torch.rand(n, 2, 1, 1, generator=g) - 1
    radius = 3 + 2 * torch.rand(n, 1, 1, generator=g)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distance = ((y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2).sqrt()
    return (2 * torch.exp(-((distance - radius) ** 2)) - 1).unsqueeze(1)


def make_generator(width=32):
    return nn.Sequential(
        nn.Linear(LATENT, 2 * width * 16), nn.Unflatten(1, (2 * width, 4, 4)), nn.GroupNorm(4, 2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1), nn.Tanh(),
    )


def make_discriminator(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(2 * width * 16, 1), nn.Flatten(0),
    )


@torch.no_grad()
def moment_distance(generator, images, args, rank, world_size, device, samples=240):
    """Distance between the mean image and pixel deviations of real and generated images."""
    noise = torch.randn(samples, LATENT, generator=torch.Generator().manual_seed(args.seed))[rank::world_size]
    fake = generator(noise.to(device)).double()
    sums = torch.stack([fake.sum(0), (fake ** 2).sum(0)])
    dist.all_reduce(sums)
    mean, square = (sums / samples).cpu()
    std = (square - mean ** 2).clamp(min=0).sqrt()
    return ((mean - images.mean(0)).abs().mean() + (std - images.std(0)).abs().mean()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    images = rings(768, args.seed)
    sampler = DistributedSampler(images, seed=args.seed, drop_last=True)
    loader = DataLoader(images, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    nets = {"generator": make_generator().to(device), "discriminator": make_discriminator().to(device)}
    optimizers = {name: torch.optim.Adam(net.parameters(), args.lr, (0.5, 0.999)) for name, net in nets.items()}
    path, first_epoch = os.path.join(args.out, "gan.pt"), 0
    if args.resume:
        state = torch.load(path, map_location=device, weights_only=True)
        for name in nets:
            nets[name].load_state_dict(state[name])
            optimizers[name].load_state_dict(state["optimizer_" + name])
        first_epoch = state["epoch"] + 1
    device_ids = [device.index] if use_cuda else None
    generator, discriminator = (DDP(net, device_ids=device_ids) for net in nets.values())

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        noise = torch.Generator().manual_seed(args.seed + 1 + epoch * world_size + rank)
        totals = torch.zeros(3, device=device)
        for real in loader:
            real = real.to(device)
            ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
            fake = generator(torch.randn(len(real), LATENT, generator=noise).to(device))

            optimizers["discriminator"].zero_grad()
            with discriminator.no_sync():  # the backward for the fakes reduces the sum of both gradients
                loss_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
                loss_real.backward()
            loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
            loss_fake.backward()
            optimizers["discriminator"].step()

            # the bare discriminator: its own gradients are not wanted here
            discriminator.requires_grad_(False)
            loss_g = F.binary_cross_entropy_with_logits(discriminator.module(fake), ones)
            optimizers["generator"].zero_grad()
            loss_g.backward()
            optimizers["generator"].step()
            discriminator.requires_grad_(True)
            totals += torch.stack([(loss_real + loss_fake).detach(), loss_g.detach(), torch.ones_like(loss_g)])

        dist.all_reduce(totals)
        distance = moment_distance(nets["generator"], images, args, rank, world_size, device)
        if rank == 0:
            loss_d, loss_g = (totals[:2] / totals[2]).tolist()
            print(f"epoch {epoch}: D {loss_d:.4f}, G {loss_g:.4f}, moment distance {distance:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            state = {"epoch": epoch, **{name: net.state_dict() for name, net in nets.items()},
                     **{"optimizer_" + name: optimizer.state_dict() for name, optimizer in optimizers.items()}}
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
