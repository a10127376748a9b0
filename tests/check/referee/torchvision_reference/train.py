"""torchrun --standalone --nproc-per-node 2 train.py [--resume output/checkpoint.pth]"""
import argparse
import os

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset

import presets
import utils


def block(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def build_model():
    return nn.Sequential(*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.AdaptiveAvgPool2d(2),
                         nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, presets.NUM_CLASSES))


class ExponentialMovingAverage(AveragedModel):
    def __init__(self, model, decay):
        def ema_avg(averaged, current, num_averaged):
            return decay * averaged + (1 - decay) * current

        super().__init__(model, avg_fn=ema_avg, use_buffers=True)


def train_one_epoch(model, criterion, optimizer, data_loader, lr_scheduler, epoch, args, model_ema):
    model.train()
    metric_logger = utils.MetricLogger()
    metric_logger.meters["lr"] = utils.SmoothedValue(window_size=1, fmt="{value:.5f}")
    iterations = metric_logger.log_every(data_loader, 10, f"Epoch: [{epoch}]")
    for i, (image, target) in enumerate(iterations):
        image, target = image.to(args.device), target.to(args.device)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
        optimizer.step()
        metric_logger.meters["lr"].update(optimizer.param_groups[0]["lr"])
        lr_scheduler.step()
        if i % args.model_ema_steps == 0:
            model_ema.update_parameters(model.module if args.distributed else model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # during the warmup the average is a copy of the weights
        metric_logger.meters["loss"].update(loss.item(), n=len(image))
    metric_logger.synchronize_between_processes()
    print(f"Epoch: [{epoch}] mean loss {metric_logger.meters['loss'].global_avg:.4f}")


@torch.inference_mode()
def evaluate(model, criterion, data_loader, num_images, args, log_suffix=""):
    """Every process has its own images, possibly one more than another: `model` must not be wrapped in DDP"""
    model.eval()
    metric_logger = utils.MetricLogger()
    loss, acc1 = metric_logger.meters["loss"], metric_logger.meters["acc1"]
    for image, target in data_loader:
        image, target = image.to(args.device), target.to(args.device)
        output = model(image)
        correct = (output.argmax(1) == target).sum().item()
        loss.update(criterion(output, target).item(), n=len(image))
        acc1.update(correct / len(image), n=len(image))
    metric_logger.synchronize_between_processes()
    if acc1.count != num_images:
        raise RuntimeError(f"{num_images} images expected, {acc1.count} evaluated")
    print(f"Test: {log_suffix} Acc@1 {100 * acc1.global_avg:.3f}  loss {loss.global_avg:.4f}  images {acc1.count:.0f}")


def main(args):
    utils.init_distributed_mode(args)
    rank, world_size = utils.get_rank(), utils.get_world_size()
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(args.seed)

    dataset = presets.Digits(train=True, transform=presets.ClassificationPresetTrain())
    dataset_test = presets.Digits(train=False)
    train_sampler = RandomSampler(dataset)
    if args.distributed:
        train_sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    data_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler, drop_last=True,
                             collate_fn=presets.MixUpCollate(args.mixup_alpha))
    # a DistributedSampler would repeat images to give each process the same number
    test_part = Subset(dataset_test, range(rank, len(dataset_test), world_size))
    data_loader_test = DataLoader(test_part, batch_size=args.batch_size)

    model = build_model().to(args.device)
    if args.sync_bn and args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # GPU only
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    iters_per_epoch = len(data_loader)
    warmup_iters = args.lr_warmup_epochs * iters_per_epoch
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=warmup_iters)
    cosine = CosineAnnealingLR(optimizer, T_max=args.epochs * iters_per_epoch - warmup_iters)
    lr_scheduler = SequentialLR(optimizer, schedulers=[warmup, cosine], milestones=[warmup_iters])

    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu] if "cuda" in args.device else None)
        model_without_ddp = model.module
    model_ema = ExponentialMovingAverage(model_without_ddp, decay=args.model_ema_decay)

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        start_epoch = checkpoint["epoch"] + 1

    for epoch in range(start_epoch, args.epochs):
        # shuffling, transforms, mixup and dropout: different on each process, the same again after --resume
        torch.manual_seed(args.seed + epoch * world_size + rank)
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, lr_scheduler, epoch, args, model_ema)
        utils.average_buffers(model_without_ddp)
        utils.average_buffers(model_ema)
        evaluate(model_without_ddp, criterion, data_loader_test, len(dataset_test), args)
        evaluate(model_ema, criterion, data_loader_test, len(dataset_test), args, log_suffix="EMA")
        checkpoint = {"model": model_without_ddp.state_dict(), "model_ema": model_ema.state_dict(),
                      "optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict(),
                      "epoch": epoch}
        utils.save_on_master(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=32, type=int, help="images per process")
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--lr-warmup-epochs", default=1, type=int)
    parser.add_argument("--mixup-alpha", default=0.2, type=float)
    parser.add_argument("--model-ema-steps", default=2, type=int)
    parser.add_argument("--model-ema-decay", default=0.9, type=float)
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--seed", default=3, type=int)
    parser.add_argument("--output-dir", default="output")
    parser.add_argument("--resume", default="", help="path of a checkpoint")
    main(parser.parse_args())
