"""Record how a program uses the modules of the course: the figures in its log, and the samples that it prepares."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import FineTuningBegun, FineTuningReported, Reported, SamplesPrepared
from workshop.check.probes.probe import Probe, after, before, on
from workshop.data.datasets import Digits
from workshop.training.finetuning import TrainingLog
from workshop.training.logs import EpochLog


class Reports(Probe):
    """Records the arguments of ``EpochLog.write``, and the true figures at that moment."""

    writes = (Reported,)

    def clear(self) -> None:
        self.test_set: Digits | None = None

    @after(Digits, "__init__")
    def _digits(self, _: None, digits: Digits, train: bool, transform: Callable[..., object] | None = None) -> None:
        # The model is evaluated with the program's transform, if it has one.
        if not train and (transform is not None or self.test_set is None):
            self.test_set = digits

    @before(EpochLog, "write")
    def _write(
        self, log: EpochLog, epoch: int, losses: Any, accuracy: Any, samples_per_second: Any, **metrics: Any
    ) -> None:
        truth, failed = self._truth()
        self.note_here(
            Reported(
                losses=[float(loss) for loss in losses],
                accuracy=None if accuracy is None else float(accuracy),
                samples_per_second=float(samples_per_second),
                metrics={name: float(value) for name, value in metrics.items()},
                truth=truth,
                samples=len(self.test_set) if truth and self.test_set is not None else 0,
                failed=failed,
            )
        )

    def _truth(self) -> tuple[dict[str, float], str]:
        """Compute the figures of the model over the whole test set; also return why this failed, or ""."""
        model, test_set = self.recorder.model, self.test_set
        if test_set is None or model is None:
            return {}, "the program has no test set from load_dataset(), or no model"
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            return {}, "with ZeRO-3 no process can evaluate the model alone"
        was_training = model.training
        try:
            with self.recorder.quietly():
                return _evaluate(model, test_set), ""
        except Exception as error:  # the learner's model may need different inputs, and raise anything
            return {}, f"{type(error).__name__}: {error}"
        finally:
            model.train(was_training)


def _evaluate(model: nn.Module, test_set: Digits) -> dict[str, float]:
    """Compute the accuracy and the macro F1 score."""
    with torch.random.fork_rng(devices=[]):  # a random transform must not change the random numbers of the program
        samples = [test_set[index] for index in range(len(test_set))]
    images = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    model.eval()
    with torch.no_grad():
        device = next(model.parameters()).device
        predictions = model(images.to(device)).argmax(dim=1).cpu()
    confusion = (labels * 10 + predictions).bincount(minlength=100).view(10, 10).double()
    f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return {"accuracy": (predictions == labels).double().mean().item(), "macro_f1": f1.mean().item()}


class PreparedSamples(Probe):
    """Counts the samples that the program reads from ``Digits`` one by one."""

    writes = (SamplesPrepared,)

    def clear(self) -> None:
        self.count = 0

    @before(Digits, "__getitem__")
    def _get(self, *_: Any) -> None:
        self.count += not self.recorder.quiet

    @on("after_step")
    def _note(self, optimizer: Optimizer) -> None:
        self.recorder.note(SamplesPrepared(count=self.count))


class FineTuning(Probe):
    """Records the arguments of the log of a language model's training."""

    writes = (FineTuningBegun, FineTuningReported)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import the model that such programs train, and disable the progress bars of transformers."""
        importlib.import_module("transformers.models.llama.modeling_llama")
        importlib.import_module("transformers.utils.logging").disable_progress_bar()

    @before(TrainingLog, "begin")
    def _begin(self, log: TrainingLog, validation_loss: Any, *_: Any, **__: Any) -> None:
        self.note_here(FineTuningBegun(validation_loss=float(validation_loss)))

    @before(TrainingLog, "write")
    def _write(self, log: TrainingLog, step: Any, losses: Any, validation_loss: Any, seconds: Any) -> None:
        values = [float(loss) for loss in losses]
        self.note_here(FineTuningReported(losses=values, validation_loss=float(validation_loss)))


COURSE_PROBES: tuple[type[Probe], ...] = (Reports, PreparedSamples, FineTuning)
