"""Supporting code of the exercise about pipelines: the stages of the transformer, PyTorch's schedules, and the timeline."""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from workshop.files import write_atomically
from workshop.training.device import synchronized_time

TIMELINE = "timeline.json"
WARM = 2  # steps at the start of a run that are not measured

Event = tuple[int, str, int, float, float]  # rank, "forward" or "backward", micro-batch, start and end in seconds


class Stage(nn.Module):
    """Some consecutive blocks of a ``Transformer``. The parameters have the same names as in the whole model.

    Args:
        model: a ``Transformer``. The stage uses its modules and does not copy them.
        blocks: the numbers of the blocks. With the first block come the embeddings, with the last one the output layer.
    """

    def __init__(self, model: nn.Module, blocks: range):
        super().__init__()
        first, last = 0 in blocks, len(model.blocks) - 1 in blocks
        self.tokens, self.positions = (model.tokens, model.positions) if first else (None, None)
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        self.norm, self.head = (model.norm, model.head) if last else (None, None)
        self.own_positions: torch.Tensor | None = None  # of the tokens of this rank; None: they start at 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            own = torch.arange(x.shape[1], device=x.device) if self.own_positions is None else self.own_positions
            x = self.tokens(x) + self.positions(own)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def split(model: nn.Module, stages: int) -> list[Stage]:
    """Return the stages of a ``Transformer``, with equally many blocks. The output of each stage is the input of the next one.

    Raises:
        ValueError: the blocks cannot be divided among the stages, or the first and the last stage would share a matrix.
    """
    layers = len(model.blocks)
    if stages > layers:
        raise ValueError(
            f"{stages} stages are more than the {layers} layers of the model; each stage needs at least one"
        )
    if stages < 1 or layers % stages:
        raise ValueError(f"{stages} stages do not divide the {layers} layers of the model")
    if stages > 1 and model.head.weight is model.tokens.weight:
        raise ValueError("the first and the last stage cannot share a matrix; create the model with Config(tied=False)")
    each = layers // stages
    return [Stage(model, range(first, first + each)) for first in range(0, layers, each)]


SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
SEVERAL = ("interleaved", "zero-bubble")  # the schedules of PyTorch with several stages on each rank


def schedule_class(name: str) -> type:
    """Return the class of ``torch.distributed.pipelining`` for a schedule of ``SCHEDULES``."""
    from torch.distributed import pipelining  # this import needs a second

    return getattr(pipelining, SCHEDULES[name])


class PyTorchPipeline:
    """Train with a schedule of ``torch.distributed.pipelining``, by the same methods as the class of the exercise.

    Args:
        model: a ``Transformer``. Each rank keeps one stage of it, or two if the schedule is "interleaved" or "zero-bubble".
        loss_function, microbatches: as in the exercise.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble".
        device: the device of this rank.
        group: the ranks of the pipeline; None: all.

    Attributes:
        stage: a module with the parameters of this rank.
        timeline: always empty.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: Callable[..., torch.Tensor],
        microbatches: int,
        schedule: str,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ):
        from torch.distributed import pipelining  # this import needs a second

        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        stages = split(model, 2 * ranks if schedule in SEVERAL else ranks)
        self.stage, self.timeline = nn.ModuleList(stages[self.rank :: ranks]).to(device), []
        own = [
            pipelining.PipelineStage(stage, number, len(stages), device, group=group)
            for number, stage in zip(range(self.rank, len(stages), ranks), self.stage, strict=True)
        ]
        kind = schedule_class(schedule)
        self.schedule = kind(own if schedule in SEVERAL else own[0], microbatches, loss_fn=loss_function)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        own_inputs = (inputs,) if self.rank == 0 else ()
        self.schedule.step(*own_inputs, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else None


def timed(work: Callable) -> Callable:
    """Decorate the methods ``forward`` and ``backward`` of a pipeline, so that each call adds an event to its ``timeline``.

    The pipeline has the attributes ``rank``, ``device`` and ``timeline``. The first argument of the method is the micro-batch. A
    GPU computes later than Python calls, so the method waits for the device before and after the work.
    """

    @functools.wraps(work)
    def method(pipeline, number, *args):
        start = synchronized_time(pipeline.device)
        result = work(pipeline, number, *args)
        pipeline.timeline.append((pipeline.rank, work.__name__, number, start, synchronized_time(pipeline.device)))
        return result

    return method


def report_timeline(args: argparse.Namespace, timelines: list[list[Event]]) -> dict:
    """Write the timeline of a typical step of all ranks, and print how long the ranks waited. Call it on all ranks.

    Args:
        args: the options: ``microbatches``, and the ``folder`` for the file.
        timelines: the events of this rank, for each step.

    Returns:
        The written data on rank 0: the share of the time in which a rank computes nothing, measured as the median over the steps
        ("bubble") and by the formula ("expected"), the most micro-batches that each rank kept at once ("kept"), and the events
        of the step with the median bubble ("timeline"), in seconds since its start. An empty dictionary elsewhere.
    """
    dist.barrier()  # the clocks of two nodes differ: count the time from a moment that all ranks share
    now = time.perf_counter()
    own = [
        [(rank, kind, number, start - now, end - now) for rank, kind, number, start, end in each] for each in timelines
    ]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own[WARM:] or own)
    if dist.get_rank() or not any(everyone[0]):
        return {}
    steps = sorted(
        ([event for events in ranks for event in events] for ranks in zip(*everyone, strict=True)), key=bubble
    )
    typical = steps[len(steps) // 2]
    beginning = min(start for *_, start, _ in typical)
    ranks = len(everyone)
    data = {
        "bubble": statistics.median(map(bubble, steps)),
        "expected": (ranks - 1) / (args.microbatches + ranks - 1),
        "kept": [most_kept(events[0]) for events in everyone],
        "timeline": [(*what, start - beginning, end - beginning) for *what, start, end in typical],
    }
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TIMELINE, json.dumps(data))
    print(
        f"The ranks computed nothing for {data['bubble']:.0%} of a step; the formula of the bubble, (p-1)/(m+p-1), gives "
        f"{data['expected']:.0%}. Micro-batches that each rank kept at once: {', '.join(map(str, data['kept']))}",
        flush=True,
    )
    return data


def bubble(events: list[Event]) -> float:
    """Return the share of a step, from the first start to the last end, in which a rank computes nothing: the mean of all."""
    ranks = {rank for rank, *_ in events}
    seconds = max(end for *_, end in events) - min(start for *_, start, _ in events)
    return 1 - sum(end - start for *_, start, end in events) / (seconds * len(ranks))


def most_kept(events: list[Event]) -> int:
    """Return the most micro-batches of one rank whose forward pass has run and whose backward pass has not."""
    kept = most = 0
    for _, kind, *_ in events:
        kept += 1 if kind == "forward" else -1
        most = max(most, kept)
    return most
