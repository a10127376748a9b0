"""Record the timeline of one step: when a process computes, and when its collectives run."""

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from workshop.training.traffic import collective

# What a process computes. OTHER: for example copies of parameters, averages of gradients, and the optimizer of DeepSpeed.
FORWARD, BACKWARD, OPTIMIZER, OTHER = COMPUTING = ("forward", "backward", "optimizer", "other")
SHORT = 0.3  # ms; Python needs less between two operations, so a longer gap is a wait
START = "the step starts"

Piece = tuple[
    str, float, float
]  # what: one of COMPUTING, a collective, "send" or "receive"; start and end in milliseconds


class Timeline:
    """Record one step with PyTorch's profiler. Call ``start`` before the step and ``stop`` after it, on all ranks.

    Attributes:
        pieces: what this process did, from the start of the step, which is the same moment on all ranks.
    """

    def __init__(self):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports on standard error that it finds no GPU
        self.pieces: list[Piece] = []
        self._profiler = None

    def start(self) -> None:
        self._profiler = profile()
        self._profiler.__enter__()
        if dist.is_initialized():
            dist.barrier()
        with record_function(START):
            pass

    def stop(self) -> None:
        self._profiler.__exit__(None, None, None)
        self.pieces = pieces(self._profiler.events())
        self._profiler = None


def pieces(events: Iterable[Any]) -> list[Piece]:
    """Return what a process did, from the events of the profiler (``torch.autograd.profiler_util.FunctionEvent``).

    A computation is the time of PyTorch's operations, on a GPU of the kernels. A communication lasts from the call until this
    process has its result (on a GPU: as long as the kernel runs), so it includes the time in which it waits for other ranks.
    """
    events = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))  # callers first
    start = next(event.time_range.end for event in events if event.name == START)
    events = [event for event in events if event.time_range.start >= start]
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    on_gpu = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    kinds = _kinds([event for event in on_cpu if not event.is_async])
    found, call = [], ""
    for event in on_cpu:
        if event.name.startswith("c10d::"):
            call = "receive" if "recv" in event.name else collective(event.name)
        elif event.is_async and call and not on_gpu:  # the work that the last call has started, by a thread of gloo
            found.append((call, event))
    for event in on_gpu:
        kind = (
            collective(event.name) if event.name.startswith("nccl") else kinds.get(event.linked_correlation_id, OTHER)
        )
        found.append((kind, event))
    if not on_gpu:
        found += [(kinds[event.id], event) for event in _outermost(on_cpu)]
    times = [(kind, event.time_range.start - start, event.time_range.end - start) for kind, event in found]
    return merged((kind, begin / 1000, end / 1000) for kind, begin, end in times)


def _outermost(events) -> Iterable[Any]:
    """Yield PyTorch's operations, without those that another operation calls."""
    ends: dict[int, float] = {}
    for event in events:
        if event.name.startswith("aten::") and not event.is_async:
            begin, end = event.time_range.start, event.time_range.end
            if begin >= ends.get(event.thread, 0):
                ends[event.thread] = end
                yield event


def _kinds(events) -> dict[int, str]:
    """Return the kind of each operation on the CPU, by the number of its event."""
    node = "autograd::engine::evaluate_function"
    last = max((event.time_range.end for event in events if event.name.startswith(node)), default=0.0)
    ends = {BACKWARD: 0.0, OPTIMIZER: 0.0}  # of the node of the backward pass, and of the optimizer step, until now
    kinds = {}
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.name.startswith(node):
            ends[BACKWARD] = max(ends[BACKWARD], end)
        elif event.name.startswith("Optimizer.step"):
            ends[OPTIMIZER] = max(ends[OPTIMIZER], end)
        if begin < ends[BACKWARD]:
            kinds[event.id] = BACKWARD
        elif event.sequence_nr >= 0 and begin < last:  # autograd records it; Lightning calls it in the optimizer step
            kinds[event.id] = FORWARD
        else:
            kinds[event.id] = OPTIMIZER if begin < ends[OPTIMIZER] else OTHER
    return kinds


def merged(found: Iterable[Piece]) -> list[Piece]:
    """Join computations of one kind with only short gaps between them, and leave out short ones of the kind OTHER."""
    result: list[Piece] = []
    computing: list[Piece] = []
    for kind, start, end in sorted(found, key=lambda piece: piece[1]):
        if kind not in COMPUTING:
            result.append((kind, start, end))
        elif computing and computing[-1][0] == kind and start - computing[-1][2] < SHORT:
            computing[-1] = (kind, computing[-1][1], max(end, computing[-1][2]))
        else:
            computing.append((kind, start, end))
    long = [piece for piece in computing if piece[0] != OTHER or piece[2] - piece[1] > SHORT]
    if len(long) < len(computing):
        return merged([*result, *long])
    return sorted(result + computing, key=lambda piece: piece[1])


def computing_share(ranks: list[list[Piece]]) -> float:
    """Return the share of the step in which a process computes, from the first start to the last end: the mean of all ranks."""
    everything = [piece for rank in ranks for piece in rank]
    if not everything:
        return 0.0
    seconds = max(end for *_, end in everything) - min(start for _, start, _ in everything)
    return sum(end - start for kind, start, end in everything if kind in COMPUTING) / (seconds * len(ranks))
