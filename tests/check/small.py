"""A small program with two mistakes, for the tests of options and reports."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import runs

PROGRAM = """\
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = DataLoader(dataset, batch_size=4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader:
    loss = (model(inputs) - targets).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
"""
COMMAND = ("torchrun", "--nproc-per-node=2", "train.py")
LOADER, SAVE = "loader = DataLoader(dataset, batch_size=4)", 'torch.save(model.module.state_dict(), "model.pt")'
# For each of its mistakes: the line that the finding names, and the repair.
MISTAKES = {
    "same-samples": (LOADER, ("batch_size=4)", "batch_size=4, sampler=DistributedSampler(dataset))")),
    "two-writers": (SAVE, (SAVE, f"if dist.get_rank() == 0:\n    {SAVE}")),
}
HANGS = PROGRAM.replace("    optimizer.step()\n", "    optimizer.step()\n    dist.get_rank() == 0 and dist.barrier()\n")
TABLE = f'[tool.workshop-check]\ncommand = "{shlex.join(COMMAND)}"\n'


def repaired(*kinds: str) -> str:
    """Return the program without these mistakes."""
    text = PROGRAM
    for kind in kinds:
        before, after = MISTAKES[kind][1]
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def line_of(kind: str, text: str = PROGRAM) -> int:
    """Return the number of the line that a finding names."""
    return text.splitlines().index(MISTAKES[kind][0]) + 1


def check(folder: Path, *arguments: object, command: Sequence[str] = ("workshop.check",)):
    """Run ``workshop-check`` in a folder, or a different command of these modules."""
    return runs.run([sys.executable, "-P", "-m", *command, *arguments], folder, COLUMNS=80, PATH=path())


def path(*folders: Path) -> str:
    """Return a PATH with these folders and the programs of this environment."""
    return os.pathsep.join([*map(str, folders), os.path.dirname(sys.executable), os.environ["PATH"]])
