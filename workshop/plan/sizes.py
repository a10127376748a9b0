"""Sizes of the models that can be planned: by name, by a Hugging Face ``config.json``, and a rank's part of a model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from workshop.errors import UserError
from workshop.training.transformer import MODELS, Sizes

# The types of models in Transformers with the architecture of Llama: the others add biases or norms, or experts.
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Model(Sizes):
    """The sizes of a decoder-only transformer, also without a gate in the MLP, and with experts.

    Attributes:
        gated: the MLP has three matrices (SwiGLU, as in Llama), else two (GELU, as in GPT).
        experts: MLPs in each layer.
        active: the experts that process each token.
        family: the type of the model in Transformers, one of ``FAMILIES``.
    """

    gated: bool = True
    experts: int = 1
    active: int = 1
    family: str = "llama"

    @property
    def attention_parameters(self) -> int:
        """Parameters of the four matrices of the attention."""
        return self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP, which is one expert if there are several."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer: attention, experts, their router, and two norms."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + self.experts * self.mlp_parameters + router + 2 * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters of the matrices that process a token, without the embedding (a table); a tied output layer counts."""
        layer = self.attention_parameters + self.active * self.mlp_parameters
        return self.layers * layer + self.vocabulary * self.hidden

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations per token, forward and backward, as MFU counts them (PaLM, appendix B)."""
        return 6 * self.active_parameters + 12 * self.layers * self.heads * self.head * sequence_length


def _llama(layers, hidden, intermediate, heads, kv_heads, vocabulary, context, **more) -> Model:
    return Model(layers, hidden, intermediate, heads, kv_heads, hidden // heads, vocabulary, context=context, **more)


# From the configuration files of the models on the Hugging Face Hub, and for GPT-3 from Brown et al., 2020, table 2.1.
KNOWN = {
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8, 128256, 131072),
    "llama-3-405b": _llama(126, 16384, 53248, 128, 8, 128256, 131072),
    "mistral-7b": _llama(32, 4096, 14336, 32, 8, 32000, 32768),
    "mixtral-8x7b": _llama(32, 4096, 14336, 32, 8, 32000, 32768, experts=8, active=2, family="mixtral"),
    "mixtral-8x22b": _llama(56, 6144, 16384, 48, 8, 32768, 65536, experts=8, active=2, family="mixtral"),
    "gpt-3-175b": _llama(96, 12288, 49152, 96, 96, 50257, 2048, gated=False),
}


def _as_model(sizes: Sizes, **more) -> Model:
    return Model(**vars(sizes), **more)


def known_models() -> dict[str, Model]:
    """Return all models that have a name."""
    return {name: _as_model(sizes) for name, sizes in MODELS.items()} | KNOWN


def find_model(name: str) -> Model:
    """Return a model by its name, or by its folder or its ``config.json``.

    Raises:
        UserError: there is no such model, or its file does not describe a model with this architecture.
    """
    models = known_models()
    if name.lower() in models:
        return models[name.lower()]
    from workshop.data.codellama import TINY, model_folder

    path = model_folder(TINY) if name == TINY else Path(name)
    if not path.exists():
        names = ", ".join([*models, TINY])
        raise UserError(f"there is no model {name}: name a folder or a config.json, or one of: {names}")
    return _read(path / "config.json" if path.is_dir() else path)


def _read(path: Path) -> Model:
    try:
        config = json.loads(path.read_text())
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise UserError(f"{path}: the model type is {kind}; the supported types are {', '.join(FAMILIES)}")
        if kind == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise UserError(f"{path}: only some layers of this model have experts; that is not supported")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        model = Model(
            config["num_hidden_layers"],
            hidden,
            config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["vocab_size"],
            config.get("tie_word_embeddings", False),
            config.get("max_position_embeddings", 2**30),
            experts=config["num_experts"] if kind == "qwen3_moe" else config.get("num_local_experts", 1),
            active=config.get("num_experts_per_tok", 1),
            family=kind,
        )
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path} does not describe a model ({type(error).__name__}: {error})") from error
    numbers = {key: value for key, value in vars(model).items() if key not in ("tied", "gated", "family")}
    for key, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{path} does not describe a model ({key} is {value}, not a whole number of at least 1)")
    return model


def part(model: Model, tp: int = 1, layers: int | None = None, ep: int = 1) -> Model:
    """Return what one rank computes with: 1/tp of each matrix, some of the layers, and 1/ep of the experts."""
    return replace(
        model,
        layers=model.layers if layers is None else layers,
        heads=model.heads // tp,
        kv_heads=max(1, model.kv_heads // tp),
        intermediate=model.intermediate // tp,
        vocabulary=-(-model.vocabulary // tp),
        experts=max(1, model.experts // ep),
    )
