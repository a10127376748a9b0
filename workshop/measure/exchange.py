"""Measure how much of a training step the communication of the gradients costs."""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from workshop.training.device import synchronized_time

ROUNDS = 5


def measure_exchange(
    step: Callable[[bool], object], samples: int, steps: int, device: torch.device
) -> dict[str, float]:
    """Time steps with and without communication of the gradients, in turn, so that other work on the machine slows both down.

    All ranks must call it.

    Args:
        step: takes one step; its argument says whether the processes communicate their gradients.
        samples: samples per step on this rank.
        steps: steps of each kind in each of the 5 rounds (after a warm-up round).
        device: the device that trains.

    Returns:
        ``with_exchange`` and ``without_exchange``: samples per second of all processes together, medians; ``efficiency``: the
        median of their ratios; ``communication``: the fraction of a step that communication adds. This is the part that does
        not overlap with ``backward()``, and the time that processes wait for each other.
    """
    rates = {True: [], False: []}
    for number in range(ROUNDS + 1):
        for exchange in rates:
            dist.barrier()
            start = synchronized_time(device)
            for _ in range(steps):
                step(exchange)
            # Each process uses its own time, because without communication the processes do not wait for each other.
            rate = torch.tensor(steps * samples / (synchronized_time(device) - start), device=device)
            dist.all_reduce(rate)
            if number > 0:
                rates[exchange].append(rate.item())
    efficiency = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
    return {
        "with_exchange": statistics.median(rates[True]),
        "without_exchange": statistics.median(rates[False]),
        "efficiency": efficiency,
        "communication": 1 - efficiency,
    }
