"""Actions of the Lightning Trainer that the functions of torch do not show."""

import importlib
import os
from typing import Any, ClassVar

from workshop.check.evidence.events import CallbacksSeen, Event, MetricsLogged, Saved, TrainerFit
from workshop.check.probes.probe import Probe, after, before


class Lightning(Probe):
    """Records ``Trainer.fit``, callbacks, loggers and checkpoints."""

    # (Without ``Saved``: a rule that needs it does not need Lightning.)
    writes: ClassVar[tuple[type[Event], ...]] = (TrainerFit, CallbacksSeen, MetricsLogged)
    library = "lightning"
    package = "lightning.pytorch"

    @after(lambda package: package.Trainer, "__init__")
    def _init(self, result: None, trainer: Any, *args: Any, **kwargs: Any) -> None:
        recorder, package = self.recorder, importlib.import_module(self.package)

        class Observer(package.Callback):  # type: ignore[misc,name-defined]  # the package has two names
            def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
                recorder.quiet += 1  # these few batches are not an evaluation of the program

            def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
                recorder.quiet -= 1

            def on_train_start(self, trainer: Any, module: Any) -> None:
                recorder.fitting = True
                with recorder.guard:
                    stop = _monitored(trainer, package.callbacks.EarlyStopping)
                    best = _monitored(trainer, package.callbacks.ModelCheckpoint)
                    recorder.note(CallbacksSeen(stop=stop, best=best))

            def on_train_end(self, trainer: Any, module: Any) -> None:
                recorder.fitting = False

        trainer.callbacks.append(Observer())

    @before(lambda package: package.Trainer, "save_checkpoint")
    def _save(self, trainer: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            self.recorder.saved += 1
            accuracy = trainer.callback_metrics.get("accuracy")
            accuracy = None if accuracy is None else float(accuracy)
            self.note_here(Saved(path=os.path.realpath(filepath), keys=[], whole=True, accuracy=accuracy))

    @before(lambda package: package.Trainer, "fit")
    def _fit(self, *args: Any, **kwargs: Any) -> None:
        self.note_here(TrainerFit())

    @before(lambda package: package.loggers.CSVLogger, "log_metrics")
    @before(lambda package: package.loggers.TensorBoardLogger, "log_metrics")
    def _log(self, logger: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.note(MetricsLogged(names=sorted(metrics)))


class PytorchLightning(Lightning):
    """The same for programs that import Lightning under its earlier name."""

    writes = ()  # rules that need these events get Lightning
    library = package = "pytorch_lightning"


def _monitored(trainer: Any, kind: type[Any]) -> list[tuple[str, str]]:
    return [(each.monitor, each.mode) for each in trainer.callbacks if isinstance(each, kind) and each.monitor]
