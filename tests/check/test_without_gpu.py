"""Programs for GPUs that behave differently without one: the check must judge what they do on GPUs."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from check.made import Made
from workshop.check.command import check_command
from workshop.check.evidence.events import Backward, Drawn, Ended, Evaluated, Raised, ScheduleSeen
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.foreign import OwnersBench
from workshop.check.lightning_ranks import uses_all_gpus
from workshop.check.rules.alike import has_resumed
from workshop.check.rules.ending import ended_early, no_training
from workshop.check.rules.schedules import _wrong_length
from workshop.check.rules.shares import slices
from workshop.check.scenarios import WHOLE
from workshop.check.start import read_start
from workshop.check.subject import Subject

PROGRAM = """
import os
import torch
import torch.distributed as dist
from torch import nn

place = ("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else ("cpu",)
device = torch.device(*place)
{start}
torch.manual_seed(0)
model = nn.Linear(4, 1).to(device)
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model, device_ids=place[1:])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):
    generator = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
    inputs = torch.randn(8, 4, generator=generator)
    loss = (model(inputs.to(device)) - inputs.sum(1, keepdim=True).to(device)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
{end}if dist.is_initialized():
    dist.destroy_process_group()
"""
JOIN = 'torch.cuda.set_device(device)\n    dist.init_process_group("nccl")\n'
STARTS = {
    "it refuses the CPU": f'if device.type != "cuda":\n    raise RuntimeError("this needs a GPU")\nelse:\n    {JOIN}',
    "it trains together only on GPUs": f"if torch.cuda.is_available():\n    {JOIN}",
}

FUTURE = """
if not dist.is_initialized():
    dist.init_process_group("nccl")
whole = torch.ones(2, device=device)
dist.reduce_scatter_tensor(whole[:1].clone(), whole, async_op=True).get_future().wait()
"""


def started(text, tmp_path, program=PROGRAM):
    """Check a program that two processes run, with these lines as its start."""
    (tmp_path / "train.py").write_text(program.format(start=text, end=""))
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    return verdict


END = """len(model.device_ids)  # None without GPUs
optimizer.step()
dist.get_rank() == 0 and dist.barrier()
model(inputs.to(device)).sum().backward()
"""


def test_a_run_with_gpus_that_gets_further_counts(tmp_path):
    start = 'torch.cuda.set_device(device)\ndist.init_process_group("nccl")'
    verdict = started(start, tmp_path, PROGRAM.replace("{end}", END + "{end}"))
    assert {finding.kind for finding in verdict.errors} in ({"hang"}, {"collectives-differ"})


@pytest.mark.parametrize("what", STARTS)
def test_a_program_that_needs_gpus_gets_them(what, tmp_path):
    verdict = started(STARTS[what], tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


GATHER = "dist.all_gather([torch.zeros(1) for _ in range(torch.cuda.device_count())], loss.detach())\n"
NEEDS = """
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    import a_package_that_is_not_there
"""


def test_a_program_that_counts_gpus_gets_gpus_whose_tensors_are_on_the_cpu(tmp_path):
    """It counts them after the training. Pretended GPUs come later, because DeepSpeed, for example, does not use them."""
    (tmp_path / "train.py").write_text(PROGRAM.format(start="dist.init_process_group()", end=GATHER))
    (tmp_path / "place").mkdir()
    start = read_start(["torchrun", "--nproc-per-node=2", str(tmp_path / "train.py")])
    subject = Subject(tmp_path / "train.py", "", (), ())
    bench = OwnersBench(subject, start, on_cpu=True, place=tmp_path / "place", original=tmp_path)
    run = bench.make(WHOLE, {})
    assert len(run.trained) == 2
    assert not run.failed
    assert (bench.gpus, bench.devices) == (2, False)


def test_a_missing_package_of_the_run_with_gpus_is_named(tmp_path):
    """Without GPUs, the program trains without a group: that is not what its owner wants to know."""
    (error,) = started(NEEDS, tmp_path).errors
    assert error.rule.name == "ended-early"
    assert "a_package_that_is_not_there" in error.seen


def test_a_program_without_set_device_is_told_what_fails_on_a_second_node(tmp_path):
    program = PROGRAM.replace('int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"])')
    verdict = started('dist.init_process_group("nccl")', tmp_path, program)
    (error,) = verdict.errors
    assert error.rule.name == "device-index"
    assert error.seen == "the program asks for GPU 2, which the node does not have"


def test_a_wrapper_with_the_gpu_of_another_node_is_named(tmp_path):
    program = PROGRAM.replace("device_ids=place[1:]", 'device_ids=[int(os.environ["RANK"])]')
    verdict = started('torch.cuda.set_device(device)\ndist.init_process_group("nccl")', tmp_path, program)
    (seen,) = [finding for finding in verdict.findings if finding.rule.name == "device-index"]
    assert seen.seen == "DistributedDataParallel gets device_ids with a GPU that the node does not have"
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert "DistributedDataParallel" in lines[int(seen.where.partition(":")[2]) - 1]


KEPT = """
import argparse, os
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint_path", help="path of a checkpoint, to resume the training")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if args.checkpoint_path:
    saved = torch.load(args.checkpoint_path)
    first = saved["epoch"] + 1
    model.module.load_state_dict(saved["model"])
for epoch in range(first, 3):
    for number in range(4):
        name = f"sample-{rank}-{epoch}-{number}.pt"
        if not os.path.exists(name):
            torch.save(torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * epoch + 10 * number + rank)), name)
        inputs = torch.load(name)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, "tmp.pt")
        os.replace("tmp.pt", f"model-{epoch}.pt")
    dist.barrier()
dist.destroy_process_group()
"""


def test_samples_that_a_program_keeps_in_files_are_no_checkpoint(tmp_path):
    (tmp_path / "train.py").write_text(KEPT)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert not any("resume" in text for text in verdict.unchecked)


HYBRID = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
model = FullyShardedDataParallel(nn.Linear(4, 1).cuda(), device_id=torch.cuda.current_device(), **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(dist.get_rank())
for step in range(6):
    inputs = torch.randn(8, 4).cuda()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
print(model.process_group.size(), "ranks share the parameters")
dist.destroy_process_group()
"""


def test_hybrid_sharding_shards_over_the_processes_of_the_node(tmp_path):
    (tmp_path / "train.py").write_text(HYBRID)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert "2 ranks share the parameters" in "".join(
        finding.seen for finding in verdict.findings
    )  # both ranks print it


TENSORS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    with torch.device("meta"):
        model, size = nn.Linear(4, 1), torch.ones(2)
    print(size.is_meta, model.weight.is_meta)

    @torch.jit.script
    def twos(x):
        return torch.ones(x.shape) + 1

    print(twos(torch.ones(3)).sum().item())
    print(torch.func.jvp(torch.sigmoid, (torch.zeros(1),), (torch.ones(1),))[1].item())
    torch.manual_seed(0)
    for devices in (None, [0], [torch.device("cuda", 0)], [torch.ones(1, device="cuda").device]):
        with torch.random.fork_rng(devices):
            torch.rand(9)
    print(torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0))))
    for (batch,) in DataLoader(TensorDataset(torch.rand(4, 3)), batch_size=2):
        torch.func.jvp(nn.Linear(3, 3), (batch,), (batch,))
"""


def test_contexts_of_a_device_torchscript_forward_mode_and_forked_random_states_work(place):
    (process,) = Made(place("tensors"), TENSORS, gpus=2).well().run.processes
    assert process.stdout.split() == ["True", "True", "6.0", "0.25", "True"]
    assert "Traceback" not in process.stderr


def test_a_program_that_fails_after_training_without_real_gpus_gets_pretended_ones(tmp_path):
    end = "if next(model.parameters()).get_device() != place[1]:\n    raise ValueError('not on the GPU of this process')\n"
    start = STARTS["it trains together only on GPUs"]
    (tmp_path / "train.py").write_text(
        PROGRAM.format(start=start, end="").replace(
            "if dist.is_initialized():\n    dist.destroy", f"{end}if True:\n    dist.destroy"
        )
    )
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []


NCCL = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from workshop.check import cuda_on_cpu
    from workshop.check.probes.models import _refreshes

    cuda_on_cpu.install(1)
    dist.init_process_group("nccl", init_method="file://{file}", rank=0, world_size=1)
    with torch.inference_mode():
        total = torch.ones(2)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)  # gloo refuses this outside of inference mode
    plain = nn.BatchNorm1d(2)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))
    print(total.tolist(), _refreshes(plain), _refreshes(synchronized), _refreshes(plain.eval()))
    dist.destroy_process_group()
"""


def test_nccl_averages_in_any_mode_and_synchronized_statistics_are_those_of_all_ranks(tmp_path):
    code = textwrap.dedent(NCCL).format(file=tmp_path / "store")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[1.0, 1.0] True False False", done.stderr


HALF = """
    import torch
    from torch import nn
    from workshop.check import cuda_on_cpu

    cuda_on_cpu.install(1)
    layer, ones = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.cuda.amp.autocast():
        print(layer(ones).dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        print(layer(ones).dtype)
"""


def test_autocast_computes_in_float32_because_float16_is_slow_on_the_cpu():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(HALF)], capture_output=True, text=True)
    assert done.stdout.split() == ["torch.float32", "torch.bfloat16"], done.stderr


SYNCHRONIZED = """
import os, torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(local := int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
ddp = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[local], broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):
    ddp.train()
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank)).cuda()
    optimizer.zero_grad()
    (ddp(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
    if step % 2:
        model.eval()
        with torch.no_grad():
            error = model(torch.full((12, 4), float(rank + 1)).cuda()).mean()
        dist.all_reduce(error)
dist.destroy_process_group()
"""


def test_synchronized_statistics_are_equal_on_all_ranks_although_the_cpu_does_not_synchronize_them(tmp_path):
    (tmp_path / "train.py").write_text(SYNCHRONIZED)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == []


BUFFERS = """
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    for step in range(2):
        for batch in range(2):
            model(torch.randn(4, 4)).sum().backward()
            for parameter in model.parameters():
                parameter.main_grad += parameter.grad
                parameter.grad = None
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.clone()
            parameter.main_grad.zero_()
        optimizer.step()
    torch.jit.trace(model, torch.randn(2, 4), check_trace=False)  # for a picture
"""


def test_gradients_in_buffers_of_the_program_are_kept_and_a_trace_is_no_evaluation(place):
    (process,) = Made(place("buffers"), BUFFERS).well().run.processes
    assert [each.leftover for each in process.of(Backward)] == [False, True, False, True]
    assert process.of(Evaluated) == []


SHARDED = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import FullyShardedDataParallel

accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(use_orig_params=True))
AcceleratorState()  # libraries ask it again
assert accelerator.distributed_type == "FSDP", accelerator.distributed_type
torch.manual_seed(0)
model = accelerator.prepare(torch.nn.Linear(4, 2))
assert isinstance(model, FullyShardedDataParallel), type(model)
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
    optimizer.zero_grad()
    accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean())
    optimizer.step()
accelerator.end_training()
"""


def test_accelerate_shards_with_a_plugin_on_the_cpu(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


SHUFFLED = """
    import random, torch

    random.shuffle([torch.randn(3) for _ in range(600)])  # their texts would take long
    random.shuffle(list(range(600)))  # numbers
"""


def test_only_numbers_of_a_long_list_are_compared(place):
    made = Made(place("shuffled"), SHUFFLED).well()
    assert [each.where for each in made.run.processes[0].of(Drawn)] == [made.line("# numbers")]


@pytest.mark.parametrize(
    ("line", "slow"), [('  File "/lib/site-packages/torch/x.py", line 2 in backward\n', True), ("", False)]
)
def test_a_slow_library_call_before_the_first_step_is_no_endless_loop(line, slow):
    stack = f'{line}  File "/home/me/train.py", line 9 in main\n'
    process = Process(pid=1, events=[(0.0, Ended())], stack=stack)
    run = Run(nproc=1, processes=[process], status=None, hung="busy", flooded=False, seconds=61.0, launch="torchrun")
    found = [list(rule.detectors[0].function(run)) for rule in (ended_early, no_training)]
    assert [len(each) for each in found] == ([0, 1] if slow else [1, 0])
    assert found[slow][0].where == "train.py:9"


@pytest.mark.parametrize(
    ("message", "needs_gpu"),
    [
        ("\"histogram_cpu\" not implemented for 'Long'", True),
        ("Pretended GPUs cannot exchange the data of a parameter", True),
        ("not implemented for this task", False),
    ],
)
def test_what_only_a_real_gpu_can_do_is_no_mistake_of_the_program(message, needs_gpu):
    raised = Raised(type="NotImplementedError", message=message, traceback="", where="train.py:9")
    process = Process(pid=1, events=[(0.0, raised), (1.0, Ended())])
    run = Run(nproc=1, processes=[process], status=1, hung="", flooded=False, seconds=6.0, launch="torchrun")
    found = [list(rule.detectors[0].function(run)) for rule in (ended_early, no_training)]
    assert [len(each) for each in found] == ([0, 1] if needs_gpu else [1, 0])
    assert found[needs_gpu][0].where == "train.py:9"


@pytest.mark.parametrize(
    ("arguments", "all_of_them"),
    [
        ("max_epochs=2", True),
        ('accelerator="auto", devices="auto"', True),
        ("devices=-1", True),
        ("devices=2", False),
        ('accelerator="cpu"', False),
        ("devices=args.devices", False),
    ],
)
def test_lightning_uses_all_gpus_unless_it_is_told_how_many(arguments, all_of_them):
    assert uses_all_gpus(f"import lightning as L\ntrainer = L.Trainer({arguments})\n") is all_of_them
    assert not uses_all_gpus(f"trainer = Trainer({arguments})\n")


def test_ranks_with_the_same_samples_take_slices_of_them_if_their_losses_differ():
    one, same, other = (
        SimpleNamespace(backwards=[SimpleNamespace(loss=loss) for loss in losses])
        for losses in ((0.7, 0.6, None), (0.7, 0.6, 0.5), (0.8, 0.5, 0.4))
    )
    assert slices(one, other)
    assert not slices(one, same)


def test_a_schedule_that_never_advances_has_no_length_to_compare():
    made = ScheduleSeen(length=30, taken=0, where="train.py:1")
    process = SimpleNamespace(of=lambda kind: [made], first=lambda kind: made, steps=[1], attempts=4, epochs=[])
    assert list(_wrong_length(SimpleNamespace(nproc=2), process, [0.1])) == []


def test_a_step_of_one_of_two_optimizers_resumes_where_its_last_step_ended():
    def step(before, after):
        sketches = [[(float(value), [float(value)])] for value in (before, after)]
        weights = [SimpleNamespace(weights=each, gradients=each) for each in sketches]
        return SimpleNamespace(before=weights[0], after=weights[1])

    done = [step(1, 2), step(5, 6)]  # the second one is of another optimizer
    assert has_resumed(done, step(2, 3))
    assert not has_resumed(done, step(4, 3))


OPTIONS = """
import gc
gc.set_threshold(10**6)  # as in a program that is fast

class Options(dict):  # its attributes are its entries: it refers to itself
    def __init__(self, **entries):
        super().__init__(entries)
        self.__dict__ = self

"""


def test_memory_that_python_frees_later_does_not_grow(tmp_path):
    batch = "    batch = Options(inputs=inputs.to(device))\n    loss = (model(batch.inputs)"
    program = PROGRAM.replace("    loss = (model(inputs.to(device))", batch).replace("range(6)", "range(12)")
    assert program != PROGRAM
    start = OPTIONS + f"if torch.cuda.is_available():\n    {JOIN}else:\n    dist.init_process_group()\n"
    verdict = started(start, tmp_path, program)
    assert [finding.seen for finding in verdict.findings] == []


@pytest.mark.parametrize("start", [FUTURE, f"{STARTS['it refuses the CPU']}{FUTURE}"], ids=["cpu", "pretended"])
def test_handles_of_nccl_have_futures(start, tmp_path):
    verdict = started(start, tmp_path)
    assert (verdict.status, [each.seen for each in verdict.findings if not each.advice]) == (0, [])
