"""The command ``workshop check``: bad input, text, JSON, progress, programs that are not exercises, --watch, Ctrl-C."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

import runs
from check.bank import second
from workshop.course.exercises import exercises
from workshop.jupyter.checking import check

LANGUAGE_MODEL = runs.ROOT / second.PROGRAM
SPAWN = next(exercise for exercise in exercises() if exercise.launch == "spawn")


def workshop(*arguments, cwd=runs.ROOT, timeout=120, **env):
    return runs.run([sys.executable, "-P", "-m", "workshop", *arguments], cwd, timeout=timeout, **env)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "no such file"),
        ("folder.py/", None, "is a folder"),
        ("guide.ipynb", "{}", "is a notebook"),
        ("notes.txt", "x", "neither a Python program"),
        ("syntax.py", "def f(:", "line 1"),
        ("binary.py", "\0", "cannot"),
        ("other.py", "print()", "workshop check -- torchrun"),
    ],
)
def test_a_file_that_cannot_be_checked_is_refused_in_one_line(name, content, words, tmp_path):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    done = workshop("check", path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_the_check_writes_text_json_and_progress(tmp_path):
    progress = tmp_path / "progress.json"
    done = workshop("check", SPAWN.path, "--device", "cpu", WORKSHOP_PROGRESS=progress)
    assert done.returncode == 1, done.stderr
    words = (
        "✗",
        "seen",
        "why",
        "fix",
        "where",
        f"./workshop.sh hint {SPAWN.name} 1",
        "not checked until goal 1 passes",
    )
    for word in words:
        assert word in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    done = workshop("check", SPAWN.path, "--json", WORKSHOP_PROGRESS=progress)
    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"], report["exercise"]) == (1, False, SPAWN.name)
    assert report["findings"][0]["kind"] == "no-group"
    assert {goal["state"] for goal in report["goals"]} == {"open", "blocked"}
    assert json.loads(progress.read_text())


def test_a_program_that_is_not_an_exercise_gets_its_options(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(LANGUAGE_MODEL, folder)
    done = workshop("check", "--", "torchrun", "--nproc-per-node=2", LANGUAGE_MODEL.name, "--steps", 12, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no error was seen" in done.stdout
    assert "not checked" in done.stdout
    assert os.listdir(folder) == [LANGUAGE_MODEL.name]


def test_watching_checks_again_at_every_save(tmp_path):
    script = tmp_path / SPAWN.file
    shutil.copy(SPAWN.solution, script)
    running = runs.Running([sys.executable, "-P", "-m", "workshop", "check", script, "--watch"], tmp_path)
    try:
        running.wait_for("6 of 7 goals met", timeout=60)
        script.write_text(script.read_text().replace("ddp_model = DDP(model)", "ddp_model = model"))
        running.wait_for("the gradients", timeout=60)
        running.wait_for("before step 1", timeout=60)
    finally:
        running.process.send_signal(2)
        assert running.wait(20) == 130, running.text()


def test_a_process_that_aborts_once_costs_no_goal(tmp_path):
    server, answers = socket.create_server(("127.0.0.1", 0)), []

    def answer():
        with suppress(OSError):  # the test has ended
            while True:
                connection, _ = server.accept()
                answers.append(b"go on" if answers else b"abort")
                connection.sendall(answers[-1])
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    ask = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).recv(9)"
    script, line = tmp_path / SPAWN.file, "    model = "
    before, after = SPAWN.solution.read_text().split(line, 1)
    more = f"    import os, socket\n    if rank == 0 and {ask} == b'abort':\n        os.abort()\n"
    script.write_text(before + more + line + after)
    done = workshop("check", script)
    server.close()
    assert (done.returncode, "7 of 7 goals met" in done.stdout) == (0, True), done.stdout
    assert answers[0] == b"abort"
    assert len(answers) > 5  # one for each run


def test_ctrl_c_at_the_moment_of_a_fork_ends_the_check(tmp_path):
    program = (
        "import os, signal, sys; from workshop.cli import main\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        f"sys.argv = ['workshop', 'check', {str(SPAWN.solution)!r}]; main()"
    )
    done = runs.run([sys.executable, "-c", program], tmp_path, TMPDIR=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (130, "workshop: stopped"), done.stdout + done.stderr
    # PyTorch creates a folder with "torchinductor" in its name.
    assert [path.name for path in tmp_path.iterdir() if "torchinductor" not in path.name] == []


def test_check_shows_its_findings_in_a_notebook(capsys):
    check("02_pytorch_ddp/exercise1_multigpu.py", "--device", "cpu")
    assert "one process trains" in capsys.readouterr().out


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda blow: blow.name)
def test_a_check_that_is_stopped_leaves_neither_files_nor_processes(blow, tmp_path):
    program, own = tmp_path / "program", tmp_path / "temporary"
    program.mkdir()
    own.mkdir()
    (program / "train.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    command = [sys.executable, "-P", "-m", "workshop", "check", "--", "torchrun", "--nproc-per-node=2", "train.py"]
    # These tests may run under nohup, which ignores SIGHUP.
    before = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    check = subprocess.Popen(command, cwd=program, env={**os.environ, "TMPDIR": str(own)}, preexec_fn=before)
    deadline = time.monotonic() + 60
    while not list(own.glob("workshop-check-*/**/program/begun")) and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(check.pid).children(recursive=True)
    assert len(family) >= 2
    check.send_signal(blow)
    assert check.wait(30) == 128 + blow
    assert list(own.glob("workshop-check-*")) == []
    assert psutil.wait_procs(family, timeout=10)[1] == []
