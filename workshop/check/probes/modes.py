"""The mode in which a program calls models with dropout or BatchNorm, and the statistics of BatchNorm in evaluations."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from workshop.check.evidence.events import Sketch
from workshop.check.evidence.misuses import (
    EvaluationGraph,
    FrozenAtRandom,
    ModeEvaluated,
    ModeSeen,
    StatisticsSeen,
    StatisticsStale,
)
from workshop.check.probes.contents import is_synchronized, mixed
from workshop.check.probes.probe import Probe, after, before, on
from workshop.check.probes.steps import largest_graph
from workshop.tensors import own_part

EVALUATIONS = 4  # whose statistics are recorded, of each model
MEASURED = (2, 3, 4)  # batches of an evaluation before which the largest graph is looked for
SOME = 4  # parameters of a copy that show whether it has changed
OFTEN = 5  # steps after which a model that has not changed is frozen


@dataclass
class _Frozen:
    """A model that is only evaluated, and in training mode."""

    name: str
    where: str  # the line that froze it, or else the one that calls it
    values: dict[tuple[str, type], Sketch]  # of some of its parameters
    steps: set[int] = field(default_factory=set)  # the numbers of steps before its calls
    changed: bool = False  # or it has been in evaluation mode, or trained


class Modes(Probe):
    """Records changes between training mode and evaluation mode, and the statistics with which models are evaluated."""

    writes = (ModeSeen, ModeEvaluated, StatisticsSeen, StatisticsStale, EvaluationGraph, FrozenAtRandom)

    def clear(self) -> None:
        self.batches = 0  # forward passes with gradients in evaluation mode, since the last backward pass
        self.graphs: dict[int, int] = {}  # the nodes of the largest graph before some of them
        self.measured, self.evaluates = False, ""  # the line that calls the model
        self.latest: dict[
            nn.Module, bool
        ] = {}  # the mode in the last forward pass with gradients, since the last backward
        self.trained: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # the mode in the last backward pass
        self.evaluated: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()
        self.called = ""  # the line of the last eval()
        self.asks = False  # whether a class of the program looks at the mode of its modules
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.counted: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()  # the steps before its evaluations
        self.synchronized: WeakSet[nn.Module] = WeakSet()  # DDP sends their buffers
        self.renewed: WeakSet[nn.Module] = WeakSet()  # update_bn() has computed their statistics
        # Copies, and at their last evaluation: some parameters, their statistics, and those of the trained model.
        self.copies: WeakKeyDictionary[nn.Module, tuple[list[Sketch], ...]] = WeakKeyDictionary()
        self.stale: WeakSet[nn.Module] = WeakSet()
        self.froze: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # the line that froze a model
        self.frozen: WeakKeyDictionary[nn.Module, _Frozen | None] = WeakKeyDictionary()  # None: it drops nothing
        self.dropping: list[_Frozen] = []  # the others; at the end the models may be gone
        self.looked: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # the steps before the last look at a copy

    @after(DistributedDataParallel, "__init__")
    def _wrap(self, result: None, ddp: Any, *args: Any, **kwargs: Any) -> None:
        if ddp.broadcast_buffers:
            self.synchronized.add(ddp.module)

    @before(nn.Module, "eval")
    def _eval(self, module: nn.Module) -> None:
        self.called = self.recorder.where()
        self.asks = self.asks or any(self.recorder.of_program(each) and _asks(type(each)) for each in module.modules())

    @on("before_forward")
    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = _inner(module)
        # A teacher that is called with gradients enabled, but has no trained parameters, is not trained.
        learns = any(each.requires_grad for each in model.parameters())
        if learns and torch.is_grad_enabled() and not self.recorder.quiet:
            self.latest[model] = model.training
            if not model.training and not self.measured:
                self.batches += 1
                if self.batches in MEASURED:
                    self.graphs[self.batches] = largest_graph()
                    self.evaluates = self.recorder.where()

    def _note_graphs(self) -> None:
        """Record how the graph has grown in an evaluation, when the training goes on with a model in training mode."""
        if len(self.graphs) > 2 and not self.measured and any(self.latest.values()):
            self.measured = True
            nodes, batches = list(self.graphs.values()), list(self.graphs)
            self.recorder.note(EvaluationGraph(nodes=nodes, batches=batches, where=self.evaluates))
        self.batches, self.graphs = 0, {}

    @on("before_backward")
    def _backward(self, loss: torch.Tensor) -> None:
        self._note_graphs()
        for model, training in self.latest.items():
            before = self.trained.get(model)
            if before is None or (before is not training and (self.asks or _depends_on_mode(model))):
                self.recorder.note(ModeSeen(model=self._name(model), training=training, called=self.called))
            self.trained[model] = training
        self.latest.clear()

    @on("before_evaluation")
    def _evaluate(self, model: nn.Module) -> None:
        if not self.recorder.quiet and _depends_on_mode(model):
            self._watch(model)
            modes = self.evaluated.setdefault(model, set())
            if model.training not in modes:
                modes.add(model.training)
                self.note_here(ModeEvaluated(model=self._name(model), training=model.training))
            if not model.training and not self.synchronized:
                self._count(model)
            if not model.training and model not in self.trained:
                self._look_at_copy(model)

    @after(nn.Module, "requires_grad_")
    def _freeze(self, result: nn.Module, module: nn.Module, requires_grad: bool = True) -> None:
        if not requires_grad and module not in self.froze:
            self.froze[module] = self.recorder.where()

    def _watch(self, model: nn.Module) -> None:
        """Look whether a model that no backward pass reaches drops values at random, but never changes otherwise."""
        steps = self.recorder.steps
        if model not in self.frozen:
            drops = any(map(_drops, model.modules())) and not any(each.requires_grad for each in model.parameters())
            where = self.froze.get(model) or self.recorder.where()
            self.frozen[model] = _Frozen(self._name(model), where, _values(model)) if drops else None
            self.dropping += filter(None, [self.frozen[model]])
        frozen = self.frozen[model]
        if frozen is None or frozen.changed:
            return
        frozen.changed = not model.training or model in self.trained
        if steps not in frozen.steps and (len(frozen.steps) < OFTEN or steps.bit_count() == 1):
            frozen.steps.add(steps)
            frozen.changed |= any(frozen.values.get(name, value) != value for name, value in _values(model).items())

    @on("at_end")
    def _end(self) -> None:
        for frozen in self.dropping:
            if len(frozen.steps) >= OFTEN and not frozen.changed:
                last = max(frozen.steps) - min(frozen.steps)
                self.recorder.note(FrozenAtRandom(model=frozen.name, steps=last, where=frozen.where))

    @before(swa_utils, "update_bn")
    def _renew(self, loader: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.renewed.add(model)

    def _count(self, model: nn.Module) -> None:
        """Record the statistics of BatchNorm of a model, once between two steps."""
        layers = [each for each in _norms(model) if not is_synchronized(each)]
        times = self.counted.setdefault(model, [])
        if layers and len(times) < EVALUATIONS and self.recorder.steps not in times:
            times.append(self.recorder.steps)
            self.note_here(StatisticsSeen(model=self._name(model), statistics=_statistics(layers), steps=times[-1]))

    def _look_at_copy(self, model: nn.Module) -> None:
        """Record a copy of the trained model whose parameters have changed, but not its statistics of BatchNorm."""
        layers = _norms(model)
        if not layers or model in self.stale or model in self.renewed or self.looked.get(model) == self.recorder.steps:
            return
        self.looked[model] = self.recorder.steps  # the other batches of an evaluation show the same
        averaged = isinstance(model, swa_utils.AveragedModel)
        if isinstance(model, swa_utils.AveragedModel):
            own_average = model.avg_fn or getattr(model, "multi_avg_fn", None) or model.use_buffers
            stale = not own_average and int(model.n_averaged) > 1
        else:
            originals = (each for each in self.trained if len(_norms(each)) == len(layers))
            if (original := next(originals, None)) is None:
                return
            some = [mixed(each) for _, each in zip(range(SOME), model.parameters(), strict=False)]
            now = some, _statistics(layers), _statistics(_norms(original))
            before = self.copies.get(model, now)
            self.copies[model] = now
            stale = [one != other for one, other in zip(before, now, strict=True)] == [True, False, True]
        if stale:
            self.stale.add(model)
            self.note_here(StatisticsStale(model=self._name(model), averaged=averaged))

    def _name(self, model: nn.Module) -> str:
        if model not in self.names:
            kind = type(model).__name__
            alike = sum(each.partition(" ")[0] == kind for each in self.names.values())
            self.names[model] = f"{kind} {alike + 1}" if alike else kind
        return self.names[model]


def _norms(model: nn.Module) -> list[_NormBase]:
    """The layers of a model that keep statistics of the batches that they have seen."""
    return [each for each in model.modules() if isinstance(each, _NormBase) and each.running_mean is not None]


def _statistics(layers: list[_NormBase]) -> list[Sketch]:
    tensors = [each for layer in layers for each in (layer.running_mean, layer.running_var) if each is not None]
    return [mixed(each) for each in tensors]


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _asks(kind: type) -> bool:
    """Whether a method of a class looks at ``self.training``."""
    codes = (getattr(method, "__code__", None) for method in vars(kind).values())
    return any(code is not None and "training" in code.co_names for code in codes)


def _depends_on_mode(model: nn.Module) -> bool:
    """Whether a model has a layer with dropout, or with statistics of the batches that it has seen."""

    def depends(layer: nn.Module) -> bool:
        return _drops(layer) or (isinstance(layer, _NormBase) and layer.track_running_stats)

    return any(map(depends, model.modules()))


def _drops(layer: nn.Module) -> bool:
    """Whether a layer drops values at random in training mode."""
    rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0)
    return isinstance(rate, float) and rate > 0


def _values(model: nn.Module) -> dict[tuple[str, type], Sketch]:
    """Some parameters. Those that FSDP has gathered are of a different type than before."""
    chosen = zip(range(2 * SOME), model.named_parameters(), strict=False)
    return {(name, type(each)): mixed(own_part(each.detach())) for _, (name, each) in chosen}
