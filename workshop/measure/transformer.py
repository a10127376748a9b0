"""The sizes of a Llama-like model, and what training it takes: operations of a token, and bytes on each GPU."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from workshop.errors import UserError

GIB = 2**30
# Memory of the cards that sites have, in GB, and one card of each size.
CARDS = {40: "A100-40", 64: "A100-64, MI250X", 80: "A100-80, H100", 96: "GH200", 141: "H200", 180: "B200"}
# What a card computes at best in bfloat16 with dense matrices, in FLOP/s, by a part of the name that it gives itself; the first
# that fits counts. From the makers' data sheets. (Half of an MI250X is a GPU of its own to PyTorch.)
PEAKS = {
    "GH200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A40": 149.7e12,
    "MI300X": 1307e12,
    "MI300A": 980.6e12,
    "MI250X": 191.5e12,
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model of Llama's architecture.

    Attributes:
        layers: decoder layers.
        hidden: numbers that stand for a token between the layers.
        intermediate: numbers between the two halves of a layer's MLP.
        heads, kv_heads: attention heads of the queries, and of keys and values.
        head: numbers of a head.
        vocabulary: tokens.
        tied: whether the embedding and the last layer share their weights.
        context: tokens of the longest sequence.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False
    context: int = 2**30

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer: attention, MLP, and two norms."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the layers: embedding, last norm, and the layer that scores the tokens."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of a token in training, forward and backward, as MFU counts them.

        6 for each weight that a token is multiplied with (all but those of the embedding, which is looked up), and for the attention
        12 x layers x width of all heads x tokens of the sequence. What activation checkpointing computes again does not count. Source:
        Chowdhery et al., "PaLM", 2022, appendix B, https://arxiv.org/abs/2204.02311.
        """
        multiplied = self.parameters - (0 if self.tied else self.vocabulary * self.hidden)
        return 6 * multiplied + 12 * self.layers * self.heads * self.head * sequence_length


MODELS = {
    "codellama-7b": Sizes(32, 4096, 11008, 32, 32, 128, 32016, context=16384),
    "codellama-13b": Sizes(40, 5120, 13824, 40, 40, 128, 32016, context=16384),
    "codellama-34b": Sizes(48, 8192, 22016, 64, 8, 128, 32000, context=16384),
    "codellama-70b": Sizes(80, 8192, 28672, 64, 8, 128, 32016, context=16384),
}


def read_sizes(folder: str | Path) -> Sizes:
    """The sizes of the model in a folder, from its ``config.json``.

    Raises:
        UserError: the file cannot be read, or the model is not of Llama's architecture.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
        if config.get("model_type") not in ("llama", "mistral"):
            raise UserError(f"{path}: a model of type {config.get('model_type')}; only Llama's architecture is known here")
        heads = config["num_attention_heads"]
        return Sizes(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            config.get("tie_word_embeddings", False),
            config["max_position_embeddings"],
        )
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path} does not describe a model ({type(error).__name__}: {error})") from error


def peak_flops(device) -> tuple[float, str] | None:
    """What a ``torch.device`` computes at best in bfloat16, in FLOP/s, and its name; None: not known (a CPU, another card)."""
    import torch

    if device.type != "cuda":  # ROCm too
        return None
    name = torch.cuda.get_device_name(device)
    return next(((peak, name) for part, peak in PEAKS.items() if part in name), None)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU (or in one process) in training, by what they are for.

    Attributes:
        parameters, gradients, optimizer: what of the model stays there from step to step, in float32 (ZeRO: as its paper has it).
        exchange: what a strategy needs on top to talk: DDP's buckets, the layers that FSDP and ZeRO-3 have gathered at a time.
        activations: what the forward pass keeps for the backward pass.
        temporary: the most that comes and goes in between: the scores of all tokens and their gradients.
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


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")


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

    DDP and FSDP as stage 04 uses them: float32 weights, gradients and optimizer, computing in bfloat16 (DDP by autocast, FSDP by its
    MixedPrecisionPolicy). ZeRO as in Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054: bfloat16 weights and
    gradients (2 + 2 bytes), and a float32 copy with AdamW's two moments (12 bytes), of which stage 1 shards the last, stage 2 the
    gradients too, stage 3 all. The bytes that a layer keeps for backward are counted operation by operation, with attention that
    never forms the table of all pairs (SDPA); the tests compare them with what PyTorch saves.

    Args:
        sizes: of the model.
        strategy: one of ``STRATEGIES``.
        processes: how many share the work, one on each GPU.
        batch_size: sequences at a time, in each process.
        sequence_length: tokens of a sequence.
        bf16: compute in bfloat16, else in float32.
        checkpointing: keep only each layer's input, and compute the rest again in the backward pass.
        offload: keep weights, gradients and optimizer in the memory of the CPU (FSDP and ZeRO; of ZeRO-1 and 2 the optimizer).
        on_gpu: count what libraries and allocator take on a GPU.
    """
    p, n = sizes.parameters, processes
    width = 2 if bf16 else 4  # bytes of a number that is computed with
    tokens = batch_size * sequence_length
    layer = _layer_activations(sizes, strategy == "ddp" and bf16, width) * tokens
    # Between the layers runs the sum of all that they have added: with autocast it stays float32.
    between = sizes.hidden * (4 if strategy == "ddp" else width) * tokens
    activations = sizes.layers * (between if checkpointing else layer) + (layer if checkpointing else 0)
    # The last norm, and the logarithms of the probabilities of all tokens, in float32.
    activations += (_norm(sizes, strategy == "ddp" and bf16, width) + 4 * sizes.vocabulary) * tokens
    # While the loss is computed, the scores as they come and in float32; going back, the gradient of both.
    temporary = (width + 4) * sizes.vocabulary * tokens

    if strategy == "ddp":
        parameters, gradients, optimizer = 4 * p, 4 * p, 8 * p
        exchange = 4 * p if n > 1 else 0  # buckets as large as the gradients
        activations += 2 * (p - sizes.vocabulary * sizes.hidden * (not sizes.tied)) if bf16 else 0  # autocast's copies of the weights
    elif strategy == "fsdp":
        parameters, gradients, optimizer = 4 * p / n, 4 * p / n, 8 * p / n
        # The outermost group stays gathered, and the next layer is fetched while one computes; a layer's gradients leave in float32.
        gathered = width * (sizes.root_parameters + 2 * sizes.layer_parameters)
        leaving = (width + 4) * max(sizes.layer_parameters, sizes.root_parameters)
        exchange = gathered + leaving
    else:
        stage = int(strategy[-1])
        parameters = 2 * p / (n if stage == 3 else 1)
        gradients = 2 * p / (n if stage >= 2 else 1)
        optimizer = 12 * p / n
        exchange = 2 * (sizes.root_parameters + 2 * sizes.layer_parameters) if stage == 3 else 0
    if offload and strategy != "ddp":
        optimizer = 0
        if strategy in ("fsdp", "zero3"):
            parameters = gradients = 0
    parts = (parameters, gradients, optimizer, exchange, activations, temporary)
    return Memory(*parts, allocator=0.05 * sum(parts) + 1.5 * GIB if on_gpu else 0)


def _norm(sizes: Sizes, autocast: bool, width: int) -> int:
    """Bytes a token that an RMSNorm and what takes its result keep: the input in float32, the normed one, and the result."""
    return sizes.hidden * (4 + (4 if autocast else width) + width)


def _layer_activations(sizes: Sizes, autocast: bool, width: int) -> int:
    """Bytes a token that a decoder layer keeps for the backward pass."""
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    attention = width * (2 * queries + 2 * keys) + 4 * sizes.heads  # queries, result, keys, values; and a sum for each head
    mlp = width * 4 * sizes.intermediate  # gate, its SiLU, the other branch, their product
    # Autocast converts an input once for each layer that takes it: three times for queries, keys and values, twice in the MLP.
    again = width * sizes.hidden * 3 if autocast else 0
    return 2 * _norm(sizes, autocast, width) + attention + mlp + again
