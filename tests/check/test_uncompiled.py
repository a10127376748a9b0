"""Programs that do not compile run without torch.compile, which takes long to import; those that use it get it."""

import subprocess
import sys

import pytest

from workshop.check.uncompiled import NEEDED

TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from workshop.check.uncompiled import prepare_compiler

prepare_compiler("import torch", needed=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(5, 3)).sum().backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
"""
WITHOUT = """
assert type(sys.modules["torch._dynamo"]).__name__ == "_NotImported"
heavy = ("torch._dynamo.", "torch._inductor", "torch.distributed.tensor")
assert [name for name in sys.modules if name.startswith(heavy)] == ["torch._dynamo.utils"]  # what stands for it
"""
USES = {
    "an attribute": "assert torch._dynamo.config.suppress_errors is False",
    "a module below it": "import torch._dynamo.config as config\nassert config.suppress_errors is False",
    "a name of a module that torchvision has": "from torchvision.ops import roi_align\n"
    "assert roi_align(torch.ones(1, 1, 8, 8), [torch.tensor([[0.0, 0, 4, 4]])], 2).sum() == 4\n"
    "from torchvision.ops.roi_align import is_compile_supported\nassert is_compile_supported('cpu') in (True, False)",
    "a name of a module": "assert torch._dynamo.utils.counters is not None",
    "checkpoint": "from torch.utils.checkpoint import checkpoint\n"
    "checkpoint(nn.Linear(3, 3), torch.ones(1, 3), use_reentrant=False).sum().backward()",
}


def _run(program):
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("more", ["", "from torchvision import transforms\n"], ids=["torch", "torchvision"])
def test_a_training_does_not_import_the_compiler(more):
    _run(TRAINING + more + WITHOUT)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_program_that_uses_the_compiler_gets_it(use):
    _run(f"{TRAINING}{use}\nassert type(sys.modules['torch._dynamo']).__name__ == 'module'\noptimizer.step()")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("import torch\nfrom torch.utils.data import DataLoader\ntorch.save(model, checkpoint)", False),
        ("from torchvision import transforms\nimport numpy as np", False),
        ("from torch.distributed.fsdp import fully_shard", True),
        ("x = checkpoint(layer, x)", True),
        ("import lightning as L", True),
        ("    from pytorch_lightning import Trainer", True),
    ],
)
def test_programs_that_need_it_are_known_by_their_text(text, needed):
    assert bool(NEEDED.search(text)) is needed
