"""Try the classes of a program of stage 06 with models that are different from the one that it trains.

    python workshop/course/built/cases.py KIND FILE        in each process of a group, with the variables of torchrun

KIND is the key ``cases`` of the exercise, and the name of a module of this package. Each case compares the class with one
process; ``report`` tells the result.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

CLOSE = 1e-10
STEPS = 3
UNEVEN = 1.3  # the most that one rank may have, as a multiple of the mean
State = dict[str, torch.Tensor]
Case = Callable[[ModuleType], str]  # returns what went wrong, or ""


def report(name: str, problem: str | None, where: str = "") -> None:
    """Tell the result of a case; a probe of the check records it.

    Args:
        name: of the case.
        problem: what went wrong, or ""; None: the case begins.
        where: the line of the program, as "file.py:12".
    """


class Odd(nn.Module):
    """A model with a tied matrix, a frozen one, one that no rank uses and one that only rank 0 uses."""

    def __init__(self, frozen: bool = True, uneven: bool = True):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen, self.unused, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(not frozen)
        self.uneven = uneven

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.sometimes(x) if rank == 0 or not self.uneven else x


def made(seed: int, **options: bool) -> Odd:
    torch.manual_seed(seed)
    return Odd(**options).double()


def batches() -> list[torch.Tensor]:
    size = 4 * dist.get_world_size()
    return list(torch.randn(STEPS, size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def alone(optimizer: Callable[..., Any] = torch.optim.SGD, **options: bool) -> State:
    """Train with the parts of all ranks, in one process."""
    model, world_size = made(0, **options), dist.get_world_size()
    stepping = optimizer(model.parameters(), lr=0.1)
    for batch in batches():
        for rank, part in enumerate(batch.chunk(world_size)):
            (model(part, rank).square().mean() / world_size).backward()
        stepping.step()
        stepping.zero_grad()
    return model.state_dict()


def together(wrapped: nn.Module, stepping: Any) -> None:
    """Train with the part of this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for batch in batches():
        wrapped(batch.chunk(world_size)[rank], rank).square().mean().backward()
        finish(wrapped)
        stepping.step()
        stepping.zero_grad()


def finish(wrapped: Any) -> None:
    """Average the gradients, if the program does this after the backward pass, as it is delivered."""
    getattr(wrapped, "average_gradients", lambda: None)()


def decaying(parameters: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.5)


def difference(found: State, expected: State, what: str = "") -> str:
    """Name the parameter that differs most, or return ""."""
    sizes = {name: float((found[name] - value).abs().max()) for name, value in expected.items() if name in found}
    if missing := sorted(set(expected) - set(found)):
        return f"{missing[0]} is missing"
    name = max(sizes, key=lambda name: sizes[name])
    if sizes[name] < CLOSE:
        return ""
    return f"{name} differs by {sizes[name]:.1e} from training in one process{what}"


def far(found: torch.Tensor, expected: torch.Tensor, what: str) -> str:
    """Say how much a result differs, or return ""."""
    if found.shape != expected.shape:
        return f"{what} has the shape {list(found.shape)} instead of {list(expected.shape)}"
    size = float((found - expected).detach().abs().max())
    return "" if size < CLOSE else f"{what} differs by {size:.1e} from that of one process"


def first_problem(problem: str) -> str:
    """Return what the first rank with a problem has seen, on all ranks, so that they all continue or all end."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


UPDATED = ", because a parameter without gradients was updated"


def attempt(name: str, case: Case, module: ModuleType) -> None:
    """Try a case; each rank reports what it has seen before the ranks wait for each other."""
    report(name, None)
    problem, where = "", ""
    try:
        problem = case(module)
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        frames = traceback.extract_tb(error.__traceback__)
        where = next(
            (f"{Path(each.filename).name}:{each.lineno}" for each in frames[::-1] if each.filename == module.__file__),
            "",
        )
    report(name, problem or None, where)
    dist.barrier()
    report(name, problem, where)


def main() -> None:
    kind, file = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        sys.path.insert(0, str(Path(file).parent))  # for the other exercises that it imports
        specification = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[Path(file).stem] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        of_kind = importlib.import_module(f"workshop.course.built.{kind}").CASES
        for name, case in of_kind.items():
            attempt(name, case, module)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    from workshop.course.built import cases  # so that a probe can replace cases.report

    cases.main()
