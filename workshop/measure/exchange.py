"""Measure how much of a training step the communication of the gradients costs."""

import socket
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from workshop.training.device import synchronized_time

ROUNDS = 5
SLOW = 1.2  # a rank is slow if it computes longer than this many times the median of the others, in all rounds but one


def measure_exchange(
    step: Callable[[bool], object], samples: int, steps: int, device: torch.device
) -> dict[str, float | list[str]]:
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
        not overlap with ``backward()``, and the time that processes wait for each other; ``stragglers``: a sentence about each
        rank that computes slower than the others.
    """
    rates, alone = {True: [], False: []}, []
    for number in range(ROUNDS + 1):
        for exchange in rates:
            dist.barrier()
            start = synchronized_time(device)
            for _ in range(steps):
                step(exchange)
            # Each process uses its own time, because without communication the processes do not wait for each other.
            rate = torch.tensor(steps * samples / (synchronized_time(device) - start), device=device)
            of_ranks = [torch.zeros_like(rate) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, rate)
            if number > 0:
                rates[exchange].append(sum(of_ranks).item())
                alone += [[each.item() for each in of_ranks]] * (not exchange)
    efficiency = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
    return {
        "with_exchange": statistics.median(rates[True]),
        "without_exchange": statistics.median(rates[False]),
        "efficiency": efficiency,
        "communication": 1 - efficiency,
        "stragglers": _sentences(stragglers(alone)),
    }


def stragglers(rounds: Sequence[Sequence[float]]) -> dict[int, float]:
    """Return the slow ranks, each with how many times the median time of the other ranks it needs for its own computation.

    Args:
        rounds: for each round, the samples per second of each rank while the ranks do not wait for each other.
    """
    found = {}
    for rank in range(len(rounds[0])):
        times = [statistics.median([*each[:rank], *each[rank + 1 :]]) / each[rank] for each in rounds if len(each) > 1]
        if times and sum(time > SLOW for time in times) >= len(rounds) - 1:
            found[rank] = statistics.median(times)
    return found


def _sentences(slow: dict[int, float]) -> list[str]:
    """Say on which node each slow rank is. All ranks must call it."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return [
        f"rank {rank} on {hosts[rank]} computes {times:.1f} times as long as the median of the other ranks, which wait for it in "
        "each step; compare the nodes with: ./workshop.sh doctor --nodes"
        for rank, times in slow.items()
    ]
