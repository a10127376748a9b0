"""What FSDP1 saves in a run without GPUs: the states of an optimizer, whole or in shards."""

import pytest

from workshop.check.command import check_command, subject_of
from workshop.check.foreign import OwnersBench
from workshop.check.start import read_start

PROGRAM = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = FullyShardedDataParallel(torch.nn.Linear(8, 8).cuda(), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(16, 8))
sampler = torch.utils.data.DistributedSampler(data)
for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
    optimizer.zero_grad()
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
whole = FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(offload_to_cpu=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
assert not torch.equal(states["weight"]["exp_avg"], states["weight"]["exp_avg_sq"])
if dist.get_rank() == 0:
    torch.save(states, "states.pt")
    torch.load("states.pt", map_location=torch.device(batch.cuda().device.type, 0))
with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
    sharded = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
torch.save({"model": sharded[0], "optimizer": sharded[1]}, f"own-{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


# With DeepSpeed, the check also looks whether saved parameters are empty.
@pytest.mark.parametrize("before", ["", 'import sys\n\nsys.modules["deepspeed"] = None\n'])
def test_the_states_of_an_optimizer_are_copies(before, tmp_path, caplog):
    (tmp_path / "train.py").write_text(before + PROGRAM)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert (verdict.status, [finding.seen for finding in verdict.errors]) == (0, [])
    assert not [text for text in verdict.unchecked if "fails" in text]
    assert caplog.text == ""  # the check counts what each rank saves, and says if it cannot


def test_they_are_copies_without_pretended_gpus(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    start = read_start(["torchrun", "--nproc-per-node=2", "train.py"])
    (place := tmp_path / "place").mkdir()
    bench = OwnersBench(subject_of(script), start, on_cpu=True, place=place, original=tmp_path)
    run = bench._run(bench.folder())
    assert run.first_exception() is None
    assert len(run.trained) == 2
