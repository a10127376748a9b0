"""A decoder-only transformer in which every feed-forward block is a mixture of experts with top-k routing."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class MoELayer(nn.Module):
    """Each token goes to its `top_k` best experts. No capacity limit: no token is ever dropped.

    Every process holds all the experts. In training the second output is the load-balancing loss of the Switch
    Transformer, taken over the tokens of all processes: the shares of tokens are averaged over the processes (they
    carry no gradient), while the mean probabilities stay local and meet when DDP averages the gradients.
    """

    def __init__(self, dim, hidden, num_experts, top_k, noise):
        super().__init__()
        self.num_experts, self.top_k, self.noise = num_experts, top_k, noise
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(num_experts))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # routing is always decided in float32
            logits = F.linear(tokens.float(), self.router.weight)
            if self.training:
                logits = logits + self.noise * torch.randn_like(logits)
            probs = logits.softmax(dim=-1)
            gates, chosen = probs.topk(self.top_k, dim=-1)
            gates = gates / gates.sum(dim=-1, keepdim=True)

        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            # An expert that nobody chose runs on zero tokens, so that DDP sees (zero) gradients for its weights.
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            weighted = expert(tokens[rows]) * gates[rows, slots].unsqueeze(1)
            out = out.index_add(0, rows, weighted.to(out.dtype))
        return out.view_as(x), self.balance_loss(probs, chosen)

    def balance_loss(self, probs, chosen):
        if not self.training:
            return probs.new_zeros(())
        share = F.one_hot(chosen, self.num_experts).sum(dim=1).float().mean(dim=0) / self.top_k
        dist.all_reduce(share)
        share /= dist.get_world_size()
        return self.num_experts * (share * probs.mean(dim=0)).sum()


class Block(nn.Module):
    def __init__(self, dim, heads, **moe):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.moe = nn.LayerNorm(dim), MoELayer(dim, **moe)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class MoELanguageModel(nn.Module):
    def __init__(self, vocab, length, dim=48, heads=4, layers=2, hidden=96, num_experts=4, top_k=2, noise=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        moe = dict(hidden=hidden, num_experts=num_experts, top_k=top_k, noise=noise)
        self.blocks = nn.ModuleList(Block(dim, heads, **moe) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        """Returns the logits and the mean load-balancing loss of the layers."""
        x = self.embed(tokens) + self.position[:tokens.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()
