"""Attention to the tokens of all ranks, with the ring of PyTorch, also for tensors on the CPU.

PyTorch's ``context_parallel`` calls this ring only for tensors on a GPU. Here it calls the kernel for flash attention on the CPU,
which keeps tensors of the same sizes.
"""

import torch
import torch.distributed as dist

aten = torch.ops.aten


class RingAttention(torch.autograd.Function):
    """Causal attention for tensors of batch x heads x own tokens x head size. All have the same number of heads."""

    @staticmethod
    def forward(ctx, query, key, value, group: dist.ProcessGroup):
        """Return the attention of the own queries to the keys and values of all ranks of a group."""
        from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention

        flash = aten._scaled_dot_product_flash_attention_for_cpu
        output, total = _templated_ring_attention(group, 2, flash, query, key, value, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(query, key, value, output, total)
        return output

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of query, key and value."""
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            _templated_ring_attention_backward,
        )

        query, key, value, output, total = ctx.saved_tensors
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return *_templated_ring_attention_backward(
            ctx.group,
            2,
            flash,
            gradient.contiguous(),
            "grad_out",
            query,
            key,
            value,
            output,
            total,
            True,
            dropout_p=0.0,
        )[:3], None


def use_ring(group: dist.ProcessGroup) -> str:
    """Register the ring as an attention of transformers, and return its name for ``set_attn_implementation``."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import repeat_kv

    def attend(module, query, key, value, attention_mask, **_):
        key, value = (repeat_kv(each, query.shape[1] // key.shape[1]) for each in (key, value))
        return RingAttention.apply(query, key, value, group).transpose(1, 2).contiguous(), None

    AttentionInterface.register("simulated_ring", attend)
    return "simulated_ring"
