"""Metric learning on synthetic waveforms: triplet loss, hard examples mined from the samples of all processes.

    python train.py                      # one process per GPU, or two on the CPU
    python train.py --world-size 4
    python train.py --resume             # goes on from the last finished epoch

The classes of the validation set do not occur in training. Recall@1 asks how often the nearest other validation sample
has the class of the query, with the averaged (EMA) weights.
"""
import argparse
import copy
import math
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

LENGTH = 48


def make_waveforms(classes, per_class, seed):
    """Each class is a periodic shape of a few harmonics; its samples differ in phase, loudness, pitch and noise."""
    g = torch.Generator().manual_seed(seed)
    harmonics = torch.arange(1, 6)
    weights = torch.randn(classes, 2, len(harmonics), generator=g) / harmonics.sqrt()
    labels = torch.arange(classes).repeat_interleave(per_class)
    n = len(labels)
    pitch = 1 + 0.1 * (2 * torch.rand(n, 1, 1, generator=g) - 1)
    phase = torch.rand(n, 1, 1, generator=g)
    t = torch.arange(LENGTH).view(1, 1, -1) / LENGTH
    angle = 2 * math.pi * harmonics.view(1, -1, 1) * (pitch * t + phase)
    waves = (weights[labels, 0, :, None] * angle.sin() + weights[labels, 1, :, None] * angle.cos()).sum(1)
    waves = waves * (0.7 + 0.6 * torch.rand(n, 1, generator=g)) + 0.25 * torch.randn(n, LENGTH, generator=g)
    return waves.unsqueeze(1), labels


class Waveforms(Dataset):
    def __init__(self, waves, labels, augment=False):
        self.waves, self.labels, self.augment = waves, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        wave = self.waves[index]
        if self.augment:
            wave = wave * (0.8 + 0.4 * torch.rand(1)) + 0.1 * torch.randn(wave.shape)
        return wave, self.labels[index]


class DistributedPKSampler(Sampler):
    """Batches of P times K samples, K of one class at a time. All ranks shuffle alike and deal the K-tuples out in turn,
    so that every rank sees other samples and the same number of batches; what does not fill a batch waits for another
    epoch."""

    def __init__(self, labels, p, k, rank, world_size, seed):
        self.members = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        self.p, self.k = p, k
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return sum(len(m) // self.k for m in self.members) // (self.p * self.world_size)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        tuples = []
        for m in self.members:
            m = m[torch.randperm(len(m), generator=g)]
            tuples += m[:len(m) // self.k * self.k].view(-1, self.k)
        order = torch.randperm(len(tuples), generator=g).tolist()
        for i in range(len(self)):
            batch = order[i * self.p * self.world_size:(i + 1) * self.p * self.world_size]
            yield torch.cat([tuples[j] for j in batch[self.rank::self.world_size]]).tolist()


class Embedder(nn.Module):
    """Small 1-D CNN with LayerNorm over channels, so nothing depends on how the batch is spread over the ranks."""

    def __init__(self, width=24, dim=24):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(1, width, 7, padding=3), nn.Conv1d(width, width, 5, stride=2, padding=2),
                                    nn.Conv1d(width, 2 * width, 5, stride=2, padding=2)])
        self.norms = nn.ModuleList([nn.LayerNorm(conv.out_channels) for conv in self.convs])
        self.head = nn.Linear(4 * width, dim)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms):
            x = F.gelu(norm(conv(x).transpose(1, 2)).transpose(1, 2))
        x = torch.cat([x.mean(2), x.amax(2)], 1)
        return F.normalize(self.head(x), dim=1)


class GatherWithGrad(torch.autograd.Function):
    """Stacks the rows of all ranks. Backward gives each row the gradients that it got from the losses of all ranks."""

    @staticmethod
    def forward(ctx, rows):
        ctx.count = len(rows)
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.count:(dist.get_rank() + 1) * ctx.count]


def gather_labels(labels):
    gathered = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, labels)
    return torch.cat(gathered)


def hard_triplet_loss(anchors, labels, margin):
    """This rank's samples as anchors, positives and negatives from all ranks. Every rank has equally many anchors, so
    DDP's mean of the ranks' gradients is the gradient of the mean over all anchors."""
    pool, pool_labels = GatherWithGrad.apply(anchors), gather_labels(labels)
    distances = torch.cdist(anchors, pool, compute_mode="donot_use_mm_for_euclid_dist")
    same = labels[:, None] == pool_labels[None, :]
    itself = torch.zeros_like(same)
    rows = torch.arange(len(labels), device=labels.device)
    itself[rows, dist.get_rank() * len(labels) + rows] = True
    positive = distances.masked_fill(~same | itself, -math.inf).amax(1)
    # the hardest negative that is farther away than the positive; the hardest of all only where there is no such one,
    # for always pulling at the very hardest lets young embeddings collapse into a point
    hardest = distances.masked_fill(same, math.inf).amin(1)
    semi_hard = distances.masked_fill(same | (distances <= positive[:, None]), math.inf).amin(1)
    negative = torch.where(semi_hard.isinf(), hardest, semi_hard)
    return F.relu(margin + positive - negative).mean()


class EMA:
    def __init__(self, net, decay):
        self.net, self.decay = copy.deepcopy(net).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, net):
        for average, value in zip(self.net.state_dict().values(), net.state_dict().values()):
            if average.is_floating_point():
                average.lerp_(value, 1 - self.decay)
            else:
                average.copy_(value)


def gather_rows(rows, sizes):
    """Rows of all ranks, in the order of the ranks, where rank r has sizes[r] of them."""
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[:len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes)])


@torch.no_grad()
def recall_at_1(net, loader, total, device):
    """`total` samples in all, of which rank r has every world_size-th from r on."""
    net.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    embeddings, labels = [], []
    for waves, targets in loader:
        embeddings.append(net(waves.to(device)))
        labels.append(targets.to(device))
    queries, query_labels = torch.cat(embeddings), torch.cat(labels)
    sizes = [len(range(r, total, world_size)) for r in range(world_size)]
    gallery, gallery_labels = gather_rows(queries, sizes), gather_rows(query_labels, sizes)
    begin = sum(sizes[:rank])
    distances = torch.cdist(queries, gallery)
    rows = torch.arange(len(queries), device=device)
    distances[rows, begin + rows] = math.inf  # a query does not find itself
    hits = (gallery_labels[distances.argmin(1)] == query_labels).sum()
    counts = torch.stack([hits, torch.tensor(len(queries), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train_epoch(model, ema, loader, optimizer, margin, device):
    model.train()
    losses = torch.zeros(2, dtype=torch.float64, device=device)
    for waves, labels in loader:
        waves, labels = waves.to(device), labels.to(device)
        loss = hard_triplet_loss(model(waves), labels, margin)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ema.update(model.module)
        losses += torch.stack([loss.detach(), torch.ones_like(loss)])
    dist.all_reduce(losses)
    return (losses[0] / losses[1]).item()


def worker(rank, args):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=rank,
                            world_size=args.world_size)
    torch.manual_seed(args.seed + rank)

    waves, labels = make_waveforms(args.classes + args.val_classes, args.per_class, args.seed)
    seen = labels < args.classes
    train_set = Waveforms(waves[seen], labels[seen], augment=True)
    val_set = Waveforms(waves[~seen], labels[~seen])
    sampler = DistributedPKSampler(train_set.labels, args.p, args.k, rank, args.world_size, args.seed)
    train_loader = DataLoader(train_set, batch_sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), args.world_size)), batch_size=64)

    net = Embedder().to(device)
    model = DDP(net, device_ids=[rank] if use_cuda else None)  # hands rank 0's weights to all
    ema = EMA(net, args.ema_decay)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)
    path, first_epoch = os.path.join(args.out, "last.pt"), 0
    if args.resume:
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        ema.net.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1

    end = min(args.epochs, first_epoch + args.epochs_per_job) if args.epochs_per_job else args.epochs
    for epoch in range(first_epoch, end):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1000 * (epoch + 1) + rank)  # augmentation, the same in a resumed run
        lr = scheduler.get_last_lr()[0]
        loss = train_epoch(model, ema, train_loader, optimizer, args.margin, device)
        scheduler.step()
        recall = recall_at_1(ema.net, val_loader, len(val_set), device)
        if rank == 0:
            print(f"epoch {epoch}: lr {lr:.1e}, loss {loss:.4f}, recall@1 {recall:.2%}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"epoch": epoch, "net": net.state_dict(), "ema": ema.net.state_dict(),
                        "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


def find_free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--classes", type=int, default=32)
    parser.add_argument("--val-classes", type=int, default=17)
    parser.add_argument("--per-class", type=int, default=21)
    parser.add_argument("--p", type=int, default=6, help="K-tuples in the batch of one process")
    parser.add_argument("--k", type=int, default=4, help="samples in a K-tuple")
    parser.add_argument("--margin", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--epochs-per-job", type=int, default=0, help="leave after so many (0: all); --resume goes on")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--ema-decay", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", default="runs/triplets")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.port = args.port or find_free_port()
    mp.spawn(worker, args=(args,), nprocs=args.world_size, join=True)


if __name__ == "__main__":
    main()
