"""The model of a simulation: a part of a model of Transformers, divided over the ranks by PyTorch's own functions."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workshop.plan.sizes import Model
from workshop.simulate.experts import MixtureOfExperts


class Part(nn.Module):
    """Some layers of a model; with the first one also the embedding, with the last one also the output layer.

    Args:
        model: the whole model, whose modules the part uses.
        numbers: the numbers of the layers.
        tokens: the tokens of a sequence on this rank (with tensor parallelism: before it divides the sequence).
    """

    def __init__(self, model: PreTrainedModel, numbers: range, tokens: int):
        super().__init__()
        last = len(model.model.layers) - 1
        self.tokens, self.rotary = tokens, model.model.rotary_emb
        self.embed_tokens = model.model.embed_tokens if 0 in numbers else None
        self.layers = nn.ModuleDict({str(number): model.model.layers[number] for number in numbers})
        self.norm, self.lm_head = (model.model.norm, model.lm_head) if last in numbers else (None, None)

    def forward(self, x):
        x = x if self.embed_tokens is None else self.embed_tokens(x)
        positions = torch.arange(self.tokens, device=x.device).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=rotary)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def make_model(
    sizes: Model, attention: str = "sdpa", experts: dist.ProcessGroup | None = None, tp: int = 1
) -> PreTrainedModel:
    """Return the whole model. Call this with a ``FakeTensorMode``.

    Args:
        sizes: the sizes of the model.
        attention: the implementation of the attention, as Transformers names it.
        experts, tp: see ``Experts``.
    """
    width = {"moe_intermediate_size": sizes.intermediate, "num_experts": 1} if sizes.family == "qwen3_moe" else {}
    config = AutoConfig.for_model(
        sizes.family,
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head,
        tie_word_embeddings=sizes.tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **({"num_local_experts": 1} if sizes.family == "mixtral" else width),
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if sizes.experts > 1:  # those of Transformers need the values of the router
        for layer in model.model.layers:
            layer.mlp = MixtureOfExperts(sizes, experts, tp)
    return model


def divide(layers: int, stages: int) -> list[range]:
    """Return the numbers of the layers of each stage. If they cannot be equal, the middle stages get one more.

    The first stage also has the embedding, and the last one the output layer.
    """
    each, more = divmod(layers, stages)
    counts = [each] * stages
    for number in sorted(range(stages), key=lambda number: abs(number - (stages - 1) / 2))[:more]:
        counts[number] += 1
    starts = [sum(counts[:number]) for number in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def recompute(layers: Iterable[nn.Module]) -> None:
    """Let layers keep only their input for the backward pass, which computes the rest again."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class DividedExperts(ParallelStyle):
    """Give experts, which already have only their part of each matrix, all tokens, and add up their results.

    They take and return this rank's tokens, as the other modules between the layers do.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_, inputs):  # the norm before the experts returns a DTensor
            return inputs[0].redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def reduce(_, inputs, output):
            return DTensor.from_local(output, device_mesh, [Partial()]).redistribute(placements=[Shard(1)]).to_local()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(reduce)
        return module


def parallelize(part: Part, mesh: DeviceMesh) -> None:
    """Divide a part with tensor and sequence parallelism. It then takes and returns this rank's tokens between the layers."""
    gather = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_kwarg_layouts=gather[0], desired_input_kwarg_layouts=gather[1]),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in part.layers.values():
        own = dict(plan)
        if isinstance(layer.mlp, MixtureOfExperts):  # it has only its part of each matrix already
            own = {name: style for name, style in plan.items() if not name.startswith("mlp")}
            own["mlp"] = DividedExperts()
        if hasattr(layer.self_attn, "q_norm"):  # they normalize each head (sequences x tokens x heads x size of a head)
            own |= {
                f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
                for name in ("q_norm", "k_norm")
            }
        parallelize_module(layer, mesh, own)
    outside = {}
    if part.embed_tokens is not None:
        outside["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if part.lm_head is not None:
        outside["norm"] = SequenceParallel()
        # The logits stay divided by tokens of the vocabulary; the loss is computed with loss_parallel.
        outside["lm_head"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    if outside:
        parallelize_module(part, mesh, outside)
