"""Read seven-segment digits with a small CNN. Starts its own processes:  python train.py --world-size 2"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

# which segments (top, upper left, upper right, middle, lower left, lower right, bottom) are lit in 0 to 9
SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
PLACES = [(0, 0, 1, 5), (0, 0, 5, 1), (0, 4, 5, 1), (4, 0, 1, 5), (4, 0, 5, 1), (4, 4, 5, 1), (8, 0, 1, 5)]


def find_free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make_digits(n, seed):
    glyphs = torch.zeros(10, 9, 5)
    for digit, lit in enumerate(SEGMENTS):
        for on, (top, left, height, width) in zip(lit, PLACES):
            if on == "1":
                glyphs[digit, top:top + height, left:left + width] = 1.0
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=g)
    images = 0.4 * torch.randn(n, 1, 12, 8, generator=g)
    for image, label, (dy, dx) in zip(images, labels, torch.randint(4, (n, 2), generator=g).tolist()):
        image[0, dy:dy + 9, dx:dx + 5] += glyphs[label]
    return TensorDataset(images, labels)


def build_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 3 * 2, 10),
    )


@torch.no_grad()
def test(net, loader, device):
    net.eval()
    counts = torch.zeros(2, device=device)  # right answers, images
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        counts += torch.stack([(net(images).argmax(1) == labels).sum(), torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def worker(rank, args):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=args.world_size)
    torch.manual_seed(args.seed + rank)

    dataset = make_digits(1200, args.seed)
    train_set, val_set = random_split(dataset, [960, 240], generator=torch.Generator().manual_seed(args.seed))
    sampler = DistributedSampler(train_set, num_replicas=args.world_size, rank=rank, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), args.world_size)), batch_size=args.batch_size)

    net = build_net().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    path, first_epoch = os.path.join(args.checkpoint_dir, "digits.pt"), 1
    if args.resume:
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1
    model = DDP(net, device_ids=[rank] if use_cuda else None)

    for epoch in range(first_epoch, args.epochs + 1):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + epoch * args.world_size + rank)  # dropout masks
        model.train()
        losses = torch.zeros(2, device=device)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])
        scheduler.step()
        dist.all_reduce(losses)
        accuracy = test(net, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[0] / losses[1]:.4f}, accuracy {accuracy:.1%}", flush=True)
            os.makedirs(args.checkpoint_dir, exist_ok=True)
            torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict()}, path + ".part")
            os.replace(path + ".part", path)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port or find_free_port())
    mp.spawn(worker, args=(args,), nprocs=args.world_size, join=True)


if __name__ == "__main__":
    main()
