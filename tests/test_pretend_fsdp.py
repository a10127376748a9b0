"""Both versions of FSDP on pretended GPUs."""

import textwrap

import pytest

from test_pretend import TORCHRUN, pretend

MIXED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

    dist.init_process_group()
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    low, full = torch.bfloat16, torch.float32
    losses = []
    for version in ("fully_shard", "one flat parameter", "original parameters"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).cuda()
        if version == "fully_shard":
            model = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full))
        else:
            types = MixedPrecision(param_dtype=low, reduce_dtype=full)
            original = version == "original parameters"
            model = FullyShardedDataParallel(model, device_id=rank, mixed_precision=types, use_orig_params=original)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs = torch.randn(16, 8).cuda()
        losses.append([])
        for _ in range(4):
            loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert {(str(each.device), each.dtype) for each in model.parameters()} == {(f"cuda:{rank}", full)}
    assert losses[0][-1] < losses[0][0] / 2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(losses[:1]).expand(3, -1))
    dist.destroy_process_group()
"""


def test_mixed_precision_trains_as_with_fully_shard(tmp_path):
    """FSDP exchanges the data of its parameters in each forward and backward pass, also in hooks of the backward pass."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(MIXED))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", file)
    assert done.returncode == 0, done.stdout + done.stderr


FROM_META = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank = int(os.environ["RANK"])
    dist.init_process_group(device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    fully_shard(model)
    model.to_empty(device=torch.device("cuda", rank))
    for layer in model:
        layer.reset_parameters()
    weight = model[0].weight.full_tensor().cpu()
    assert len(weight.unique()) == weight.numel()  # the shards of the ranks have different random numbers
    mine, theirs = weight.cuda(), weight.cuda()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs)
    assert torch.cuda.get_rng_state().numel() == 16  # a seed and a place in the sequence of its numbers
    model(torch.randn(2, 8).cuda()).sum().backward()
    dist.destroy_process_group()
"""


def test_parameters_on_the_meta_device_are_initialized_in_shards(tmp_path):
    """DTensor changes the place in the random numbers of each GPU. The program does not choose a GPU: the mesh does."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(FROM_META))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", file)
    assert done.returncode == 0, done.stdout + done.stderr


EVALUATED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group()
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    policy = ModuleWrapPolicy({nn.Sequential})
    model = FullyShardedDataParallel(model, device_id=rank, use_orig_params=True, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, inputs = [], torch.randn(8, 4).cuda()
    for _ in range(6):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            losses.append((model(inputs) - inputs.sum(1, keepdim=True)).square().mean().item())
    assert losses[-1] < 0.9 * losses[0], losses
    dist.destroy_process_group()
"""


def test_fsdp1_evaluates_in_inference_mode_between_steps(tmp_path):
    file = tmp_path / "evaluated.py"
    file.write_text(textwrap.dedent(EVALUATED))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", file)
    assert done.returncode == 0, done.stdout + done.stderr


SHARDED = """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig
    from torch.distributed.fsdp import StateDictType

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = FullyShardedDataParallel(torch.nn.Linear(8, 8).cuda())
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 8).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [each.detach().clone() for each in model.parameters()]

    def state():
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}

    step()
    on_cpu = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *on_cpu):
        torch.save(state(), f"{dist.get_rank()}.pt")
        expected = step()
        saved = torch.load(f"{dist.get_rank()}.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        moments = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved["optimizer"])
        optimizer.load_state_dict(moments)
    torch.testing.assert_close(step(), expected)
    dist.destroy_process_group()
"""


WHOLE = (
    SHARDED.replace("ShardedOptimStateDictConfig", "FullOptimStateDictConfig")
    .replace("ShardedStateDictConfig", "FullStateDictConfig")
    .replace("SHARDED_STATE_DICT", "FULL_STATE_DICT")
    .replace("Linear(8, 8).cuda())", "Linear(8, 8).cuda(), use_orig_params=True)")
    .replace("expected =", "assert all(not each.is_cuda for each in state()['model'].values())\n        expected =")
)


@pytest.mark.parametrize("text", [SHARDED, WHOLE], ids=["shards", "whole"])
def test_fsdp1_resumes_from_its_state_on_the_cpu(text, tmp_path):
    program = tmp_path / "sharded.py"
    program.write_text(textwrap.dedent(text))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", program)
    assert done.returncode == 0, done.stderr
