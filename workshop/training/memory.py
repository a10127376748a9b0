"""Predict the memory that training a model takes in each process, from the sizes of the model.

Gradients, optimizer state and activations are counted tensor by tensor; the tests compare them with the bytes in PyTorch.
"""

from dataclasses import dataclass, fields

from workshop.training.transformer import GIB, Sizes


@dataclass(frozen=True)
class Memory:
    """The bytes that training takes on one GPU (or in one process), by purpose.

    Attributes:
        parameters, gradients, optimizer: what stays in memory from step to step, in float32 (ZeRO: as in its paper).
        exchange: what communication needs in addition: the buckets of DDP, the layers that FSDP and ZeRO-3 gather at a time.
        activations: what the forward pass keeps for the backward pass.
        temporary: the largest amount that is soon freed: the logits of all tokens and their gradients, or, with activation
            checkpointing, the activations of the layer that is recomputed.
        allocator: what the allocator cannot use, and what libraries take: assumed, not measured.
    """

    parameters: float
    gradients: float
    optimizer: float
    exchange: float
    activations: float
    temporary: float
    allocator: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


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
        on_gpu: add what libraries and the allocator take on a GPU.
    """
    width = 2 if bf16 else 4  # bytes per number in the computation
    tokens = batch_size * sequence_length
    autocast = strategy in ("ddp", "lora") and bf16
    layer = _layer_activations(sizes, autocast, width) * tokens
    # Between the layers is the residual stream, which stays in float32 with autocast.
    between = sizes.hidden * (4 if autocast else width) * tokens
    activations = sizes.layers * (between if checkpointing else layer)
    # The last norm, and the logarithms of all token probabilities, in float32.
    activations += (_norm(sizes, autocast, width) + 4 * sizes.vocabulary) * tokens
    if strategy == "ddp" and bf16:  # autocast copies all parameters except the embedding
        activations += 2 * (sizes.parameters - sizes.vocabulary * sizes.hidden * (not sizes.tied))
    # The logits, and their copy in float32 for the loss; in the backward pass, the gradients of both.
    temporary = (width + 4) * sizes.vocabulary * tokens
    if checkpointing:  # in the backward pass, one layer is recomputed
        temporary = max(temporary, layer)
    parameters, gradients, optimizer, exchange = _model_states(sizes, strategy, processes, width)
    if offload and strategy not in ("ddp", "lora"):
        optimizer = 0
        if strategy in ("fsdp", "zero3"):
            parameters = gradients = 0
    parts = (parameters, gradients, optimizer, exchange, activations, temporary)
    return Memory(*parts, allocator=0.05 * sum(parts) + 1.5 * GIB if on_gpu else 0)


def _model_states(sizes: Sizes, strategy: str, n: int, width: int) -> tuple[float, float, float, float]:
    """Return the bytes of parameters, gradients, optimizer and exchange per process; ``width``: bytes per computed number."""
    p = sizes.parameters
    if strategy == "ddp":
        return 4 * p, 4 * p, 8 * p, 4 * p if n > 1 else 0  # the buckets are as large as the gradients
    if strategy == "lora":
        # Two matrices per matrix of a layer: one has the same number of columns, one the same number of rows.
        queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        edges = 2 * (sizes.hidden + queries) + 2 * (sizes.hidden + keys) + 3 * (sizes.hidden + sizes.intermediate)
        adapters = sizes.layers * LORA_RANK * edges
        return width * p + 4 * adapters, 4 * adapters, 8 * adapters, 4 * adapters if n > 1 else 0
    if strategy == "fsdp":
        # The root group stays gathered, and FSDP gathers the next layer while one computes. It reduces gradients in float32.
        gathered = width * (sizes.root_parameters + 2 * sizes.layer_parameters)
        leaving = (width + 4) * max(sizes.layer_parameters, sizes.root_parameters)
        return 4 * p / n, 4 * p / n, 8 * p / n, gathered + leaving
    stage = int(strategy[-1])
    gathered = 2 * (sizes.root_parameters + 2 * sizes.layer_parameters) if stage == 3 else 0
    return 2 * p / (n if stage == 3 else 1), 2 * p / (n if stage >= 2 else 1), 12 * p / n, gathered


def _norm(sizes: Sizes, autocast: bool, width: int) -> int:
    """Return the bytes per token that an RMSNorm and the next layer keep: float32 input, normalized input, and output."""
    return sizes.hidden * (4 + (4 if autocast else width) + width)


def _layer_activations(sizes: Sizes, autocast: bool, width: int) -> int:
    """Return the bytes per token that a decoder layer keeps for the backward pass."""
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    # Queries, output, keys, values, and one float32 sum per head.
    attention = width * (2 * queries + 2 * keys) + 4 * sizes.heads
    mlp = width * 4 * sizes.intermediate  # gate, its SiLU, the other branch, their product
    # Autocast converts an input for each layer that takes it: three times for queries, keys and values, twice in the MLP.
    again = width * sizes.hidden * 3 if autocast else 0
    return 2 * _norm(sizes, autocast, width) + attention + mlp + again
