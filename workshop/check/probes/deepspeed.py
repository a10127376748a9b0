"""DeepSpeed's engine: how it is set up, the calls of its methods, and what ZeRO shards."""

import importlib
import importlib.util
import io
import os
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch

from workshop.check.evidence.events import EngineCalled, EngineLoss, EngineMade, MomentsMeasured
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe

METHODS = ("backward", "step", "save_checkpoint", "load_checkpoint")


class Engine(Probe):
    """Notes ``deepspeed.initialize`` and methods of the engine."""

    writes = (EngineMade, EngineCalled, EngineLoss, MomentsMeasured)
    library = "deepspeed"

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import it: that takes seconds."""
        if importlib.util.find_spec("deepspeed"):
            if on_cpu:
                os.environ["DS_ACCELERATOR"] = "cpu"  # it chooses when it is imported
            importlib.import_module("deepspeed")

    def install(self) -> None:
        """Replace them."""
        if not importlib.util.find_spec("deepspeed"):
            return
        deepspeed: Any = importlib.import_module("deepspeed")
        self.patches.wrap(deepspeed, "initialize", self._initialize)
        for name in METHODS:
            self.patches.wrap(deepspeed.DeepSpeedEngine, name, partial(self._call, name=name))

    def _initialize(self, original: Function) -> Function:
        recorder = self.recorder

        def initialize(*args: Any, **kwargs: Any) -> Any:
            where, recorder.starting = recorder.where(), True
            try:
                with redirect_stdout(io.StringIO()):  # each process would print there that the extension is built
                    made = original(*args, **kwargs)
            finally:
                recorder.starting = False
            with recorder.guard:
                engine = made[0]
                recorder.note(
                    EngineMade(
                        stage=engine.zero_optimization_stage(),
                        clipping=engine.gradient_clipping(),
                        batch=engine.train_micro_batch_size_per_gpu(),
                        where=where,
                    )
                )
            return made

        return initialize

    def _call(self, original: Function, name: str) -> Function:
        recorder = self.recorder

        def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
            with recorder.guard:
                recorder.note(EngineCalled(name=name, where=recorder.where()))
                if name == "backward" and args:
                    recorder.note(EngineLoss(loss=args[0].item(), where=recorder.where()))
            done = original(engine, *args, **kwargs)
            if name == "step":
                with recorder.guard:
                    recorder.note(_moments(engine))
            return done

        return call


def _moments(engine: Any) -> MomentsMeasured:
    """The bytes of the optimizer's moments in this process, and those of the whole model."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # ZeRO's own, around the program's
        optimizer = optimizer.optimizer
    own = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    whole = 8 * sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    return MomentsMeasured(own=own, whole=whole)
