"""The probes, one file per aspect that they observe in the processes of a checked program."""

import re
from collections.abc import Sequence

from workshop.check.evidence.events import Event
from workshop.check.probes.accelerate import Accelerators
from workshop.check.probes.checkpoints import Checkpoints, ModelStates, SafeTensors, Weights
from workshop.check.probes.copies import Copies
from workshop.check.probes.deepspeed import Engine
from workshop.check.probes.devices import Compiling, Devices, HostSync
from workshop.check.probes.discarded import Discarded
from workshop.check.probes.divided import Divided
from workshop.check.probes.draws import Draws
from workshop.check.probes.emptied import Emptied
from workshop.check.probes.encoders import Encoders
from workshop.check.probes.files import Files
from workshop.check.probes.fsdp import Sharding, Shards
from workshop.check.probes.gpus import Gpus
from workshop.check.probes.group import Collectives, Groups
from workshop.check.probes.layers import Activations, Checkpointing, Layers
from workshop.check.probes.lightning import Lightning, PytorchLightning
from workshop.check.probes.losses import Losses
from workshop.check.probes.meters import Meters
from workshop.check.probes.models import Models
from workshop.check.probes.modes import Modes
from workshop.check.probes.optimizers import Optimizers, TwoOptimizers
from workshop.check.probes.prints import Prints
from workshop.check.probes.probe import Probe
from workshop.check.probes.process import Processes
from workshop.check.probes.recorder import Recorder
from workshop.check.probes.samples import Samples
from workshop.check.probes.scaling import Scaling
from workshop.check.probes.schedules import Schedules
from workshop.check.probes.steps import Clipping, Steps
from workshop.check.probes.stopping import Stopping
from workshop.check.probes.totals import Totals
from workshop.check.probes.workers import Workers

__all__ = ["ALWAYS", "PROBES", "Probe", "Recorder", "probes_for"]

# In the order of installation: the probes that are always installed, those that a rule needs, those of libraries.
ALWAYS: tuple[type[Probe], ...] = (
    Processes,
    Devices,
    Groups,
    Collectives,
    Models,
    Samples,
    Steps,
    Files,
    Compiling,
    Gpus,
    Scaling,
    Divided,
)
_OTHERS = (Copies, Draws, Schedules, Optimizers, Losses, Layers, HostSync, Sharding, Shards, Clipping,
           Checkpoints, Weights, SafeTensors, Activations, Checkpointing, ModelStates, Encoders, Prints, Totals, Discarded, Modes,
           Workers, Emptied, Stopping, TwoOptimizers)  # fmt: skip
_LIBRARIES = (Lightning, PytorchLightning, Accelerators, Engine, Meters)
PROBES: tuple[type[Probe], ...] = (*ALWAYS, *_OTHERS, *_LIBRARIES)


def probes_for(needs: set[type[Event]], offered: Sequence[type[Probe]], text: str = "") -> tuple[type[Probe], ...]:
    """Return the probes to install: the offered ones that record what the rules need.

    With the text of a program, probes of a library are installed only if the program uses it, because the import takes seconds.
    """

    def chosen(probe: type[Probe]) -> bool:
        if probe.library and text:
            imports = rf"^\s*(?:import|from)\s+{re.escape(probe.library)}\b"
            return re.search(f"{imports}|{probe.named}" if probe.named else imports, text, re.MULTILINE) is not None
        return probe in ALWAYS or not needs.isdisjoint(probe.writes)

    return tuple(probe for probe in offered if chosen(probe))
