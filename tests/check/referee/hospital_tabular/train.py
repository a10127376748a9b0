"""Risk prediction from tables of several hospitals with Hugging Face Accelerate.

Each process reads its own hospitals (one file per hospital, sites differ in case mix and in their lab's calibration).

    accelerate launch --multi_gpu --num_processes 2 train.py
"""
import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, SITES = 12, 7


def write_hospitals(folder: Path):
    """Make the csv-like files once: site_0.npz ... site_6.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(42)
    w = rng.normal(size=(FEATURES, 3))
    scales = 10.0 ** rng.uniform(-2, 2, FEATURES)  # units: mmol/l, years, beats per minute ...
    for site in range(SITES):
        n = int(rng.integers(500, 1100))
        z = rng.normal(size=(n, FEATURES)) + 0.9 * rng.normal(size=FEATURES)
        risk = np.tanh(z @ w / 2).sum(1) + 0.6 * z[:, 0] * z[:, 1] - 0.8
        y = rng.random(n) < 1 / (1 + np.exp(-2 * risk))
        x = z * scales
        x[rng.random(x.shape) < 0.05] = np.nan  # not measured
        np.savez(folder / f"site_{site}.npz", x=x.astype(np.float32), y=y)


def read_sites(folder: Path, rank: int, world_size: int):
    """Own hospitals of this process; the last fifth of the rows of a hospital is for validation."""
    parts = {"train": [], "val": []}
    for site in range(rank, SITES, world_size):
        with np.load(folder / f"site_{site}.npz") as f:
            x, y = torch.from_numpy(f["x"]), torch.from_numpy(f["y"]).float()
        cut = int(0.8 * len(y))
        parts["train"].append((x[:cut], y[:cut]))
        parts["val"].append((x[cut:], y[cut:]))
    return {name: tuple(torch.cat(col) for col in zip(*rows)) for name, rows in parts.items()}


def fit_scaler(accelerator, x):
    """Mean and standard deviation of the measured values over the training rows of all processes."""
    known = ~x.isnan()
    v = x.nan_to_num().double()
    sums = torch.stack([known.sum(0).double(), v.sum(0), v.square().sum(0)]).to(accelerator.device)
    n, s1, s2 = accelerator.reduce(sums, reduction="sum").cpu()
    mean = s1 / n
    std = (s2 / n - mean**2).clamp(min=1e-12).sqrt()
    return {"mean": mean.float(), "std": std.float()}


def transform(x, scaler):
    z = (x - scaler["mean"]) / scaler["std"]
    return torch.cat([z.nan_to_num(0.0), z.isnan().float()], dim=1)


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 * FEATURES, width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def auc(scores, labels):
    """Area under the ROC curve from ranks (Mann-Whitney U); scores are continuous, so ties do not matter."""
    order = scores.argsort()
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(order) + 1)
    pos = labels > 0.5
    n_pos, n_neg = pos.sum().item(), (~pos).sum().item()
    return (ranks[pos].sum().item() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


@torch.no_grad()
def validate(accelerator, model, x, y):
    model.eval()
    scores = accelerator.unwrap_model(model)(x.to(accelerator.device))
    model.train()
    # the processes have different numbers of rows: pad with a label that cannot be, and drop the padding
    scores = accelerator.pad_across_processes(scores, dim=0, pad_index=0)
    labels = accelerator.pad_across_processes(y.to(accelerator.device), dim=0, pad_index=-1)
    scores, labels = accelerator.gather((scores, labels))
    keep = labels >= 0
    return auc(scores[keep].cpu(), labels[keep].cpu())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("hospitals"))
    parser.add_argument("--out", type=Path, default=Path("risk_model"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(args.seed)
    if accelerator.is_main_process and not args.data.exists():
        write_hospitals(args.data)
    accelerator.wait_for_everyone()
    data = read_sites(args.data, accelerator.process_index, accelerator.num_processes)

    scaler = fit_scaler(accelerator, data["train"][0])
    x_train, y_train = transform(data["train"][0], scaler), data["train"][1]
    x_val, y_val = transform(data["val"][0], scaler), data["val"][1]

    # each process has its own rows, so the loader is not prepared; all run the number of batches of the shortest
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(x_train, y_train), args.batch_size, shuffle=True, drop_last=True, generator=generator)
    steps = accelerator.gather(torch.tensor([len(loader)], device=accelerator.device)).min().item()

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(schedule)  # stepped per epoch, so not prepared
    loss_fn = nn.BCEWithLogitsLoss()

    epoch, best = 0, 0.0
    if args.resume:
        accelerator.load_state(str(args.out / "last"))
        progress = json.loads((args.out / "last" / "progress.json").read_text())
        epoch, best = progress["epoch"], progress["best"]

    while epoch < args.epochs:
        generator.manual_seed(args.seed + 100 * epoch + accelerator.process_index)
        total = torch.zeros((), device=accelerator.device)
        for _, (x, y) in zip(range(steps), loader):
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach() / steps
        schedule.step()
        epoch += 1

        mean_loss = accelerator.reduce(total, reduction="mean").item()
        score = validate(accelerator, model, x_val, y_val)
        accelerator.print(f"epoch {epoch} loss {mean_loss:.4f} AUC {score:.4f}")
        best_so_far, best = score > best, max(best, score)
        accelerator.save_state(str(args.out / "last"))
        if accelerator.is_main_process:
            (args.out / "last" / "progress.json").write_text(json.dumps({"epoch": epoch, "best": best, "seed": args.seed}))
            torch.save(scaler, args.out / "last" / "scaler.pt")
            if best_so_far:
                shutil.copytree(args.out / "last", args.out / "best", dirs_exist_ok=True)
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
