"""Programs that wrap their model only on a GPU: the check judges them on pretended GPUs."""

import pytest

from workshop.check.command import check_command

PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
device = torch.device("cuda", local_rank)
torch.manual_seed(0)
model = nn.Linear(4, 1).to(device)
if {condition}:
    model = DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("condition", "kinds"), [('device.type != "cpu"', []), ("False", ["gradients-differ"])])
def test_a_model_that_is_wrapped_only_on_a_gpu_is_averaged_there(condition, kinds, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.format(condition=condition))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds


def test_a_run_that_ends_because_it_does_not_wrap_the_model_is_not_judged(tmp_path):
    text = PROGRAM.format(condition="torch.cuda.device_count() > 1").replace(
        "dist.destroy_process_group()",
        'if torch.cuda.device_count() > 1 and dist.get_rank() == 0:\n    raise RuntimeError("rank 0 fails with GPUs")',
    )
    (tmp_path / "train.py").write_text(text)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == ["crash"]
