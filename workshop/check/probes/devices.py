"""The device that a process chooses."""

from typing import Any

import torch

from workshop.check.evidence.events import DeviceChosen
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe


def device_index(device: Any) -> int | None:
    """The index of a device in the forms that torch takes; None: it has none."""
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return index


class Devices(Probe):
    """Notes the device that is set for a process."""

    writes = (DeviceChosen,)
    always = True

    def install(self) -> None:
        """Replace the functions that set it."""
        for module, name in (
            (torch.accelerator, "set_device_index"),
            (torch.accelerator, "set_device_idx"),
            (torch.cuda, "set_device"),
        ):
            self.patches.wrap(module, name, self._set)

    def _set(self, original: Function) -> Function:
        def set_index(device: object, *args: object, **kwargs: object) -> object:
            with self.recorder.guard:
                self.recorder.note(DeviceChosen(index=device_index(device), where=self.recorder.where()))
            return original(device, *args, **kwargs)

        return set_index
