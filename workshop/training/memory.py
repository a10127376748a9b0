"""Predict the memory that training a model takes in each process, from the sizes of the model.

Gradients, optimizer state and activations are counted tensor by tensor; the tests compare them, and the peak, with the bytes in
PyTorch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from workshop.training.transformer import GIB, Sizes


@dataclass(frozen=True)
class Memory:
    """The bytes that training takes on one GPU (or in one process): the most for each purpose, and the most at one time.

    They do not reach their maxima at the same time. For example, the gradients are complete only at the end of the backward
    pass, when the activations are freed.

    Attributes:
        parameters, gradients, optimizer: what stays in memory from step to step, in float32 (ZeRO: as in its paper).
        exchange: what communication needs in addition: the buckets of DDP, the layers that FSDP and ZeRO-3 gather at a time, and
            the gradients that FSDP is reducing.
        activations: what the forward pass keeps for the backward pass.
        temporary: the largest amount that is soon freed: two gradients for the logits of all tokens, the activations of the layer
            that is recomputed (with activation checkpointing), or what the optimizer step computes for each parameter.
        peak: the most that all of these take at one time.
        allocator: what the allocator cannot use, and what libraries take: assumed, not measured.
    """

    parameters: float
    gradients: float
    optimizer: float
    exchange: float
    activations: float
    temporary: float
    peak: float
    allocator: float

    @property
    def total(self) -> float:
        return self.peak + self.allocator


class States(NamedTuple):
    """The bytes of parameters, gradients and optimizer state in each process, and what communication needs at three moments.

    Attributes:
        parameters, gradients, optimizer: as in ``Memory``.
        at_loss, in_backward, in_step: for communication while the process computes the loss, the backward pass of a layer, and
            the optimizer step.
    """

    parameters: float
    gradients: float
    optimizer: float
    at_loss: float
    in_backward: float
    in_step: float


LORA_RANK = 8  # in lora.py


def estimate(
    sizes: Sizes,
    strategy: str,
    processes: int,
    *,
    batch_size: int,
    sequence_length: int,
    bf16: bool = True,
    checkpointing: bool = False,
    offload: bool = False,
    on_gpu: bool = True,
) -> Memory:
    """Predict the memory that training with AdamW takes in each process.

    DDP and FSDP are as in stage 04: parameters, gradients and optimizer state in float32, computation in bfloat16 (DDP: autocast;
    FSDP: MixedPrecisionPolicy). ZeRO is as in Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054: parameters and
    gradients in bfloat16 (2 + 2 bytes), and a float32 copy with the two moments of AdamW (12 bytes). Stage 1 shards these 12
    bytes, stage 2 also the gradients, stage 3 everything. LoRA is as in lora.py: bfloat16 parameters, and small float32 matrices
    that are trained with DDP.

    The bytes that a layer keeps for the backward pass are counted operation by operation; the tests compare them with what
    PyTorch saves. The attention (SDPA) never stores the scores of all pairs of tokens.

    Args:
        sizes: the sizes of the model.
        strategy: "ddp", "zero1", "zero2", "zero3", "fsdp" or "lora".
        processes: the number of processes, one per GPU.
        batch_size: sequences per batch, in each process.
        sequence_length: tokens per sequence.
        bf16: compute in bfloat16, else in float32.
        checkpointing: keep only the input of each layer, and recompute the rest in the backward pass.
        offload: keep parameters, gradients and optimizer state in CPU memory (FSDP, ZeRO-3), or only the last (ZeRO-1, ZeRO-2).
        on_gpu: add what libraries, the allocator and the default implementation of AdamW (``foreach``) take on a GPU.
    """
    width = 2 if bf16 else 4  # bytes per number in the computation
    tokens = batch_size * sequence_length
    autocast = strategy in ("ddp", "lora") and bf16
    layer = _layer_activations(sizes, autocast, width) * tokens
    # Between the layers is the residual stream, which stays in float32 with autocast.
    between = sizes.hidden * (4 if autocast else width) * tokens
    activations = sizes.layers * (between if checkpointing else layer)
    # The last norm, and the logarithms of all token probabilities, in float32.
    activations += (norm_bytes(sizes, autocast, width) + 4 * sizes.vocabulary) * tokens
    if strategy == "ddp" and bf16:  # autocast copies all parameters except the embedding
        activations += 2 * (sizes.parameters - sizes.vocabulary * sizes.hidden * (not sizes.tied))
    states = _states(sizes, strategy, processes, width)
    if offload and strategy not in ("ddp", "lora"):
        states = states._replace(optimizer=0)
        if strategy in ("fsdp", "zero3"):
            states = states._replace(parameters=0, gradients=0)
    # In the backward pass of the loss, the gradients of the logits before and after the softmax, in float32.
    logits = 2 * 4 * sizes.vocabulary * tokens
    # With foreach, AdamW computes the denominators of all parameters at once, as large as one of its two moments.
    update = states.optimizer / 2 if on_gpu and strategy in ("ddp", "fsdp", "lora") else 0
    kept = (between if checkpointing else layer) + 2 * sizes.layer_parameters * (strategy == "ddp" and bf16)
    at_loss, in_step = states.at_loss + activations + logits, states.in_step + states.gradients + update
    peak = states.parameters + states.optimizer + max(at_loss, in_step, *_in_backward(sizes, states, kept, layer))
    temporary = max(logits, update, layer if checkpointing else 0)
    allocator = 0.05 * peak + 1.5 * GIB if on_gpu else 0
    return Memory(*states[:3], max(states[3:]), activations, temporary, peak, allocator)


def _in_backward(sizes: Sizes, states: States, kept: float, layer: float) -> list[float]:
    """Return the bytes at the beginning and at the end of the backward pass, without parameters and optimizer state.

    Between these two moments, the bytes change linearly: each layer frees what it has kept, and adds its gradients.

    Args:
        sizes: the sizes of the model.
        states: what the strategy needs.
        kept: the activations that the forward pass of a layer has kept.
        layer: the activations of a layer during its backward pass.
    """
    found = []
    for left in {0, max(0, sizes.layers - 2)}:  # the number of layers whose backward pass has not begun
        done = states.gradients * (sizes.layers - 1 - left) * sizes.layer_parameters / sizes.parameters
        found.append(states.in_backward + left * kept + layer + done)
    return found


def _states(sizes: Sizes, strategy: str, n: int, width: int) -> States:
    """Return what a strategy needs in each of n processes; ``width``: bytes per computed number."""
    p, layer = sizes.parameters, sizes.layer_parameters
    if strategy == "ddp":
        buckets = 4 * p  # as large as the gradients; one process has them too
        return States(4 * p, 4 * p, 8 * p, buckets, buckets, buckets)
    if strategy == "lora":
        # Two matrices per matrix of a layer: one has the same number of columns, one the same number of rows.
        queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        edges = 2 * (sizes.hidden + queries) + 2 * (sizes.hidden + keys) + 3 * (sizes.hidden + sizes.intermediate)
        adapters = sizes.layers * LORA_RANK * edges
        return States(width * p + 4 * adapters, 4 * adapters, 8 * adapters, *[4 * adapters] * 3)
    if strategy == "fsdp":
        # The root group stays gathered, and the gradient of the output layer is complete until the end of the backward pass.
        # There, a layer has its parameters and its gradients, FSDP gathers the next layer, and it reduces the gradients of the
        # previous one in float32.
        output = sizes.vocabulary * sizes.hidden
        in_backward = width * (sizes.root_parameters + output) + (4 + 3 * width) * layer
        return States(4 * p / n, 4 * p / n, 8 * p / n, width * (sizes.root_parameters + layer), in_backward, 0)
    stage = int(strategy[-1])
    gathered = 2 * (sizes.root_parameters + 2 * layer) if stage == 3 else 0
    stored = (2 * p / (n if stage == 3 else 1), 2 * p / (n if stage >= 2 else 1), 12 * p / n)
    return States(*stored, gathered, gathered, 0)


def norm_bytes(sizes: Sizes, autocast: bool, width: int) -> int:
    """Return the bytes per token that an RMSNorm and the next layer keep: float32 input, normalized input, and output."""
    return sizes.hidden * (4 + (4 if autocast else width) + width)


def attention_bytes(sizes: Sizes, width: int) -> int:
    """Return the bytes per token that the attention keeps: queries, output, keys, values, and one float32 sum per head."""
    return width * (2 * sizes.heads * sizes.head + 2 * sizes.kv_heads * sizes.head) + 4 * sizes.heads


def mlp_bytes(sizes: Sizes, width: int) -> int:
    """Return the bytes per token that the MLP keeps: gate, its SiLU, the other branch, their product."""
    return width * 4 * sizes.intermediate


def _layer_activations(sizes: Sizes, autocast: bool, width: int) -> int:
    """Return the bytes per token that a decoder layer keeps for the backward pass."""
    # Autocast converts an input for each layer that takes it: three times for queries, keys and values, twice in the MLP.
    again = width * sizes.hidden * 3 if autocast else 0
    return 2 * norm_bytes(sizes, autocast, width) + attention_bytes(sizes, width) + mlp_bytes(sizes, width) + again
