"""Cases for the class MixtureOfExperts and the function average_gradients of exercise 7."""

from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workshop.check.rules.words import plural
from workshop.course.built.cases import CLOSE, STEPS, Case, far

WIDTH, LENGTH = 6, 5
MOST_ROWS = 1.5  # that experts may compute for each choice


class Expert(nn.Module):
    """Counts the rows that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.rows = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows += len(rows)
        return self.down(torch.tanh(self.up(rows)))


class Reference(nn.Module):
    """The layer in one process: all experts compute all tokens, and each token takes what it has chosen."""

    def __init__(self, experts: int, top_k: int, capacity_factor: float | None):
        super().__init__()
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.probabilities = self.router(x).softmax(-1)
        gates, self.choices = self.probabilities.topk(self.top_k)
        self.kept = self.kept_of(self.choices)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)  # sequences x length x experts x width
        chosen = outputs.gather(-2, self.choices.unsqueeze(-1).expand(*self.choices.shape, WIDTH))
        return (chosen * (gates * self.kept).unsqueeze(-1)).sum(-2)

    def kept_of(self, choices: torch.Tensor) -> torch.Tensor:
        kept = torch.ones(choices.shape, dtype=torch.float64)
        if self.capacity_factor is None:
            return kept
        for sequence, tokens in enumerate(choices.tolist()):
            taken: Counter[int] = Counter()
            for place, of_token in enumerate(tokens):
                for number, expert in enumerate(of_token):
                    limit = self.capacity_factor * self.top_k * len(tokens) / len(self.experts)
                    kept[sequence, place, number] = taken[expert] < limit
                    taken[expert] += taken[expert] < limit
        return kept

    def balance_loss(self) -> torch.Tensor:
        counts = self.choices.flatten().bincount(minlength=len(self.experts)).double()
        mean = self.probabilities.flatten(0, -2).mean(0)
        return len(self.experts) * (counts / counts.sum() * mean).sum()


@dataclass
class Setting:
    """What a case trains: ``parts`` are the tokens of each rank of ``group``."""

    parts: list[torch.Tensor]
    top_k: int = 1
    capacity_factor: float | None = None
    balance: float = 0.0
    group: Any = None
    seed: int = 0

    @property
    def experts(self) -> int:
        return 4 * len(self.parts)

    def uneven(self, layer: Any) -> Any:
        """Make the router choose the first expert never, and some others often."""
        with torch.no_grad():
            layer.router.weight[:1] = -9
            layer.router.weight[2:4] += 0.5
        return layer.double()

    def reference(self) -> Any:
        torch.manual_seed(self.seed)
        return self.uneven(Reference(self.experts, self.top_k, self.capacity_factor))


def tokens_of(ranks: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return list(torch.rand(ranks, 3, LENGTH, WIDTH, dtype=torch.float64, generator=chance))


def stepped(layer: nn.Module, loss: Any, average: Any = lambda: None) -> None:
    """Make a step; a scale for each number of the output gives each token a gradient of its own."""
    layer.zero_grad()
    loss.backward()
    average()
    with torch.no_grad():
        for each in layer.parameters():
            if each.grad is not None:
                each -= 0.5 * each.grad


def scaled(output: torch.Tensor) -> torch.Tensor:
    return (output * torch.linspace(-1, 1, WIDTH, dtype=output.dtype)).square().sum()


def of_layer(module: ModuleType, setting: Setting) -> str:
    """Compare some steps with one process."""
    ranks, rank, group = len(setting.parts), dist.get_rank(setting.group), setting.group
    single, made = setting.reference(), []
    torch.manual_seed(setting.seed)

    def make_expert() -> Expert:
        made.append(Expert())
        return made[-1]

    sizes = {"top_k": setting.top_k, "capacity_factor": setting.capacity_factor}
    layer = setting.uneven(module.MixtureOfExperts(WIDTH, make_expert, setting.experts, **sizes, group=group))
    first = sum(map(len, setting.parts[:rank]))
    for step in range(STEPS):
        when = f" after {plural(step, 'step')}" if step else ""
        whole, own = torch.cat(setting.parts).requires_grad_(), setting.parts[rank].clone().requires_grad_()
        for each in made:
            each.rows = 0
        expected, found = single(whole), layer(own)
        rows = torch.tensor(sum(each.rows for each in made))
        dist.all_reduce(rows, group=group)
        wrong = [far(found, expected[first : first + len(own)], f"the output{when}")]
        if rows > MOST_ROWS * single.kept.sum():
            wrong.append(f"the experts compute {rows} rows for {int(single.kept.sum())} choices of tokens")
        losses = [scaled(expected) / ranks, scaled(found)]
        if setting.balance:
            losses = [
                loss + setting.balance * each.balance_loss() for loss, each in zip(losses, (single, layer), strict=True)
            ]
        stepped(single, losses[0])
        stepped(layer, losses[1], lambda: module.average_gradients(layer, group))
        if len(own) and not setting.balance:
            gradient = whole.grad[first : first + len(own)]
            wrong.append(far(own.grad / ranks, gradient, f"the gradient of the input{when}, divided by the ranks,"))
        if any(wrong):
            return next(filter(None, wrong))
    return ""


def layer(module: ModuleType) -> str:
    parts = tokens_of(dist.get_world_size())
    return next(filter(None, (of_layer(module, Setting(parts, top_k)) for top_k in (1, 3))), "")


def group(module: ModuleType) -> str:
    """Two groups, each with its own layer; with an odd number of ranks, each rank is a group."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = ranks // 2 if ranks % 2 == 0 else 1
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    parts = tokens_of(ranks)[rank // size * size :][:size]
    return of_layer(module, Setting(parts, group=groups[rank // size], seed=rank // size))


def no_tokens(module: ModuleType) -> str:
    """Rank 0 has no tokens, and all tokens need one expert; only the tokens of the last rank need a gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layer = module.MixtureOfExperts(WIDTH, Expert, 2 * ranks)
    with torch.no_grad():
        layer.router.weight.fill_(-1)
        layer.router.weight[1] = 1
    start = layer.router.weight.detach().clone()
    shape = [0 if rank == 0 else 2, LENGTH, WIDTH]
    output = layer(torch.ones(shape, requires_grad=rank == ranks - 1))
    if list(output.shape) != shape:
        return f"the output has the shape {list(output.shape)} instead of {shape}"
    output.sum().backward()
    module.average_gradients(layer)
    gradient = layer.router.weight.grad
    if gradient is None or not torch.isfinite(gradient).all() or not torch.equal(layer.router.weight, start):
        return "the router has no gradient"
    return ""


def capacity(module: ModuleType) -> str:
    parts = tokens_of(dist.get_world_size())
    for top_k, factor in ((1, 0.5), (3, 0.8), (2, 2.0)):
        if problem := of_layer(module, Setting(parts, top_k, factor)):
            return f"{problem} (top_k={top_k}, capacity_factor={factor})"
    return ""


def balance(module: ModuleType) -> str:
    parts = tokens_of(dist.get_world_size())
    for setting in (Setting(parts, 2), Setting(parts, 1, 0.5)):
        torch.manual_seed(0)
        layer = setting.uneven(
            module.MixtureOfExperts(WIDTH, Expert, setting.experts, setting.top_k, setting.capacity_factor)
        )
        single, own = setting.reference(), parts[dist.get_rank()]
        for step in range(STEPS):
            single(torch.cat(parts))
            layer(own)
            expected, found = single.balance_loss(), layer.balance_loss()
            if not abs(float(found - expected)) < CLOSE:
                when = f"after {plural(step, 'step')} with its gradient" if step else "before the first step"
                return f"{when}, balance_loss() is {float(found):.6f} on rank {dist.get_rank()} instead of {float(expected):.6f}"
            if not found.requires_grad:
                return "balance_loss() has no gradient"
            stepped(single, expected)
            stepped(layer, found, lambda layer=layer: module.average_gradients(layer))
    return ""


def impossible(module: ModuleType) -> str:
    ranks = dist.get_world_size()
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"experts": 2 * ranks + 1}, (1, 2, WIDTH)),
        ({"experts": 2 * ranks, "top_k": 2 * ranks + 1}, (1, 2, WIDTH)),
        ({"experts": 2 * ranks, "top_k": 0}, (1, 2, WIDTH)),
        ({"experts": 2 * ranks, "capacity_factor": 0}, (1, 2, WIDTH)),
        ({"experts": 2 * ranks}, (1, 2, WIDTH - 1)),
    ]
    for options, shape in cases:
        try:
            module.MixtureOfExperts(WIDTH, Expert, **options)(torch.zeros(shape))
        except ValueError:
            continue
        words = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"no ValueError for {words} and an input of the shape {list(shape)}"
    return ""


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "experts-impossible": impossible,
    "balance": balance,
    "experts-layer": layer,
    "capacity": capacity,
    "experts-group": group,
    "no-tokens": no_tokens,
}
