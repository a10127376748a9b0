"""The events that the probes of libraries and of the workshop's modules record, and how probes are chosen and removed."""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, DistributedSampler, dataloader

from check.made import CORE, Made
from workshop.check import launching
from workshop.check.evidence import events
from workshop.check.evidence.events import (
    AcceleratorCalled,
    Backward,
    CallbacksSeen,
    EngineCalled,
    EngineLoss,
    EngineMade,
    Evaluated,
    FineTuningBegun,
    FineTuningReported,
    LayersSeen,
    Loaded,
    MetricsLogged,
    MomentsMeasured,
    MonitorSeen,
    Reported,
    SamplesPrepared,
    Saved,
    TrainerFit,
)
from workshop.check.evidence.misuses import DataModuleSeen, MetricKept, SamplesCounted, ScheduleAdvanced, StatePrepared
from workshop.check.evidence.recorded import all_events
from workshop.check.probes import ALWAYS, PROBES, Recorder, probes_for
from workshop.check.probes.accelerate import Accelerators
from workshop.check.probes.deepspeed import Engine
from workshop.check.probes.lightning import Lightning, PytorchLightning
from workshop.check.probes.meters import Meters
from workshop.course.built.tracing import StepTracer
from workshop.course.digits import TEST_SAMPLES, prepare_digits, small_digits
from workshop.course.probes import COURSE_PROBES, FineTuning

# ---------------------------------------------------------------- libraries


def needs(package):
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"needs {package}")


LIGHTNING = """
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("accuracy", self.layer(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(pl.LightningDataModule):
        scale = 1.0

        def prepare_data(self):
            self.scale = 2.0

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(4, 2)), 2)

        val_dataloader = train_dataloader

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        log_every_n_steps=1,
        callbacks=[
            EarlyStopping("accuracy"),
            ModelCheckpoint(".", monitor="accuracy", mode="max"),
            ThroughputMonitor(batch_size_fn=lambda batch: len(batch)),
        ],
        logger=pl.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
    )
    trainer.fit(Module(), Data())
"""


@needs("lightning")
def test_events_of_lightning_are_recorded(place):
    made = Made(place("lightning"), LIGHTNING, probes=(*CORE, Lightning)).well()
    (process,) = made.run.processes
    assert process.first(TrainerFit).where == made.line("trainer.fit")
    (watched,) = process.of(CallbacksSeen)
    (monitored,) = process.of(MonitorSeen)
    assert (monitored.name, monitored.where) == ("accuracy", made.line("self.log("))
    assert (watched.stop, watched.best) == ([("accuracy", "min")], [("accuracy", "max")])
    (counted,) = process.of(SamplesCounted)
    assert (counted.counted, counted.rows, counted.where) == (1, 2, made.line("ThroughputMonitor("))
    (prepared,) = process.of(StatePrepared)
    assert (prepared.names, prepared.where) == (["scale"], made.line("trainer.fit"))
    assert [each.values["scale"] for each in process.of(DataModuleSeen)] == ["2.0"]
    assert {"accuracy"} <= {name for event in process.of(MetricsLogged) for name in event.names}
    (saved,) = (event for event in process.of(Saved) if event.whole)
    assert saved.path.endswith(".ckpt")
    assert saved.accuracy is not None
    assert [step.before.fitting for step in process.steps] == [True, True]
    assert len(process.evaluations) == 1  # none in the sanity check
    assert len(process.of(Evaluated)) == 2


ACCELERATE = """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), 2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))  # schedule
    for (batch,) in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    schedule.step()  # advanced
"""


@needs("accelerate")
def test_events_of_accelerate_are_recorded(place):
    made = Made(place("accelerate"), ACCELERATE, probes=(*CORE, Accelerators)).well()
    (process,) = made.run.processes
    prepared, schedule, *backwards = process.of(AcceleratorCalled)
    assert (schedule.name, schedule.of) == ("prepare", ["StepLR"])
    (advanced,) = process.of(ScheduleAdvanced)
    assert (advanced.kind, advanced.calls, advanced.taken) == ("StepLR", 1, 1)
    assert advanced.where == made.line("# advanced")
    assert (prepared.name, prepared.of) == ("prepare", ["Linear", "Optimizer", "RandomSampler"])
    assert prepared.where == made.line("accelerator.prepare(model")
    assert [event.name for event in backwards] == ["backward", "backward"]
    assert len(process.steps) == 2
    assert len(process.epochs[0]) == 4


GATHERING = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(5, 2), 2))
    with torch.no_grad():
        for batch in loader:
            for value in (batch.mean(), batch, (batch.mean(), batch[0])):
                accelerator.gather_for_metrics(value)
        accelerator.gather(batch)  # by the program
"""


@needs("accelerate")
def test_single_numbers_that_accelerate_gathers_from_a_smaller_batch_are_recorded(place):
    made = Made(place("gathering"), GATHERING, probes=(*CORE, Accelerators)).well()
    gathered = [event for event in made.run.all(AcceleratorCalled) if event.name == "gather_for_metrics"]
    assert [event.rest for event in gathered] == [1, 0, 1] * 3
    (plain,) = (event for event in made.run.all(AcceleratorCalled) if event.name == "gather")
    assert plain.where == made.line("# by the program")


DEEPSPEED = """
    import torch
    import deepspeed

    model = torch.nn.Linear(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)  # made
    loss = engine(torch.ones(2, 2)).square().mean()
    engine.backward(loss)
    engine.step()
"""


@needs("deepspeed")
def test_events_of_deepspeed_are_recorded(place):
    from workshop.course.engine import load_extension
    from workshop.training.deepspeed import missing_tools

    if missing_tools():
        pytest.skip("needs a compiler and ninja")
    load_extension()
    made = Made(place("deepspeed"), DEEPSPEED, "torchrun", probes=(*CORE, Engine)).well()
    (process,) = made.run.processes
    engine = process.first(EngineMade)
    assert (engine.stage, engine.clipping, engine.batch, engine.where) == (1, 0.5, 2, made.line("# made"))
    assert [event.name for event in process.of(EngineCalled)] == ["backward", "step"]
    (loss,), (moments,) = process.of(EngineLoss), process.of(MomentsMeasured)
    assert loss.loss > 0
    assert loss.where == made.line("engine.backward")
    assert moments.whole == 8 * 3 <= moments.own
    assert len(process.steps) == 1


METER = """
    import torch
    from torchmetrics import MeanMetric

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, reset, trained = MeanMetric(), MeanMetric(), MeanMetric()
    for epoch in range(3):
        loss = model(torch.randn(8, 4)).mean()
        trained.update(loss.detach())  # that of the training so far
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for metric in (kept, reset):
                metric(model(torch.randn(8, 4)))
                metric(model(torch.randn(8, 4)))
            trained.compute()
            reset.compute()
            reset.reset()
            kept.compute()  # kept
"""


@needs("torchmetrics")
def test_metrics_without_a_reset_are_recorded(place):
    program = Made(place("meter"), METER, probes=(*CORE, Meters)).well()
    (event,) = program.run.processes[0].of(MetricKept)
    assert (event.metric, event.before, event.updates, event.where) == ("MeanMetric", 2, 4, program.line("# kept"))


# ---------------------------------------------------------------- the workshop's own modules

COURSE = """
    import torch
    from types import SimpleNamespace
    from torch.utils.data import DataLoader
    from workshop.data.datasets import load_dataset
    from workshop.training.finetuning import TrainingLog
    from workshop.training.logs import EpochLog
    from workshop.training.models import SmallCNN

    train_set, test_set = load_dataset("digits")
    print(len(train_set), len(test_set))
    model = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = EpochLog("run.pt", 1, "cpu", 1)
    for images, labels in DataLoader(train_set, 8):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    log.write(0, [2.0, 1.0], 0.25, 100, macro_f1=0.5)
    text = TrainingLog.__new__(TrainingLog)
    text.rank = 1  # writes nothing
    text.begin(5.0, "completion")
    text.write(2, [4.0, 3.0], 2.5, 1.0)
"""


@needs("transformers")
def test_events_of_the_workshop_modules_are_recorded(place):
    prepare_digits()
    made = Made(place("course"), COURSE, probes=(*CORE, *COURSE_PROBES), before=small_digits(20)).well()
    (process,) = made.run.processes
    assert process.stdout.startswith(f"20 {TEST_SAMPLES}\n")
    (reported,) = process.of(Reported)
    assert (reported.losses, reported.accuracy, reported.samples_per_second) == ([2.0, 1.0], 0.25, 100.0)
    assert reported.metrics == {"macro_f1": 0.5}
    assert (reported.samples, reported.failed) == (TEST_SAMPLES, "")
    assert reported.truth.keys() == {"accuracy", "macro_f1"}
    assert 0 <= reported.truth["accuracy"] * TEST_SAMPLES <= TEST_SAMPLES
    assert len(process.of(Evaluated)) == 0  # the evaluation by the check itself does not count
    assert [event.count for event in process.of(SamplesPrepared)] == [8, 16, 20]
    (begun,), (written,) = process.of(FineTuningBegun), process.of(FineTuningReported)
    assert (begun.validation_loss, begun.where) == (5.0, made.line("text.begin"))
    assert (written.losses, written.validation_loss) == ([4.0, 3.0], 2.5)


def test_a_report_without_a_test_set_says_so(place):
    text = """
        from workshop.training.logs import EpochLog

        EpochLog("run.pt", 1, "cpu", 1).write(0, [1.0], None, 1.0)
    """
    probes = tuple(probe for probe in COURSE_PROBES if probe is not FineTuning)
    made = Made(place("report"), text, probes=probes).well()
    (reported,) = made.run.all(Reported)
    assert (reported.accuracy, reported.truth, reported.samples) == (None, {}, 0)
    assert reported.failed


# ---------------------------------------------------------------- all probes


def test_every_event_is_written_by_a_probe():
    written = {kind for probe in (*PROBES, *COURSE_PROBES, StepTracer) for kind in probe.writes}
    parts = {events.Forward}  # part of other events
    assert written == set(all_events().values()) - parts


def test_the_probes_that_rules_need_are_chosen():
    always = set(ALWAYS)
    assert set(probes_for(set(), PROBES)) == always
    lightning = set(probes_for({TrainerFit, LayersSeen}, PROBES)) - always
    assert {probe.__name__ for probe in lightning} == {"Lightning", "Layers"}
    # The text of a program shows whether it can use a library.
    assert Lightning not in probes_for({TrainerFit}, PROBES, "import torch")
    assert Lightning in probes_for(set(), PROBES, "import torch\nfrom lightning import Trainer")
    assert Engine in probes_for(set(), PROBES, 'args = TrainingArguments("out", deepspeed="zero2.json")')
    assert Engine not in probes_for(set(), PROBES, "# as with deepspeed\nimport torch")
    old = probes_for({TrainerFit}, PROBES, "if True:\n    import pytorch_lightning as pl")
    assert PytorchLightning in old
    assert Lightning not in old


def _state():
    """Return what probes replace, such as the attributes of modules and classes."""
    owners = [torch, torch.Tensor, torch.autograd, torch.accelerator, torch.cuda, dist, c10d, Join, torch.nn.Module]
    owners += [torch.nn.utils, torch.nn.utils.clip_grad, DistributedDataParallel, torch.optim.Optimizer, DataLoader]
    owners += [dataloader._BaseDataLoaderIter, DistributedSampler, sys.modules["torch.multiprocessing.spawn"]]
    owners += [sys.modules["multiprocessing.process"].BaseProcess]
    names = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "safetensors.torch", "workshop.training.logs")
    owners += [sys.modules[name] for name in names if name in sys.modules]
    owners += [sys.modules["workshop.training.logs"].EpochLog, sys.modules["workshop.data.datasets"].Digits]
    owners += [sys.modules["workshop.training.finetuning"].TrainingLog]
    if pl := sys.modules.get("lightning.pytorch"):
        owners += [pl.Trainer, pl.loggers.CSVLogger, pl.loggers.TensorBoardLogger]
    hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    return [dict(vars(owner)) for owner in owners], [dict(each) for each in hooks]


def _differ(before, after):
    return [name for one, other in zip(before, after, strict=True) for name in one if one[name] is not other.get(name)]


def test_undo_restores_everything(tmp_path):
    probes = (*(probe for probe in PROBES if not probe.library or probe is Lightning), *COURSE_PROBES)
    launching.prepare([probe for probe in probes if probe is not FineTuning], on_cpu=True)
    recorder = Recorder(tmp_path, tmp_path / "program.py", tmp_path)
    before, hooks = _state()
    installed = [probe(recorder) for probe in probes]
    for probe in installed:
        probe.install()
    replaced = set(_differ(before, _state()[0]))
    assert {"all_reduce", "__call__", "backward", "save", "fully_shard", "compile", "TCPStore"} <= replaced
    assert [len(each) for each in _state()[1]] == [len(each) + 1 for each in hooks]
    for probe in reversed(installed):
        probe.undo()
    after, hooks_after = _state()
    assert _differ(before, after) == []
    assert [one.keys() - other.keys() for one, other in zip(after, before, strict=True)] == [set()] * len(before)
    assert hooks_after == hooks
    (tmp_path.parent / "outside").write_text("the audit hook does nothing any more")


FABRIC = """
    import torch
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(layer := torch.nn.Linear(2, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.ones(4, 2)).square().mean())
    fabric.backward(model(torch.ones(4, 2)).square().mean())
    optimizer.step()
    fabric.save("last.ckpt", {"model": model})
    fabric.load("last.ckpt", {"model": model})
"""


@needs("lightning")
def test_checkpoints_of_fabric_have_their_paths_and_its_passes_go_through_its_wrapper(place):
    made = Made(place("fabric"), FABRIC, "torchrun", nproc=2, probes=(*CORE, Lightning)).well()
    process, _ = made.ranks
    passes = process.of(Backward)
    assert [(each.forward.wrapped, each.sync) for each in passes] == [(True, False), (True, True)]
    assert passes[0].unsynced == made.line("no_backward_sync")
    assert [each.where for each in process.of(Saved) if each.path.endswith("last.ckpt")] == [made.line("fabric.save")]
    assert process.first(Loaded).path.endswith("last.ckpt")
