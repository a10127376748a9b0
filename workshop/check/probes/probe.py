"""What a probe is: it observes one thing in each process of a checked program, and changes nothing that is computed."""

from typing import ClassVar

from workshop.check.evidence.events import Event
from workshop.check.probes.patching import Patches
from workshop.check.probes.recorder import Recorder


class Probe:
    """Replaces functions with ones that note an event and then call the original.

    Code of a probe that runs inside the program stands in ``with self.recorder.guard``: an error in it does not reach the
    program.

    Attributes:
        writes: the kinds of events that it notes.
        always: whether it is installed even if no rule needs these events.
        library: the package whose programs it observes; "": it observes every program.
    """

    writes: ClassVar[tuple[type[Event], ...]] = ()
    always: ClassVar[bool] = False
    library: ClassVar[str] = ""

    def __init__(self, recorder: Recorder):
        self.recorder, self.patches = recorder, Patches()
        self.clear()
        recorder.after_fork.append(self.clear)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import what takes long, in the process that the program's processes are forked from.

        Args:
            on_cpu: whether the GPUs are hidden from the program.
        """

    def clear(self) -> None:
        """Forget what was seen: at the beginning, and in each process that is forked from this one."""

    def install(self) -> None:
        """Begin to observe this process."""

    def undo(self) -> None:
        """Put everything back that ``install`` has replaced."""
        self.patches.undo()
