"""How programs are launched, watched and ended, and the bench for any program."""

import dataclasses
import textwrap
from pathlib import Path

import pytest
import torch

from check.made import Made
from check.test_run import BEGUN, process, run
from workshop.check import launching
from workshop.check.evidence.events import DeviceChosen, Ended, Joining
from workshop.check.foreign import OwnersBench
from workshop.check.forked import Program, _in_the_copy
from workshop.check.probes import ALWAYS, Probe
from workshop.check.probes.checkpoints import Checkpoints
from workshop.check.scenarios import COMPARED, METRICS, SPLIT, WHOLE, Unavailable
from workshop.check.start import read_start
from workshop.check.subject import Subject
from workshop.run.stillness import Patience

JOINING = Joining(
    backend="gloo", init_method="", world_size=2, address=None, port=None, given_address=None, given_port=None
)


class Broken(Probe):
    """A probe that raises errors."""

    def install(self):
        self.recorder.after_step.append(lambda optimizer: 1 / 0)
        self.recorder.after_module.append(lambda module, output: {}["nothing"])


STEP = """
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
"""


def test_an_error_in_a_probe_does_not_reach_the_program(place):
    made = Made(place("broken"), STEP.replace("STEPS", "2"), probes=(Broken,))
    assert made.run.status == 0
    assert len(made.run.processes[0].steps) == 2
    (record,) = made.warnings.buffer
    assert "ZeroDivisionError" in record.getMessage()
    assert "KeyError" in record.getMessage()


# ---------------------------------------------------------------- launching


def test_a_failing_process_and_a_killed_process_are_told_apart(place):
    join = 'import torch\n\n    torch.distributed.init_process_group("gloo")\n'
    joined = STEP.replace("STEPS", "4").replace("import torch\n", join)
    failed = Made(place("fails"), joined, "torchrun", 2, fails=True)
    _, raised = failed.run.first_exception()
    assert raised.type == "ZeroDivisionError"
    assert raised.where == failed.line("optimizer.step()")
    assert failed.run.status == 1
    saving = STEP.replace("STEPS", "4") + '        torch.save(model.state_dict(), "run.pt")\n'
    died = Made(place("dies"), saving, dies=True)
    assert died.run.status == 128 + 9
    assert [len(process.steps) for process in died.run.processes] == [1]
    assert not died.run.processes[0].first(Ended)


def test_two_simulated_nodes_have_two_devices_each(place):
    text = """
        import os
        import torch

        assert torch.accelerator.is_available() and torch.cuda.device_count() == 2
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        print(os.environ["GROUP_RANK"], os.environ["RANK"], torch.accelerator.current_device_index())
    """
    made = Made(place("nodes"), text, "torchrun", 4, nodes=2, devices=True).well()
    assert [event.index for event in made.run.all(DeviceChosen)] == [0, 1, 0, 1]
    assert [process.stdout.split() for process in made.run.processes] == [
        ["0", "0", "0"],
        ["0", "1", "1"],
        ["1", "2", "0"],
        ["1", "3", "1"],
    ]


# Its first process asks whether there is a GPU, and with OPENS it also opens it. (These functions imitate a machine with a GPU.)
SPAWNS = """
    import os
    import sys
    import torch
    import torch.multiprocessing as mp

    opened = False

    def count():
        global opened
        opened = True  # cuInit()
        return 1

    torch._C._cuda_getDeviceCount = count
    torch.cuda._is_in_bad_fork = lambda: opened and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    torch.cuda.device_count = lambda: 1  # NVML counts without opening the GPU

    def worker(rank):
        assert not torch.cuda._is_in_bad_fork(), "Cannot re-initialize CUDA in forked subprocess"
        print("GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES", "visible"))

    if __name__ == "__main__":
        torch.cuda.is_available()
        OPENS
        mp.spawn(worker, nprocs=2)
"""


@pytest.mark.parametrize(("opens", "seen"), [("", "GPUs: visible"), ("torch._C._cuda_getDeviceCount()", "GPUs: ")])
def test_a_program_that_asks_for_a_gpu_before_it_spawns_is_checked(opens, seen, tmp_path, monkeypatch):
    """Forked processes cannot use a GPU that their parent has opened; then the check runs the program on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SPAWNS.replace("OPENS", opens)))
    (tmp_path / "place").mkdir()
    bench = OwnersBench(
        Subject(script, "", (), ()),
        read_start(["python", script.name]),
        on_cpu=False,
        place=tmp_path / "place",
        original=tmp_path,
    )
    run = bench.make(WHOLE, {})
    assert run.status == 0, "\n".join(process.stderr for process in run.processes)
    assert [process.stdout.strip() for process in run.processes][1:] == [seen.strip()] * 2
    assert bench.on_cpu is bool(opens)


def test_a_run_that_hangs_is_ended_and_its_stacks_are_kept(place):
    text = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        time.sleep(1000)  # here
    """
    made = Made(place("waits"), text, patience=Patience(idle=0.5, busy=5, total=20))
    assert (made.run.status, made.run.hung) == (None, "idle")
    assert any("line 6" in process.stack for process in made.run.processes)
    assert len(made.run.processes) == 2


@pytest.mark.parametrize("status", [0, 3])
def test_programs_run_at_the_same_time_and_end_if_the_first_one_fails(status, place):
    """The first program waits for a file of the second one. If the first one fails, the second one would wait forever."""
    folders = [place("first"), place("second")]
    texts = [
        f"""
        import os, sys, time
        while not os.path.exists("{folders[1]}/run/started"):
            time.sleep(0.05)
        sys.exit({status})
        """,
        f"""
        import time
        open("started", "w").close()
        while {status}:
            time.sleep(0.05)
        """,
    ]
    programs = []
    for folder, text in zip(folders, texts, strict=True):
        (folder / "program.py").write_text(textwrap.dedent(text))
        programs.append(Program(script=folder / "program.py", launch="single", nproc=1, scratch=folder / "run"))
    launching.prepare((), on_cpu=True)
    run, (other,) = launching.run_beside(*programs)
    assert run.status == status
    assert other is None if status else other.status == 0
    assert all([path.name for path in folder.iterdir() if path.name.startswith("evidence")] == [] for folder in folders)


def test_a_run_that_prints_without_end_is_ended(place, monkeypatch):
    monkeypatch.setattr(launching, "OUTPUT_LIMIT", 1000)
    made = Made(place("prints"), "while True:\n    print('again')\n")
    assert (made.run.status, made.run.flooded) == (None, True)


# ---------------------------------------------------------------- the bench of any program

RESUMING = """
    import os, sys
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = torch.load("run.pt")["step"] if os.path.exists("run.pt") else 0
    for step in range(first, 4):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if step % 2 or "--never" in sys.argv:
            torch.save({"step": step + 1}, "run.pt") if "--never" not in sys.argv else None
"""


def test_the_bench_runs_a_program_that_is_not_an_exercise(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(RESUMING))
    (tmp_path / "place").mkdir()
    start, subject = read_start(["python", script.name]), Subject(script, "", (), ())
    bench = OwnersBench(subject, start, on_cpu=True, place=tmp_path / "place", original=tmp_path)
    assert bench.nproc == 1
    assert bench.has("--never")
    assert not bench.has("--ever")
    assert bench.offers == (WHOLE, COMPARED, METRICS, SPLIT)
    assert set(bench.probes) == set(ALWAYS)
    whole = bench.make(WHOLE, {})
    assert [len(process.steps) for process in whole.trained] == [4]
    split = bench.make(SPLIT, {WHOLE: whole})
    assert [len(run.trained[0].steps) for run in (split.first, split.second)] == [2, 2]
    assert split.first.status != 0 == split.second.status
    bench.start = read_start(["python", script.name, "--never"])
    never = bench.make(WHOLE, {})
    with pytest.raises(Unavailable, match="it saves none before its last step"):
        bench.make(SPLIT, {WHOLE: never})
    assert Path(bench.place).is_dir()


SHARDED = """
    import os
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model.module.state_dict(), "step": 0}
    if os.path.exists("saved/.metadata"):
        dcp.load(state, checkpoint_id="saved")
    for step in range(state["step"], 4):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if step == 1:
            state = {"model": model.module.state_dict(), "step": step + 1}
            saving = dcp.async_save(state, checkpoint_id="saved")
            saving.result()
    dist.destroy_process_group()
"""


def test_a_program_is_killed_after_a_distributed_checkpoint(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SHARDED))
    (tmp_path / "place").mkdir()
    start = read_start(["torchrun", "--nproc-per-node=2", script.name])
    bench = OwnersBench(Subject(script, "", (), ()), start, on_cpu=True, place=tmp_path / "place", original=tmp_path)
    assert Checkpoints in bench.probes
    whole = bench.make(WHOLE, {})
    assert [len(process.steps) for process in whole.trained] == [4, 4]
    split = bench.make(SPLIT, {WHOLE: whole})
    assert [len(process.steps) for process in split.second.trained] == [2, 2]
    assert split.first.status != 0 == split.second.status


def test_what_pythonpath_names_in_the_folder_of_the_program_is_imported_from_the_copy(tmp_path):
    original, copy = tmp_path / "mine", tmp_path / "copy"
    for folder in (original / "package", original / "env" / "site-packages", copy / "package"):
        folder.mkdir(parents=True)
    program = Program(script=copy / "train.py", launch="single", nproc=1, scratch=copy, probes=(), original=original)
    assert _in_the_copy(str(original), program) == str(copy)
    assert _in_the_copy(str(original / "package"), program) == str(copy / "package")
    for same in ("", "/usr/lib/python3", str(original / "env"), str(original / "env" / "site-packages")):
        assert _in_the_copy(same, program) == same


@pytest.mark.parametrize(("events", "repeated"), [([JOINING], True), ([JOINING, BEGUN], False)])
def test_only_a_run_that_hangs_before_its_first_step_is_repeated(events, repeated):
    """A second run in the same folder would resume. A step may have no backward pass, as with evolution strategies."""
    hung = dataclasses.replace(run(process(1, *events)), hung="idle")
    assert launching._hangs_while_forming(hung) is repeated
