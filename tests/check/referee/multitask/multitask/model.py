import torch
import torch.nn as nn
import torch.nn.functional as F

from .data import TOPICS, VOCAB


class MultiTaskNet(nn.Module):
    """A shared trunk with one head for each task."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleDict({"topic": nn.Linear(hidden, TOPICS), "rating": nn.Linear(hidden, 1)})

    def forward(self, task, words):
        return self.heads[task](self.trunk(self.words(words)))


class WeightedLoss(nn.Module):
    """Runs the net and weights the loss of the task by a learned uncertainty (Kendall et al. 2018)."""

    def __init__(self, net, tasks):
        super().__init__()
        self.net = net
        self.log_var = nn.ParameterDict({task: nn.Parameter(torch.zeros(())) for task in tasks})

    def forward(self, task, words, target):
        output = self.net(task, words)
        if task == "topic":
            loss = F.cross_entropy(output, target)
        else:
            loss = 0.5 * F.mse_loss(output.squeeze(1), target)
        return torch.exp(-self.log_var[task]) * loss + 0.5 * self.log_var[task]
