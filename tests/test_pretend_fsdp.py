"""FullyShardedDataParallel of PyTorch's first version on pretended GPUs."""

import textwrap

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
