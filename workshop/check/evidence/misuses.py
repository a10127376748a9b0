"""Further events, most of which are a mistake by themselves: see ``events.py``."""

from workshop.check.evidence.events import Event, Sketch


class NeverAwaited(Event):  # the program has never waited for an asynchronous collective, called in this line
    name: str


class TotalsSummed(Event):  # ``all_reduce`` got, several times in a row, its last result and the same number more
    calls: int  # in a row
    first: float  # the result of the first of these calls
    last: float  # that of the last one


class ResultDiscarded(Event):  # the tensor of a collective ceased to exist in the line of the call
    name: str
    value: Sketch  # of the tensor before the call


class LossOfProbabilities(
    Event
):  # a loss that needs the outputs of a model got their softmax or sigmoid; once for each line
    name: str  # of the loss
    of: str  # "softmax" or "sigmoid"


class LabelsShifted(Event):  # a language model that shifts its labels itself got shifted ones; once for each line
    model: str  # its class


class SamplesCounted(Event):  # ThroughputMonitor of Lightning counts the samples of its first batch
    counted: int
    rows: int  # of the batch


class BuffersKept(Event):  # before a forward pass of a wrapper that sends no buffers (broadcast_buffers=False)
    buffers: list[Sketch]  # without those of BatchNorm
    names: list[str]


class GradientsIgnored(
    Event
):  # DistributedDataParallel got a module whose list of parameters to ignore has trained ones
    names: list[str]


class ShardsLeft(Event):  # a backward pass of a sharded model has left these gradients, in the first steps
    norms: dict[str, float]  # of the part of this process, by the name of the parameter


class OwnStateLoaded(Event):
    """``load_state_dict`` of a model got its own tensors, as ``state_dict`` returns them, after at least one step."""


class InputsWithoutGradients(Event):
    """In training, ``torch.utils.checkpoint.checkpoint`` was called with use_reentrant=True, and no input needs a gradient."""


class LossScaled(Event):  # before a backward pass: the numbers by which terms of the loss are multiplied or divided
    factors: list[float]


class OptimizerSeen(Event):  # before the first step of an optimizer; ``where`` is the line that created it
    kind: str  # its class
    rate: float  # the learning rate of its first group, without a schedule
    settings: dict[
        str, str
    ]  # of its first group, without those that change only how it computes, or that a schedule changes
