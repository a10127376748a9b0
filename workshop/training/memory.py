"""What training a model takes in each process, predicted from its sizes.

Gradients, optimizer and activations are counted, not looked up: the tests compare them with the bytes that PyTorch holds.
"""

from dataclasses import dataclass, fields

from workshop.training.transformer import GIB, Sizes


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU (or in one process) in training, by what they are for.

    Attributes:
        parameters, gradients, optimizer: what of the model stays there from step to step, in float32 (ZeRO: as its paper has it).
        exchange: what a strategy needs on top to talk: DDP's buckets, the layers that FSDP and ZeRO-3 have gathered at a time.
        activations: what the forward pass keeps for the backward pass.
        temporary: the most that comes and goes in between: the scores of all tokens and their gradients, or, with activation
            checkpointing, what a layer has to compute again.
        allocator: what the allocator cannot use, and the libraries' own: assumed, not measured.
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

    DDP and FSDP as stage 04 uses them: float32 weights, gradients and optimizer, computing in bfloat16 (DDP by autocast, FSDP by
    its MixedPrecisionPolicy). ZeRO as in Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054: bfloat16 weights and
    gradients (2 + 2 bytes), and a float32 copy with AdamW's two moments (12 bytes), of which stage 1 shards the last, stage 2 the
    gradients too, stage 3 all. LoRA as in lora.py: the weights in bfloat16, small float32 matrices that are trained, under DDP.

    The bytes that a layer keeps for backward are counted operation by operation, with attention that never forms the table of all
    pairs (SDPA); the tests compare them with what PyTorch saves.

    Args:
        sizes: of the model.
        strategy: "ddp", "zero1", "zero2", "zero3", "fsdp" or "lora".
        processes: how many share the work, one on each GPU.
        batch_size: sequences at a time, in each process.
        sequence_length: tokens of a sequence.
        bf16: compute in bfloat16, else in float32.
        checkpointing: keep only each layer's input, and compute the rest again in the backward pass.
        offload: keep weights, gradients and optimizer in the memory of the CPU (FSDP and ZeRO; of ZeRO-1 and 2 the optimizer).
        on_gpu: count what libraries and allocator take on a GPU.
    """
    width = 2 if bf16 else 4  # bytes of a number that is computed with
    tokens = batch_size * sequence_length
    autocast = strategy in ("ddp", "lora") and bf16
    layer = _layer_activations(sizes, autocast, width) * tokens
    # Between the layers runs the sum of all that they have added: with autocast it stays float32.
    between = sizes.hidden * (4 if autocast else width) * tokens
    activations = sizes.layers * (between if checkpointing else layer)
    # The last norm, and the logarithms of the probabilities of all tokens, in float32.
    activations += (_norm(sizes, autocast, width) + 4 * sizes.vocabulary) * tokens
    if strategy == "ddp" and bf16:  # autocast's copies of all weights but the embedding's
        activations += 2 * (sizes.parameters - sizes.vocabulary * sizes.hidden * (not sizes.tied))
    # While the loss is computed, the scores as they come and in float32; going back, the gradient of both.
    temporary = (width + 4) * sizes.vocabulary * tokens
    if checkpointing:  # later, what was not kept of a layer
        temporary = max(temporary, layer)
    parameters, gradients, optimizer, exchange = _model_states(sizes, strategy, processes, width)
    if offload and strategy not in ("ddp", "lora"):
        optimizer = 0
        if strategy in ("fsdp", "zero3"):
            parameters = gradients = 0
    parts = (parameters, gradients, optimizer, exchange, activations, temporary)
    return Memory(*parts, allocator=0.05 * sum(parts) + 1.5 * GIB if on_gpu else 0)


def _model_states(sizes: Sizes, strategy: str, n: int, width: int) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, optimizer and exchange in each of n processes that compute with ``width`` bytes."""
    p = sizes.parameters
    if strategy == "ddp":
        return 4 * p, 4 * p, 8 * p, 4 * p if n > 1 else 0  # buckets as large as the gradients
    if strategy == "lora":
        # Beside each matrix of the layers one with as many columns as it has, and one with as many rows.
        queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        edges = 2 * (sizes.hidden + queries) + 2 * (sizes.hidden + keys) + 3 * (sizes.hidden + sizes.intermediate)
        adapters = sizes.layers * LORA_RANK * edges
        return width * p + 4 * adapters, 4 * adapters, 8 * adapters, 4 * adapters if n > 1 else 0
    if strategy == "fsdp":
        # The outermost group stays gathered, and the next layer is fetched while one computes. Gradients leave in float32.
        gathered = width * (sizes.root_parameters + 2 * sizes.layer_parameters)
        leaving = (width + 4) * max(sizes.layer_parameters, sizes.root_parameters)
        return 4 * p / n, 4 * p / n, 8 * p / n, gathered + leaving
    stage = int(strategy[-1])
    gathered = 2 * (sizes.root_parameters + 2 * sizes.layer_parameters) if stage == 3 else 0
    return 2 * p / (n if stage == 3 else 1), 2 * p / (n if stage >= 2 else 1), 12 * p / n, gathered


def _norm(sizes: Sizes, autocast: bool, width: int) -> int:
    """Bytes a token that an RMSNorm and what takes its result keep: the input in float32, the normed one, and the result."""
    return sizes.hidden * (4 + (4 if autocast else width) + width)


def _layer_activations(sizes: Sizes, autocast: bool, width: int) -> int:
    """Bytes a token that a decoder layer keeps for the backward pass."""
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    # Queries, result, keys, values; and a sum for each head.
    attention = width * (2 * queries + 2 * keys) + 4 * sizes.heads
    mlp = width * 4 * sizes.intermediate  # gate, its SiLU, the other branch, their product
    # Autocast converts an input once for each layer that takes it: three times for queries, keys and values, twice in the MLP.
    again = width * sizes.hidden * 3 if autocast else 0
    return 2 * _norm(sizes, autocast, width) + attention + mlp + again
