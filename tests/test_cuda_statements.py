"""Statements and functions of torch.cuda that many programs use, on a machine without a GPU.

They run as the check runs a program on the CPU, and on pretended GPUs. Each must do what it does on a real GPU.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import runs

STATEMENTS = Path(__file__).with_name("cuda_statements.txt")
OF_GROUPS = Path(__file__).with_name("distributed_statements.txt")  # for two processes
INSTALL = {
    "cpu": "from workshop.check import cuda_on_cpu; cuda_on_cpu.install(2)",
    "pretended": "from workshop.pretend import installation; installation.install(2)",
}
# Pretended GPUs are hidden by the variables that hide real ones.
VISIBLE = {"cpu": {}, "pretended": {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None}}
EXECUTE = """
for line in open(sys.argv[1]):
    try:
        exec(line)
    except Exception as error:
        print(f"{line.strip()}: {error!r}", flush=True)
    together()
"""
RUN = """
import copy, pickle, sys, warnings
import numpy, torch
import torch.nn.functional as F
from torch import nn
{install}
warnings.simplefilter("ignore")

def together():
    pass

def gpu(*shape):
    return torch.zeros(shape, device="cuda")

def step(optimizer):
    model = nn.Linear(2, 2).cuda()
    before = model.weight.detach().clone()
    trained = optimizer(model.parameters())
    model(1 + gpu(1, 2)).sum().backward()
    trained.step()
    assert not torch.equal(before, model.weight)

{execute}
"""
RUN_TOGETHER = """
import datetime, os, sys, warnings
from functools import partial
import torch.distributed.fsdp
{install}
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn as dnn
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (CPUOffloadPolicy, FullyShardedDataParallel as FSDP, MixedPrecision, MixedPrecisionPolicy,
    ShardingStrategy, fully_shard)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
warnings.simplefilter("ignore")
rank = int(os.environ["RANK"])
dev = torch.device("cuda", rank)
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60))

def together():
    c10d._get_default_group().barrier().wait()

def gpu(*shape):
    return torch.full(shape, rank + 1.0, device="cuda")

def linear():
    return nn.Linear(4, 4).cuda()

def hooked(model, hook):
    model.register_comm_hook(None, hook)
    return model

def step(model, optimizer=torch.optim.AdamW):
    trained = optimizer(model.parameters())
    model(gpu(2, 4)).sum().backward()
    trained.step()
    return model

{execute}
dist.destroy_process_group()
"""
SIGNATURES = """
import inspect, warnings
import torch, torch.cuda.profiler
warnings.simplefilter("ignore")
original = {{}}
for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator):
    for name, value in vars(module).items():
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__.startswith("torch"):
            original[module, name] = value, inspect.signature(value)
{install}

def given(parameter):
    if parameter.default is not parameter.empty:
        return parameter.default
    if "state" in parameter.name:
        return [torch.cuda.get_rng_state()] if parameter.name.endswith("s") else torch.cuda.get_rng_state()
    return torch.cuda.current_stream() if parameter.name == "stream" else 0

replaced = 0
for (module, name), (function, signature) in original.items():
    now = getattr(module, name)
    wanted = [each for each in signature.parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if now is function or inspect.isclass(now):
        continue
    replaced += 1
    positional = [given(each) for each in wanted if each.kind is not each.KEYWORD_ONLY]
    only = {{each.name: given(each) for each in wanted if each.kind is each.KEYWORD_ONLY}}
    named = {{each.name: given(each) for each in wanted if each.kind is not each.POSITIONAL_ONLY}}
    first = [given(each) for each in wanted if each.kind is each.POSITIONAL_ONLY]
    for args, kwargs in ((positional, only), (first, named)):
        try:
            now(*args, **kwargs)
        except Exception as error:
            print(f"{{module.__name__}}.{{name}}: {{error!r}}")
assert replaced > 40, replaced
"""


def run(program, where, folder, *arguments):
    command = [sys.executable, "-P", "-c", program.format(install=INSTALL[where], execute=EXECUTE), *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=runs.environment(**VISIBLE[where]), timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("where", INSTALL)
def test_statements_of_programs_for_gpus_run(where, tmp_path):
    assert len(STATEMENTS.read_text().splitlines()) > 200
    assert run(RUN, where, tmp_path, STATEMENTS) == ""


@pytest.mark.parametrize("where", INSTALL)
def test_collectives_and_wrappers_of_programs_for_gpus_run(where, tmp_path):
    assert len(OF_GROUPS.read_text().splitlines()) > 90
    program = tmp_path / "program.py"
    program.write_text(RUN_TOGETHER.format(install=INSTALL[where], execute=EXECUTE))
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        program,
        OF_GROUPS,
    ]
    done = runs.run(command, tmp_path, **VISIBLE[where])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("where", INSTALL)
def test_replaced_functions_take_the_arguments_of_the_originals(where, tmp_path):
    assert run(SIGNATURES, where, tmp_path) == ""


OF_GLOO = """
import torch, torch.distributed as dist
{install}
dist.init_process_group("gloo", init_method="file://" + __import__("os").path.abspath("store"), rank=0, world_size=1)
for call in (
    lambda: dist.all_reduce(torch.ones(2, dtype=torch.long), dist.ReduceOp.AVG),
    lambda: dist.all_gather_into_tensor(torch.zeros(1, 2), torch.ones(2)),
    lambda: dist._coalescing_manager(device=torch.device("cpu")).__enter__(),
):
    try:
        call()
    except RuntimeError:
        print("refused", end=" ")
"""


# Pretended GPUs compare only the numbers of elements, whatever the group is.
@pytest.mark.parametrize(("where", "refused"), [("cpu", 3), ("pretended", 2)])
def test_a_group_of_gloo_refuses_what_only_nccl_can_do(where, refused, tmp_path):
    assert run(OF_GLOO, where, tmp_path).split() == ["refused"] * refused
