"""Try the classes of a program of stage 06 with models that are different from the one that it trains.

    python workshop/course/built_cases.py KIND FILE        in each process of a group, with the variables of torchrun

KIND is the key ``cases`` of the exercise. Each case compares the class with one process; ``report`` tells the result.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

CLOSE = 1e-10
STEPS = 3
Case = tuple[str, Callable[[], str]]


def report(name: str, problem: str | None) -> None:
    """Tell the result of a case; a probe of the check records it. ``problem``: what went wrong, or ""; None: it begins."""


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


def alone(optimizer: Callable[..., Any] = torch.optim.SGD, **options: bool) -> dict[str, torch.Tensor]:
    """Train with the parts of all ranks, in one process."""
    model, world_size = made(0, **options), dist.get_world_size()
    stepping = optimizer(model.parameters(), lr=0.1)
    for batch in batches():
        for rank, part in enumerate(batch.chunk(world_size)):
            (model(part, rank).square().mean() / world_size).backward()
        stepping.step()
        stepping.zero_grad()
    return model.state_dict()


def together(model: nn.Module, wrapped: nn.Module, stepping: Any, finish: Callable[[], None] = lambda: None) -> None:
    """Train with the part of this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for batch in batches():
        wrapped(batch.chunk(world_size)[rank], rank).square().mean().backward()
        finish()
        stepping.step()
        stepping.zero_grad()


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str = "") -> str:
    """Name the parameter that differs most, or return ""."""
    sizes = {name: float((found[name] - value).abs().max()) for name, value in expected.items() if name in found}
    if missing := sorted(set(expected) - set(found)):
        return f"{missing[0]} is missing"
    name = max(sizes, key=lambda name: sizes[name])
    if sizes[name] < CLOSE:
        return ""
    return f"{name} differs by {sizes[name]:.1e} from training in one process{what}"


# ---------------------------------------------------------------- exercise 1


def ddp_cases(module: ModuleType) -> Iterator[Case]:
    """Yield the cases of data parallelism."""

    def finish_of(wrapped: Any) -> Callable[[], None]:
        return getattr(wrapped, "average_gradients", lambda: None)  # in the program as delivered

    def start() -> str:
        model = made(dist.get_rank(), uneven=False)
        model.register_buffer("offset", torch.full((6,), float(dist.get_rank()), dtype=torch.float64))
        module.DDP(model)
        expected = made(0).state_dict() | {"offset": torch.zeros(6, dtype=torch.float64)}
        wrong = [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
        kind = "buffer" if wrong == ["offset"] else "parameter"
        return f"the {kind} {wrong[0]} of rank {dist.get_rank()} is not that of rank 0 after DDP()" if wrong else ""

    def odd() -> str:
        model = made(0)
        wrapped = module.DDP(model, bucket_bytes=200)
        together(model, wrapped, torch.optim.SGD(model.parameters(), lr=0.1), finish_of(wrapped))
        return difference(model.state_dict(), alone())

    def no_gradient() -> str:
        model = made(0)
        wrapped = module.DDP(model)
        together(model, wrapped, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), finish_of(wrapped))
        return difference(model.state_dict(), alone(_decaying), ", because a parameter without gradients was updated")

    def twice() -> str:
        model = made(0, uneven=False)
        wrapped = module.DDP(model)
        for part in batches()[0].chunk(dist.get_world_size())[dist.get_rank()].chunk(2):
            (wrapped(part, 0).square().mean() / 2).backward()
        finish_of(wrapped)()
        single = made(0, uneven=False)
        single(batches()[0], 0).square().mean().backward()
        expected = {name: each.grad for name, each in single.named_parameters() if each.grad is not None}
        found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        return difference(found, expected, ", after two backward passes")

    def changed() -> str:
        model = made(0)
        wrapped = module.DDP(model)
        model.unused = nn.Linear(6, 6).double()
        try:
            wrapped(batches()[0][:2], 0)
        except ValueError as error:
            return "" if "unused" in str(error) else f"the ValueError does not name the parameter: {error}"
        return "a parameter was replaced after DDP() wrapped the module, and forward() raises no ValueError"

    yield "start", start
    yield "odd", odd
    yield "no-gradient", no_gradient
    yield "twice", twice
    yield "changed", changed


def _decaying(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.5)


# ---------------------------------------------------------------- exercise 2


def zero1_cases(module: ModuleType) -> Iterator[Case]:
    """Yield the cases of the sharded optimizer."""

    def gradients(model: nn.Module, number: int) -> None:
        chance = torch.Generator().manual_seed(number)
        for each in model.parameters():
            each.grad = torch.randn(each.shape, dtype=each.dtype, generator=chance) if each.requires_grad else None

    def trained(make: Callable[..., Any], steps: range, state: Any = None, start: Any = None) -> tuple[Any, Any]:
        model = made(0)
        if start:
            model.load_state_dict(start)
        optimizer = make(model.parameters())
        if state:
            optimizer.load_state_dict(state)
        for number in steps:
            gradients(model, number)
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()

    def plain(parameters: Any) -> Any:
        return torch.optim.Adagrad(parameters, lr=0.1)

    def sharded(parameters: Any) -> Any:
        return module.ShardedOptimizer(parameters, torch.optim.Adagrad, lr=0.1)

    def other_class() -> str:
        return difference(trained(sharded, range(3))[0], trained(plain, range(3))[0], ", with Adagrad")

    def shares() -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(40, 40), *(nn.Linear(20, 20) for _ in range(4)))
        optimizer = module.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        gradients(model, 0)
        optimizer.step()
        own = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, own)
        if max(sizes) > 1.3 * sum(sizes) / len(sizes):
            return f"the ranks store {' and '.join(map(str, sizes))} elements of optimizer state, which is uneven"
        return ""

    def scheduled() -> str:
        def run(make: Callable[..., Any]) -> Any:
            model = made(0)
            optimizer = make(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for number in range(3):
                gradients(model, number)
                optimizer.step()
                schedule.step()
            return model.state_dict()

        return difference(run(sharded), run(plain), ", with a schedule of the learning rate")

    def saved() -> str:
        state = trained(sharded, range(2))[1]["state"]
        expected = trained(plain, range(2))[1]["state"]
        if set(state) != set(expected):
            return f"state_dict() has the state of {len(state)} parameters, and {len(expected)} have one"
        return difference(
            {str(key): state[key]["sum"].cpu() for key in state}, {str(key): expected[key]["sum"] for key in expected}
        )

    def loaded() -> str:
        start, state = trained(plain, range(2))
        found = trained(sharded, range(2, 4), state, start)[0]
        return difference(found, trained(plain, range(4))[0], ", after the state was loaded")

    def loaded_part() -> str:
        model = made(0)
        optimizer = sharded(model.parameters())
        optimizer.load_state_dict(trained(plain, range(2))[1])
        own = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
        whole = sum(each.numel() for each in model.parameters() if each.requires_grad)
        return f"after load_state_dict() each rank stores all {own} elements" if own >= whole else ""

    yield "other-class", other_class
    yield "shares", shares
    yield "scheduled", scheduled
    yield "saved", saved
    yield "loaded", loaded
    yield "loaded-part", loaded_part


# ---------------------------------------------------------------- exercise 3


def fsdp_cases(module: ModuleType) -> Iterator[Case]:
    """Yield the cases of sharded parameters."""

    def wrapped(model: nn.Module, **options: Any) -> Any:
        return module.FSDP(model, [], **options)

    def odd() -> str:
        model = made(dist.get_rank())
        sharded = wrapped(model)
        together(model, sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
        return difference(sharded.full_state_dict(), alone())

    def uneven_sizes() -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        return difference(module.FSDP(model, [nn.Linear]).full_state_dict(), expected)

    def precision() -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        sharded = module.FSDP(model, [nn.Linear], compute_dtype=torch.bfloat16)
        output = sharded(torch.ones(2, 8))
        output.float().sum().backward()
        if output.dtype != torch.bfloat16:
            return f"with compute_dtype=torch.bfloat16 the output is {output.dtype}"
        kinds = {each.dtype for each in sharded.parameters()} | {
            each.grad.dtype for each in sharded.parameters() if each.grad is not None
        }
        return "" if kinds == {torch.float32} else "with compute_dtype the shards or their gradients are not float32"

    def old_parameters() -> str:
        torch.manual_seed(0)
        sharded = module.FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [nn.Linear])
        sharded(torch.ones(1, 4))  # no backward pass follows
        with torch.no_grad():
            for each in sharded.parameters():
                each.zero_()
        found = float(sharded(torch.ones(1, 4)).abs().sum().detach())
        return "the forward pass uses parameters from before the optimizer step" if found else ""

    yield "odd", odd
    yield "uneven-sizes", uneven_sizes
    yield "precision", precision
    yield "old-parameters", old_parameters


KINDS = {"ddp": ddp_cases, "zero1": zero1_cases, "fsdp": fsdp_cases}


def main() -> None:
    kind, file = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        specification = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert specification and specification.loader
        module = sys.modules[Path(file).stem] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        for name, case in KINDS[kind](module):
            report(name, None)
            try:
                problem = case()
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            problems: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(problems, problem)
            report(name, next((each for each in problems if each), ""))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    from workshop.course import built_cases  # so that a probe can replace built_cases.report

    built_cases.main()
