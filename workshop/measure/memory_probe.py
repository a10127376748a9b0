"""What ``workshop memory --measure`` lets torchrun start: two steps of a model with random weights, and the bytes they hold.

Parameters, gradients and optimizer are counted in this process's tensors, activations in what autograd keeps for the backward
pass; on a GPU the peak is the allocator's own figure.
"""

import gc
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from workshop.measure.device import local_device
from workshop.measure.kept import kept_for_backward, own_part
from workshop.measure.transformer import Sizes


def main() -> None:
    sizes, strategy, checkpointing, settings, output = sys.argv[1:]
    device = local_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        measured = measure(Sizes(**json.loads(sizes)), strategy, checkpointing == "1", device, **json.loads(settings))
        if dist.get_rank() == 0:
            Path(output).write_text(json.dumps({"measured": measured, "device": device.type}))
    finally:
        gc.collect()
        dist.destroy_process_group()


def measure(sizes: Sizes, strategy: str, checkpointing: bool, device, batch_size: int, sequence_length: int) -> dict:
    """Take two steps, and return the bytes of this process: parameters, gradients, optimizer, activations; on a GPU the peak too.

    Args:
        sizes: of the model, of which only its shapes count.
        strategy: "ddp" or "fsdp".
        checkpointing: keep only each layer's input.
        device: where.
        batch_size: sequences at a time.
        sequence_length: tokens of a sequence.
    """
    bf16 = device.type != "cpu"
    model = make_model(sizes)
    if checkpointing:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fill(model, device)
    wrapped = model if strategy == "fsdp" else DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(sizes.vocabulary, (batch_size, sequence_length), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 and strategy == "ddp" else nullcontext()
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
    activations = 0
    for _ in range(2):  # the second with an optimizer that has its moments
        with autocast, nullcontext() if activations else kept_for_backward() as kept:
            loss = wrapped(input_ids=batch, labels=batch, use_cache=False).loss
        activations = activations or kept.bytes
        del kept
        loss.backward()
        gradients = sum(own_part(parameter.grad).nbytes for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    measured = {
        "parameters": sum(own_part(parameter).nbytes for parameter in model.parameters()),
        "gradients": gradients,
        "optimizer": sum(own_part(value).nbytes for value in state),
        "activations": activations,
    }
    if device.type != "cpu":
        measured["peak"] = torch.get_device_module(device).max_memory_allocated()
    return measured


def make_model(sizes: Sizes) -> LlamaForCausalLM:
    """The model without memory for its weights."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head,
        tie_word_embeddings=sizes.tied,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@torch.no_grad()
def fill(model: LlamaForCausalLM, device) -> None:
    """Give the model memory, and each process's part of the weights some values."""
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for parameter in model.parameters():
        own_part(parameter).normal_(std=0.02)


if __name__ == "__main__":
    main()
