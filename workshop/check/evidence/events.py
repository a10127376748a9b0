"""One frozen dataclass for each kind of event: probes write them, rules read them, nothing else knows them.

An event holds only what some rule reads (a test compares). ``where`` is the line of the program, as "file.py:12", or "".
A new field or event changes ``schema.SCHEMA``, and evidence that was recorded before has to be recorded again.
"""

from dataclasses import dataclass, field

# A sample: (type of the data set, its length, index in it), or ("content", checksum, bytes) where no loader names it.
Key = tuple[object, ...]
# A loader and the number of its iteration.
Loader = tuple[int, int]
# The norm of a tensor and some of its values; None: there is no tensor (no gradient, or one without contents).
Sketch = tuple[float, list[float]] | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has."""

    where: str = ""


# ---------------------------------------------------------------- the process


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A process began to record. ``parent`` is the process id of its parent; the rest is what its launcher set."""

    parent: int
    rank: str | None = None
    local_rank: str | None = None


@dataclass(frozen=True, kw_only=True)
class Raised(Event):
    """An exception ended the program or one of its processes."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Exited(Event):
    """The program called ``sys.exit``."""

    status: int


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The process reached its end (it was not killed)."""


# ---------------------------------------------------------------- the group and its collectives


@dataclass(frozen=True, kw_only=True)
class Joining(Event):
    """``init_process_group`` was called. ``given_*`` is what the launcher had set in the environment."""

    init_method: str
    world_size: object
    address: str | None
    port: str | None
    given_address: str | None
    given_port: str | None


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """``init_process_group`` returned."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class GroupDestroyed(Event):
    """``destroy_process_group`` was called."""


@dataclass(frozen=True, kw_only=True)
class StoreOpened(Event):
    """A ``TCPStore`` was made."""

    port: int
    master: bool


@dataclass(frozen=True, kw_only=True)
class DeviceChosen(Event):
    """The program asked for the device with this index."""

    index: int | None


@dataclass(frozen=True, kw_only=True)
class Collective(Event):
    """The program called a collective. ``shape`` is that of the first tensor, None for objects."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True, kw_only=True)
class InnerCollective(Event):
    """A library called a collective during the backward pass: FSDP gathers parameters and reduces gradients."""

    name: str
    dtype: str


# ---------------------------------------------------------------- models, batches and steps


@dataclass(frozen=True, kw_only=True)
class Wrapped(Event):
    """A model was given to ``DistributedDataParallel``."""


@dataclass(frozen=True, kw_only=True)
class UnevenJoined(Event):
    """``torch.distributed.algorithms.join.Join`` was entered: the ranks may take different numbers of steps."""


@dataclass(frozen=True, kw_only=True)
class Forward(Event):
    """One forward pass of the whole model; part of ``Backward`` or ``Evaluated``.

    Attributes:
        wrapped: whether it went through ``DistributedDataParallel``.
        sync: whether the backward is to average gradients (False under ``no_sync()``); None: not wrapped.
        keys: its samples.
        rows: their contents, as the model saw them.
        shape: of one sample; None: the input is no tensor.
        loader: where the batch came from, if a loader was seen.
    """

    wrapped: bool
    sync: bool | None
    keys: list[Key]
    rows: list[Key]
    shape: tuple[int, ...] | None
    loader: Loader | None

    def names(self, identity: str) -> list[Key]:
        """The samples, named by ``Process.identity``."""
        return self.rows if identity == "rows" else self.keys


@dataclass(frozen=True, kw_only=True)
class Backward(Event):
    """One backward pass.

    Attributes:
        forward: the forward that it belongs to, if one was seen.
        loss: the mean of the loss.
        sync: as in ``Forward``.
        leftover: whether gradients of an earlier backward were still there.
        random: a checksum of torch's random state.
    """

    forward: Forward | None
    loss: float | None
    sync: bool | None
    leftover: bool
    random: int


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """A forward pass that no backward pass followed."""

    forward: Forward


@dataclass(frozen=True, kw_only=True)
class LoaderStarted(Event):
    """A ``DataLoader`` began an iteration; ``length`` is its number of batches, if it knows."""

    loader: int
    iteration: int
    length: int | None


@dataclass(frozen=True, kw_only=True)
class EpochSet(Event):
    """``DistributedSampler.set_epoch`` was called."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class BatchLoaded(Event):
    """A ``DataLoader`` returned a batch, after so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepBegun(Event):
    """``optimizer.step()`` was called.

    Attributes:
        gradients, weights: a sketch for each parameter of the optimizer.
        names: their names in the model, "" where unknown.
        rates: the learning rate of each group.
        state: how many parameters the optimizer has a state for.
        of_model: whether the optimizer holds any parameter of the model.
        fitting: whether Lightning's Trainer takes the step.
    """

    gradients: list[Sketch]
    weights: list[Sketch]
    names: list[str]
    rates: list[float]
    state: int
    of_model: bool
    fitting: bool


@dataclass(frozen=True, kw_only=True)
class StepTaken(Event):
    """``optimizer.step()`` returned."""

    weights: list[Sketch]


@dataclass(frozen=True, kw_only=True)
class GraphMeasured(Event):
    """The size of the largest autograd graph that something still holds, at two of the first steps."""

    nodes: int


# ---------------------------------------------------------------- what the layers and the device do, after each step


@dataclass(frozen=True, kw_only=True)
class LayersSeen(Event):
    """After a step: what the layers have done so far.

    Attributes:
        dtypes: of what linear and convolution layers return in training.
        convolved: height and width of what each convolution returns, in the first step.
        batchnorm: whether a layer normalizes with the batch.
    """

    dtypes: list[str]
    convolved: list[tuple[int, ...]]
    batchnorm: bool


@dataclass(frozen=True, kw_only=True)
class DeviceSeen(Event):
    """After the first step: whether the model's device computes faster in bfloat16 than in float32."""

    bf16_is_fast: bool


@dataclass(frozen=True, kw_only=True)
class ValuesAsked(Event):
    """After a step: how often the program has asked a tensor for its value so far; ``where`` is the last time."""

    count: int


@dataclass(frozen=True, kw_only=True)
class SamplesPrepared(Event):
    """After a step: how many samples of the workshop's data set have been prepared one by one so far."""

    count: int


# ---------------------------------------------------------------- files and reports


@dataclass(frozen=True, kw_only=True)
class FileWritten(Event):
    """A file in the run's folder was opened for writing, got its name, or was saved to."""

    path: str


@dataclass(frozen=True, kw_only=True)
class FileRenamed(Event):
    """A file or folder was renamed; ``source`` is its name before."""

    source: str


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """``torch.save`` or Lightning's ``save_checkpoint`` was called.

    Attributes:
        path: the file; "" if it has no name.
        keys: the names of the model's parameters in it.
        whole: whether the library itself replaces the file only when it is complete (Lightning).
        accuracy: the accuracy that Lightning had then.
    """

    path: str
    keys: list[str]
    whole: bool = False
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded(Event):
    """``torch.load`` was called."""


@dataclass(frozen=True, kw_only=True)
class WroteOutside(Event):
    """The program tried to write outside of the run's folder."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Reported(Event):
    """An epoch's figures were written to the workshop's log.

    Attributes:
        losses: of its steps.
        accuracy, samples_per_second, metrics: as reported.
        truth: the same metrics of the model over the whole test set, computed at that moment; empty if unknown.
        samples: the number of test samples behind ``truth``.
        failed: why there is no truth, or "".
    """

    losses: list[float]
    accuracy: float | None
    samples_per_second: float
    metrics: dict[str, float]
    truth: dict[str, float]
    samples: int
    failed: str


# ---------------------------------------------------------------- Lightning


@dataclass(frozen=True, kw_only=True)
class TrainerFit(Event):
    """``Trainer.fit`` was called."""


@dataclass(frozen=True, kw_only=True)
class CallbacksSeen(Event):
    """Training began with these callbacks: (monitor, mode) of each EarlyStopping and of each ModelCheckpoint."""

    stop: list[tuple[str, str]]
    best: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class MetricsLogged(Event):
    """A logger of Lightning received metrics with these names."""

    names: list[str]


# ---------------------------------------------------------------- FSDP, checkpoints of many ranks, language models


@dataclass(frozen=True, kw_only=True)
class FullySharded(Event):
    """``fully_shard`` was called.

    Attributes:
        held: bytes of the module's parameters that this process held in full at that moment.
        offload: the type of the offload policy.
    """

    held: int
    offload: str


@dataclass(frozen=True, kw_only=True)
class CheckpointCalled(Event):
    """A function of ``torch.distributed.checkpoint`` was called; ``writer``: the type of its storage writer, or ""."""

    name: str
    writer: str


@dataclass(frozen=True, kw_only=True)
class WeightsRead(Event):
    """A safetensors file was read in full."""

    bytes: int


@dataclass(frozen=True, kw_only=True)
class GradientsClipped(Event):
    """``clip_grad_norm_`` was called with gradients of these norms in this process."""

    norms: list[float]


@dataclass(frozen=True, kw_only=True)
class FineTuningBegun(Event):
    """The log of a language model's training began with this validation loss, in nats."""

    validation_loss: float


@dataclass(frozen=True, kw_only=True)
class FineTuningReported(Event):
    """The log of a language model's training got the losses of some steps and a validation loss, in nats."""

    losses: list[float]
    validation_loss: float


@dataclass(frozen=True, kw_only=True)
class Compiled(Event):
    """``torch.compile`` or ``Module.compile`` was called (the check compiles nothing)."""


@dataclass(frozen=True, kw_only=True)
class ActivationsKept(Event):
    """A forward pass in training kept so many bytes for the backward pass."""

    bytes: int


@dataclass(frozen=True, kw_only=True)
class LayoutSeen(Event):
    """How the model was sharded at the first step.

    Attributes:
        own, whole: bytes of the parameters that this process holds, and of all.
        whole_here: the names of the parameters that this process holds in full.
        dtypes: of the parameters.
        groups: modules that ``fully_shard`` has made groups of.
        layers, layer_groups: the model's layers, and those that are groups.
        buffers: the names of rotary buffers with wrong contents.
    """

    own: int
    whole: int
    whole_here: list[str]
    dtypes: list[str]
    groups: int
    layers: int
    layer_groups: int
    buffers: list[str]


# ---------------------------------------------------------------- DeepSpeed and Accelerate


@dataclass(frozen=True, kw_only=True)
class EngineMade(Event):
    """``deepspeed.initialize`` returned an engine with this ZeRO stage, clipping and batch size per process."""

    stage: int
    clipping: float
    batch: int


@dataclass(frozen=True, kw_only=True)
class EngineCalled(Event):
    """A method of the DeepSpeed engine was called."""

    name: str


@dataclass(frozen=True, kw_only=True)
class EngineLoss(Event):
    """The engine's ``backward`` was given this loss."""

    loss: float


@dataclass(frozen=True, kw_only=True)
class MomentsMeasured(Event):
    """After a step of the engine: bytes of the optimizer's moments in this process, and of the whole model's."""

    own: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class AcceleratorCalled(Event):
    """A method of Accelerate's ``Accelerator`` was called; ``of``: the types of its arguments (of a loader: its sampler's)."""

    name: str
    of: list[str] = field(default_factory=list)
