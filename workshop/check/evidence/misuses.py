"""Further events, most of which are a mistake by themselves: see ``events.py``."""

from workshop.check.evidence.events import Event, Sketch


class NeverAwaited(Event):  # the program has never waited for an asynchronous collective, called in this line
    name: str


class TotalsSummed(Event):  # ``all_reduce`` got, several times in a row, its last result and the same number more
    calls: int  # in a row
    first: float  # the result of one of these calls
    last: float  # what a later call got, or its result


class ResultDiscarded(Event):  # the tensor of a collective ceased to exist in the line of the call
    name: str
    value: Sketch  # of the tensor before the call


class OutputsShared(Event):  # a collective got a list for its results in which tensors have the same memory
    name: str


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


# Before a forward pass of a wrapper that sends no buffers (broadcast_buffers=False), or of a module without parameters, such as a
# loss; of the latter also before the first step.
class BuffersKept(Event):
    buffers: list[Sketch]  # without those of BatchNorm
    names: list[str]


class GradientsIgnored(
    Event
):  # DistributedDataParallel got a module whose list of parameters to ignore has trained ones
    names: list[str]


class ShardsLeft(Event):  # a backward pass of a sharded model has left these gradients, in the first steps
    norms: dict[str, float]  # of the part of this process, by the name of the parameter


class OthersSeen(
    Event
):  # before the first forward pass, and that after a save: what the model has beside its trained parameters
    names: list[str]  # of frozen parameters and buffers
    values: list[Sketch]


class NormsSeen(Event):  # before one of the first steps: variables of the program with a norm in their names
    norms: dict[str, float]


class OwnStateLoaded(Event):
    """``load_state_dict`` of a model got its own tensors, as ``state_dict`` returns them, after at least one step."""


class InputsWithoutGradients(Event):
    """In training, ``torch.utils.checkpoint.checkpoint`` was called with use_reentrant=True, and no input needs a gradient."""


class RecomputedAtRandom(Event):
    """``torch.utils.checkpoint.checkpoint`` ran a function that draws random numbers, with preserve_rng_state=False."""


class LossScaled(Event):  # before a backward pass: the numbers by which terms of the loss are multiplied or divided
    factors: list[float]


class OptimizerSeen(Event):  # before the first step of an optimizer; ``where`` is the line that created it
    kind: str  # its class
    rate: float  # the learning rate of its first group, without a schedule
    settings: dict[
        str, str
    ]  # of its first group, without those that change only how it computes, or that a schedule changes


class ModeSeen(
    Event
):  # before a backward pass: a model with dropout or BatchNorm was called in a different mode than before
    model: str  # its class, and its number if the process has several models of this class
    training: bool
    called: str  # the line of the last call of eval()


class ModeEvaluated(Event):  # the first evaluation of such a model in this mode
    model: str
    training: bool


class StatisticsSeen(
    Event
):  # before one of the first evaluations: the statistics of BatchNorm, which DDP does not send
    model: str
    statistics: list[Sketch]  # running_mean and running_var of each layer
    steps: int  # that were taken before


# The evaluation of a copy of the trained model: its parameters have changed, but not its statistics of BatchNorm.
class StatisticsStale(Event):
    model: str
    averaged: bool  # it is an AveragedModel with the mean of the parameters, which update_bn() has not got


class WorkerBegun(Event):  # a worker process of a DataLoader made its first batch; ``where`` begins the iteration
    rank: int  # of the process that started it
    worker: int  # its number
    states: dict[str, int]  # checksums of the random states, before, of the generators that it used


class StatePrepared(Event):  # ``prepare_data`` of a LightningDataModule has set these attributes
    names: list[str]


class DataModuleSeen(Event):  # when Lightning's training begins: attributes of a LightningDataModule that prepares data
    values: dict[str, str]


class PassEnded(Event):  # an iteration of a DataLoader has returned all its batches
    loader: int
    iteration: int
    batches: int
    order: int | None  # a checksum of the indices of its samples, in order; None: it has no indices


class DataHeld(Event):  # before the first iteration of a DataLoader over a data set
    name: str  # its class
    length: int
    contents: dict[str, int]  # checksums of its tensors, arrays and long lists, by the attributes that have them


class StreamEndless(Event):  # a DataLoader began to iterate over a data set that begins again at its end
    loader: int


class ScheduleAdvanced(
    Event
):  # at the end: a schedule that Accelerate has prepared; ``where`` is the line that calls step()
    kind: str  # its class
    calls: int  # of step(), by the program
    taken: int  # its steps


# Before the first step: parameters that the optimizer has, and that the program has not set since ``to_empty()``.
class NeverFilled(Event):
    names: list[str]
    of: int  # the number of parameters of the model that the optimizer has


# The line of the program, if it is not an exercise, that made a loader whose first iteration began.
class LoaderMade(Event):
    loader: int


# A second iteration began over a loader with persistent workers, which still have the data set of the first one. The program has
# since changed attributes of it that are numbers or texts. ``where`` is the line that made the loader, if it is in the program.
class WorkersKept(Event):
    names: list[str]  # of the attributes


# A second iteration began over a loader. ``set_epoch`` was called, but not of the DistributedSampler of this loader.
class OtherSamplerSet(Event):
    loader: int


# The program started a further Python program with ``subprocess``. Nothing observes that one.
class PythonStarted(Event):
    pass


class ScheduleStepped(Event):  # the program or a library calls ``step()`` of a schedule of the learning rate
    kind: str  # its class
    metric: float | None  # the value that ReduceLROnPlateau decides by


class LossReduced(Event):  # before a backward pass: autograd does not see that a collective has changed the loss
    name: str  # of the collective; ``where`` is its line
    factor: float  # the loss, or the term of it that the collective has changed, divided by what the collective has made of it


class PlateauSeen(Event):  # ReduceLROnPlateau got its first value
    mode: str
    metric: str  # the name of the value in the program; "" if it is computed in the call


# After the second step whose forward pass computes in float16 by autocast: the program has made no GradScaler. ``where`` is the
# line that enters autocast.
class HalfUnscaled(Event):
    pass


# Before the first step: the process has changed a tensor that mp.spawn() shares between all processes.
class SharedChanged(Event):
    name: str  # of the argument that has the tensor


# DistributedDataParallel gets a model, and is about to send the parameters and the buffers of rank 0 to the other ranks.
class BuffersReplaced(Event):
    weights: list[Sketch]
    buffers: list[Sketch]  # without those of BatchNorm
    names: list[str]  # of the buffers


class ClipLimit(Event):  # the largest norm that ``clip_grad_norm_`` leaves as it is, at its first call
    limit: float


class RankGiven(Event):  # ``init_process_group`` gets the rank as an argument
    rank: int


class StopsEarly(
    Event
):  # after the first step: a comparison in the program (``where``) decides whether a loop ends early
    names: list[str]  # of what is compared, without the objects to which they belong


class MemoryShared(Event):  # at the first step: other processes have the same parameters in shared memory (Hogwild)
    pass


class SavedEmpty(Event):  # a saved file has parameters of a model without values
    path: str
    names: list[str]
    of: int  # how many parameters it has


class StopsAtLimit(Event):  # a comparison with a limit ends a loop around the step
    names: list[str]  # of the variables that it compares, such as "loss" and "self.best"


class InHalfPrecision(Event):  # before the first step of an optimizer; ``where`` is the line that created it
    dtype: str  # such as "bfloat16"
    places: list[int]  # the numbers of its parameters that have this type


class MetricKept(Event):  # an evaluation computes a metric of torchmetrics that still has the samples of the one before
    metric: str  # its class
    before: int  # how often it was updated until the evaluation before
    updates: int  # until now


# A backward pass, at ``where``, added to the gradients that the one for another optimizer had left; the step used both.
class GradientsMixed(Event):
    names: list[str]  # of some of the parameters
    other: str  # the line of the backward pass for the other optimizer


class ShardedAsOne(Event):  # FSDP gathers all parameters of the model together
    layers: int  # of the longest list of layers of the model
    kind: str  # the class of these layers


class EvaluationGraph(Event):  # the size of the largest graph in some batches of an evaluation with gradients
    nodes: list[int]
    batches: list[int]  # their numbers


class FrozenAtRandom(
    Event
):  # a model whose parameters never change, and that was never in evaluation mode, drops values
    model: str  # its class
    steps: int  # between which it was called


class NothingDropped(Event):  # the first iteration of a DataLoader without drop_last
    loader: int


class LossCounted(Event):  # before a backward pass: the whole numbers by which the loss, or a term of it, is divided
    counts: list[int]  # without repetitions; also the numbers of the chosen elements over which a mean is taken
