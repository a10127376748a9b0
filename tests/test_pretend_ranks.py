"""Several processes on pretended GPUs: what NCCL refuses, and the GPUs that DDP and other parts of PyTorch use."""

import re
import textwrap

from test_pretend import MINIMAL, TORCHRUN, pretend


def test_two_ranks_on_one_gpu_are_refused(tmp_path):
    program = tmp_path / "all_on_0.py"
    program.write_text("".join(line for line in MINIMAL.read_text().splitlines(True) if "set_device_index" not in line))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", program)
    assert done.returncode != 0
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in done.stderr
    assert "refused: two ranks on one GPU: ranks 0 and 1, GPU 0" in done.stdout


def test_objects_of_two_ranks_on_one_gpu_are_refused(tmp_path):
    program = tmp_path / "objects.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "own = torch.device('cuda', int(os.environ['LOCAL_RANK']))\n"
        "dist.all_reduce(torch.ones(1, device=own))\n"
        "dist.all_gather_object([None, None], 'from the current GPU, which is GPU 0 on both ranks')\n"
    )
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", program)
    assert done.returncode != 0
    assert "refused: two ranks on one GPU: ranks 0 and 1, GPU 0" in done.stdout
    program.write_text(program.read_text().replace("'nccl'", ""))  # then the CPU has a backend, and sends them
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", program)
    assert done.returncode == 0, done.stderr


def test_set_device_by_rank_fails_only_on_the_second_node(tmp_path):
    program = tmp_path / "by_rank.py"
    index = 'int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()'
    assert index in MINIMAL.read_text()
    program.write_text(MINIMAL.read_text().replace(index, 'int(os.environ["RANK"])'))
    one = pretend(tmp_path, "torchrun", "--nproc-per-node=2", program)
    assert one.returncode == 0, one.stderr
    two = pretend(tmp_path, "torchrun", "--nproc-per-node=2", program, nodes=2)
    assert two.returncode != 0
    assert "CUDA error: invalid device ordinal" in two.stderr
    (first, second) = re.findall(r"refused: the program asks for GPU (\d)", two.stdout)
    assert (first, second) == ("2", "3")


WITHOUT_SET_DEVICE = """
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Linear(1, 1)).to(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank], find_unused_parameters=True).to(rank)
    losses, inputs = [], torch.randn(8, 4).to(rank)
    for _ in range(8):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    weights = [torch.zeros_like(model.module[0].weight) for _ in range(2)]
    dist.all_gather(weights, model.module[0].weight.detach())
    assert torch.equal(*weights) and weights[0].device.index == rank
    dist.destroy_process_group()
"""


def test_ddp_uses_the_gpu_of_the_model_and_a_later_tensor_on_the_gpu_of_another_rank_is_refused(tmp_path):
    """Without ``set_device``, GPU 0 is the current one on both ranks."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(WITHOUT_SET_DEVICE))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", file)
    assert done.returncode == 0, done.stdout + done.stderr
    late = '    dist.all_reduce(torch.ones(1, device="cuda:0"))\n    dist.destroy'
    text = textwrap.dedent(WITHOUT_SET_DEVICE.replace("    dist.destroy", late))
    file.write_text(text)
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", file)
    assert done.returncode != 0
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in done.stderr
    number = 1 + text.count("\n", 0, text.index("dist.all_reduce"))
    assert f"program.py:{number}: once, rank 1" in done.stdout


SYNCHRONIZED = """
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    x, part = torch.randn(5, 3, 2, 2), slice(0, 2) if rank == 0 else slice(2, 5)
    results = []
    for synchronized in (False, True):
        torch.manual_seed(1)
        model = nn.BatchNorm2d(3)
        nn.init.normal_(model.weight)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronized else model
        inputs = (x[part].cuda() if synchronized else x.clone()).requires_grad_()
        model = model.cuda() if synchronized else model
        y = model(inputs)
        y.pow(3).sum().backward()
        if synchronized:
            for each in model.parameters():
                dist.all_reduce(each.grad)
        parts = (y, inputs.grad) if synchronized else (y[part], inputs.grad[part])
        values = (*parts, model.weight.grad, model.bias.grad, model.running_mean, model.running_var)
        results.append([each.detach().cpu() for each in values])
    torch.testing.assert_close(*results)
    dist.destroy_process_group()
"""


def test_synchronized_batch_norm_is_that_of_the_whole_batch(tmp_path):
    """The two ranks have different numbers of samples."""
    file = tmp_path / "program.py"
    file.write_text("import torch\n" + textwrap.dedent(SYNCHRONIZED))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", file)
    assert done.returncode == 0, done.stdout + done.stderr


IN_TWO_THREADS = """
    import os
    import threading
    import time

    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")

    def save(group):
        for number in range(20):
            time.sleep(0.002 * rank)  # the ranks begin in a different order
            names = [None, None]
            dist.all_gather_object(names, (rank, number), group=group)
            assert names == [(0, number), (1, number)], names

    for group in (None, dist.new_group([0, 1])):
        thread = threading.Thread(target=save, args=(group,))
        thread.start()
        for number in range(60):
            total = torch.full((3,), float(rank + number), device="cuda")
            dist.all_reduce(total, group=group)
            assert total.tolist() == [2.0 * number + 1] * 3, total
            time.sleep(0.001 * (1 - rank))
        thread.join()
    print("both ended")
    dist.destroy_process_group()
"""


def test_a_thread_uses_gloo_while_the_program_uses_nccl_in_the_same_group(tmp_path):
    """Only real GPUs have a communicator of NCCL of their own; here, a second group stands for it. async_save() needs this."""
    program = tmp_path / "threads.py"
    program.write_text(textwrap.dedent(IN_TWO_THREADS))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("both ended") == 2


POWER_SGD = """
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    state = power.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draws, losses = torch.Generator().manual_seed(rank), []
    for _ in range(12):
        inputs = torch.randn(16, 64, generator=draws).cuda()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4, losses
    sent = torch.full((2,), float(rank), device="cuda")
    (result,) = dist.all_reduce(sent, async_op=True).get_future().wait()
    assert result is sent and result.tolist() == [1.0, 1.0]
    dist.destroy_process_group()
"""


def test_the_future_of_a_collective_has_its_tensor_on_the_gpu(tmp_path):
    program = tmp_path / "power_sgd.py"
    program.write_text(textwrap.dedent(POWER_SGD))
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=2", program)
    assert done.returncode == 0, done.stderr
