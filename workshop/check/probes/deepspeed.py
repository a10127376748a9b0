"""The engine of DeepSpeed: its settings, calls of its methods, and what ZeRO shards."""

import io
import os
from contextlib import redirect_stdout
from typing import Any

import torch

from workshop.check.evidence.events import EngineCalled, EngineLoss, EngineMade, MomentsMeasured
from workshop.check.probes.probe import Function, Probe, around

METHODS = ("backward", "step", "save_checkpoint", "load_checkpoint")


class Engine(Probe):
    """Records ``deepspeed.initialize`` and calls of engine methods."""

    writes = (EngineMade, EngineCalled, EngineLoss, MomentsMeasured)
    library = "deepspeed"
    # As options of the Trainer, Lightning and Accelerate.
    named = r"\bdeepspeed\s*=|[\"']-{0,2}deepspeed|DeepSpeed(?:Strategy|Plugin)"

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        if on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it at import
        super().prepare(on_cpu)

    @around(lambda deepspeed: deepspeed, "initialize")
    def _initialize(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self.recorder.starting = True
        try:
            with redirect_stdout(io.StringIO()):  # otherwise each process prints that it builds the extension
                made = original(*args, **kwargs)
        finally:
            self.recorder.starting = False
        with self.recorder.guard:
            stage, batch = made[0].zero_optimization_stage(), made[0].train_micro_batch_size_per_gpu()
            # With float16 or bfloat16, the optimizer has flat copies of the parameters in float32.
            self.recorder.sharded = stage > 0 or made[0].bfloat16_enabled() or made[0].fp16_enabled()
            self.note_here(EngineMade(stage=stage, clipping=made[0].gradient_clipping(), batch=batch))
        return made

    @around(lambda deepspeed: deepspeed.DeepSpeedEngine, *METHODS, named=True)
    def _call(self, name: str, original: Function, engine: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.guard:
            tag = kwargs.get("tag", args[1] if name == "save_checkpoint" and len(args) > 1 else None)
            self.note_here(EngineCalled(name=name, tag="" if tag is None else str(tag)))
            if name == "backward" and args:
                self.note_here(EngineLoss(loss=args[0].item()))
        done = original(engine, *args, **kwargs)
        if name == "step":
            with self.recorder.guard:
                self.recorder.note(_moments(engine))
        return done


def _moments(engine: Any) -> MomentsMeasured:
    """Return the bytes of the optimizer moments in this process and in the whole model."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # ZeRO wraps the optimizer of the program
        optimizer = optimizer.optimizer
    values = [value for state in optimizer.state.values() for value in state.values()]
    own = sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)
    whole = 8 * sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    return MomentsMeasured(own=own, whole=whole)
