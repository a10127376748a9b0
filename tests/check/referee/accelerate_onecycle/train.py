"""Image classification with Accelerate: gradient accumulation, a OneCycle schedule, early stopping."""
import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset


class Patterns(Dataset):
    """3x16x16 images: ten fixed low-frequency patterns with random gain, shift and noise."""

    def __init__(self, size, seed, augment=False):
        proto = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(5))
        proto = F.interpolate(proto, size=16, mode="bilinear")
        gen = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (size,), generator=gen)
        gain = 0.5 + torch.rand(size, 1, 1, 1, generator=gen)
        self.images = gain * proto[self.labels] + 3.0 * torch.randn(size, 3, 16, 16, generator=gen)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment and torch.rand(()) < 0.5:
            image = image + 0.3 * torch.randn_like(image)
        return image, self.labels[i]


class ConvNet(nn.Module):
    def __init__(self, width=16, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width * 16, classes))

    def forward(self, x):
        return self.classifier(self.features(x))


class TrainState:
    """What the training loop has to remember across restarts."""

    def __init__(self):
        self.epoch, self.best_loss, self.bad_epochs, self.stopped = 0, float("inf"), 0, False

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, sd):
        vars(self).update(sd)


@torch.no_grad()
def evaluate(model, loader, accelerator):
    model.eval()
    losses, correct = [], []
    for images, labels in loader:
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="none")
        loss, hit = accelerator.gather_for_metrics((loss, logits.argmax(-1) == labels))
        losses.append(loss), correct.append(hit.float())
    return torch.cat(losses).mean().item(), torch.cat(correct).mean().item()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--max-lr", type=float, default=0.15)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--output-dir", default="output")
    return parser.parse_args()


def main():
    args = parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accum,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    set_seed(0)
    model = ConvNet()
    set_seed(0, device_specific=True)  # augmentation and dropout differ between processes

    train_loader = DataLoader(Patterns(1024, seed=1, augment=True), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Patterns(403, seed=2), 64)
    test_loader = DataLoader(Patterns(405, seed=3), 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.max_lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    model, optimizer, train_loader, val_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader, test_loader)

    updates = args.epochs * (-(-len(train_loader) // args.accum))
    # a prepared scheduler advances num_processes steps at every optimizer step
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.max_lr, total_steps=updates * accelerator.num_processes, pct_start=0.25)
    scheduler = accelerator.prepare(scheduler)

    state = TrainState()
    accelerator.register_for_checkpointing(state)
    ckpt_dir = os.path.join(args.output_dir, "last")
    if os.path.isdir(ckpt_dir):
        accelerator.load_state(ckpt_dir)

    while state.epoch < args.epochs and not state.stopped:
        train_loader.set_epoch(state.epoch)
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        val_loss, val_acc = evaluate(model, val_loader, accelerator)
        state.epoch += 1
        accelerator.print(f"epoch {state.epoch} val loss {val_loss:.4f} acc {val_acc:.4f} "
                          f"lr {scheduler.get_last_lr()[0]:.5f}")
        if val_loss < state.best_loss:
            state.best_loss, state.bad_epochs = val_loss, 0
            accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "best.pt"))
        else:
            state.bad_epochs += 1
            state.stopped = state.bad_epochs >= args.patience
        accelerator.save_state(ckpt_dir)

    accelerator.wait_for_everyone()
    best = torch.load(os.path.join(args.output_dir, "best.pt"), map_location="cpu")
    accelerator.unwrap_model(model).load_state_dict(best)
    test_loss, test_acc = evaluate(model, test_loader, accelerator)
    accelerator.print(f"test loss {test_loss:.4f} acc {test_acc:.4f}")
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "results.json"), "w") as f:
            json.dump({"epochs": state.epoch, "test_loss": test_loss, "test_acc": test_acc}, f)
    accelerator.end_training()


if __name__ == "__main__":
    main()
