"""Distill a wide teacher into a small student:  torchrun --nproc-per-node=2 train.py [--resume]"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class MLP(nn.Module):
    def __init__(self, width, inputs=20, classes=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        features = self.body(x)
        return self.head(features), features


def make_data(n, seed):
    centres = 1.5 * torch.randn(24, 20, generator=torch.Generator().manual_seed(0))  # four clusters per class
    g = torch.Generator().manual_seed(seed)
    cluster = torch.randint(24, (n,), generator=g)
    return TensorDataset(centres[cluster] + 1.5 * torch.randn(n, 20, generator=g), cluster % 6)


def save(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def pretrain(teacher, dataset, device, epochs=6):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(dataset, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(teacher(x.to(device))[0], y.to(device)).backward()
            optimizer.step()


def soft_target_loss(logits, teacher_logits, temperature):
    log_p, q = F.log_softmax(logits / temperature, 1), F.softmax(teacher_logits / temperature, 1)
    return temperature ** 2 * F.kl_div(log_p, q, reduction="batchmean")


@torch.no_grad()
def evaluate(student, loader, device):
    student.eval()
    totals = torch.zeros(2, device=device)  # right answers, samples
    for x, y in loader:
        hits = student(x.to(device))[0].argmax(1) == y.to(device)
        totals += torch.tensor([hits.sum(), len(hits)], device=device)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=3.0)
    parser.add_argument("--patience", type=int, default=2, help="epochs without a better accuracy")
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    train_set, val_set = make_data(1536, seed=1), make_data(240, seed=2)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 64)
    teacher, teacher_path = MLP(128).to(device), os.path.join(args.out, "teacher.pt")
    if rank == 0 and not os.path.exists(teacher_path):
        os.makedirs(args.out, exist_ok=True)
        pretrain(teacher, train_set, device)
        save(teacher.state_dict(), teacher_path)
    dist.barrier()
    teacher.load_state_dict(torch.load(teacher_path, map_location=device, weights_only=True))
    teacher.eval().requires_grad_(False)

    student, projector = MLP(12).to(device), nn.Linear(12, 128).to(device)
    optimizer = torch.optim.Adam([*student.parameters(), *projector.parameters()], lr=1e-2)
    path, epoch, best, bad_epochs = os.path.join(args.out, "student.pt"), 0, 0.0, 0
    if args.resume:
        state = torch.load(path, map_location=device, weights_only=True)
        student.load_state_dict(state["student"])
        projector.load_state_dict(state["projector"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, best, bad_epochs = state["epoch"], state["best"], state["bad_epochs"]
    ddp_student = DDP(student, device_ids=[local_rank])
    ddp_projector = DDP(projector, device_ids=[local_rank])
    while epoch < args.epochs and bad_epochs < args.patience:
        sampler.set_epoch(epoch)
        ddp_student.train()
        losses = torch.zeros(2, device=device)
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            with torch.no_grad():
                teacher_logits, teacher_features = teacher(x)
            logits, features = ddp_student(x)
            soft_loss = soft_target_loss(logits, teacher_logits, args.temperature)
            hint_loss = F.mse_loss(ddp_projector(features), teacher_features)
            loss = 0.7 * soft_loss + 0.3 * F.cross_entropy(logits, y) + 0.1 * hint_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(losses)
        accuracy, epoch = evaluate(student, val_loader, device), epoch + 1
        bad_epochs = 0 if accuracy > best else bad_epochs + 1
        best = max(best, accuracy)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[0] / losses[1]:.4f}, accuracy {accuracy:.4f}, best {best:.4f}")
            save({"student": student.state_dict(), "projector": projector.state_dict(), "epoch": epoch, "best": best,
                  "bad_epochs": bad_epochs, "optimizer": optimizer.state_dict()}, path)
            if bad_epochs == 0:
                save(student.state_dict(), os.path.join(args.out, "best_student.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
