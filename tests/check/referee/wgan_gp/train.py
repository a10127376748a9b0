"""WGAN with gradient penalty on tiny images: critic and generator under DDP, several critic steps per generator step, EMA of the generator.

Every start trains --epochs epochs, on top of those in the checkpoint that it finds in --out.
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Z = 16


def make_images(n, seed=5):
    """8x8 images of one bright spot with random place, size and colour."""
    g = torch.Generator().manual_seed(seed)
    place, size = 2 + 3 * torch.rand(n, 2, 1, 1, generator=g), 0.8 + 0.8 * torch.rand(n, 1, 1, generator=g)
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    spot = torch.exp(-((y - place[:, 0]) ** 2 + (x - place[:, 1]) ** 2) / (2 * size ** 2))
    return 2 * spot[:, None] * (0.4 + 0.6 * torch.rand(n, 1, 1, 1, generator=g)) - 1


def make_generator():
    return nn.Sequential(nn.Linear(Z, 64 * 4), nn.ReLU(), nn.Unflatten(1, (64, 2, 2)),
                         nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh())


def make_critic():
    return nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2),
                         nn.Flatten(), nn.Linear(64 * 4, 1))


def features(images):
    return F.avg_pool2d(images, 2).flatten(1).double()


def frechet(sums, other):
    """Distance of two normal distributions, each given by (sum of outer products, sum, count) of features."""
    (m1, c1), (m2, c2) = (((s := t[-2] / t[-1, 0]), t[:-2] / t[-1, 0] - torch.outer(s, s)) for t in (sums, other))
    root = torch.linalg.eigvals(c1 @ c2).real.clamp(min=0).sqrt().sum()
    return (m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * root


def moments(images):
    f = features(images)
    return torch.cat([f.t() @ f, f.sum(0, keepdim=True), torch.full_like(f[:1], len(f))])


@torch.no_grad()
def evaluate(generator, real, device, n=600):
    """Distance between real images and n samples; every rank draws its part of the samples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    z = torch.randn(n, Z, generator=torch.Generator().manual_seed(9))[rank::world].to(device)
    sums = moments(generator(z))
    dist.all_reduce(sums)
    return frechet(sums, real).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=96, help="images per step over all ranks")
    parser.add_argument("--critic-steps", type=int, default=3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    images = make_images(4800)
    real_moments, data = moments(images.to(device)), TensorDataset(images)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True, pin_memory=cuda)

    generator, critic = make_generator().to(device), make_critic().to(device)
    ema = copy.deepcopy(generator).requires_grad_(False)
    generator_ddp = DDP(generator, device_ids=[device.index] if cuda else None)
    critic_ddp = DDP(critic, device_ids=[device.index] if cuda else None)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    path, first = os.path.join(args.out, "checkpoint.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        generator.load_state_dict(state["generator"])
        critic.load_state_dict(state["critic"])
        ema.load_state_dict(state["ema"])
        opt_g.load_state_dict(state["opt_g"])
        opt_c.load_state_dict(state["opt_c"])
        first = state["epoch"] + 1

    noise = torch.Generator(device)
    for epoch in range(first, first + args.epochs):
        sampler.set_epoch(epoch)
        noise.manual_seed(100_000 * (epoch + 1) + rank)  # other noise on every rank and in every epoch, also after a resume
        gap = torch.zeros((), device=device)
        for i, (real,) in enumerate(loader):
            real = real.to(device, non_blocking=True)
            n = len(real)
            z = torch.randn(n, Z, generator=noise, device=device)
            mix = torch.rand(n, 1, 1, 1, generator=noise, device=device)
            with torch.no_grad():
                fake = generator(z)
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            on_real, on_fake, on_between = critic_ddp(torch.cat([real, fake, between])).split(n)
            slope, = torch.autograd.grad(on_between.sum(), between, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = on_fake.mean() - on_real.mean() + 10 * penalty
            opt_c.zero_grad(set_to_none=True)
            loss.backward()
            opt_c.step()
            gap += (on_real.mean() - on_fake.mean()).detach() / len(loader)

            if (i + 1) % args.critic_steps == 0:
                critic.requires_grad_(False)  # its gradients are not wanted here, so it is used without DDP
                z = torch.randn(n, Z, generator=noise, device=device)
                loss = -critic(generator_ddp(z)).mean()
                opt_g.zero_grad(set_to_none=True)
                loss.backward()
                opt_g.step()
                critic.requires_grad_(True)
                with torch.no_grad():
                    for slow, fast in zip(ema.parameters(), generator.parameters()):
                        slow.lerp_(fast, 0.1)
        dist.all_reduce(gap)
        distance = evaluate(ema, real_moments, device)
        if rank == 0:
            print(f"epoch {epoch}: critic gap {gap.item() / world:.4f}, distance {distance:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"generator": generator.state_dict(), "critic": critic.state_dict(), "ema": ema.state_dict(),
                        "opt_g": opt_g.state_dict(), "opt_c": opt_c.state_dict(), "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
