"""What makes the program wait for the device: asking a tensor for its value."""

from typing import Any

import torch
from torch.optim import Optimizer

from workshop.check.evidence.events import ValuesAsked
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe

ASKING = ("item", "tolist", "__float__", "__int__", "__bool__", "numpy")


class HostSync(Probe):
    """Counts how often the program itself asks a tensor for its value."""

    writes = (ValuesAsked,)

    def clear(self) -> None:
        """Begin to count."""
        self.count, self.last = 0, ""

    def install(self) -> None:
        """Replace the methods of tensors, and note the count after each step."""
        for name in ASKING:
            self.patches.wrap(torch.Tensor, name, self._asking)
        self.recorder.after_step.append(self._note)

    def _asking(self, original: Function) -> Function:
        recorder = self.recorder

        def ask(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not recorder.quiet and recorder.called_by_script():
                self.count += 1
                self.last = recorder.where()
            return original(tensor, *args, **kwargs)

        return ask

    def _note(self, optimizer: Optimizer) -> None:
        self.recorder.note(ValuesAsked(count=self.count, where=self.last))
