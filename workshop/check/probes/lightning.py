"""Actions of the Lightning Trainer that the functions of torch do not show."""

import importlib
import os
from typing import Any, ClassVar

import torch

from workshop.check.evidence.events import (
    CallbacksSeen,
    Event,
    MetricsLogged,
    MonitorSeen,
    Saved,
    TrainerFit,
)
from workshop.check.evidence.misuses import DataModuleSeen, SamplesCounted, StatePrepared
from workshop.check.probes.contents import first_tensor
from workshop.check.probes.probe import Function, Probe, after, around, before

SHORT = 200  # letters of a value


class Lightning(Probe):
    """Records ``Trainer.fit``, callbacks, loggers and checkpoints."""

    # (Without ``Saved``: a rule that needs it does not need Lightning.)
    writes: ClassVar[tuple[type[Event], ...]] = (
        TrainerFit,
        CallbacksSeen,
        MonitorSeen,
        MetricsLogged,
        SamplesCounted,
        StatePrepared,
        DataModuleSeen,
    )
    library = "lightning"
    package = "lightning.pytorch"

    def clear(self) -> None:
        self.lines: dict[str, str] = {}  # by the name of a value, the line that logs it

    @after(lambda package: package.Trainer, "__init__")
    def _init(self, result: None, trainer: Any, *args: Any, **kwargs: Any) -> None:
        recorder, lines, package = self.recorder, self.lines, importlib.import_module(self.package)

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
                    data = getattr(trainer, "datamodule", None)
                    if data is not None and "prepare_data" in vars(type(data)):
                        recorder.note(DataModuleSeen(values=_shown(data)))

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                with recorder.guard:
                    for name in () if trainer.sanity_checking else _monitors(trainer, package.callbacks):
                        if (value := trainer.callback_metrics.get(name)) is not None:  # computed and exchanged before
                            recorder.note(MonitorSeen(name=name, value=float(value), where=lines.get(name, "")))

            def on_train_end(self, trainer: Any, module: Any) -> None:
                recorder.fitting = False

        trainer.callbacks.append(Observer())

    @after(lambda package: package.callbacks.ThroughputMonitor, "__init__")
    def _throughput(self, result: None, monitor: Any, *args: Any, **kwargs: Any) -> None:
        original, where = monitor.batch_size_fn, self.recorder.where()

        def counted(batch: Any) -> int:
            number = int(original(batch))
            with self.recorder.guard:
                tensor = first_tensor(batch)
                if tensor is not None and monitor.batch_size_fn is counted:
                    self.recorder.note(SamplesCounted(counted=number, rows=len(tensor), where=where))
            monitor.batch_size_fn = original  # one batch is enough
            return number

        monitor.batch_size_fn = counted

    @around(lambda package: package.trainer.call, "_call_lightning_datamodule_hook")
    def _hook(self, original: Function, trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if hook_name != "prepare_data":
            return original(trainer, hook_name, *args, **kwargs)
        before = dict(vars(trainer.datamodule))
        result = original(trainer, hook_name, *args, **kwargs)
        with self.recorder.guard:
            names = [name for name, value in vars(trainer.datamodule).items() if before.get(name, before) is not value]
            own = [name for name in names if not name.startswith("_")]
            if own:
                self.note_here(StatePrepared(names=own))
        return result

    @before(lambda package: package.LightningModule, "log")
    def _log_value(self, module: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if name not in self.lines:
            self.lines[name] = self.recorder.where()

    @before(lambda package: package.Trainer, "save_checkpoint")
    def _save(self, trainer: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            self.recorder.saved += 1
            with self.recorder.guard:
                # trainer.callback_metrics would compute what is logged with sync_dist=True, and wait for the other ranks.
                accuracy = trainer._logger_connector._callback_metrics.get("accuracy")
                accuracy = None if accuracy is None else float(accuracy)
                self.note_here(Saved(path=os.path.realpath(filepath), keys=[], whole=True, accuracy=accuracy))

    @before(lambda package: _fabric(package.__name__), "save")
    def _save_by_fabric(self, fabric: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if fabric.is_global_zero:
            self.recorder.saved += 1
            self.note_here(Saved(path=os.path.realpath(path), keys=[], whole=True))

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


def _fabric(package: str) -> Any:
    """The class Fabric of the same distribution as this package of Lightning."""
    return importlib.import_module("lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric").Fabric


def _shown(data: Any) -> dict[str, str]:
    """The attributes of an object in a few letters, if they are short, equal in equal objects, and not private."""
    kinds = (bool, int, float, str, type(None), torch.Tensor, list, tuple, dict)
    found = {name: value for name, value in vars(data).items() if isinstance(value, kinds) and not name.startswith("_")}
    return {name: text for name, value in found.items() if len(text := repr(value)) <= SHORT and " at 0x" not in text}


def _monitored(trainer: Any, kind: type[Any]) -> list[tuple[str, str]]:
    return [(each.monitor, each.mode) for each in trainer.callbacks if isinstance(each, kind) and each.monitor]


def _monitors(trainer: Any, callbacks: Any) -> list[str]:
    """The names of the values by which a callback stops or saves, or a schedule lowers the learning rate."""
    found = [
        name for kind in (callbacks.EarlyStopping, callbacks.ModelCheckpoint) for name, _ in _monitored(trainer, kind)
    ]
    found += [each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau and each.monitor]
    return list(dict.fromkeys(found))
