"""The cross entropy that the loss is made of, over how many targets it is the mean, and the constants that weight the loss."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F

from workshop.check.evidence.events import Event, LossComputed, LossWeighted
from workshop.check.evidence.misuses import LabelsShifted, LossCounted, LossOfProbabilities, LossReduced, LossScaled
from workshop.check.probes.contents import mean
from workshop.check.probes.probe import Probe, after, on

FIRST = 6  # backward passes whose loss is looked at
SHORT = 8  # elements of a vector of factors, such as one for each task
MOST = 400  # backward passes of which single factors are looked at
NEAR = 24  # nodes of the autograd graph behind a loss
FEW, LARGEST = 64, 10_000_000  # different constants, and elements of the tensor that contains them
ARGUMENTS = ("_raw_saved_weight", "_raw_saved_pos_weight")
FACTORS = ("_raw_saved_other", "_raw_saved_self")
VIEWS = re.compile(r"(View|UnsafeView|Reshape|Squeeze|Unsqueeze|Select|Slice|Alias|ToCopy|T|Transpose|Permute)Backward")
MEANS = re.compile(r"(MseLoss|L1Loss|SmoothL1Loss|HuberLoss|BinaryCrossEntropy)")
ELEMENTWISE = re.compile(r"(Abs|Pow|Neg|Sub|Add|Mul|Log|Exp|Softplus|LogSigmoid|Sqrt)Backward|" + VIEWS.pattern)
CHAIN = 6  # functions of single elements one after the other
CAUSAL = re.compile(r"ForCausalLM|LMHead")  # the language models of transformers


class Losses(Probe):
    """Records each ``cross_entropy`` with gradients; targets with the value ``ignore_index`` do not count."""

    writes = (LossComputed, LossWeighted, LossScaled, LossCounted, LossReduced, LossOfProbabilities, LabelsShifted)

    def clear(self) -> None:
        self.passes, self.line = 0, ""  # the line of the last cross entropy
        self.told: set[str] = set()  # lines with a wrong input of a loss
        self.reduced: list[tuple[Any, LossReduced, float]] = []  # since the last backward pass: node, event, and value

    @after(F, "cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", named=True)
    def _input(self, name: str, result: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._tell(LossOfProbabilities(name=name, of=_squashed(input)) if _squashed(input) else None)

    @on("before_forward")
    def _labels(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = type(getattr(module, "module", module)).__name__
        inputs, labels = kwargs.get("input_ids", args[0] if args else None), kwargs.get("labels")
        if CAUSAL.search(model) and isinstance(inputs, torch.Tensor) and isinstance(labels, torch.Tensor):
            self._tell(LabelsShifted(model=model) if _shifted(inputs, labels) else None)

    def _tell(self, event: Event | None) -> None:
        where = self.recorder.where() if event else ""
        if event and where not in self.told:
            self.told.add(where)
            self.recorder.note(dataclasses.replace(event, where=where))

    @after(c10d, "all_reduce", "reduce", named=True)
    def _reduce(self, name: str, result: Any, tensor: Any = None, *args: Any, **kwargs: Any) -> None:
        changed = isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and tensor.numel() == 1
        if changed and result is None and self.passes <= MOST and (value := mean(tensor)):
            event = LossReduced(name=name, factor=1.0, where=self.recorder.where())
            self.reduced = [*self.reduced[-1:], (tensor.grad_fn, event, value)]

    @on("before_backward")
    def _reduced(self, loss: torch.Tensor | None) -> None:
        reduced, self.reduced = self.reduced, []  # a node keeps its graph in memory
        nodes = set(_nodes(loss)) if reduced else set()
        for node, event, value in reduced:
            if node in nodes and (now := mean(loss)) is not None:
                divided = _constant_after(node, nodes)
                self.recorder.note(dataclasses.replace(event, factor=divided or now / value))

    @on("before_backward")
    def _weights(self, loss: torch.Tensor | None) -> None:
        self.passes += 1
        if self.passes <= MOST and (factors := [*_single(loss)]):
            self.recorder.note(LossScaled(factors=factors))
        if self.passes <= MOST and (counts := [*dict.fromkeys(_counts(loss))]):
            self.note_here(LossCounted(counts=counts))
        if self.passes > FIRST:
            return
        for node in _nodes(loss):
            names = (*ARGUMENTS, *FACTORS) if node.name().startswith(("Mul", "Div")) else ARGUMENTS
            for name in names:
                # Without its hooks, because these may compute a checkpointed layer again.
                constants = getattr(getattr(node, name, None), "data", None)
                values = _few(constants, name in ARGUMENTS) if isinstance(constants, torch.Tensor) else []
                if len(values) > 1:
                    event = LossWeighted(values=values, argument=name in ARGUMENTS, where=self.line)
                    self.recorder.note(event) if self.line else self.note_here(event)

    @after(F, "cross_entropy")
    def _cross_entropy(
        self,
        result: torch.Tensor,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if result.requires_grad:
            self.line = self.recorder.where()
        if not result.requires_grad or weight is not None or target.is_floating_point() or reduction == "none":
            return
        targets = int((target != ignore_index).sum())
        if targets:
            value, summed = float(result.detach()), reduction != "mean"
            self.note_here(LossComputed(targets=targets, mean=value / targets if summed else value, summed=summed))


def _squashed(tensor: torch.Tensor) -> str:
    """The function that has made probabilities of the outputs of a model; "" if there is none."""
    node = tensor.grad_fn
    while node is not None and VIEWS.match(node.name()):
        node = node.next_functions[0][0]
    return next((name for name in ("softmax", "sigmoid") if node and node.name().lower().startswith(name)), "")


def _shifted(inputs: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether each label is the token that follows the one in its place."""
    if inputs.shape != labels.shape or labels.dim() != 2 or labels.shape[1] < 3:
        return False
    counted = labels[:, :-1] >= 0
    following = (labels[:, :-1] == inputs[:, 1:])[counted]
    return following.numel() > 0 and bool(following.all()) and not bool((labels == inputs)[:, :-1][counted].all())


def _nodes(loss: torch.Tensor | None) -> Iterator[Any]:
    """Yield the nodes of the autograd graph behind a loss, the nearest first."""
    level = [loss.grad_fn] if loss is not None else []
    seen: set[Any] = set()
    for node in level:
        if node is not None and node not in seen and len(seen) < NEAR:
            seen.add(node)
            yield node
            level += [following for following, _ in node.next_functions]


def _constant_after(node: Any, nodes: set[Any]) -> float:
    """The constant by which the result of a node, such as a term of a loss, is multiplied next; 0: it is not."""
    for each in nodes:
        if node in (following for following, _ in each.next_functions) and each.name().startswith(("Mul", "Div")):
            for name in FACTORS:
                constant = getattr(getattr(each, name, None), "data", None)
                if isinstance(constant, torch.Tensor) and constant.numel() == 1 and not constant.requires_grad:
                    number = float(constant)
                    return 1 / number if each.name().startswith("Div") and number else number
    return 0.0


def _single(loss: torch.Tensor | None) -> Iterator[float]:
    """Yield the numbers by which something behind a loss is multiplied or divided: single ones, and those of short vectors."""
    for node in _nodes(loss):
        for name in FACTORS if node.name().startswith(("Mul", "Div")) else ():
            constant = getattr(getattr(node, name, None), "data", None)
            if not isinstance(constant, torch.Tensor) or constant.requires_grad or constant.numel() > SHORT:
                continue
            if not constant.dim() or (constant.dim() == 1 and constant.is_floating_point()):
                yield from map(float, constant.flatten().tolist())


def _counts(loss: torch.Tensor | None) -> Iterator[int]:
    """Yield the whole numbers by which something behind a loss is divided, and how many elements it has chosen for a mean."""
    for node in _nodes(loss):
        name = node.name()
        if name.startswith("Div"):
            numbers = getattr(getattr(node, "_raw_saved_other", None), "data", None)
            if isinstance(numbers, torch.Tensor) and not numbers.requires_grad and numbers.numel() <= SHORT:
                values = map(float, numbers.flatten().tolist())
                yield from (int(each) for each in values if each > 1 and each.is_integer())
        elif name.startswith("MeanBackward0") and _chooses(node):
            yield int(node._saved_self_sym_numel)
        elif MEANS.match(name) and node._saved_reduction == 1 and _chooses(node):
            yield node._raw_saved_self.data.numel()


def _chooses(node: Any) -> bool:
    """Whether a function of single elements gets those that an index or a mask has chosen."""
    for _ in range(CHAIN):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None or not ELEMENTWISE.match(node.name()):
            break
    return node is not None and node.name().startswith(("IndexBackward", "MaskedSelectBackward"))


def _few(constants: torch.Tensor, argument: bool) -> list[float]:
    """The values of a tensor without gradients, if there are only a few different ones."""
    if constants.requires_grad or not constants.is_floating_point() or constants.numel() > LARGEST:
        return []
    if argument:
        return [float(value) for value in constants.flatten().tolist()] if constants.numel() <= FEW else []
    values = constants.detach().flatten()
    different = values[:1] if len(values) > 2 * FEW and len(values[: 2 * FEW].unique()) > FEW else values.unique()
    return [float(value) for value in different.tolist()] if 2 * len(different) <= len(values) else []
