"""Measure what DistributedDataParallel costs: compare N processes with DDP and N processes that train independently.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m workshop.measure.efficiency

In each round, the same processes train in all ways, one after the other, so that other work on the machine slows all of
them down. Compare the ratios within a round. The steps are those of stage 02: the digits through PIL, SmallCNN, AdamW.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms

from workshop.data import load_dataset
from workshop.run.machine import machine
from workshop.training.device import local_device, synchronized_time
from workshop.training.models import SmallCNN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step and process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = local_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, _ = load_dataset("digits", transform)
    loader = DataLoader(
        train_set, args.batch_size, sampler=DistributedSampler(train_set, drop_last=True), drop_last=True
    )
    gradients = torch.zeros(sum(parameter.numel() for parameter in SmallCNN().parameters()), device=device)

    def epoch(model, optimizer, each_step):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            each_step()

    def prepared(model):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def nothing():
        pass

    ways = {
        "independent": (*prepared(SmallCNN().to(device)), nothing),
        # the same work; after each step the processes wait for each other, but do not communicate data
        "in step": (*prepared(SmallCNN().to(device)), dist.barrier),
        # an all-reduce with the size of the gradients after each step, so communication does not overlap
        "independent + all_reduce": (*prepared(SmallCNN().to(device)), lambda: dist.all_reduce(gradients)),
        "DDP": (*prepared(DDP(SmallCNN().to(device))), nothing),
    }
    rates = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            epoch(*way)
            seconds = synchronized_time(device) - start
            # Samples per second of all processes together; each process uses its own time, as independent processes would.
            rate = torch.tensor(len(loader) * args.batch_size / seconds, device=device)
            dist.all_reduce(rate)
            if number > 0:  # the first round warms up
                rates[name].append(rate.item())
    dist.destroy_process_group()
    if rank == 0:
        report(args, world_size, device, rates)


def report(args, world_size, device, rates) -> None:
    """Print, and write if requested, the median samples per second of each way and its ratio to the independent processes."""
    print(f"{world_size} processes on {device.type}, {args.batch_size} samples per step on each, {args.rounds} rounds")
    print(f"{'':26}{'samples/s':>10}{'of independent':>16}{'lowest':>8}{'highest':>9}")
    rows = {}
    for name, values in rates.items():
        ratios = [value / independent for value, independent in zip(values, rates["independent"], strict=True)]
        rows[name] = {
            "samples_per_second": statistics.median(values),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
        print(
            f"{name:26}{rows[name]['samples_per_second']:10,.0f}{rows[name]['ratio']:16.1%}{min(ratios):8.1%}{max(ratios):9.1%}"
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        launch = f"OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node={world_size} -m workshop.measure.efficiency"
        result = {
            "machine": machine(),
            "command": f"{launch} --batch-size={args.batch_size} --rounds={args.rounds}",
            "processes": world_size,
            "device": device.type,
            "ways": rows,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
