"""The training script one_gpu.py after the ten edits of docs/your-script.md, for any number of GPUs.

Run it:  torchrun --standalone --nproc-per-node=2 docs/your_script/many_gpus.py
"""

import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

EPOCHS, GLOBAL_BATCH_SIZE, LEARNING_RATE, CHECKPOINT = 6, 64, 1e-3, "runs/many_gpus.pt"
WORKERS = 2  # processes per rank that load samples


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    # Edit 1: one device per process.
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    # Edit 2: the process group.
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def choose_device(local_rank):
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(rank, world_size, device):
    torch.manual_seed(0)  # the same initial parameters in every run
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, validation_set = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    # Edit 3: each rank trains on a different part of the data.
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)
    # Edit 4: the batch size per rank. The global batch stays the same, so the learning rate does not change.
    batch_size = GLOBAL_BATCH_SIZE // world_size
    # Edit 5: the workers of each rank. Pinned memory makes the copies to a GPU faster.
    loading = {"num_workers": WORKERS, "pin_memory": device.type != "cpu"}
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **loading)
    own = Subset(validation_set, range(rank, len(validation_set), world_size))  # each sample once, for any world size
    validation_loader = DataLoader(own, batch_size)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    first_epoch, best = 0, float("inf")
    if os.path.exists(CHECKPOINT):  # edit 8: all ranks resume from the checkpoint that rank 0 has written
        state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first_epoch, best = state["epoch"] + 1, state["best"]
    ddp_model = DDP(model)  # edit 2: backward() averages the gradients

    for epoch in range(first_epoch, EPOCHS):
        torch.manual_seed(1000 * epoch + rank)  # different dropout on each rank, the same after a restart
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        train_one_epoch(ddp_model, train_loader, optimizer, device)
        schedule.step()
        loss, accuracy = evaluate(model, validation_loader, device)
        improved, best = loss < best, min(best, loss)  # the same on all ranks, because the loss is the same
        if rank == 0:  # edit 8: one rank prints and writes
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}, {time.perf_counter() - start:.1f} s")
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            state = {name: part.state_dict() for name, part in parts.items()}
            save(state | {"epoch": epoch, "best": best}, CHECKPOINT)
            if improved:
                save(model.state_dict(), "runs/best_of_many_gpus.pt")


def save(state, path):
    """Write to a temporary name, then rename the file, so that a kill at any moment leaves a complete checkpoint."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # edit 6: after backward() has averaged the gradients
        optimizer.step()


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(3, device=device)  # edit 7: add up over all ranks, then divide
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        sums[0] += F.cross_entropy(outputs, labels, reduction="sum")
        sums[1] += (outputs.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, correct, total = sums.tolist()
    return loss / total, correct / total


if __name__ == "__main__":
    main()
