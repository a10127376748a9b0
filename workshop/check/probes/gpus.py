"""What a program does with pretended GPUs: the copies, the waits, what CUDA refuses, and the memory in use."""

import gc
from typing import Any

import torch
from torch.optim import Optimizer

from workshop.check.evidence.events import Autocasting, GpuMemory, GpuNoted
from workshop.check.probes.probe import Probe, before, on
from workshop.pretend import devices


class Gpus(Probe):
    """Records what the pretended GPUs note. Without them it records nothing."""

    writes = (GpuNoted, GpuMemory, Autocasting)
    bytes = 0  # on all GPUs after the step before

    def install(self) -> None:
        """Listen to the pretended GPUs, and observe autocast."""
        if devices.total:
            super().install()
            devices.listeners.append(self._noted)

    def undo(self) -> None:
        """Stop listening."""
        if self._noted in devices.listeners:
            devices.listeners.remove(self._noted)
        super().undo()

    def _noted(self, kind: str, detail: str) -> None:
        if not self.recorder.guarding:
            self.note_here(GpuNoted(kind=kind, detail=detail))

    @before(torch.amp.autocast_mode.autocast, "__enter__")
    def _autocast(self, context: Any) -> None:
        if not context._enabled:
            return
        device = "cuda" if context.device == devices.NAME else context.device
        self.note_here(Autocasting(device=device, dtype=str(context.fast_dtype).removeprefix("torch.")))

    @on("after_step")
    def _memory(self, optimizer: Optimizer) -> None:
        if sum(devices.allocated.values()) > self.bytes:
            gc.collect()  # Python also frees objects that refer to each other, but only now and then
        self.bytes = sum(devices.allocated.values())
        visible = devices.visible()
        self.recorder.note(GpuMemory(bytes={visible[gpu]: size for gpu, size in devices.allocated.items() if size}))
