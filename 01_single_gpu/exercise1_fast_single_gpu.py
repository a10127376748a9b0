"""Exercise 1: make the training on one device as fast as possible.
This program is single_gpu.py with three TODOs, and it works as delivered.
Run it once to measure how many samples per second it processes. Then do the TODOs in order.
After each TODO, run the program again, compare the samples per second, and check the program.

Run it:    01_single_gpu/exercise1_run_fast_single_gpu.sh --epochs 3
Check it:  ./workshop.sh check 01_single_gpu/exercise1_fast_single_gpu.py
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
    # TODO 3, step a: convolutions in 16-bit formats are faster on most devices if the values of all channels of a pixel
    # are next to each other in memory. Convert the model to this memory layout.
    # Look up: torch.channels_last, the argument memory_format of Module.to
    model = SmallCNN().to(device)
    # TODO 3, step b: by default, AdamW updates the parameters with many small operations, and Python starts each of them.
    # Let it update all parameters together.
    # Look up: the argument fused of torch.optim.AdamW
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    log = EpochLog(args.checkpoint, args.epochs, device, processes=1)
    print(f"training on {device} from epoch {first_epoch + 1}")

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    # TODO 1, step a: in every epoch, the loader transforms each image again, one after the other, and the device waits.
    # Transform all samples once, before the first epoch, and keep them in the memory of the device.
    # Look up: torch.utils.data.TensorDataset, default_collate
    train_set, test_set = load_dataset(args.dataset, transform)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    # TODO 1, step b: take a whole batch from the tensors at once, instead of one sample after the other. Here, create only
    # the batches of indices. Step d creates the loader.
    # Look up: torch.utils.data.BatchSampler
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # TODO 1, step c: the order of the test set never changes. Divide its indices, as a tensor on the device, into batches,
    # and let the loader pass each of them to the data set. Keep the last, smaller batch.
    # Look up: torch.arange, torch.Tensor.split, batch_size=None of DataLoader ("Disable automatic batching")
    test_loader = DataLoader(test_set, args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch)
        sampler.generator.manual_seed(SEED + epoch)
        start = time.perf_counter()
        # TODO 1, step d: with a list of indices, each step would copy the list to the device and wait for the copy. Copy the
        # batches of the whole epoch to the device at once, as a tensor with one row per batch, and create the loader from it.
        # Look up: torch.tensor, the argument sampler of DataLoader
        losses = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size / seconds

        accuracy = evaluate(model, test_loader, device)
        log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_checkpoint(args.checkpoint, model, optimizer, epoch)


# TODO 1, step a: you can write a function here that turns a data set into a TensorDataset on the device.


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch and return the loss of each step."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        # TODO 3, step c: compute the output and the loss in bfloat16, but only if bf16_is_fast(device) is true. The
        # parameters stay in float32, because small optimizer updates would round to zero in bfloat16.
        # Look up: torch.autocast
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        # TODO 2: item() waits until the device has computed the loss. Python starts the next step only afterwards, so the
        # device then waits for Python. Store the loss here without reading its value; read all values after the epoch.
        # Look up: torch.Tensor.detach
        losses[step] = loss.item()
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
