"""Programs whose first steps are compared with those of one process."""

import pytest

from workshop.check.command import check_command

CLIPPED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = nn.Linear(4, 1)
ddp_model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in DataLoader(data, 4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    (100 * nn.functional.mse_loss(ddp_model(inputs), targets) / SCALE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
torch.distributed.destroy_process_group()
"""


SCALES = pytest.mark.parametrize(
    ("scale", "kinds"), [("1", []), ("torch.distributed.get_world_size()", ["gradient-scale"])]
)


@SCALES
def test_a_wrong_scale_is_seen_before_the_gradients_are_clipped(tmp_path, scale, kinds):
    (tmp_path / "train.py").write_text(CLIPPED.replace("SCALE", scale))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds


TEACHER = """
if torch.distributed.get_rank() == 0:
    teacher = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
    for _ in range(5):
        teacher(data.tensors[0]).square().mean().backward()
        optimizer.step()
torch.distributed.barrier()
ddp_model ="""


@SCALES
def test_steps_of_one_rank_before_the_model_is_wrapped_are_no_steps_of_the_comparison(tmp_path, scale, kinds):
    text = CLIPPED.replace("\nddp_model =", TEACHER)
    (tmp_path / "train.py").write_text(text.replace("SCALE", scale))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds
    assert not any("one process computes the same" in each for each in verdict.unchecked)


FABRIC = """
import os
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", precision="bf16-mixed")
fabric.launch()
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for inputs, targets in fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True)):
    optimizer.zero_grad()
    fabric.backward(nn.functional.mse_loss(model(inputs), targets) / SCALE)
    optimizer.step()
"""


@SCALES
def test_a_program_of_fabric_with_mixed_precision_is_compared(tmp_path, scale, kinds):
    (tmp_path / "train.py").write_text(FABRIC.replace("SCALE", scale))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds
