"""Cases for the class Pipeline of exercise 5."""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F

from workshop.course.built.cases import Case, difference, first_problem

WAIT = 3  # seconds until a pass of a neighbor counts as late; a right program needs none
ROUNDED = 1e-5  # between numbers of float32
Shape = tuple[int, ...]


class Meeting:
    """Two neighbors meet in the passes that they must compute at the same time.

    Rank r can compute the second micro-batch while rank r + 1 computes the first one. Each of them waits here for the other.
    """

    def __init__(self, name: str):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.store, self.missed = dist.PrefixStore(name, c10d._get_default_store()), ""

    def begin(self, number: int) -> None:
        """Wait in the forward pass of a micro-batch for the neighbor."""
        self.store.set(f"{self.rank}-{number}", "")
        previous, following = self.rank - 1, self.rank + 1
        if number == 0 and self.rank and not self._has_begun(previous, 1):
            self.missed = (
                f"while rank {self.rank} computes the first micro-batch, rank {previous} does not begin the second one"
            )
        if number == 1 and following < self.ranks and not self._has_begun(following, 0):
            self.missed = (
                f"rank {self.rank} computes the second micro-batch, and rank {following} does not have the first yet"
            )

    def _has_begun(self, rank: int, number: int) -> bool:
        end = time.monotonic() + WAIT
        while not (found := self.store.check([f"{rank}-{number}"])) and time.monotonic() < end:
            time.sleep(0.005)
        return bool(found)


class Noted(nn.Module):
    """A stage that notes its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.passes: list[str] = []
        self.meeting: Meeting | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() >= 0:  # activation checkpointing computes this pass again
            return torch.tanh(self.linear(x))
        number = self.passes.count("forward")
        self.passes.append("forward")
        if self.meeting:
            self.meeting.begin(number)
        output = torch.tanh(self.linear(x))
        if output.requires_grad:
            output.register_hook(lambda _: self.passes.append("backward"))
        return output


def stages_of(make: Callable[[int], nn.Module]) -> list[nn.Module]:
    """The same stages on all ranks: ``make`` gets the number of a stage."""
    torch.manual_seed(0)
    return [make(number).double() for number in range(dist.get_world_size())]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(stage: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}


def compared(
    pipeline: Any, stages: list[nn.Module], batches: list[tuple[torch.Tensor, torch.Tensor]], what: str
) -> str:
    """Compute batches in the pipeline and in one process; say what differs, or ""."""
    rank, last = dist.get_rank(), dist.get_rank() == len(stages) - 1
    losses = [pipeline.step(inputs, targets) for inputs, targets in batches]
    found = {name: value.clone() for name, value in gradients(stages[rank]).items()}
    for each in stages:
        each.zero_grad()
    expected = [F.mse_loss(nn.Sequential(*stages)(inputs), targets) for inputs, targets in batches]
    if any(each.requires_grad for each in expected):
        torch.stack(expected).sum().backward()
    for loss, right in zip(losses, expected, strict=True):
        if last and (loss is None or not abs(float(loss) - float(right)) < ROUNDED):
            return f"step() returns the loss {loss} on the last rank instead of {float(right):.6f}{what}"
        if not last and loss is not None:
            return f"step() returns {loss} on rank {rank}; only the last rank has a loss{what}"
    right = gradients(stages[rank])
    if found.keys() != right.keys():
        name = min(found.keys() ^ right.keys())
        return f"the parameter {name} of rank {rank} has {'a' if name in found else 'no'} gradient, unlike in one process{what}"
    exact = all(value.dtype == torch.float64 for value in batches[0]) and not what.endswith("types")
    wrong = difference(found, right, what) if exact and right else ""
    far = [name for name in right if not float((found[name] - right[name]).abs().max()) < ROUNDED]
    return f"the gradient of {wrong}" if wrong else f"the gradient of {far[0]} differs{what}" if far else ""


def scheduled(module: ModuleType, schedule: str, problem_of: Callable[[list[str], int], str]) -> str:
    """Compute with a schedule and two numbers of micro-batches, and compare the order of the passes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for microbatches in (ranks, 2 * ranks):
        stages = stages_of(lambda _: Noted())
        own = stages[rank]
        assert isinstance(own, Noted)
        batch = random(2 * microbatches, 4), random(2 * microbatches, 4).tanh()
        pipeline = module.Pipeline(own, F.mse_loss, microbatches, schedule=schedule)
        pipeline.step(*batch)  # a program may compute more in its first step, to learn the shapes
        own.passes = []
        pipeline.step(*batch)
        count = own.passes.count("forward")
        wrong = "" if count == microbatches else f"rank {rank} computes {count} forward passes in a step"
        wrong = first_problem(wrong or problem_of(own.passes, microbatches))
        if not wrong:
            own.passes, own.meeting = [], Meeting(f"{schedule}-{microbatches}")
            pipeline.step(*batch)
            wrong = first_problem(own.meeting.missed)
        if wrong:
            return f"{wrong} ({microbatches} micro-batches, {ranks} stages)"
    return ""


def microbatches(module: ModuleType) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for schedule in ("gpipe", "1f1b"):
        for number in (ranks, 2 * ranks):
            stages = stages_of(lambda _: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
            pipeline = module.Pipeline(stages[rank], F.mse_loss, number, schedule=schedule)
            batch = random(2 * number, 4), random(2 * number, 4).tanh()
            found.append(
                compared(pipeline, stages, [batch], f", with {number} micro-batches and the schedule {schedule}")
            )
    return next(filter(None, found), "")


def gpipe(module: ModuleType) -> str:
    def problem(passes: list[str], microbatches: int) -> str:
        first = passes.index("backward") if "backward" in passes else microbatches
        if first == microbatches:
            return ""
        return f"rank {dist.get_rank()} begins a backward pass after {first} of {microbatches} forward passes"

    return scheduled(module, "gpipe", problem)


def one_forward_one_backward(module: ModuleType) -> str:
    def problem(passes: list[str], microbatches: int) -> str:
        rank, kept, most = dist.get_rank(), 0, 0
        for each in passes:
            kept += 1 if each == "forward" else -1
            most = max(most, kept)
        allowed = dist.get_world_size() - rank
        return (
            ""
            if most == allowed
            else f"of micro-batches, rank {rank} keeps {most} at the same time instead of {allowed}"
        )

    return scheduled(module, "1f1b", problem)


def other_shape(module: ModuleType) -> str:
    """The size of a batch changes, then the number of its dimensions."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = stages_of(lambda _: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    pipeline = module.Pipeline(stages[rank], F.mse_loss, ranks)
    shapes: list[Shape] = [(2 * ranks, 4), (2 * ranks, 4), (ranks, 4), (2 * ranks, 3, 4), (2 * ranks, 4)]
    return compared(pipeline, stages, [(random(*shape), random(*shape).tanh()) for shape in shapes], "")


class Turned(nn.Module):
    """A stage whose output has a different shape than its input, is not contiguous, and has a different data type."""

    def __init__(self, number: int, shape: Shape):
        super().__init__()
        self.linear, self.even = nn.Linear(shape[-1], shape[-1] + 1), number % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x.double())).transpose(1, 2)
        return x.float() if self.even else x


def stages(module: ModuleType) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shapes: list[Shape] = [(3, 5)]
    for _ in range(ranks):
        shapes.append((shapes[-1][1] + 1, shapes[-1][0]))
    turned = stages_of(lambda number: Turned(number, shapes[number]))
    found = []
    for schedule in ("gpipe", "1f1b"):
        pipeline = module.Pipeline(turned[rank], F.mse_loss, 2 * ranks, schedule=schedule)
        last = random(2 * ranks, *shapes[-1])
        batch = random(2 * ranks, *shapes[0]), last.float() if ranks % 2 else last
        turned[rank].zero_grad()
        found.append(compared(pipeline, turned, [batch], ", with different shapes and data types"))
    return next(filter(None, found), "")


def frozen_stage(module: ModuleType) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = stages_of(lambda _: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    made[0].requires_grad_(False)
    made[-1][0].requires_grad_(False)  # type: ignore[index]
    pipeline = module.Pipeline(made[rank], F.mse_loss, ranks)
    return compared(pipeline, made, [(random(ranks, 4), random(ranks, 4))], ", with a frozen stage")


def whole_numbers(module: ModuleType) -> str:
    """The first stage returns its input, and the second one has an embedding."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kinds: list[Callable[[], nn.Module]] = [nn.Identity, lambda: nn.Embedding(9, 4), lambda: nn.Linear(4, 4)]
    made = stages_of(lambda number: kinds[min(number, 2)]())
    pipeline = module.Pipeline(made[rank], F.mse_loss, ranks)
    return compared(pipeline, made, [(torch.arange(2 * ranks) % 9, random(2 * ranks, 4))], ", with whole numbers")


def one_stage(module: ModuleType) -> str:
    """Each rank is the only one of its group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 4).double(), random(6, 4), random(6, 4)
    loss = module.Pipeline(model, F.mse_loss, 3, group=groups[dist.get_rank()]).step(inputs, targets)
    found = {name: value.clone() for name, value in gradients(model).items()}
    model.zero_grad()
    expected = F.mse_loss(model(inputs), targets)
    expected.backward()
    if loss is None or not abs(float(loss) - float(expected)) < ROUNDED:
        return f"step() returns the loss {loss} instead of {float(expected):.6f} in a group of one rank"
    return difference(found, gradients(model))


def microbatch_errors(module: ModuleType) -> str:
    ranks = dist.get_world_size()

    def run(microbatches: int, samples: int, schedule: str = "1f1b") -> None:
        pipeline = module.Pipeline(nn.Linear(2, 2), F.mse_loss, microbatches, schedule=schedule)
        pipeline.step(torch.zeros(samples, 2), torch.zeros(samples, 2))

    cases: dict[str, Callable[[], None]] = {
        f"{ranks - 1} micro-batches for {ranks} stages": lambda: run(ranks - 1, 2 * ranks - 2),
        "the schedule 2f2b": lambda: run(ranks, ranks, schedule="2f2b"),
        f"{ranks} micro-batches of {2 * ranks + 1} samples": lambda: run(ranks, 2 * ranks + 1),
    }
    for what, function in cases.items():
        try:
            function()
        except ValueError:
            continue
        return f"{what} raise no ValueError".replace("schedule 2f2b raise", "schedule 2f2b raises")
    return ""


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "microbatches": microbatches,
    "gpipe": gpipe,
    "one-forward-one-backward": one_forward_one_backward,
    "other-shape": other_shape,
    "stages": stages,
    "frozen-stage": frozen_stage,
    "whole-numbers": whole_numbers,
    "one-stage": one_stage,
    "microbatch-errors": microbatch_errors,
}
