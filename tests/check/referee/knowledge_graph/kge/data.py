"""A made-up knowledge graph: entities are places on a map, a relation is a walk in some direction."""
from collections import defaultdict

import torch


def make_graph(entities, relations, seed, held_out=0.08):
    """Training and validation triples (head, relation, tail)."""
    g = torch.Generator().manual_seed(seed)
    places = torch.randn(entities, 3, generator=g)
    walks = 0.8 * torch.randn(relations, 3, generator=g)
    triples = []
    for relation in range(relations):
        distance = torch.cdist(places + walks[relation], places)
        distance.fill_diagonal_(float("inf"))
        for head, tails in enumerate(distance.topk(3, largest=False).indices.tolist()):
            triples += [(head, relation, tail) for tail in tails[:1 + (head + relation) % 3]]
    triples = torch.tensor(triples)[torch.randperm(len(triples), generator=g)]
    n_valid = int(held_out * len(triples))
    return triples[n_valid:], triples[:n_valid]


def known_tails(triples):
    """All true tails of each (head, relation): they are not counted as mistakes in the ranking."""
    known = defaultdict(list)
    for head, relation, tail in triples.tolist():
        known[head, relation].append(tail)
    return known


def corrupt(triples, entities, count, generator):
    """Entities to put in the place of the tail."""
    return torch.randint(entities, (len(triples), count), generator=generator)
