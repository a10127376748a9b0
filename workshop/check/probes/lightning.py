"""What Lightning's Trainer does where the functions of torch do not show it."""

import importlib
import importlib.util
import os
import sys
from typing import Any, ClassVar

from workshop.check.evidence.events import CallbacksSeen, Event, MetricsLogged, Saved, TrainerFit
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe


class Lightning(Probe):
    """Notes ``Trainer.fit``, its callbacks, its loggers and its checkpoints.

    (``Saved`` is not among its ``writes``: who needs it does not need Lightning.)
    """

    writes: ClassVar[tuple[type[Event], ...]] = (TrainerFit, CallbacksSeen, MetricsLogged)
    library = "lightning"
    package: ClassVar[str] = "lightning.pytorch"

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import it: that takes seconds."""
        if importlib.util.find_spec(cls.library):
            importlib.import_module(cls.package)

    def install(self) -> None:
        """Replace methods of the Trainer and of the loggers."""
        package: Any = sys.modules.get(self.package)
        if package is None:
            return
        for logger in (package.loggers.CSVLogger, package.loggers.TensorBoardLogger):
            self.patches.wrap(logger, "log_metrics", self._log)
        observer = self._observer(package)
        self.patches.wrap(package.Trainer, "__init__", lambda original: self._init(original, observer))
        self.patches.wrap(package.Trainer, "save_checkpoint", self._save)
        self.patches.wrap(package.Trainer, "fit", self._fit)

    def _observer(self, package: Any) -> Any:
        recorder = self.recorder

        class Observer(package.Callback):  # type: ignore[misc]  # the package has two names, so its class is found at run time
            """Follows the training."""

            def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
                recorder.quiet += 1  # a few batches whose figures nothing shows

            def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
                recorder.quiet -= 1

            def on_train_start(self, trainer: Any, module: Any) -> None:
                recorder.fitting = True
                with recorder.guard:
                    stop, best = (
                        [
                            (each.monitor, each.mode)
                            for each in trainer.callbacks
                            if isinstance(each, kind) and each.monitor
                        ]
                        for kind in (package.callbacks.EarlyStopping, package.callbacks.ModelCheckpoint)
                    )
                    recorder.note(CallbacksSeen(stop=stop, best=best))

            def on_train_end(self, trainer: Any, module: Any) -> None:
                recorder.fitting = False

        return Observer()

    def _init(self, original: Function, observer: Any) -> Function:
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            with self.recorder.guard:
                trainer.callbacks.append(observer)

        return __init__

    def _save(self, original: Function) -> Function:
        recorder = self.recorder

        def save_checkpoint(trainer: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.is_global_zero:
                recorder.saved = True
                with recorder.guard:
                    accuracy = trainer.callback_metrics.get("accuracy")
                    recorder.note(
                        Saved(
                            path=os.path.realpath(filepath),
                            keys=[],
                            whole=True,
                            accuracy=None if accuracy is None else float(accuracy),
                            where=recorder.where(),
                        )
                    )
            return original(trainer, filepath, *args, **kwargs)

        return save_checkpoint

    def _fit(self, original: Function) -> Function:
        def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.guard:
                self.recorder.note(TrainerFit(where=self.recorder.where()))
            return original(trainer, *args, **kwargs)

        return fit

    def _log(self, original: Function) -> Function:
        def log_metrics(logger: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.guard:
                self.recorder.note(MetricsLogged(names=sorted(metrics)))
            return original(logger, metrics, *args, **kwargs)

        return log_metrics


class PytorchLightning(Lightning):
    """The same under its earlier name, for programs that import that."""

    writes = ()  # what needs its events gets Lightning
    library = package = "pytorch_lightning"
