"""A small llama: RMSNorm, rotary position embeddings, grouped-query attention, SwiGLU."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def apply_rotary(x, positions, inv_freq):
    angles = positions[:, None, :, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.head_dim = dim // n_heads
        self.wk, self.wv = (nn.Linear(dim, n_kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        inv_freq = 10000.0 ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, positions, mask):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary(q, positions, self.inv_freq), apply_rotary(k, positions, self.inv_freq)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden_dim):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim, eps=1e-5), Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.w1, self.w3 = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x, positions, mask):
        x = x + self.attention(self.attention_norm(x), positions, mask)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, vocab_size, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=160):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_heads, n_kv_heads, hidden_dim) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.apply(lambda m: isinstance(m, (nn.Linear, nn.Embedding)) and nn.init.normal_(m.weight, std=0.05))

    def forward(self, tokens, positions, documents):
        # several documents share a sequence: a token sees the earlier tokens of its own document only
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        mask = ((documents[:, :, None] == documents[:, None, :]) & causal).unsqueeze(1)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.output(self.norm(x)).float()
