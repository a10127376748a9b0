"""Sizes of models with the Llama architecture, the operations that training takes, and the peak performance of GPUs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError

GIB = 2**30
# Peak FLOP/s in bfloat16 with dense matrices, by a part of the device name; the first match counts. Source: the data sheets of
# the manufacturers. (PyTorch sees each half of an MI250X as one GPU.)
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
    """The sizes of a model with the Llama architecture.

    Attributes:
        layers: decoder layers.
        hidden: size of the hidden state of a token between the layers.
        intermediate: size of the hidden layer of the MLP.
        heads, kv_heads: attention heads of the queries, and of keys and values.
        head: size of a head.
        vocabulary: number of tokens.
        tied: whether the embedding and the output layer share their parameters.
        context: maximum sequence length, in tokens.
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
        """Parameters outside the layers: embedding, last norm, and output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the floating-point operations per token in training, forward and backward, as MFU counts them.

        These are 6 for each parameter that processes a token (all except the embedding, which is a table), and, for the
        attention, 12 x layers x size of all heads x sequence length. Recomputation in activation checkpointing does not
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
    # Version 3.1 has the same sizes as version 3, and accepts longer sequences.
    "llama-3-8b": Sizes(32, 4096, 14336, 32, 8, 128, 128256, context=131072),
    "llama-3-70b": Sizes(80, 8192, 28672, 64, 8, 128, 128256, context=131072),
    "llama-3-405b": Sizes(126, 16384, 53248, 128, 8, 128, 128256, context=131072),
}


def read_sizes(place: str | Path) -> Sizes:
    """Read the sizes of a model from its ``config.json``, or from the file with this name in its folder.

    Raises:
        UserError: the file cannot be read, or the model does not have the Llama architecture.
    """
    path = Path(place) if Path(place).suffix == ".json" else Path(place) / "config.json"
    try:
        config = json.loads(path.read_text())
        if config.get("model_type") not in ("llama", "mistral"):
            raise UserError(
                f"{path}: the model type is {config.get('model_type')}; only the Llama architecture is supported"
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
    """Return the peak FLOP/s of a ``torch.device`` in bfloat16 and its name; None: not known (a CPU, or a GPU not in PEAKS)."""
    import torch

    if device.type != "cuda":  # ROCm too
        return None
    name = torch.cuda.get_device_name(device)
    return next(((peak, name) for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
