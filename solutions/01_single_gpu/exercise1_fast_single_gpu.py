"""Train a small CNN on handwritten digits as fast as possible on one device: the GPU if there is one, else the CPU.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

One process:  python solutions/01_single_gpu/exercise1_fast_single_gpu.py --epochs 5
Slurm:        srun --ntasks=1 --gpus=1 --cpus-per-task=4 solutions/01_single_gpu/exercise1_run_fast_single_gpu.sh
"""

import os
import time

import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, default_collate
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.tensors import bf16_is_fast
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42


def main():
    args = parse_arguments()
    device = choose_device()
    train(device, args)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs between two checkpoints")
    parser.add_argument("--checkpoint", default="runs/fast_single_gpu.pt", help="file to save to and to resume from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    args = parser.parse_args()
    check_arguments(parser, args, SmallCNN(), world_size=1)
    return args


def choose_device():
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def train(device, args):
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN().to(device, memory_format=torch.channels_last)  # convolutions are faster in this memory format
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # updates all parameters together
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    log = EpochLog(args.checkpoint, args.epochs, device, processes=1)
    print(f"training on {device} from epoch {first_epoch + 1}")

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = (on_device(part, device) for part in load_dataset(args.dataset, transform))
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    # Each element of the sampler is a tensor with the indices of a whole batch, so indexing once returns the batch.
    test_batches = torch.arange(len(test_set), device=device).split(args.batch_size)
    test_loader = DataLoader(test_set, batch_size=None, sampler=test_batches)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch)
        sampler.generator.manual_seed(SEED + epoch)
        start = time.perf_counter()
        # The indices of all batches are copied to the device at once. With lists, each step would copy a list and wait.
        train_loader = DataLoader(train_set, batch_size=None, sampler=torch.tensor([*train_batches], device=device))
        losses = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size / seconds

        accuracy = evaluate(model, test_loader, device)
        log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_checkpoint(args.checkpoint, model, optimizer, epoch)


def on_device(dataset, device):
    """Transform each sample once, and keep all samples in the memory of the device."""
    images, labels = default_collate([dataset[index] for index in range(len(dataset))])
    return TensorDataset(images.to(device), labels.to(device))


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch and return the loss of each step."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16_is_fast(device)):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()  # item() would wait for the device in every step
    return losses.tolist()


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return the accuracy over the whole test set, between 0 and 1."""
    model.eval()
    correct_and_total = torch.zeros(2, device=device)
    for images, labels in loader:
        predictions = model(images.to(device)).argmax(dim=1)
        correct_and_total[0] += (predictions == labels.to(device)).sum()
        correct_and_total[1] += len(labels)
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    # os.replace is atomic: a reader finds the old checkpoint or the new one, never an incomplete file.
    torch.save(checkpoint, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_checkpoint(path, model, optimizer):
    """Load the model and the optimizer from the checkpoint if it exists, and return the first epoch to train."""
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # load_state_dict decides what goes to the GPU
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


if __name__ == "__main__":
    main()
