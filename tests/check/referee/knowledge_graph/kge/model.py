import torch
import torch.nn as nn
import torch.nn.functional as F


class TransE(nn.Module):
    """head + relation is close to tail (Bordes et al., 2013), trained with self-adversarial negatives."""

    def __init__(self, entities, relations, dim, margin):
        super().__init__()
        self.entities, self.relations = nn.Embedding(entities, dim), nn.Embedding(relations, dim)
        nn.init.uniform_(self.entities.weight, -1, 1)
        nn.init.uniform_(self.relations.weight, -0.1, 0.1)
        self.margin = margin

    def score(self, heads, relations, tails):
        moved = self.entities(heads) + self.relations(relations)
        return self.margin - torch.linalg.vector_norm(moved - self.entities(tails), dim=-1)

    def forward(self, triples, negatives):
        heads, relations, tails = triples.unbind(dim=1)
        positive = self.score(heads, relations, tails)
        negative = self.score(heads[:, None], relations[:, None], negatives)
        weight = F.softmax(negative.detach(), dim=1)
        return -0.5 * (F.logsigmoid(positive) + (weight * F.logsigmoid(-negative)).sum(dim=1)).mean()

    def rank_of_tail(self, head, relation, tail, known):
        scores = self.score(head, relation, torch.arange(self.entities.num_embeddings, device=tail.device))
        others = [t for t in known[head.item(), relation.item()] if t != tail.item()]
        own, scores[others] = scores[tail].clone(), -float("inf")
        return 1 + (scores > own).sum()
