"""The experts of a layer, divided over ranks (expert parallelism), for tensors without values.

A router chooses experts by values. Here, each expert gets the same number of tokens, as a load-balancing loss aims at.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from workshop.plan.sizes import Model
from workshop.training.experts import pytorch_all_to_all


class Experts(nn.Module):
    """The matrices of the experts of this rank.

    Args:
        model: the sizes.
        own: how many experts the rank has.
        tp: ranks that share each matrix.
    """

    def __init__(self, model: Model, own: int, tp: int):
        super().__init__()
        width = model.intermediate // tp
        self.gate_up_proj = nn.Parameter(torch.empty(own, model.hidden, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(own, width, model.hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the results for tokens (own experts x tokens of each expert x hidden)."""
        gate, up = torch.bmm(tokens, self.gate_up_proj).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down_proj)


class MixtureOfExperts(nn.Module):
    """A router and the experts, in place of the MLP of a layer.

    Args:
        model: the sizes.
        group: the ranks that share the experts; None: each rank has all.
        tp: ranks that share each matrix.
    """

    def __init__(self, model: Model, group: dist.ProcessGroup | None, tp: int):
        super().__init__()
        self.active, self.group, self.ranks = model.active, group, group.size() if group else 1
        self.gate = nn.Linear(model.hidden, model.experts, bias=False)
        self.own = model.experts // self.ranks
        self.experts = Experts(model, self.own, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the results of the chosen experts, for each token (sequences x tokens x hidden)."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.active)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort()
        results = self.compute(tokens[order // self.active])
        results = torch.empty_like(results).index_copy(0, order, results)
        return (results.view(len(tokens), self.active, -1) * weights.unsqueeze(-1)).sum(1).view(x.shape)

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results for rows (rows x hidden) that are sorted by expert, equally many for each expert of all ranks."""
        received = self.exchange(rows).view(self.ranks, self.own, -1, rows.shape[1])
        results = self.experts(received.transpose(0, 1).reshape(self.own, -1, rows.shape[1]))
        return self.exchange(results.view(self.own, self.ranks, -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape))

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Send each rank its part of the rows, and return the parts that come from the ranks."""
        if self.group is None:
            return rows
        each = [len(rows) // self.ranks] * self.ranks
        return pytorch_all_to_all(rows, each, each, self.group)
