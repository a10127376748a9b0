"""The probes, one file for each thing that they observe in the processes of a checked program."""

import re
from collections.abc import Sequence

from workshop.check.evidence.events import Event
from workshop.check.probes.accelerate import Accelerators
from workshop.check.probes.checkpoints import Checkpoints
from workshop.check.probes.clipping import Clipping
from workshop.check.probes.collectives import Collectives
from workshop.check.probes.compiling import Compiling
from workshop.check.probes.deepspeed import Engine
from workshop.check.probes.devices import Devices
from workshop.check.probes.files import Files
from workshop.check.probes.fsdp import Sharding
from workshop.check.probes.group import Groups
from workshop.check.probes.host_sync import HostSync
from workshop.check.probes.layers import Layers
from workshop.check.probes.lightning import Lightning, PytorchLightning
from workshop.check.probes.memory import Activations
from workshop.check.probes.models import Models
from workshop.check.probes.probe import Probe
from workshop.check.probes.process import Processes
from workshop.check.probes.recorder import Recorder
from workshop.check.probes.samples import Samples
from workshop.check.probes.steps import Steps
from workshop.check.probes.weights import Weights

__all__ = ["PROBES", "Probe", "Recorder", "probes_for"]

# In the order in which they are installed.
PROBES: tuple[type[Probe], ...] = (
    Processes,
    Devices,
    Groups,
    Collectives,
    Models,
    Samples,
    Steps,
    Layers,
    HostSync,
    Files,
    Lightning,
    PytorchLightning,
    Accelerators,
    Engine,
    Sharding,
    Clipping,
    Checkpoints,
    Weights,
    Activations,
    Compiling,
)


def probes_for(needs: set[type[Event]], offered: Sequence[type[Probe]], text: str = "") -> tuple[type[Probe], ...]:
    """The probes to install.

    Args:
        needs: the kinds of events that the rules need.
        offered: all probes.
        text: the program's. Given, a probe of a library is installed only if the program imports the library, and then
            whether or not a rule needs its events: importing a large library for nothing takes seconds.
    """

    def chosen(probe: type[Probe]) -> bool:
        if probe.library and text:
            return re.search(rf"^\s*(?:import|from)\s+{re.escape(probe.library)}\b", text, re.MULTILINE) is not None
        return probe.always or not needs.isdisjoint(probe.writes)

    return tuple(probe for probe in offered if chosen(probe))
