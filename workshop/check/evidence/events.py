"""One frozen dataclass for each kind of event: probes write them, rules read them, nothing else knows them.

The comment beside an event says when it is noted. It holds only what some rule reads (a test compares). If a field or an event
is new, all evidence is recorded again.
"""

from dataclasses import dataclass, field
from typing import dataclass_transform

# A sample: (type of the data set, its length, index in it), or ("content", checksum, bytes) where no loader names it.
Key = tuple[object, ...]
Loader = tuple[int, int]  # a loader and the number of its iteration
# The norm of a tensor and some of its values; None: there is no tensor (no gradient, or one without contents).
Sketch = tuple[float, list[float]] | None


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has. Each subclass becomes such a dataclass by itself."""

    where: str = ""  # the line of the program, as "file.py:12"

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Started(Event):  # a process began to record
    parent: int  # the process id of its parent; the rest is what its launcher set
    rank: str | None = None
    local_rank: str | None = None


class Raised(Event):  # an exception ended the program or one of its processes
    type: str
    message: str
    traceback: str


class Exited(Event):  # the program called ``sys.exit``
    status: int


class Ended(Event):
    """The process reached its end (it was not killed)."""


class Joining(Event):  # ``init_process_group`` was called
    init_method: str
    world_size: object
    address: str | None
    port: str | None
    given_address: str | None  # what the launcher had set in the environment
    given_port: str | None


class Joined(Event):  # ``init_process_group`` returned
    rank: int
    world_size: int


class GroupDestroyed(Event):
    """``destroy_process_group`` was called."""


class StoreOpened(Event):  # a ``TCPStore`` was made
    port: int
    master: bool


class DeviceChosen(Event):  # the program asked for the device with this index
    index: int | None


class Collective(Event):  # the program called a collective
    name: str
    shape: tuple[int, ...] | None  # of the first tensor; None for objects
    dtype: str


class InnerCollective(Event):  # a library, such as FSDP, called a collective during the backward pass
    name: str
    dtype: str


class Wrapped(Event):
    """A model was given to ``DistributedDataParallel``."""


class UnevenJoined(Event):
    """``torch.distributed.algorithms.join.Join`` was entered: the ranks may take different numbers of steps."""


class Forward(Event):  # one forward pass of the whole model; part of ``Backward`` or ``Evaluated``
    wrapped: bool  # it went through ``DistributedDataParallel``
    sync: bool | None  # the backward is to average gradients (False under ``no_sync()``); None: not wrapped
    keys: list[Key]  # its samples
    rows: list[Key]  # their contents, as the model saw them
    shape: tuple[int, ...] | None  # of one sample; None: the input is no tensor
    loader: Loader | None  # where the batch came from, if a loader was seen

    def names(self, identity: str) -> list[Key]:
        """The samples, named by ``Process.identity``."""
        return self.rows if identity == "rows" else self.keys


class Backward(Event):  # one backward pass
    forward: Forward | None  # the forward that it belongs to, if one was seen
    loss: float | None  # the mean
    sync: bool | None  # as in ``Forward``
    leftover: bool  # gradients of an earlier backward were still there
    random: int  # a checksum of torch's random state


class Evaluated(Event):  # a forward pass that no backward pass followed
    forward: Forward


class LoaderStarted(Event):  # a ``DataLoader`` began an iteration
    loader: int
    iteration: int
    length: int | None  # its number of batches, if it knows


class EpochSet(Event):  # ``DistributedSampler.set_epoch`` was called
    epoch: int


class BatchLoaded(Event):  # a ``DataLoader`` returned a batch
    seconds: float  # that it took


class StepBegun(Event):  # ``optimizer.step()`` was called
    gradients: list[Sketch]  # of each parameter of the optimizer
    weights: list[Sketch]
    names: list[str]  # of these parameters in the model, "" where unknown
    rates: list[float]  # the learning rate of each group
    state: int  # how many parameters the optimizer has a state for
    of_model: bool  # the optimizer holds some parameter of the model
    fitting: bool  # Lightning's Trainer takes the step


class StepTaken(Event):  # ``optimizer.step()`` returned
    weights: list[Sketch]


class GraphMeasured(Event):  # at two of the first steps
    nodes: int  # of the largest autograd graph that something still holds


class LayersSeen(Event):  # after a step: what the layers have done so far
    dtypes: list[str]  # of what linear and convolution layers return in training
    convolved: list[tuple[int, ...]]  # height and width of what each convolution returns, in the first step
    batchnorm: bool  # a layer normalizes with the batch


class DeviceSeen(Event):  # after the first step
    bf16_is_fast: bool  # the model's device computes faster in bfloat16 than in float32


class ValuesAsked(Event):  # after a step; ``where`` is the last time that the program asked a tensor for its value
    count: int  # how often it has asked so far


class SamplesPrepared(Event):  # after a step
    count: int  # samples of the workshop's data set that have been prepared one by one so far


class FileWritten(Event):  # a file in the run's folder was opened for writing, got its name, or was saved to
    path: str


class FileRenamed(Event):  # a file or folder was renamed
    source: str  # its name before


class Saved(Event):  # ``torch.save`` or Lightning's ``save_checkpoint`` was called
    path: str  # "" if the file has no name
    keys: list[str]  # the names of the model's parameters in it
    whole: bool = False  # the library itself replaces the file only when it is complete (Lightning)
    accuracy: float | None = None  # that Lightning had then


class Loaded(Event):
    """``torch.load`` was called."""


class WroteOutside(Event):  # the program tried to write outside of the run's folder
    path: str


class Reported(Event):  # an epoch's figures were written to the workshop's log
    losses: list[float]  # of its steps
    accuracy: float | None
    samples_per_second: float
    metrics: dict[str, float]
    truth: dict[str, float]  # the same metrics, computed at that moment over the whole test set; empty if unknown
    samples: int  # the number of test samples behind ``truth``
    failed: str  # why there is no truth, or ""


class TrainerFit(Event):
    """``Trainer.fit`` was called."""


class CallbacksSeen(Event):  # Lightning's training began
    stop: list[tuple[str, str]]  # (monitor, mode) of each EarlyStopping
    best: list[tuple[str, str]]  # the same of each ModelCheckpoint


class MetricsLogged(Event):  # a logger of Lightning received metrics with these names
    names: list[str]


class FullySharded(Event):  # ``fully_shard`` was called
    held: int  # bytes of the module's parameters that this process held in full at that moment
    offload: str  # the type of the offload policy


class CheckpointCalled(Event):  # a function of ``torch.distributed.checkpoint`` was called
    name: str
    writer: str  # the type of its storage writer, or ""


class WeightsRead(Event):  # a safetensors file was read in full
    bytes: int


class GradientsClipped(Event):  # ``clip_grad_norm_`` was called with gradients of these norms in this process
    norms: list[float]


class FineTuningBegun(Event):  # the log of a language model's training began
    validation_loss: float  # in nats


class FineTuningReported(Event):  # a line was written to this log
    losses: list[float]  # of the steps since the line before, in nats
    validation_loss: float


class Compiled(Event):
    """``torch.compile`` or ``Module.compile`` was called (the check compiles nothing)."""


class ActivationsKept(Event):  # a forward pass in training ended
    bytes: int  # that it kept for the backward pass


class LayoutSeen(Event):  # how the model was sharded at the first step
    own: int  # bytes of the parameters that this process holds
    whole: int  # bytes of all parameters
    whole_here: list[str]  # the names of the parameters that this process holds in full
    dtypes: list[str]  # of the parameters
    groups: int  # modules that ``fully_shard`` has made groups of
    layers: int
    layer_groups: int  # layers that are groups
    buffers: list[str]  # the names of rotary buffers with wrong contents


class EngineMade(Event):  # ``deepspeed.initialize`` returned an engine
    stage: int  # of ZeRO
    clipping: float
    batch: int  # per process


class EngineCalled(Event):  # a method of the DeepSpeed engine was called
    name: str


class EngineLoss(Event):  # the engine's ``backward`` was given this loss
    loss: float


class MomentsMeasured(Event):  # after a step of the engine
    own: int  # bytes of the optimizer's moments in this process
    whole: int  # bytes of the moments of the whole model


class AcceleratorCalled(Event):  # a method of Accelerate's ``Accelerator`` was called
    name: str
    of: list[str] = field(default_factory=list)  # the types of its arguments (of a loader: its sampler's)
