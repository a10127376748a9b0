"""The model of a simulation: a part of a Llama of transformers, divided over the ranks by PyTorch's own functions."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from workshop.measure.language_model import llama_config
from workshop.training.transformer import Sizes


class Part(nn.Module):
    """Some layers of a Llama; with the first one also the embedding, with the last one also the output layer.

    Args:
        model: the whole model, whose modules the part uses.
        numbers: the numbers of the layers.
        tokens: the tokens of a sequence on this rank (with tensor parallelism: before it divides the sequence).
    """

    def __init__(self, model: LlamaForCausalLM, numbers: range, tokens: int):
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


def make_model(sizes: Sizes, attention: str = "sdpa") -> LlamaForCausalLM:
    """Return the whole model. Call this with a ``FakeTensorMode``."""
    return LlamaForCausalLM(llama_config(sizes, attention))


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
        parallelize_module(layer, mesh, plan)
    outside = {}
    if part.embed_tokens is not None:
        outside["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if part.lm_head is not None:
        outside["norm"] = SequenceParallel()
        # The logits stay divided by tokens of the vocabulary; the loss is computed with loss_parallel.
        outside["lm_head"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    if outside:
        parallelize_module(part, mesh, outside)
