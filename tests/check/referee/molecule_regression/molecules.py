"""Made-up molecules: a random skeleton of C, N, O and F atoms with rings and double bonds, and an energy."""
import random
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

VALENCE = {"C": 4, "N": 3, "O": 2, "F": 1}
ELEMENTS = list(VALENCE)
ATOM_ENERGY = {"C": -38.1, "N": -54.6, "O": -75.1, "F": -99.8}
BOND_ENERGY = {1: -3.4, 2: -6.3}
POLARITY = {"C": 2.5, "N": 3.0, "O": 3.4, "F": 4.0}


class Graph(NamedTuple):
    elements: torch.Tensor  # [atoms]
    edges: torch.Tensor     # [2, 2 * bonds]: from, to; every bond in both directions
    orders: torch.Tensor    # [2 * bonds]: 1 single, 2 double
    energy: float


def build(num_atoms, rng):
    """Add atom after atom to a random atom with a free valence; then close some rings and double some bonds."""
    atoms, free, bonds = ["C"], [4], {}

    def connect(a, b):
        bonds[a, b] = bonds.get((a, b), 0) + 1
        free[a] -= 1
        free[b] -= 1

    for new in range(1, num_atoms):
        open_atoms = [i for i, f in enumerate(free) if f > 0]
        few = sum(free) <= 2
        atoms.append("C" if few else rng.choices(ELEMENTS, weights=[6, 2, 2, 1])[0])
        free.append(VALENCE[atoms[-1]])
        connect(rng.choice(open_atoms), new)
    for _ in range(num_atoms // 4):
        a, b = sorted(rng.sample(range(num_atoms), 2))
        if free[a] and free[b] and bonds.get((a, b), 0) < 2:
            connect(a, b)

    energy = sum(ATOM_ENERGY[atom] for atom in atoms)
    for (a, b), order in bonds.items():
        energy += BOND_ENERGY[order] - 1.5 * (POLARITY[atoms[a]] - POLARITY[atoms[b]]) ** 2
    energy += 2.0 * (len(bonds) - num_atoms + 1)  # strain of the rings
    pairs = [(a, b) for a, b in bonds] + [(b, a) for a, b in bonds]
    return Graph(torch.tensor([ELEMENTS.index(atom) for atom in atoms]),
                 torch.tensor(pairs).t().contiguous(),
                 torch.tensor(2 * list(bonds.values())), energy + rng.gauss(0, 1.0))


class Molecules(Dataset):
    """`size` molecules in order of size, as data banks number them; each is built when it is asked for first."""

    def __init__(self, size, seed, smallest=5, largest=16):
        self.size, self.seed, self.smallest, self.largest = size, seed, smallest, largest
        self.cache = {}

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index not in self.cache:
            num_atoms = self.smallest + index * (self.largest - self.smallest + 1) // self.size
            self.cache[index] = build(num_atoms, random.Random(self.seed * 1_000_003 + index))
        return self.cache[index]


class Batch(NamedTuple):
    elements: torch.Tensor
    edges: torch.Tensor
    orders: torch.Tensor
    owner: torch.Tensor     # [atoms]: the number of the atom's molecule in the batch
    energy: torch.Tensor    # [molecules]

    def to(self, device):
        return Batch(*(t.to(device) for t in self))


def collate(graphs):
    """Put graphs of different sizes into one graph without bonds between them."""
    sizes = torch.tensor([len(g.elements) for g in graphs])
    offsets = (sizes.cumsum(0) - sizes).tolist()
    return Batch(elements=torch.cat([g.elements for g in graphs]),
                 edges=torch.cat([g.edges + offset for g, offset in zip(graphs, offsets)], dim=1),
                 orders=torch.cat([g.orders for g in graphs]),
                 owner=torch.repeat_interleave(torch.arange(len(graphs)), sizes),
                 energy=torch.tensor([g.energy for g in graphs], dtype=torch.float64))
