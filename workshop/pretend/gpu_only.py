"""Operations that PyTorch has for GPUs only, computed on the CPU: the fused cells of LSTM and GRU, SyncBatchNorm, attention.

The formulas are those of ``torch.nn.LSTM``, ``torch.nn.GRU`` and ``torch.nn.BatchNorm2d``. B is the batch size, H the hidden
size, C the number of channels, W the number of processes. "gates" of an LSTM are the input, forget, cell and output gate,
(B, 4H); those of a GRU are the reset, update and new gate, (B, 3H). The input of SyncBatchNorm is (B, C, ...).
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workshop.tensors import attend_locally

aten = torch.ops.aten


def _lstm(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new hidden state and cell state, (B, H), and the gates for the backward pass."""
    gates = input_gates + hidden_gates + _sum(input_bias, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the gates, of the old cell state and of a bias."""
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    activated = cy.tanh()
    grad_c = grad_hy * o * (1 - activated**2) + (0 if grad_cy is None else grad_cy)
    grad_i, grad_f = grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f)
    grad_g, grad_o = grad_c * i * (1 - g**2), grad_hy * activated * o * (1 - o)
    gates = torch.cat([grad_i, grad_f, grad_g, grad_o], 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def _gru(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None) -> tuple[Tensor, Tensor]:
    """Return the new hidden state, (B, H), and what the backward pass needs, (B, 5H)."""
    input_r, input_z, input_n = (input_gates + _sum(input_bias)).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = (hidden_gates + _sum(hidden_bias)).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


def _gru_backward(grad_hy, workspace, has_bias) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the gates from the input and from the hidden state, of the hidden state and of both biases."""
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_n = grad_hy * (1 - z) * (1 - n**2)
    grad_r = grad_n * hidden_n * r * (1 - r)
    from_input, from_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (from_input.sum(0), from_hidden.sum(0)) if has_bias else (None, None)
    return from_input, from_hidden, grad_hy * z, *biases


def _sum(*biases: Tensor | None) -> Tensor | int:
    return sum(bias for bias in biases if bias is not None)


def _stats(x, eps) -> tuple[Tensor, Tensor]:
    """Return the mean of each channel, (C,), and 1 / its standard deviation."""
    mean, var = _sums(x.float()) / _each(x), x.float().transpose(0, 1).flatten(1).var(1, correction=0)
    return mean, (var + eps).rsqrt()


def _gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts) -> tuple[Tensor, Tensor]:
    """Return the statistics of the batches of all processes from those of each, (W, C), and update the running ones."""
    count = counts.view(-1, 1)
    total = count.sum()
    mean = (count * means).sum(0) / total
    var = (count * (invstds**-2 - eps + (means - mean) ** 2)).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def _normalize(x, weight, bias, mean, invstd, eps) -> Tensor:
    """Return the normalized input."""
    y = (x - _channel(mean, x)) * _channel(invstd, x)
    y = y if weight is None else y * _channel(weight, x)
    return (y if bias is None else y + _channel(bias, x)).to(x.dtype)


def _backward_sums(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    """Return the sums over the batch of this process that all processes add up, and the gradients of weight and bias."""
    grad, deviation = grad.float(), x.float() - _channel(mean, x)
    first, second = _sums(grad), _sums(grad * deviation)
    return first, second, second * invstd if weight_g else None, first if bias_g else None


def _backward_input(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts) -> Tensor:
    """Return the gradient of the input."""
    total, scale = counts.sum(), _channel(invstd, x)
    centered = (x.float() - _channel(mean, x)) * scale**2 * _channel(sum_dy_xmu, x)
    result = (grad.float() - (_channel(sum_dy, x) + centered) / total) * scale
    return (result if weight is None else result * _channel(weight, x)).to(x.dtype)


def _sums(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).sum(1)


def _each(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _channel(values: Tensor, x: Tensor) -> Tensor:
    """Return values of the channels in a shape that is broadcast over the input."""
    return values.view(1, -1, *(1 for _ in x.shape[2:]))


ONLY_ON_GPU = {
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
    aten.batch_norm_stats.default: _stats,
    aten.batch_norm_gather_stats_with_counts.default: _gather_stats,
    aten.batch_norm_elemt.default: _normalize,
    aten.batch_norm_backward_reduce.default: _backward_sums,
    aten.batch_norm_backward_elemt.default: _backward_input,
}
# Operations with packed sequences. The lengths stay on the CPU, also with a real GPU; they are the last result.
PACKING = {
    *(aten._pack_padded_sequence.default, aten._pack_padded_sequence_backward.default),
    aten._pad_packed_sequence.default,
}


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute attention without keeping its matrix of weights for the backward pass, as the kernels for GPUs do."""
    if isinstance(query, DTensor):
        return attend_locally(_attention, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    needs_weights = dropout_p > 0 or (
        attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4))
    )
    if needs_weights or enable_gqa or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        math = aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def install() -> torch.library.Library:
    """Let pretended GPUs compute attention so; return what PyTorch forgets when it is freed."""
    operations = torch.library.Library("aten", "IMPL")
    operations.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    return operations
