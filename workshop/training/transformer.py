"""The sizes of a model of Llama's architecture, the operations that training it takes, and what GPUs can do."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError

GIB = 2**30
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

        6 for each weight that a token is multiplied with (all but those of the embedding, which is looked up), and for the
        attention 12 x layers x width of all heads x tokens of the sequence. What activation checkpointing computes again does not
        count. Source: Chowdhery et al., "PaLM", 2022, appendix B, https://arxiv.org/abs/2204.02311.
        """
        multiplied = self.parameters - (0 if self.tied else self.vocabulary * self.hidden)
        return 6 * multiplied + 12 * self.layers * self.heads * self.head * sequence_length


MODELS = {
    "tinyllama-1.1b": Sizes(22, 2048, 5632, 32, 4, 64, 32000, context=2048),
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
            raise UserError(
                f"{path}: a model of type {config.get('model_type')}; only Llama's architecture is known here"
            )
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
    return next(((peak, name) for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
