"""Try the classes of a program of stage 06 with models that are different from the one that it trains.

    python workshop/course/built_cases.py KIND FILE        in each process of a group, with the variables of torchrun

KIND is the key ``cases`` of the exercise. Each case compares the class with one process; ``report`` tells the result.
"""

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


# ---------------------------------------------------------------- exercise 1


def ddp_start(module: ModuleType) -> str:
    model = made(dist.get_rank(), uneven=False)
    model.register_buffer("offset", torch.full((6,), float(dist.get_rank()), dtype=torch.float64))
    module.DDP(model)
    expected = made(0).state_dict() | {"offset": torch.zeros(6, dtype=torch.float64)}
    wrong = [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]
    wrong.sort(key="offset".__eq__)  # the buffer last
    if not wrong:
        return ""
    kind = "buffer" if wrong == ["offset"] else "parameter"
    return f"after DDP(), the {kind} {wrong[0]} of rank {dist.get_rank()} is not the one that rank 0 has created"


def ddp_changed(module: ModuleType) -> str:
    model = made(0)
    wrapped = module.DDP(model)
    model.unused = nn.Linear(6, 6).double()
    try:
        wrapped(batches()[0][:2], 0)
    except ValueError as error:
        return "" if "unused" in str(error) else f"the ValueError does not name the parameter: {error}"
    return "forward() raises no ValueError, although a parameter was replaced after DDP() wrapped the module"


def ddp_odd(module: ModuleType) -> str:
    model = made(0)
    together(module.DDP(model, bucket_bytes=200), torch.optim.SGD(model.parameters(), lr=0.1))
    return difference(model.state_dict(), alone())


def ddp_no_gradient(module: ModuleType) -> str:
    model = made(0)
    together(module.DDP(model), decaying(model.parameters(), lr=0.1))
    return difference(model.state_dict(), alone(decaying), UPDATED)


def ddp_twice(module: ModuleType) -> str:
    model = made(0, uneven=False)
    wrapped = module.DDP(model)
    for part in batches()[0].chunk(dist.get_world_size())[dist.get_rank()].chunk(2):
        (wrapped(part, 0).square().mean() / 2).backward()
    finish(wrapped)
    single = made(0, uneven=False)
    single(batches()[0], 0).square().mean().backward()
    found, expected = (
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        for model in (model, single)
    )
    return difference(found, expected, ", after two backward passes")


UPDATED = ", because a parameter without gradients was updated"

# ---------------------------------------------------------------- exercise 2


def give_gradients(model: nn.Module, number: int) -> None:
    chance = torch.Generator().manual_seed(number)
    for each in model.parameters():
        each.grad = torch.randn(each.shape, dtype=each.dtype, generator=chance) if each.requires_grad else None


def plain(parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sharded(module: ModuleType) -> Callable[[Any], Any]:
    return lambda parameters: module.ShardedOptimizer(parameters, torch.optim.Adagrad, lr=0.1)


def trained(
    make: Callable[..., Any], steps: range, state: Any = None, start: Any = None, scheduled: bool = False
) -> tuple[State, Any]:
    """Train with random gradients that are equal on all ranks; return the parameters and the optimizer."""
    model = made(0)
    if start:
        model.load_state_dict(start)
    optimizer = make(model.parameters())
    if state:
        optimizer.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    for number in steps:
        give_gradients(model, number)
        optimizer.step()
        if schedule:
            schedule.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer


def stored(optimizer: Any) -> int:
    """The elements of the state that an optimizer, and those that it contains, stores on this rank."""
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    states = [value for each in (optimizer, *inner) for state in each.state.values() for value in state.values()]
    return sum({id(each): each.numel() for each in states if isinstance(each, torch.Tensor) and each.dim()}.values())


def zero1_other_class(module: ModuleType) -> str:
    return difference(trained(sharded(module), range(3))[0], trained(plain, range(3))[0], ", with Adagrad")


def zero1_scheduled(module: ModuleType) -> str:
    found = trained(sharded(module), range(3), scheduled=True)[0]
    return difference(found, trained(plain, range(3), scheduled=True)[0])


def zero1_shares(module: ModuleType) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(40, 40), *(nn.Linear(20, 20) for _ in range(4)))
    optimizer = module.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    give_gradients(model, 0)
    optimizer.step()
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, stored(optimizer))
    elements = [each.numel() for each in model.parameters()]
    largest = sum(sizes) * max(elements) / sum(elements)  # with many ranks, this parameter alone is more than a share
    if max(sizes) > UNEVEN * max(sum(sizes) / len(sizes), largest):
        return f"the ranks store {' and '.join(map(str, sizes))} elements of optimizer state, which is uneven"
    return ""


def zero1_saved(module: ModuleType) -> str:
    state = trained(sharded(module), range(2))[1].state_dict()["state"]
    expected = trained(plain, range(2))[1].state_dict()["state"]
    if dist.get_rank() > 0:
        return ""  # rank 0 saves the checkpoint
    # Adagrad has a state for frozen parameters too, which no step uses.
    expected = {number: expected[number] for number, each in enumerate(made(0).parameters()) if each.requires_grad}
    if missing := set(expected) - set(state):
        return f"on rank 0, state_dict() has no state of {len(missing)} of {len(expected)} trained parameters"
    found, sums = (
        {f"the state of parameter {key}": each[key]["sum"].cpu() for key in each} for each in (state, expected)
    )
    return difference(found, sums)


def zero1_loaded(module: ModuleType) -> str:
    start, optimizer = trained(plain, range(2))
    found = trained(sharded(module), range(2, 4), optimizer.state_dict(), start)[0]
    return difference(found, trained(plain, range(4))[0], ", after the state was loaded")


def zero1_loaded_part(module: ModuleType) -> str:
    share = stored(trained(sharded(module), range(1))[1])
    state = trained(plain, range(2))[1].state_dict()
    own = stored(trained(sharded(module), range(0), state)[1])
    name = f"rank {dist.get_rank()}"
    return f"after load_state_dict(), {name} stores {own} elements; its share is {share}" if own > share else ""


# ---------------------------------------------------------------- exercise 3


def fsdp_odd(module: ModuleType) -> str:
    wrapped = module.FSDP(made(dist.get_rank()), [])
    together(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return difference(wrapped.full_state_dict(), alone())


def fsdp_no_gradient(module: ModuleType) -> str:
    wrapped = module.FSDP(made(0), [])
    together(wrapped, decaying(wrapped.parameters(), lr=0.1))
    return difference(wrapped.full_state_dict(), alone(decaying), UPDATED)


def fsdp_uneven_sizes(module: ModuleType) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    return difference(module.FSDP(model, [nn.Linear]).full_state_dict(), expected)


def fsdp_precision(module: ModuleType) -> str:
    """The gradients of rank 0 and of the others are exact in bfloat16, but their sum is not."""
    torch.manual_seed(0)
    model, small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 3 * 2.0**-11
    wrapped = module.FSDP(model, [nn.Linear], compute_dtype=torch.bfloat16)
    output = wrapped(torch.ones(2, 8))
    if output.dtype != torch.bfloat16:
        return f"with compute_dtype=torch.bfloat16 the output is {output.dtype}"
    (output.float().sum() * (small if dist.get_rank() else 1)).backward()
    gradients = [each.grad for each in wrapped.parameters() if each.grad is not None]
    if {each.dtype for each in (*wrapped.parameters(), *gradients)} != {torch.float32}:
        return "with compute_dtype the shards or their gradients are not float32"
    with torch.no_grad():
        for shard in wrapped.parameters():
            shard.copy_(torch.zeros_like(shard) if shard.grad is None else shard.grad)
    others = dist.get_world_size() - 1
    found, expected = wrapped.full_state_dict()["1.bias"], 2 * (1 + small * others) / (1 + others)
    if float((found - expected).abs().max()) > 1e-6:
        return f"the mean of gradients is {float(found[0]):.6f} instead of {expected:.6f}: it was rounded to bfloat16"
    return ""


def fsdp_old_parameters(module: ModuleType) -> str:
    torch.manual_seed(0)
    wrapped = module.FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [nn.Linear])
    wrapped(torch.ones(1, 4))  # no backward pass follows
    with torch.no_grad():
        for each in wrapped.parameters():
            each.zero_()
    found = float(wrapped(torch.ones(1, 4)).abs().sum().detach())
    return "the forward pass uses parameters from before the optimizer step" if found else ""


# ---------------------------------------------------------------- all of them

Case = Callable[[ModuleType], str]
# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
KINDS: dict[str, dict[str, Case]] = {
    "ddp": {
        "start": ddp_start,
        "changed": ddp_changed,
        "twice": ddp_twice,
        "no-gradient": ddp_no_gradient,
        "odd": ddp_odd,
    },
    "zero1": {
        "shares": zero1_shares,
        "other-class": zero1_other_class,
        "scheduled": zero1_scheduled,
        "saved": zero1_saved,
        "loaded": zero1_loaded,
        "loaded-part": zero1_loaded_part,
    },
    "fsdp": {
        "old-parameters": fsdp_old_parameters,
        "precision": fsdp_precision,
        "uneven-sizes": fsdp_uneven_sizes,
        "no-gradient": fsdp_no_gradient,
        "odd": fsdp_odd,
    },
}


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
        specification = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[Path(file).stem] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        for name, case in KINDS[kind].items():
            attempt(name, case, module)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    from workshop.course import built_cases  # so that a probe can replace built_cases.report

    built_cases.main()
