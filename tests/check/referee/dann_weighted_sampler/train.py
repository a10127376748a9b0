"""Domain adaptation of an activity recogniser (accelerometer windows): labelled windows of one device, unlabelled windows of another.

A domain discriminator behind a gradient reversal layer (DANN), class centroids of the source that attract target features, a sampler that draws
the rare classes more often, two optimizers; one DDP module."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, WIDTH = 4, 32
SHARES = torch.tensor([0.58, 0.25, 0.11, 0.06])


def make_windows(n, seed, other_device=False):
    """Windows of 3 axes x 32 samples: every activity has its frequency; the other device is turned, has another gain and more noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(SHARES, n, replacement=True, generator=g)
    rate = torch.tensor([1.0, 2.2, 3.6, 5.2])[y] + 0.2 * torch.randn(n, generator=g)
    phase = 2 * math.pi * torch.rand(n, generator=g)
    wave = 2 * math.pi * rate[:, None] * torch.linspace(0, 1, 32) + phase[:, None]
    x = torch.stack([wave.sin(), 0.7 * (wave + 0.6).sin(), 0.4 * (2 * wave).cos()], 1) + 0.3 * torch.randn(n, 3, 32, generator=g)
    if other_device:
        a = torch.tensor(0.5)
        turn = torch.tensor([[a.cos(), -a.sin(), 0], [a.sin(), a.cos(), 0], [0, 0, 1]])
        x = 1.3 * torch.einsum("ij,njt->nit", turn, x) + 0.3 * torch.randn(n, 3, 32, generator=g) + 0.2
    return x, y


class DistributedWeightedSampler(Sampler):
    """Weighted draws with replacement, of which every rank gets its own part."""

    def __init__(self, weights, num_samples, rank, world, seed=0):
        self.weights, self.num_samples, self.rank, self.world, self.seed, self.epoch = weights, num_samples, rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.num_samples, replacement=True, generator=g)
        return iter(drawn[self.rank::self.world].tolist())


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Dann(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(3, 24, 5, 2, 2), nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv1d(24, 32, 5, 2, 2), nn.GroupNorm(4, 32),
                                     nn.ReLU(), nn.Flatten(), nn.Linear(32 * 8, WIDTH), nn.Tanh())
        self.classifier = nn.Linear(WIDTH, CLASSES)
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("centroids", torch.zeros(CLASSES, WIDTH))

    def forward(self, x, strength=0.0):
        f = self.encoder(x)
        return f, self.classifier(f), self.discriminator(Reverse.apply(f, strength))[:, 0]

    @torch.no_grad()
    def update_centroids(self, f, y, keep=0.7):
        sums = f.new_zeros(CLASSES, WIDTH + 1).index_add_(0, y, F.pad(f, (0, 1), value=1.0))
        dist.all_reduce(sums)
        count = sums[:, -1:]
        fresh = torch.where(count > 0, sums[:, :-1] / count.clamp(min=1), self.centroids)
        self.centroids.lerp_(fresh, 1 - keep)


@torch.no_grad()
def macro_recall(model, windows, labels):
    """Mean over classes of the share of windows that are recognised; every rank looks at its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    guess, truth = model(windows[rank::world])[1].argmax(1), labels[rank::world]
    table = torch.bincount(truth * CLASSES + guess, minlength=CLASSES ** 2).view(CLASSES, CLASSES).double()
    dist.all_reduce(table)
    recall = (table.diag() / table.sum(1).clamp(min=1)).mean()
    model.train()
    return recall.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=48, help="source windows per step over all ranks, and as many target windows")
    parser.add_argument("--attract", type=float, default=0.05)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    source_x, source_y = make_windows(960, 1)
    target_x, _ = make_windows(720, 2, other_device=True)
    test_x, test_y = (t.to(device) for t in make_windows(130, 3, other_device=True))
    weights = 1 / torch.bincount(source_y, minlength=CLASSES)[source_y].double()
    source_sampler = DistributedWeightedSampler(weights, 480, rank, world, seed=11)
    source = DataLoader(TensorDataset(source_x, source_y), batch_size=args.batch // world, sampler=source_sampler, drop_last=True)
    target_data = TensorDataset(target_x)
    target_sampler = DistributedSampler(target_data, shuffle=True, drop_last=True, seed=12)
    target = DataLoader(target_data, batch_size=args.batch // world, sampler=target_sampler, drop_last=True)

    model = Dann().to(device)
    ddp = DDP(model, device_ids=[device.index] if cuda else None)
    opt_net = torch.optim.Adam([*model.encoder.parameters(), *model.classifier.parameters()], lr=2e-3)
    opt_dom = torch.optim.SGD(model.discriminator.parameters(), lr=0.05, momentum=0.9)

    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "last.pt")
    first_epoch, step, total = 0, 0, args.epochs * len(source)
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        opt_net.load_state_dict(state["opt_net"])
        opt_dom.load_state_dict(state["opt_dom"])
        first_epoch, step = state["epoch"] + 1, state["step"]

    for epoch in range(first_epoch, args.epochs):
        source_sampler.set_epoch(epoch)
        target_sampler.set_epoch(epoch)
        sums = torch.zeros(3, device=device)
        for (xs, ys), (xt,) in zip(source, target):
            xs, ys, xt = xs.to(device), ys.to(device), xt.to(device)
            progress = step / total
            strength = 2 / (1 + math.exp(-10 * progress)) - 1
            for group in opt_dom.param_groups:
                group["lr"] = 0.05 / (1 + 10 * progress) ** 0.75

            f, logits, domain = ddp(torch.cat([xs, xt]), strength)
            n = len(xs)
            model.update_centroids(f[:n].detach(), ys)
            class_loss = F.cross_entropy(logits[:n], ys)
            domain_loss = F.binary_cross_entropy_with_logits(domain, torch.cat([torch.ones(n), torch.zeros(len(xt))]).to(device))
            nearest = model.centroids[logits[n:].detach().argmax(1)]
            attract = (f[n:] - nearest).square().sum(1).mean()
            loss = class_loss + domain_loss + args.attract * strength * attract
            opt_net.zero_grad(set_to_none=True)
            opt_dom.zero_grad(set_to_none=True)
            loss.backward()
            opt_net.step()
            opt_dom.step()
            step += 1
            sums += torch.stack([class_loss, domain_loss, attract]).detach() / len(source)

        dist.all_reduce(sums)
        recall = macro_recall(model, test_x, test_y)
        if rank == 0:
            a, b, c = (sums / world).tolist()
            print(f"epoch {epoch}: class loss {a:.4f}, domain loss {b:.4f}, attraction {c:.4f}, macro recall on the other device {recall:.4f}", flush=True)
            torch.save({"model": model.state_dict(), "opt_net": opt_net.state_dict(), "opt_dom": opt_dom.state_dict(),
                        "epoch": epoch, "step": step}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
