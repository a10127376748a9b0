"""A layout: how a training is divided among GPUs, and whether a model and a number of GPUs allow it."""

import math
from dataclasses import dataclass

from workshop.errors import UserError
from workshop.plan.sizes import Model

SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
ATTENTION = ("plain", "flash2", "flash3")
KERNELS = ("eager", "partly", "fused")
RECOMPUTE = ("none", "selective", "half", "full")


@dataclass(frozen=True)
class Layout:
    """How a training is divided among dp x tp x pp x cp GPUs.

    Attributes:
        dp: copies of the model's pipeline that get different sequences; with FSDP they also share its parameters.
        zero: what the copies shard: 0 nothing (DDP), 1 optimizer state, 2 also gradients, 3 also parameters (FSDP).
        replicas: groups of dp GPUs that each hold the whole model (HSDP); 1: FSDP over all dp.
        tp: tensor parallelism, with sequence parallelism in between.
        pp: pipeline stages.
        vpp: parts of the model on each stage (interleaved schedule).
        schedule: "1f1b", "interleaved" or "zero-bubble".
        cp: GPUs that share a sequence (context parallelism).
        ep: GPUs that share the experts, a part of dp.
        mbs: sequences in a micro-batch.
        microbatches: micro-batches in a step, for each copy of the pipeline.
        recompute: what the backward pass computes again: "none", "selective" (half of the matrix products of a layer, and all
            that needs few operations), "half" (every second layer) or "full" (each layer).
        fp8: "" (bfloat16), "tensorwise" or "rowwise" (float8 in the matrix products of the layers).
        kernels: how element-wise operations run: "fused" (torch.compile, or Megatron's kernels), "partly" (fused, but what they
            keep for the backward pass is not) or "eager" (each one reads and writes memory).
        fused_loss: the loss is computed without float32 copies of the logits for each operation.
        attention: "plain" (writes the scores of all pairs of tokens), "flash2" (FlashAttention-2) or "flash3" (FlashAttention-3,
            or cuDNN's, on Hopper and newer).
        sp: sequence parallelism: norms and residual additions are divided over the GPUs of tensor parallelism.
        async_tp: the matrix products of tensor parallelism begin before the exchange has ended.
        gradient_bytes: bytes of each gradient that is reduced.
        by_tensor: ZeRO exchanges each tensor by itself, else a layer at once.
        balanced: the stage with the output layer has fewer layers, so that all stages take about the same time.
    """

    dp: int = 1
    zero: int = 3
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    cp: int = 1
    ep: int = 1
    mbs: int = 1
    microbatches: int = 1
    recompute: str = "none"
    fp8: str = ""
    kernels: str = "fused"
    fused_loss: bool = True
    attention: str = "flash2"
    sp: bool = True
    async_tp: bool = False
    gradient_bytes: int = 4
    by_tensor: bool = False
    balanced: bool = True

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences in a step of all GPUs."""
        return self.mbs * self.microbatches * self.dp

    @property
    def sharding(self) -> int:
        """GPUs that share one copy of what ZeRO or FSDP shards; those of context parallelism take part."""
        return self.dp * self.cp // self.replicas

    def stage_layers(self, layers: int, head: float = 1.0) -> int:
        """Return the layers of the largest stage.

        Args:
            layers: the layers of the model.
            head: the time of the output layer and the loss, in units of the time of a layer.
        """
        if self.pp == 1:
            return layers
        return math.ceil(round((layers + head * self.balanced) / self.pp, 6))

    def mesh(self) -> str:
        """Return the sizes in words, those of 1 left out."""
        words = [f"{self.strategy} {self.dp}" if self.dp > 1 or self.gpus == 1 else ""]
        words += [f"{name} {size}" for name, size in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)) if size > 1]
        if self.pp > 1:
            words.append(f"pp {self.pp}" + (f" x {self.vpp}" if self.vpp > 1 else "") + f" {self.schedule}")
        return ", ".join(word for word in words if word)

    @property
    def strategy(self) -> str:
        """The name of the data-parallel strategy."""
        if self.replicas > 1:
            return "HSDP"
        return ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")[self.zero]


def misfit(layout: Layout, model: Model, sequence_length: int) -> str:
    """Return why a model does not allow a layout, with what would fit; "": it does."""
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        fit = [n for n in _divisors(model.heads) if not model.kv_heads % n or not n % model.kv_heads]
        return f"tp={tp} does not divide {model.heads} heads and {model.kv_heads} key-value heads; {_choice(fit)} would"
    if model.intermediate % tp:
        return (
            f"tp={tp} does not divide the MLP of {model.intermediate:,}; {_choice(_divisors(model.intermediate))} would"
        )
    if pp * layout.vpp > model.layers + 2 * layout.balanced:
        return (
            f"pp={pp} times vpp={layout.vpp} is more than {model.layers} layers; at most {model.layers} parts would fit"
        )
    if layout.vpp > 1 and model.layers % (pp * layout.vpp) and (model.layers + 2) % (pp * layout.vpp):
        fit = [n for n in _divisors(model.layers // pp or 1) if not model.layers % (pp * n)]
        return f"vpp={layout.vpp} does not divide {model.layers} layers over pp={pp}; vpp={_choice(fit or [1])} would"
    if layout.vpp > 1 and layout.microbatches % pp:
        return f"the interleaved schedule needs micro-batches in groups of pp={pp}, not {layout.microbatches}"
    if sequence_length % (2 * cp if cp > 1 else 1) or (sequence_length // cp) % tp:
        return f"cp={cp} and tp={tp} do not divide {sequence_length:,} tokens; cp={_choice([1, 2, 4])} may"
    if model.experts % ep or layout.dp % ep:
        return f"ep={ep} does not divide {model.experts} experts over dp={layout.dp}; {_choice(_divisors(model.experts))} may"
    if layout.replicas > 1 and (layout.zero != 3 or layout.dp % layout.replicas):
        return f"replicas={layout.replicas} needs zero=3 and must divide dp={layout.dp}"
    if layout.schedule not in SCHEDULES or layout.recompute not in RECOMPUTE:
        return f"schedule is one of {', '.join(SCHEDULES)}; recompute is one of {', '.join(RECOMPUTE)}"
    if layout.attention not in ATTENTION or layout.kernels not in KERNELS:
        return f"attention is one of {', '.join(ATTENTION)}; kernels is one of {', '.join(KERNELS)}"
    if layout.fp8 not in ("", "tensorwise", "rowwise") or layout.zero not in (0, 1, 2, 3):
        return "fp8 is tensorwise or rowwise; zero is 0, 1, 2 or 3"
    return ""


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, min(number, 64) + 1) if number % each == 0]


def _choice(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def parse_layout(text: str) -> dict:
    """Return the fields that "tp=8,pp=4,recompute=full" sets.

    Raises:
        UserError: a field is unknown, or its value is not of the right type.
    """
    values = {}
    for each in filter(None, text.replace(" ", "").split(",")):
        key, equal, value = each.partition("=")
        kind = Layout.__dataclass_fields__.get(key)
        if not equal or kind is None:
            raise UserError(f"--layout {each}: write NAME=VALUE with one of {', '.join(Layout.__dataclass_fields__)}")
        if kind.type is int:
            if not value.isdigit() or int(value) < (key != "zero"):
                raise UserError(f"--layout {each}: {key} is a whole number of at least {int(key != 'zero')}")
            values[key] = int(value)
        elif kind.type is bool:
            if value not in ("yes", "no"):
                raise UserError(f"--layout {each}: write yes or no")
            values[key] = value == "yes"
        else:
            values[key] = value
    return values
