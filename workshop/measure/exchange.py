"""What exchanging the gradients costs a training step."""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from workshop.training.device import synchronized_time

ROUNDS = 5


def measure_exchange(
    step: Callable[[bool], object], samples: int, steps: int, device: torch.device
) -> dict[str, float]:
    """Time steps with and without the exchange of gradients, in turn, so that a noisy machine disturbs both alike.

    Every process has to call it.

    Args:
        step: takes one step; its argument says whether the processes exchange their gradients.
        samples: samples of a step, on this process.
        steps: steps of each kind, in each of the 5 rounds (after one that warms up).
        device: the device that trains.

    Returns:
        ``with_exchange`` and ``without_exchange``: samples/s of all processes together, medians; ``efficiency``: their ratio, the
        median of the rounds; ``communication``: the share of a step that the exchange adds, which is the part of it that
        does not overlap with ``backward()``, and the time that processes wait for each other.
    """
    rates = {True: [], False: []}
    for number in range(ROUNDS + 1):
        for exchange in rates:
            dist.barrier()
            start = synchronized_time(device)
            for _ in range(steps):
                step(exchange)
            # Each process counts its own time: without exchange none waits for another.
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
