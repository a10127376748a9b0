"""Copies of models, such as an EMA or a teacher: their parameters when they are made, and the lines that update them."""

import copy
import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from workshop.check.evidence.events import ModelCopied, ModelUpdated
from workshop.check.probes.contents import is_fsdp1, is_sharded, sketches
from workshop.check.probes.patching import replacement
from workshop.check.probes.probe import Function, Probe, around

TORCH = os.path.dirname(torch.__file__)
MOST = 8  # copies that are recorded
UPDATES = 2  # of each copy
IN_PLACE = ("lerp_", "copy_", "mul_", "add_")
FOREACH = ("_foreach_lerp_", "_foreach_copy_", "_foreach_mul_", "_foreach_add_")


class Copies(Probe):
    """Records ``copy.deepcopy`` of a model, and the first changes of the copy in place."""

    writes = (ModelCopied, ModelUpdated)

    def clear(self) -> None:
        self.updates: dict[int, int] = {}

    @around(swa_utils, "deepcopy")  # in AveragedModel
    @around(copy, "deepcopy")
    def _deepcopy(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        replaced, copy.deepcopy = copy.deepcopy, original  # it calls itself for each part, which must stay as quick
        try:
            copied = original(*args, **kwargs)
        finally:
            copy.deepcopy = replaced
        with self.recorder.guard:
            caller = sys._getframe(2).f_code.co_filename
            # torch itself copies layers, in nn.TransformerEncoder; other libraries copy a model for its EMA.
            if isinstance(copied, nn.Module) and (not caller.startswith(TORCH) or caller == swa_utils.__file__):
                self._copied(copied)
        return copied

    def _copied(self, copied: nn.Module) -> None:
        if self.recorder.quiet or len(self.recorder.copies) >= MOST:
            return
        parameters = dict(copied.named_parameters())
        if not parameters or is_fsdp1(copied) or any(map(is_sharded, parameters.values())):
            return
        kind = type(copied).__name__
        self.note_here(ModelCopied(model=kind, weights=sketches(parameters.values()), names=list(parameters)))
        if not self.recorder.copies:  # other programs do not pay for this
            for owner, names in ((torch.Tensor, IN_PLACE), (torch, FOREACH)):
                for name in names:
                    if original := getattr(owner, name, None):
                        changed = replacement(self.recorder, "before", self._change, original)
                        self.patches.set(owner, name, changed)
        self.recorder.copies[next(iter(parameters.values())).data_ptr()] = kind

    def _change(self, changed: Any, *args: Any, **kwargs: Any) -> None:
        first = changed[0] if isinstance(changed, (list, tuple)) else changed
        place = first.data_ptr()
        if place in self.recorder.copies and self.updates.get(place, 0) < UPDATES and self.recorder.steps:
            self.updates[place] = self.updates.get(place, 0) + 1
            self.note_here(ModelUpdated(model=self.recorder.copies[place], calls=self._calls()))

    def _calls(self) -> list[tuple[str, str, int, int]]:
        """The calls of the program that led here, the innermost first: file, line, and the lines of the function."""
        calls = []
        frame: FrameType | None = sys._getframe(1)
        while frame:
            if name := self.recorder.own(frame.f_code.co_filename):
                lines = [line for _, _, line in frame.f_code.co_lines() if line]
                calls.append((name, f"{name}:{frame.f_lineno}", min(lines), max(lines)))
            frame = frame.f_back
        return calls
