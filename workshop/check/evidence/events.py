"""One frozen dataclass per kind of event: probes write them, rules read them, and no other code uses them.

The comment beside an event says when it is recorded. After a change to the fields of an event, record again where it occurs.
"""

from dataclasses import dataclass, field
from typing import dataclass_transform

# A sample: (type of the data set, its length, index in it), or ("content", checksum, bytes) if no loader is known. In runs that
# are compared with one process, a sample that is only a number, such as that of a user, begins with A_NUMBER.
Key = tuple[object, ...]
A_NUMBER = "number"
Loader = tuple[int, int]  # a loader and the number of its iteration
Trainer = tuple[str, int, tuple[str, ...]]  # an optimizer: its line, the number of its parameters, some of their names
# The norm of a tensor and some of its values; None: there is no tensor, or it has no contents.
Sketch = tuple[float, list[float]] | None


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all events. Each subclass becomes a frozen dataclass automatically."""

    where: str = ""  # the line of the program, as "file.py:12"

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Started(Event):  # a process began to record
    parent: int  # the process id of its parent; the other fields come from its launcher
    rank: str | None = None
    local_rank: str | None = None


class Raised(Event):  # an exception ended the program or one of its processes
    type: str
    message: str
    traceback: str


class Exited(Event):  # the program called ``sys.exit``
    status: int


class Ended(Event):
    """The process ended by itself (it was not killed)."""


class Stopped(Event):  # the check ended the process, because it had seen enough
    steps: int  # that the process had taken


class Joining(Event):  # ``init_process_group`` was called
    backend: str | None  # None: the program left the choice to torch
    init_method: str
    world_size: object
    address: str | None
    port: str | None
    given_address: str | None  # as the launcher had set it in the environment
    given_port: str | None


class Joined(Event):  # ``init_process_group`` returned
    rank: int
    world_size: int


class GroupDestroyed(Event):
    """``destroy_process_group`` was called."""


class VariableSet(Event):  # the program set MASTER_ADDR or MASTER_PORT
    name: str


class StoreOpened(Event):  # a ``TCPStore`` was created
    port: int
    master: bool


class DeviceChosen(Event):  # the program asked for the device with this index
    index: int | None


class GpuNoted(
    Event
):  # on pretended GPUs: a copy, a wait, an operation that CUDA refuses, or another thing that a GPU shows
    kind: str  # see workshop/measure/pretended_table.py
    detail: str


class GpuMemory(Event):  # on pretended GPUs, after a step
    bytes: dict[int, int]  # of the tensors on each GPU; its number is that of the node


class Autocasting(Event):  # on pretended GPUs: the program entered torch.autocast
    device: str  # its device type
    dtype: str


class Collective(Event):  # the program called a collective
    name: str
    shape: tuple[int, ...] | None  # of the first tensor; None for objects
    dtype: str
    group: tuple[int, ...] = ()  # the ranks in the group; empty if all ranks are
    inside: bool = False  # it was called in a forward pass of the model

    @property
    def point_to_point(self) -> bool:
        """Whether only two ranks take part."""
        return self.name in ("send", "recv", "isend", "irecv")

    @property
    def common_shape(self) -> tuple[int, ...] | None:
        """The shape that the first tensor must have on all ranks; None: any, for example as many rows as a rank receives."""
        if self.name in ("all_gather", "all_to_all", "all_to_all_single"):
            return None
        return () if self.shape == (1,) else self.shape  # both are one number


class NotAwaited(Event):  # at a step: the program has not waited for an asynchronous collective, called in this line
    name: str


class InnerCollective(Event):  # a library, such as FSDP, called a collective during the backward pass
    name: str
    dtype: str


class Wrapped(Event):  # a model was wrapped in ``DistributedDataParallel``
    names: tuple[str, ...] = ()  # of its parameters that need gradients


class UnevenJoined(Event):
    """``torch.distributed.algorithms.join.Join`` was entered: the ranks may take different numbers of steps."""


class Forward(Event):  # one forward pass of the whole model; part of ``Backward`` or ``Evaluated``
    wrapped: bool  # the program called the ``DistributedDataParallel`` wrapper
    sync: bool | None  # the backward pass will average gradients (False under ``no_sync()``); None: not wrapped
    keys: list[Key]  # its samples
    rows: list[Key]  # their contents, as the model saw them
    shape: tuple[int, ...] | None  # of one sample; None: the input is not a tensor
    loader: Loader | None  # the loader that returned the batch, if known
    follows: bool = False  # its input has gradients, because it is the output of a different model
    refreshes: bool = False  # without gradients, and BatchNorm updates its statistics

    def names(self, identity: str) -> list[Key]:
        """The samples, named by ``Process.identity``."""
        return self.rows if identity == "rows" else self.keys


class Backward(Event):  # one backward pass
    forward: Forward | None  # the matching forward pass, if known; of several the last one with a loader
    others: list[Forward] = field(default_factory=list)  # further forward passes behind the loss, for example of a GAN
    loss: float | None  # the mean
    sync: bool | None  # as in ``Forward``
    leftover: bool  # gradients of an earlier backward pass were not cleared
    random: int  # a checksum of the random state of torch
    unsynced: str = ""  # the line of the last ``no_sync()`` before it


class LossComputed(Event):  # a cross entropy with gradients
    targets: int  # number of targets that count
    mean: float  # over them
    summed: bool = False  # it returned the sum


class LossWeighted(Event):  # the loss of one of the first backward passes is weighted with a few different constants
    values: list[float]  # the constants; of an argument of the loss all of them, in order, else without repetition
    argument: bool  # they are the weight= or pos_weight= of the loss


class ModelEvaluated(Event):  # before one of the first evaluations with a model
    model: str  # its class
    weights: list[Sketch]
    names: list[str]
    steps: int = 0  # of the process before it


class BuffersSeen(Event):  # before a forward pass, if DistributedDataParallel sends rank 0's buffers to the other ranks
    # Without those of BatchNorm, which each rank computes from its own batches. Without DistributedDataParallel: only those of
    # layers that have no parameters and change their input.
    buffers: list[Sketch]
    names: list[str]


class ModelCopied(Event):  # ``copy.deepcopy`` returned a model
    model: str  # its class
    weights: list[Sketch]
    names: list[str]


class ModelUpdated(Event):  # a copy was changed in place, after a step
    model: str  # its class
    # The calls that led to it, the innermost first: the file, the line, the first and the last line of the function.
    calls: list[tuple[str, str, int, int]]


class Evaluated(Event):  # a forward pass without a backward pass
    forward: Forward


SUBSET = "Subset"  # what ``Drawn`` names a Subset that a DistributedSampler divides; it is not random in itself
# The same for each data set that it divides: ``size`` is the number of samples; ``of`` and ``result``, the number of parts.
DATA_SET = "data set"


class Printed(Event):  # rank 0 printed or logged a text with a number
    text: str
    given: (
        bool  # the model that was evaluated last has the same parameters as in the run with which this one is compared
    )


class Drawn(Event):  # the program itself split, shuffled or sampled something at random
    name: str  # of the function
    size: int  # of what it chose from
    of: int  # a checksum of this, whatever its order
    result: int  # a checksum of the result


class LoaderStarted(Event):  # a ``DataLoader`` began an iteration
    loader: int
    iteration: int
    length: int | None  # its number of batches, if known
    workers: int = 0  # processes that each have a copy of an IterableDataset
    source: str = ""  # the line of its __iter__, if it is in the program


class EpochSet(Event):  # ``DistributedSampler.set_epoch`` was called
    epoch: int


class BatchLoaded(Event):  # a ``DataLoader`` returned a batch
    seconds: float  # time that the program waited for it


class StepBegun(Event):  # ``optimizer.step()`` was called
    gradients: list[Sketch]  # of each parameter of the optimizer
    weights: list[Sketch]
    names: list[str]  # of these parameters in the model, "" where unknown
    rates: list[float]  # the learning rate of each group
    state: int  # number of parameters with optimizer state
    of_model: bool  # the optimizer has at least one parameter of a model that has run
    sharded: bool = False  # each process has only a part of the parameters
    forgotten: list[str] = field(default_factory=list)  # parameters with a gradient that no optimizer has
    made: str = ""  # the line that created the optimizer

    @property
    def trainer(self) -> "Trainer":
        """What tells one optimizer from another, also on different ranks."""
        return self.made, len(self.names), tuple(self.names[:3])

    fitting: bool  # the Trainer of Lightning takes the step


class VariablesSeen(Event):  # before a step: variables of the functions of the program that are running
    numbers: dict[str, float]  # with integers and floats
    states: dict[str, int]  # random generators, each with a checksum of its state


class StateLoaded(Event):
    """``load_state_dict`` of an optimizer was called."""


class ModelLoaded(Event):  # ``load_state_dict`` of a model returned
    given: int  # number of tensors that it was given
    matched: int  # of these, the tensors whose names the model has


class StepSkipped(Event):  # ``GradScaler.step`` did not call ``optimizer.step()``, because a gradient was not finite
    scale: float  # the factor in the loss


class ScaledClipped(Event):  # gradients were clipped that contain the scale of a GradScaler
    scale: float


BY_HASH = 1 << 32  # more than any checksum


class EncodersSeen(Event):  # at two of the first steps: variables that turn the data into the inputs of the model
    # Dictionaries from texts to the numbers 0, 1, 2, ...: their lengths, and checksums of their items. If the process itself has
    # numbered the texts in the order of a set: BY_HASH and its rank, because this order differs between new interpreters.
    vocabularies: dict[str, tuple[int, int]]
    statistics: dict[str, list[float]]  # means, deviations and limits


class ModelDivided(Event):  # before the first step: the layers are DTensors that several ranks have together
    ranks: list[int]  # these ranks, which must see the same samples


class InputSharded(Event):
    """The input of a model is the part of this process of a DTensor, such as its part of a sequence."""


class ScheduleSeen(Event):  # at the end: a schedule of the learning rate; ``where`` is the line that created it
    taken: int  # number of its steps
    length: int  # number of steps for which it is made


class StepTaken(Event):  # ``optimizer.step()`` returned
    weights: list[Sketch]


class GraphMeasured(Event):  # at three of the first steps
    nodes: int  # of the largest autograd graph in memory


class LayersSeen(Event):  # after a step: the layers that have run so far
    dtypes: list[str]  # of the outputs of linear and convolution layers in training
    convolved: list[tuple[int, ...]]  # height and width of the output of each convolution, in the first step
    batchnorm: bool  # a layer normalizes over the batch


class DeviceSeen(Event):  # after the first step
    bf16_is_fast: bool  # the device of the model computes faster in bfloat16 than in float32


class ValuesAsked(Event):  # after a step; ``where`` is the last line that read the value of a tensor
    count: int  # how often the program has read a value so far


class SamplesPrepared(Event):  # after a step
    count: int  # samples of the workshop data set that were prepared one by one so far


class FileWritten(Event):  # a file in the folder of the run was opened for writing, renamed, or saved
    path: str


class FileRenamed(Event):  # a file or folder was renamed
    source: str  # its previous name


class Saved(Event):  # ``torch.save`` or ``Trainer.save_checkpoint`` was called
    path: str  # "" if the file has no name
    keys: list[str]  # the names of the model parameters in it
    whole: bool = False  # the library replaces the file only when the new one is complete (Lightning)
    accuracy: float | None = None  # the value in Lightning at that moment
    moments: int = 0  # elements of the optimizer state in it
    own: int = 0  # elements of the optimizer state of this process
    tensors: list[Sketch] = field(default_factory=list)  # the floating-point tensors in it
    copies: list[str] = field(default_factory=list)  # the classes of the copies of models in it


class Loaded(Event):  # ``torch.load`` was called
    path: str = ""  # "" if the file has no name


class WroteOutside(Event):  # the program tried to write outside the folder of the run
    path: str


class Reported(Event):  # the figures of an epoch were written to the workshop log
    losses: list[float]  # of its steps
    accuracy: float | None
    samples_per_second: float
    metrics: dict[str, float]
    truth: dict[str, float]  # the same metrics, computed by the check over the whole test set; empty if unknown
    samples: int  # the number of test samples behind ``truth``
    failed: str  # why ``truth`` is unknown, or ""


class TrainerFit(Event):
    """``Trainer.fit`` was called."""


class CallbacksSeen(Event):  # training with Lightning began
    stop: list[tuple[str, str]]  # (monitor, mode) of each EarlyStopping
    best: list[tuple[str, str]]  # the same for each ModelCheckpoint


class MonitorSeen(Event):  # after a validation with Lightning; ``where`` is the line that logs the value
    name: str  # that a callback or a schedule monitors
    value: float  # in this process


class MetricsLogged(Event):  # a logger of Lightning received metrics with these names
    names: list[str]


class FullySharded(Event):  # ``fully_shard`` was called
    held: int  # bytes of the module's parameters that this process had in full at that moment
    offload: str  # the type of the offload policy


class CheckpointCalled(Event):  # a function of ``torch.distributed.checkpoint`` was called
    name: str
    writer: str  # the type of its storage writer, or ""


class EntriesSaved(Event):  # ``torch.distributed.checkpoint`` saves what it does not divide among the ranks
    entries: dict[str, int]  # a checksum of each, by its key


class WeightsRead(Event):  # a safetensors file was read in full
    bytes: int


class GradientsClipped(Event):  # ``clip_grad_norm_`` was called with gradients of these norms in this process
    norms: list[float]
    total: float | None  # the norm that it returned; None: of a DTensor, which is that of all processes


class FineTuningBegun(Event):  # the log of a language-model training began
    validation_loss: float  # in nats


class FineTuningReported(Event):  # a line was written to this log
    losses: list[float]  # of the steps since the previous line, in nats
    validation_loss: float


class Compiled(Event):
    """``torch.compile`` or ``Module.compile`` was called (the check compiles nothing)."""


class ActivationsKept(Event):  # a forward pass in training ended
    bytes: int  # kept for the backward pass


class LayoutSeen(Event):  # how the model was sharded at the first step
    own: int  # bytes of the parameters in this process
    whole: int  # bytes of all parameters
    whole_here: list[str]  # the names of the parameters that this process has in full
    dtypes: list[str]  # of the parameters
    groups: int  # modules that ``fully_shard`` made into groups
    layers: int
    layer_groups: int  # layers that are groups
    buffers: list[str]  # the names of rotary buffers with wrong contents


class EngineMade(Event):  # ``deepspeed.initialize`` returned an engine
    stage: int  # of ZeRO
    clipping: float
    batch: int  # per process


class EngineCalled(Event):  # a method of the DeepSpeed engine was called
    name: str
    tag: str  # of save_checkpoint(), or ""


class EngineLoss(Event):  # ``engine.backward`` was called with this loss
    loss: float


class MomentsMeasured(Event):  # after a step of the engine
    own: int  # bytes of the optimizer moments in this process
    whole: int  # bytes of the moments of the whole model


class AcceleratorCalled(Event):  # a method of ``accelerate.Accelerator`` was called
    name: str
    of: list[str] = field(default_factory=list)  # the types of its arguments (of the sampler of a loader; "Optimizer")
    rest: int = 0  # samples of the last batch of all ranks, if it is smaller and only single numbers are gathered


@dataclass(frozen=True)
class Moment:
    """Something that a process did in a step of a program of stage 06."""

    # "forward" or "backward" (a block of the model begins), "call" (of a collective), "wait" (for one), "class" (the step has
    # used a class of PyTorch)
    what: str
    name: str  # of the collective that was called or waited for, also "send" and "recv"; the number of the block; the class
    bytes: int  # that this process sends in the collective; for "forward": of the input of the block
    peer: int  # the rank to which a "send" or from which a "recv" is, in its group; -1 for others
    group: tuple[int, ...]  # of a call: the ranks in the group
    flops: int  # of the matrix products of this step so far
    phase: str  # "forward", "backward", "optimizer" or "" (before the first block and after the optimizer)
    held: int  # bytes of all tensors at this moment
    where: str  # the line of the program


class StepTraced(Event):  # at the end of one step of a program of stage 06
    moments: list[Moment]
    optimizers: dict[
        str, list[str]
    ]  # for each line that created one: the classes of torch.distributed to which it or a parameter belongs
    parameters: int  # bytes of the parameters that the optimizers update
    state: int  # bytes of the state of the optimizers
    held: int  # bytes of all tensors
    flops: int  # of all matrix products
    normalized: int = 0  # bytes of the inputs of all layer norms
    exchanges: list[str] = field(
        default_factory=list
    )  # the lines that called a collective of PyTorch with a backward pass


class BuildReported(Event):  # a program of stage 06 reported the losses of its last steps
    losses: list[float]


class CaseTried(Event):  # the check tries a class of the program with a model of its own
    name: str  # of the case
    problem: str | None  # what went wrong, or ""; None: the case begins
