"""Train the forecaster:  torchrun --nproc_per_node 2 -m patchcast.train [--resume]"""
import os
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset

from .config import parse_config
from .data import block, make_datasets
from .model import PatchForecaster
from .utils import EarlyStopping, log, save, setup


def train_epoch(model, loader, optimizer, cfg, device):
    model.train()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for context, target in loader:
        context, target = context.to(device), target.to(device)
        loss = F.mse_loss(model(context), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        totals += torch.stack([loss.detach() * len(target), torch.tensor(float(len(target)), device=device)])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def sum_errors(net, loader, device):
    """Squared errors, absolute errors and number of forecast values in this rank's windows."""
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for context, target in loader:
        target = target.to(device)
        error = (net(context.to(device)) - target).double()
        sums += torch.stack([error.square().sum(), error.abs().sum(), sums.new_tensor(error.numel())])
    return sums


def main():
    cfg = parse_config()
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    (train_set, val_set, test_set), scaler = make_datasets(cfg)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=cfg.seed, drop_last=True)
    train_loader = DataLoader(train_set, cfg.batch_size, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, block(val_set, rank, world_size)), 4 * cfg.batch_size)
    test_loader = DataLoader(Subset(test_set, block(test_set, rank, world_size)), 4 * cfg.batch_size)

    torch.manual_seed(cfg.seed)
    net = PatchForecaster(cfg).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    scheduler = ReduceLROnPlateau(optimizer, factor=cfg.plateau_factor, patience=cfg.plateau_patience,
                                  threshold=cfg.min_delta, threshold_mode="abs")
    stopping = EarlyStopping(cfg.stop_patience, cfg.min_delta)
    best_weights, best_epoch, first_epoch = None, 0, 1
    last_path, best_path = os.path.join(cfg.out, "last.pt"), os.path.join(cfg.out, "best.pt")
    if cfg.resume:
        state = torch.load(last_path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        stopping.load_state_dict(state["stopping"])
        best_weights, best_epoch = state["best_weights"], state["best_epoch"]
        first_epoch = state["epoch"] + 1
        log(f"resuming after epoch {state['epoch']}")
    model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    log(f"{world_size} processes; {len(train_set)}, {len(val_set)}, {len(test_set)} windows")

    epochs_left = cfg.epochs_per_job or cfg.epochs
    for epoch in range(first_epoch, cfg.epochs + 1):
        if stopping.stop or epochs_left == 0:
            break
        epochs_left -= 1
        sampler.set_epoch(epoch)
        torch.manual_seed(cfg.seed + 1000 * epoch + rank)  # dropout, the same in a resumed run
        train_mse = train_epoch(model, train_loader, optimizer, cfg, device)

        sums = sum_errors(net, val_loader, device)
        dist.all_reduce(sums)  # from here on every rank has the errors of all windows, and comes to the same decisions
        val_mse, val_mae = (sums[:2] / sums[2]).tolist()
        scheduler.step(val_mse)
        improved = stopping.improved(val_mse)
        if improved:
            best_weights = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
            best_epoch = epoch
        if rank == 0:
            if improved:
                save({"net": best_weights, "epoch": epoch, "val_mse": val_mse, "config": asdict(cfg),
                      "mean": scaler.mean, "std": scaler.std}, best_path)
            save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                  "stopping": stopping.state_dict(), "best_weights": best_weights, "best_epoch": best_epoch,
                  "epoch": epoch}, last_path)
        log(f"epoch {epoch:2d}: train mse {train_mse:.4f}, val mse {val_mse:.4f}, val mae {val_mae:.4f}, "
            f"next lr {optimizer.param_groups[0]['lr']:.2e}{' *' if improved else ''}")

    net.load_state_dict(best_weights)
    sums = sum_errors(net, test_loader, device)
    dist.all_reduce(sums)
    test_mse, test_mae = (sums[:2] / sums[2]).tolist()
    log(f"test with the weights of epoch {best_epoch}: mse {test_mse:.4f}, mae {test_mae:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
