"""Predict the bytes of a training step on the fullest GPU from a model and a layout.

``workshop memory`` and the stage scripts use the same counts of bytes (``workshop.training.memory``); here they are divided over
the GPUs of a mesh, and multiplied by the micro-batches that a pipeline has in flight.
"""

from dataclasses import dataclass

from workshop.plan.layout import Layout
from workshop.plan.sizes import Model, part
from workshop.training.memory import attention_bytes, mlp_bytes, norm_bytes

GIB = 2**30
ALLOCATOR = 0.08  # of the peak: what the caching allocator reserves and cannot use
LIBRARIES = 2.0 * GIB  # the contexts of CUDA or ROCm, of NCCL or RCCL, and their buffers


@dataclass(frozen=True)
class Bytes:
    """The bytes of a training step on the fullest GPU: the most for each purpose, and the most at one time.

    Attributes:
        parameters, gradients, optimizer: what stays from step to step. FSDP: float32; else bfloat16 parameters, gradients of
            ``Layout.gradient_bytes``, and a float32 copy with two moments for the optimizer.
        gathered: parameters that FSDP gathers, and gradients that it has not reduced yet.
        activations: what the forward passes in flight keep.
        temporary: the most that is soon freed: a layer in its backward pass, or the logits and their gradients.
        peak: the most that all of these take at one time; less than their sum, because they do not reach their maxima together.
        allocator: what the allocator cannot use, and what libraries take.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    temporary: float
    peak: float
    allocator: float

    @property
    def total(self) -> float:
        return self.peak + self.allocator


def states(model: Model, layout: Layout, layers: int, roots: int) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state of a stage in each process.

    Args:
        model: its sizes.
        layout: how it is divided among the GPUs.
        layers: the layers of the stage.
        roots: embedding and output layer: how many of them the stage has.
    """
    own = part(model, layout.tp)
    experts = model.experts * (3 if model.gated else 2) * model.hidden * own.intermediate if model.experts > 1 else 0
    dense = layers * (own.layer_parameters - experts) + roots * own.vocabulary * model.hidden + model.hidden
    found = [0.0, 0.0, 0.0]
    for count, ep in ((dense, 1), (layers * experts, layout.ep)):
        shards = max(
            1, layout.sharding // ep
        )  # the experts are divided among a part of the data-parallel ranks already
        count /= ep
        if layout.zero == 3:
            each = (4 / shards, 4 / shards, 8 / shards)
        else:
            reduced = layout.gradient_bytes / (shards if layout.zero == 2 else 1)
            each = (2, reduced, 12 / (shards if layout.zero else 1))
        found = [total + count * width for total, width in zip(found, each, strict=True)]
    return found[0], found[1], found[2]


def layer_bytes(model: Model, layout: Layout, sequence_length: int) -> float:
    """Return the bytes that a layer keeps in each process for one micro-batch without recomputation."""
    own, tp = part(model, layout.tp, ep=layout.ep), layout.tp
    tokens = layout.mbs * sequence_length / layout.cp
    fused = layout.kernels == "fused"
    # A fused norm keeps its input and its output; else also the input in float32 and the normalized input.
    norms = 2 * (4 * model.hidden if fused else norm_bytes(model, False, 2)) / (tp if layout.sp else 1)
    attention = attention_bytes(own, 2)
    if layout.attention == "plain":  # scores before and after the softmax, and the mask of the dropout
        attention += 5 * own.heads * sequence_length
    mlp = mlp_bytes(own, 2) * (1 if model.gated else 0.5) * model.active
    if fused and model.gated:
        mlp *= 0.75  # the SiLU is computed again in the fused backward pass
    again = 4 * model.hidden if layout.tp > 1 and not fused else 0  # Megatron gathers these inputs again instead
    return tokens * (norms + attention + mlp + again)


def _kept(model: Model, layout: Layout, sequence_length: int, layer: float) -> float:
    """Return the bytes that a layer keeps until its backward pass."""
    tokens = layout.mbs * sequence_length / layout.cp
    between = 2 * model.hidden * tokens / (layout.tp if layout.sp else 1)
    if layout.recompute == "none":
        return layer
    if layout.recompute == "half":
        return (layer + between) / 2
    if layout.recompute == "full":
        return between
    # Selective: the input, the output of the attention, and every second matrix product.
    own = part(model, layout.tp)
    products = own.heads * own.head + 2 * own.kv_heads * own.head + (2 if model.gated else 1) * own.intermediate
    products += 2 * model.hidden / layout.tp
    return between + tokens * (2 * own.heads * own.head + products)


def predict_bytes(model: Model, layout: Layout, sequence_length: int) -> Bytes:
    """Predict the memory of the fullest GPU: of a pipeline, the first stage or the last."""
    if layout.pp == 1:
        return _stage(model, layout, sequence_length, model.layers, 1 if model.tied else 2, 1.0, loss=True)
    layers = layout.stage_layers(model.layers, model.vocabulary * model.hidden / model.layer_parameters)
    flight = min(layout.pp, layout.microbatches)
    flight *= 1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1
    first = _stage(model, layout, sequence_length, layers, 1, flight, loss=False)
    last = _stage(model, layout, sequence_length, max(1, model.layers - layers * (layout.pp - 1)), 1, 1.0, loss=True)
    return max(first, last, key=lambda found: found.total)


def _stage(
    model: Model, layout: Layout, sequence_length: int, layers: int, roots: int, flight: float, *, loss: bool
) -> Bytes:
    parameters, gradients, optimizer = states(model, layout, layers, roots)
    layer = layer_bytes(model, layout, sequence_length)
    each = flight * _kept(model, layout, sequence_length, layer)
    kept = layers * each
    tokens = layout.mbs * sequence_length / layout.cp
    own = part(model, layout.tp, ep=layout.ep)
    output = own.vocabulary * model.hidden
    # The logits in the type of the computation and in float32, their logarithms, and two gradients; a fused loss needs two.
    logits = (8 if layout.fused_loss else 14) * tokens * own.vocabulary if loss else 0.0
    # In tensor parallelism, the whole inputs of attention and MLP and their gradients exist besides.
    backward = layer + (0.5 * layer + 8 * tokens * model.hidden if layout.tp > 1 else 0)
    early = late = 0.0  # what FSDP gathers, with the loss and in the backward pass
    if layout.zero == 3 and layout.pp == 1:
        # The root stays gathered; the gradient of the output layer is whole until the backward pass ends. There, a layer has its
        # parameters and gradients, FSDP gathers the next layer, and reduces the gradients of the one before in float32.
        early = 2 * (roots * output + own.layer_parameters)
        late = 2 * (roots + 1) * output + (6 + layout.gradient_bytes) * own.layer_parameters
    elif layout.zero == 3:  # a pipeline keeps its parameters gathered, and adds up whole gradients
        early = late = (2 + layout.gradient_bytes) * (roots * output + layers * own.layer_parameters)
    first = layout.zero == 3 and layout.pp == 1 and layout.microbatches == 1
    held = (
        0.0 if first else gradients
    )  # before the backward pass: of an earlier micro-batch, or a buffer for all gradients
    update = optimizer / 2 if layout.zero == 3 and layout.kernels == "eager" else 0.0  # AdamW's foreach
    peak = parameters + optimizer
    peak += max(
        early + kept + logits + held,
        late + max(0.0, kept - each) + backward + held,
        late + backward + gradients,
        gradients + update,
    )
    temporary = max(backward, logits, update)
    allocator = ALLOCATOR * peak + LIBRARIES
    return Bytes(parameters, gradients, optimizer, max(early, late), kept, temporary, peak, allocator)
