"""Self-distillation without labels on small images, in the style of DINO.

    torchrun --standalone --nproc_per_node=2 main_dino.py
    torchrun --standalone --nproc_per_node=2 main_dino.py --resume output/checkpoint.pth
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from knn import knn_accuracy
from multicrop import MultiCrop, digit_splits
from networks import MultiCropWrapper, param_groups
from utils import cosine_schedule, init_distributed, is_main_process, save_checkpoint


def get_args():
    parser = argparse.ArgumentParser("DINO on digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size_per_gpu", type=int, default=48)
    parser.add_argument("--out_dim", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--local_crops", type=int, default=2)
    parser.add_argument("--global_scale", type=float, nargs=2, default=(0.6, 1.0))
    parser.add_argument("--local_scale", type=float, nargs=2, default=(0.3, 0.6))
    parser.add_argument("--lr", type=float, default=1.6e-2, help="for 256 images per step; scaled linearly")
    parser.add_argument("--min_lr", type=float, default=1e-4)
    parser.add_argument("--warmup_epochs", type=int, default=1)
    parser.add_argument("--weight_decay", type=float, default=0.04)
    parser.add_argument("--weight_decay_end", type=float, default=0.2)
    parser.add_argument("--momentum_teacher", type=float, default=0.9)
    parser.add_argument("--teacher_temp", type=float, default=0.03)
    parser.add_argument("--student_temp", type=float, default=0.1)
    parser.add_argument("--clip_grad", type=float, default=3.0)
    parser.add_argument("--freeze_last_layer", type=int, default=1, help="epochs in which the output layer stays as it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--resume", default="", help="checkpoint to go on from")
    return parser.parse_args()


class DINOLoss(nn.Module):
    """Cross-entropy between the teacher's global views and every other view of the student.

    The teacher's outputs are centred with a running mean over the batches of all ranks, against collapse.
    """

    def __init__(self, out_dim, crops, student_temp, teacher_temp, center_momentum=0.5):
        super().__init__()
        self.crops, self.student_temp, self.teacher_temp = crops, student_temp, teacher_temp
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        student_views = F.log_softmax(student_output / self.student_temp, dim=-1).chunk(self.crops)
        targets = F.softmax((teacher_output - self.center) / self.teacher_temp, dim=-1).chunk(2)
        terms = [-(target * view).sum(dim=-1).mean()
                 for i, target in enumerate(targets) for j, view in enumerate(student_views) if i != j]
        self.update_center(teacher_output)
        return torch.stack(terms).mean()

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = teacher_output.sum(dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


@torch.no_grad()
def update_teacher(student, teacher, momentum):
    for ours, theirs in zip(student.parameters(), teacher.parameters()):
        theirs.mul_(momentum).add_(ours, alpha=1 - momentum)


def train_one_epoch(student, teacher, criterion, loader, multicrop, optimizer, schedules, epoch, device, args):
    student.train()
    total = torch.zeros(2, device=device)
    for i, (images, _) in enumerate(loader):
        it = epoch * len(loader) + i
        for j, group in enumerate(optimizer.param_groups):
            group["lr"] = schedules["lr"][it]
            if j == 0:
                group["weight_decay"] = schedules["wd"][it]

        crops = multicrop(images.to(device))
        with torch.no_grad():
            teacher_output = teacher(crops[:2])
        loss = criterion(student(crops), teacher_output)

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), args.clip_grad)
        if epoch < args.freeze_last_layer:
            student.module.head.last_layer.weight.grad = None
        optimizer.step()
        update_teacher(student.module, teacher, schedules["momentum"][it])

        total += torch.stack([loss.detach(), torch.ones_like(loss)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    args = get_args()
    device = init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    train_set, val_set = digit_splits()
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size_per_gpu, sampler=sampler, drop_last=True)
    multicrop = MultiCrop(args.global_scale, args.local_scale, args.local_crops)

    student = MultiCropWrapper(args.width, args.out_dim).to(device)
    teacher = MultiCropWrapper(args.width, args.out_dim).to(device)
    student = DDP(student, device_ids=[device.index] if device.type == "cuda" else None)
    teacher.load_state_dict(student.module.state_dict())
    teacher.requires_grad_(False)

    criterion = DINOLoss(args.out_dim, 2 + args.local_crops, args.student_temp, args.teacher_temp).to(device)
    optimizer = torch.optim.AdamW(param_groups(student.module))

    total = args.epochs * len(loader)
    lr = args.lr * args.batch_size_per_gpu * world_size / 256
    schedules = {
        "lr": cosine_schedule(lr, args.min_lr, total, warmup=args.warmup_epochs * len(loader)),
        "wd": cosine_schedule(args.weight_decay, args.weight_decay_end, total),
        "momentum": cosine_schedule(args.momentum_teacher, 1.0, total),
    }

    first_epoch = 0
    if args.resume:
        state = torch.load(args.resume, map_location="cpu", weights_only=True)
        student.module.load_state_dict(state["student"])
        teacher.load_state_dict(state["teacher"])
        criterion.load_state_dict(state["criterion"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
        if is_main_process():
            print(f"resumed from {args.resume} at epoch {first_epoch}", flush=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank)  # the crops of this epoch, different on each rank
        loss = train_one_epoch(student, teacher, criterion, loader, multicrop, optimizer, schedules, epoch, device, args)
        save_checkpoint({
            "student": student.module.state_dict(),
            "teacher": teacher.state_dict(),
            "criterion": criterion.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
        }, os.path.join(args.output_dir, "checkpoint.pth"))
        accuracy = knn_accuracy(teacher.backbone, train_set, val_set, device)
        if is_main_process():
            print(f"epoch {epoch}: loss {loss:.4f}, k-NN accuracy of the teacher {accuracy:.2%}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
