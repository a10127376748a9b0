"""However a program ends, the check gives a verdict, leaves no process, and protects files outside the folder of the run."""

import os
import sys
import time

import psutil
import pytest

import runs
from check.bank import ddp
from workshop.check import foreign
from workshop.check.command import check_command
from workshop.course.checking import check_file
from workshop.course.exercises import exercises
from workshop.run.stillness import Patience

TORCHRUN = ["torchrun", "--nproc-per-node=2", "program.py"]
ENDINGS = {
    "sys.exit(3)": ("import sys\nsys.exit(3)", "ended-early"),
    "an exception": ("raise ValueError('no')", "ended-early"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", "ended-early"),
    "a segmentation fault": ("import ctypes\nctypes.string_at(0)", "ended-early"),
    "an endless loop": ("while True: pass", "ended-early"),
    "an endless wait": ("import time\ntime.sleep(1000)", "ended-early"),
    "endless output": ("while True: print('x' * 1000)", "output-flood"),
    "an empty program": ("pass", "no-group"),
    "nested processes": (
        "import os, time\nfor _ in range(6): os.fork()\nif os.fork() == 0: os.setsid(); time.sleep(1000)\ntime.sleep(1000)",
        "ended-early",
    ),
    "a daemon left behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(1000)\n    os._exit(0)\nos.wait()",
        "no-group",
    ),
    "an unknown option": ("import argparse\nargparse.ArgumentParser().parse_args(['--nonsense'])", "ended-early"),
    "a write outside of the run": ("open('/var/tmp/workshop-check-test', 'w')", "outside-write"),
}


def kinds(verdict):
    return [finding.kind for finding in verdict.errors]


@pytest.mark.parametrize(("program", "kind"), ENDINGS.values(), ids=ENDINGS.keys())
def test_every_way_to_end_gives_a_verdict_and_leaves_no_process(program, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "UNKNOWN", Patience(idle=2, busy=4, total=250))
    script = tmp_path / "program.py"
    script.write_text(program)
    before = set(psutil.pids())
    start = time.monotonic()
    *_, verdict = check_command(TORCHRUN, folder=tmp_path)
    assert time.monotonic() - start < 300  # the processes would wait 1000 s
    assert kinds(verdict)[:1] == [kind], verdict.findings
    new = [process for process in psutil.process_iter() if process.pid not in before]
    assert str(script) not in runs.command_lines(new)
    assert psutil.Process().children(recursive=True) == []
    assert script.read_text() == program
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_folder_outside_of_the_run_cannot_be_removed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("three years")
    script = tmp_path / "program.py"
    # rmtree() changes to the folder and removes its files by relative names.
    script.write_text(f"import shutil\nshutil.rmtree({str(kept)!r})")
    *_, verdict = check_command(TORCHRUN, folder=tmp_path)
    assert kinds(verdict)[:1] == ["outside-write"], verdict.findings
    assert (kept / "thesis.txt").read_text() == "three years"


def test_each_rank_may_use_temporary_files_of_the_same_name(tmp_path):
    solution = runs.ROOT / ddp.TORCHRUN
    temporary = """
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kept.txt").write_text(str(os.getpid()))
"""
    place, text = "def main():\n", solution.read_text()
    assert text.count(place) == 1
    script = tmp_path / solution.name
    script.write_text(text.replace(place, place + temporary.lstrip("\n")))
    verdict, *_ = check_file(script, quick=True)
    assert verdict.errors == []


def test_a_hang_says_which_rank_waits_where_within_a_minute():
    hang = next(exercise for exercise in exercises() if "hang" in exercise.name)
    *_, verdict = check_file(hang.path, quick=True)
    finding = verdict.errors[0]
    assert finding.kind == "hang"
    lines = hang.path.read_text().splitlines()
    for call in ("dist.barrier()", "loss.backward()"):
        number = next(number for number, line in enumerate(lines, 1) if call in line)
        assert f"{hang.path.name}:{number}" in finding.seen
    assert "rank 0 waits in" in finding.seen
    assert "rank 1 waits in" in finding.seen
    assert verdict.seconds < 60  # two runs, the second with traced lines


def test_killing_the_check_leaves_no_process(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import time\ntime.sleep(1000)")
    running = runs.Running([sys.executable, "-P", "-m", "workshop", "check", "--", *TORCHRUN], tmp_path)
    deadline = time.monotonic() + 30
    while len(children := psutil.Process(running.process.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
