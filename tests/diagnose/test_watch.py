"""``workshop diagnose -- COMMAND`` changes nothing of a program: not its status, its signals, its output or its folder."""

import os
import signal
import subprocess
import sys
import time

import pytest

from diagnose.cases import CASES, run
from workshop.run.environment import environment, torchrun

COMMAND = [sys.executable, "-P", "-m", "workshop", "diagnose"]


def diagnose(*words: object, **options) -> subprocess.CompletedProcess:
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(
        command, env=environment(OMP_NUM_THREADS=1), capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_and_the_output_are_those_of_the_program(tmp_path, status):
    result = diagnose("--", sys.executable, "-c", f"print('epoch 1'); raise SystemExit({status})", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (status, "epoch 1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_ends_the_program_ends_the_command():
    result = diagnose("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert result.returncode == -signal.SIGKILL


def test_signals_reach_the_program():
    program = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
    program += "print('ready', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen(
        [*COMMAND, "--", sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 7


def test_a_healthy_run_is_not_reported(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(8):\n"
        "    dist.all_reduce(torch.ones(1)); time.sleep(0.5)\n"
        "dist.destroy_process_group()\n"
    )
    result = diagnose("--patience=2", "--", *torchrun(2), program, cwd=tmp_path)
    assert result.returncode == 0
    assert "workshop diagnose" not in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("name", ["fork_lock", "error"])
def test_two_programs_of_the_lab(tmp_path, name):
    case = next(case for case in CASES if case.name == name)
    named = run(case, tmp_path)
    assert named.right, named.first
    assert named.line == named.cause_line


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_whole_lab(tmp_path, case):
    named = run(case, tmp_path)
    assert named.right, named.first


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name one of: a job, a folder, --pid PID, or the command of the program after --"),
        (["--pid", "4194303"], "there is no process 4194303: it has ended, or it runs on a different node"),
        (["--", "no-such-program"], "no-such-program: No such file or directory"),
        (["."], ". contains no log, no file of the flight recorder and no report"),
    ],
    ids=["nothing", "no process", "no program", "empty folder"],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, words, sentence):
    result = diagnose(*words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.strip().splitlines() == [f"workshop: {sentence}"] or sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_process_that_was_started_without_the_command_is_diagnosed_too(tmp_path):
    case = next(case for case in CASES if case.name == "server")
    process = subprocess.Popen(case.command(tmp_path), env=environment(OMP_NUM_THREADS=1), cwd=tmp_path)
    try:
        for _ in range(60):
            time.sleep(1)
            result = diagnose("--pid", process.pid, "--output", tmp_path / "report")
            # At first rank 1 may still be on its way to the call in which it waits: then it is "slow, but it moves", status 0.
            if result.returncode == 1 and "never called barrier" in result.stderr:
                break
        assert result.returncode == 1
        assert (
            "Rank 1 never called barrier (server.py:13): it is waiting for the network (server.py:12)." in result.stderr
        )
        assert "not known: the numbers of the collectives" in result.stderr
        assert (tmp_path / "report" / "scene.json").exists()
    finally:
        process.terminate()
        process.wait(30)
