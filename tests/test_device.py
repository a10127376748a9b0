"""Each process uses one of the GPUs that it sees, by its local rank. It uses the CPU only if it sees none, or a tool says so."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import runs
from workshop.check import command as check
from workshop.demo import strategies, tour
from workshop.measure import bench
from workshop.run.environment import why_hidden
from workshop.run.machine import gpus
from workshop.training import deepspeed, device

FOLDERS = ("[0-9]*", "slurm-multinode", "solutions", "strategies", "docs", "bonus_jax", "workshop")
NAMES = ("choose_device", "local_device")
MINIMAL = "02_pytorch_ddp/minimal_ddp.py"  # too short for a function
# How a job shows two GPUs to the two processes of a node: the number that each process sees, and the indices that they must take.
VISIBLE = {"both GPUs": (2, [0, 1]), "only its own GPU": (1, [0, 0]), "no GPU": (0, ["cpu", "cpu"])}


def programs() -> dict[str, ast.Module]:
    """Return the source of each program with a function that chooses the device."""
    files = [file for folder in FOLDERS for file in runs.ROOT.glob(f"{folder}/**/*.py") if "runs" not in file.parts]
    texts = {str(file.relative_to(runs.ROOT)): file.read_text() for file in sorted(files)}
    return {name: ast.parse(text) for name, text in texts.items() if any(f"def {each}(" in text for each in NAMES)}


PROGRAMS = programs()
# These programs use one process, and therefore the first GPU. Exercise 1 does so until TODO 1 is done.
ONE_PROCESS = [name for name, tree in PROGRAMS.items() if "device = choose_device()" in ast.unparse(tree)]
ONE_PROCESS += ["02_pytorch_ddp/exercise1_multigpu.py"]
# All processes that mp.spawn starts see the same GPUs. With more processes than GPUs, set_device_index fails.
SPAWN = ["solutions/02_pytorch_ddp/exercise1_multigpu.py", "02_pytorch_ddp/exercise2_multigpu_torchrun.py"]


@pytest.fixture
def see(monkeypatch):
    """Let torch show a number of GPUs; the function returns a list to which each chosen index is added."""

    def change(count: int) -> list[int]:
        chosen: list[int] = []

        def choose(index: int) -> None:
            if not 0 <= index < count:
                raise RuntimeError("CUDA error: invalid device ordinal")
            chosen.append(index)

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", choose)
        # A build for CUDA returns this device even without a GPU.
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        return chosen

    return change


@pytest.fixture
def chosen(see, monkeypatch):
    """Run the part of a program that chooses its device, and return the index, or "cpu"."""

    def choose(name: str, local_rank: int, count: int) -> int | str:
        place = {"RANK": 2 + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
        for variable, value in place.items():  # the second of two nodes
            monkeypatch.setenv(variable, str(value))
        indices = see(count)
        names = {"torch": torch, "os": os, "gpus": gpus, "rank": local_rank, "world_size": 2, **vars(device)}
        tree = PROGRAMS.get(name) or ast.parse((runs.ROOT / name).read_text())
        if name == MINIMAL:
            first = next(number for number, each in enumerate(tree.body) if ast.unparse(each).startswith("device ="))
            body, call = tree.body[first : first + 2], "device"
        else:
            body = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in NAMES]
            calls = [ast.unparse(each) for each in ast.walk(tree) if isinstance(each, ast.Call)]
            call = next((each for each in calls if each.startswith(body[0].name)), f"{body[0].name}()")
        exec(compile(ast.Module(body, []), name, "exec"), names)
        used = eval(call, names)
        return used.type if used.type == "cpu" else indices[-1] if indices else used.index or 0

    return choose


def test_the_programs_that_choose_a_device_are_found():
    assert len(PROGRAMS) >= 40
    assert {"slurm-multinode/multigpu_torchrun.py", "docs/your_script/many_gpus.py"} <= PROGRAMS.keys()
    assert {Path(name).name for name in ONE_PROCESS} == {
        "single_gpu.py", "exercise1_fast_single_gpu.py", "data_parallel.py", "exercise1_multigpu.py",
    }  # fmt: skip


@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("name", [*PROGRAMS, MINIMAL])
def test_each_process_uses_its_gpu_among_those_that_it_sees(name, visible, chosen):
    count, expected = VISIBLE[visible]
    if name in ONE_PROCESS:
        assert chosen(name, 0, count) == expected[0]
    elif name in SPAWN and count == 1:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            chosen(name, 1, count)
    else:
        assert [chosen(name, local_rank, count) for local_rank in range(2)] == expected


@pytest.mark.parametrize("file", sorted(runs.ROOT.glob("**/03_pytorch_lightning/*.py")), ids=lambda file: file.stem)
def test_lightning_uses_the_cpu_only_without_a_gpu(file, see):
    """With "auto", Lightning uses the GPUs, and fails if a process sees fewer GPUs than there are processes."""
    body = [each for each in ast.parse(file.read_text()).body if getattr(each, "name", "") == "choose_accelerator"]
    names = {"torch": torch}
    exec(compile(ast.Module(body, []), file, "exec"), names)
    for count, expected in ((2, "auto"), (1, "auto"), (0, "cpu")):
        see(count)
        assert names["choose_accelerator"]() == expected


@pytest.mark.parametrize("visible", VISIBLE)
def test_deepspeed_gets_the_index_of_the_gpu_as_its_local_rank(visible, see, monkeypatch):
    """DeepSpeed uses LOCAL_RANK as the index, and requires that Open MPI has set the same number."""
    count, expected = VISIBLE[visible]
    see(count)
    monkeypatch.setattr(deepspeed.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(deepspeed, "take_own_ninja", lambda: None)
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DS_ACCELERATOR", "")
    deepspeed.require_deepspeed()
    assert os.environ["DS_ACCELERATOR"] == ("" if count else "cpu")
    assert {os.environ[name] for name in names} == {str(expected[1]) if count else "1"}


@pytest.mark.parametrize(
    ("processes", "count", "line"),
    [
        (2, 0, ""),
        (2, 2, ""),
        (2, 1, "2 processes do not fit on 1 GPU, so the GPU is hidden and these processes run on the CPU"),
        (4, 2, "4 processes do not fit on 2 GPUs, so the GPUs are hidden and these processes run on the CPU"),
    ],
)
def test_a_tool_says_why_it_hides_the_gpus(processes, count, line):
    assert why_hidden(processes, count) == line


SHOW = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"


@pytest.fixture
def one_gpu(monkeypatch):
    """Let the tools find one GPU."""
    for module in (tour, strategies, bench):
        monkeypatch.setattr(module, "gpus", lambda: 1)
    monkeypatch.setattr(check, "devices", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_tour_hides_a_gpu_from_two_processes(one_gpu, tmp_path):
    entry = tour.Entry("09", "show", lambda processes: [sys.executable, "-c", SHOW])
    for processes, seen in ((1, "all\n"), (2, "\n")):
        tour._run(entry, processes, 128, 1, runs.ROOT, tmp_path, lambda line: None)
        assert (tmp_path / f"09-show-{processes}" / "output.txt").read_text() == seen


def test_the_benchmark_of_collectives_hides_a_gpu_from_two_processes(one_gpu, monkeypatch, capfd):
    monkeypatch.setattr(bench, "torchrun", lambda processes: [sys.executable, "-c", SHOW])
    assert bench.run_collectives("") == 0
    assert capfd.readouterr().out == f"{why_hidden(2, 1)}\n\n"


def test_the_check_hides_a_gpu_from_two_processes(one_gpu, capfd):
    assert [check.hides_gpus(processes, device) for processes, device in ((1, "auto"), (1, "cpu"))] == [False, True]
    assert capfd.readouterr().err == ""
    assert check.hides_gpus(2, "auto")
    assert capfd.readouterr().err == f"{why_hidden(2, 1)}\n"


@pytest.mark.parametrize(
    ("options", "variables", "hidden"),
    [
        (["--epochs", "2"], {}, False),
        ([], {"NPROC": 2}, True),
        ([], {"NPROC": 1}, False),
        ([], {"NPROC": "many"}, False),  # the check of the options reports it
        (["--nproc", "2"], {}, True),
        (["--devices=2", "--epochs=1"], {}, True),
    ],
)
def test_a_runner_hides_a_gpu_from_two_processes(options, variables, hidden, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("from workshop.run import machine\nmachine.gpus_unopened = lambda: 1\n")
    program = tmp_path / "run.sh"
    program.write_text(
        f'set -euo pipefail\nsource "{runs.ROOT}/workshop/runner.sh"\necho "${{CUDA_VISIBLE_DEVICES-all}}"\n'
    )
    path = os.pathsep.join([str(tmp_path), str(runs.ROOT)])
    environment = runs.environment(PYTHONPATH=path, CUDA_VISIBLE_DEVICES=None, **variables)
    done = subprocess.run(["bash", program, *options], env=environment, capture_output=True, text=True)
    seen, said = ("\n", f"{why_hidden(2, 1)}\n") if hidden else ("all\n", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, seen, said)
