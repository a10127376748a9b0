"""The training script before the ten edits of docs/your-script.md, for one GPU.

Run it:  python docs/your_script/one_gpu.py
"""

import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS, BATCH_SIZE, LEARNING_RATE, CHECKPOINT = 6, 64, 1e-3, "runs/one_gpu.pt"


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, validation_set = random_split(data, [0.8, 0.2])
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, num_workers=2, drop_last=True)
    validation_loader = DataLoader(validation_set, BATCH_SIZE)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    first_epoch, best = 0, float("inf")
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first_epoch, best = state["epoch"] + 1, state["best"]

    for epoch in range(first_epoch, EPOCHS):
        start = time.perf_counter()
        train_one_epoch(model, train_loader, optimizer, device)
        schedule.step()
        loss, accuracy = evaluate(model, validation_loader, device)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}, {time.perf_counter() - start:.1f} s")
        best = min(best, loss)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        os.makedirs(os.path.dirname(CHECKPOINT), exist_ok=True)
        torch.save(state | {"epoch": epoch, "best": best}, CHECKPOINT)
        if loss == best:
            torch.save(model.state_dict(), "runs/best.pt")


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    loss = correct = total = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return loss / total, correct / total


if __name__ == "__main__":
    main()
