"""What the recorder notes of programs with DeepSpeed or Accelerate: the calls that a program makes, and what ZeRO spreads."""

import io
from contextlib import redirect_stdout
from functools import partial

import torch

from workshop.check.recorder import _wrap

ENGINE = ("backward", "step", "save_checkpoint", "load_checkpoint")
ACCELERATOR = ("prepare", "backward", "gather_for_metrics", "save_state", "load_state")


def install(r, text: str) -> None:
    """Replace what is to be noted; ``r``: the recorder, ``text``: the program's."""
    if "deepspeed" in text:
        import deepspeed

        _wrap(deepspeed, "initialize", partial(_initialize, r))
        for name in ENGINE:
            _wrap(deepspeed.DeepSpeedEngine, name, partial(_call, r, "engine_call", name))
    if "accelerate" in text:
        import accelerate

        for name in ACCELERATOR:
            _wrap(accelerate.Accelerator, name, partial(_call, r, "accelerator_call", name))


def _initialize(r, original):
    def initialize(*args, **kwargs):
        where, r.starting = r.where(), True
        try:
            with redirect_stdout(io.StringIO()):  # each process would say there that the extension is built
                made = original(*args, **kwargs)
        finally:
            r.starting = False
        r.note(
            "engine",
            stage=made[0].zero_optimization_stage(),
            clipping=made[0].gradient_clipping(),
            batch=made[0].train_micro_batch_size_per_gpu(),
            where=where,
        )
        return made

    return initialize


def _call(r, kind, name, original):
    def call(self, *args, **kwargs):
        what = [type(getattr(arg, "sampler", arg)).__name__ for arg in args]  # of a loader: how it deals
        r.note(kind, name=name, of=what, by_script=r.called_by_script(), where=r.where())
        if (kind, name) == ("engine_call", "backward") and args:
            r.note("engine_loss", loss=args[0].item(), where=r.where())
        done = original(self, *args, **kwargs)
        if (kind, name) == ("engine_call", "step"):
            r.note("moments", **_moments(self))
        return done

    return call


def _moments(engine) -> dict:
    """The bytes of the optimizer's moments in this process, and those of the whole model's."""
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
    return {"own": own, "whole": whole}
