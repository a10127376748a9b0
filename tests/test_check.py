"""``workshop check``: the bank of mistakes, the correct styles, and programs that end in every other way."""

import json
import os
import shutil
import sys
import time

import psutil
import pytest

import runs
from mistakes.bank import BANK
from mistakes.correct import CORRECT
from mistakes.held_out import HELD_OUT
from mistakes.lightning import LIGHTNING, LIGHTNING_CIFAR10, LIGHTNING_CIFAR10_CORRECT, LIGHTNING_CORRECT
from mistakes.second_program import SECOND
from mistakes.sharded import SHARDED, SHARDED_CORRECT
from mistakes.zero import ZERO, ZERO_CORRECT
from workshop.check import judge, real, rules
from workshop.check.exercises import EXERCISES
from workshop.check.findings import HINTS, WHY, Finding

TORCHRUN = runs.ROOT / "solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py"
LANGUAGE_MODEL = runs.ROOT / "tests/mistakes/language_model.py"
ALL = (*BANK, *HELD_OUT, *SECOND, *LIGHTNING, *LIGHTNING_CIFAR10, *SHARDED, *ZERO)
STYLES = (*CORRECT, *LIGHTNING_CORRECT, *LIGHTNING_CIFAR10_CORRECT, *SHARDED_CORRECT, *ZERO_CORRECT)
# In the daily tests every tenth; all of them in the long run.
SAMPLE = {mistake.name for mistake in ALL[::10]} | {style.name for style in STYLES[1::10]}


def cases(mistakes):
    return [
        pytest.param(mistake, id=mistake.name, marks=[] if mistake.name in SAMPLE else pytest.mark.full)
        for mistake in mistakes
    ]


def judged(mistake, folder, quick=True):
    """The verdict on a version of a program."""
    base = runs.ROOT / mistake.base
    files = next((names for names in map(program_files, EXERCISES) if base.name in names), [base.name])
    for name in files:
        shutil.copy(base.with_name(name), folder)
    (folder / base.name).write_text(mistake.source(base.read_text()))
    generic = {"launch": "torchrun", "arguments": ["--steps", "12"]} if base == LANGUAGE_MODEL else {}
    *_, verdict = judge.check_file(folder / files[0], quick=quick, **generic)
    return verdict


def program_files(exercise):
    return [exercise.path.name, *exercise.beside]


def seen(verdict):
    return "\n".join(map(str, verdict.findings)) or "nothing"


def workshop(*arguments, cwd=runs.ROOT, timeout=120, **env):
    return runs.run([sys.executable, "-P", "-m", "workshop", *arguments], cwd, timeout=timeout, **env)


# ---------------------------------------------------------------- the bank


@pytest.mark.parametrize("mistake", cases(ALL))
def test_a_mistake_is_named(mistake, tmp_path, record_property):
    start = time.monotonic()
    verdict = judged(mistake, tmp_path, quick=not mistake.real)
    record_property("seconds", round(time.monotonic() - start, 1))
    record_property("expected", " or ".join(mistake.kinds))
    record_property("named", verdict.errors[0].kind if verdict.errors else "nothing")
    assert verdict.errors, f"nothing was found; expected {mistake.kinds}"
    assert verdict.errors[0].kind in mistake.kinds, seen(verdict)


@pytest.mark.parametrize("style", cases(STYLES))
def test_a_correct_style_passes(style, tmp_path):
    assert judged(style, tmp_path).errors == []


def test_the_bank_is_as_large_as_it_says():
    names = [mistake.name for mistake in (*ALL, *STYLES)]
    assert len(names) == len(set(names))
    assert len(BANK) + len(HELD_OUT) >= 80
    assert len(CORRECT) >= 25
    assert len(LIGHTNING) >= 20
    assert len(LIGHTNING_CORRECT) >= 8
    assert len(SHARDED) >= 25
    assert len(SHARDED_CORRECT) >= 8
    assert len(ZERO) >= 20
    assert len(ZERO_CORRECT) >= 8
    for mistake in ALL:
        assert set(mistake.kinds) <= set(WHY) - HINTS


def test_the_second_program_is_right(tmp_path):
    script = tmp_path / "language_model.py"
    shutil.copy(LANGUAGE_MODEL, script)
    *_, verdict = judge.check_file(script, launch="torchrun", arguments=["--steps", "12"])
    assert verdict.findings == []
    assert verdict.complete


@pytest.mark.parametrize("nproc", [1, 3, pytest.param(8, marks=pytest.mark.full)])
def test_with_other_numbers_of_processes(nproc):
    """Also where they do not divide the samples, and with several batches a step."""
    for exercise in (EXERCISES[1], EXERCISES[3]):
        *_, verdict = judge.check_file(exercise.solution, nproc=nproc, quick=True)
        assert verdict.errors == [], seen(verdict)
        assert set(verdict.states().values()) == {"met"}


def version(folder, solution, *edits):
    """A copy of a solution with edits, as in the bank."""
    text = solution.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / solution.name
    script.write_text(text)
    return script


def test_random_numbers_that_are_the_same_or_not_restored_are_a_hint(tmp_path):
    dropout = ("F.cross_entropy(model(images), labels)", "F.cross_entropy(F.dropout(model(images), 0.1), labels)")
    seed = ("torch.manual_seed(SEED + 1000 * epoch + rank)", "torch.manual_seed(SEED + 1000 * epoch)")
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, dropout), quick=True)
    assert verdict.findings == [], seen(verdict)
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, dropout, seed), quick=True)
    assert [finding.kind for finding in verdict.findings] == ["same-random"]
    assert verdict.errors == []
    first_epoch_only = (seed[0], "if epoch == 0:\n            " + seed[0])
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, dropout, first_epoch_only), quick=True)
    assert [finding.kind for finding in verdict.findings] == ["random-lost"]


def test_what_a_program_calls_while_it_goes_back_is_its_own_affair(tmp_path):
    """A collective without a tensor, called by a hook: the recorder looks at tensors there."""
    hook = (
        "        loss.backward()\n",
        "        loss.register_hook(lambda gradient: dist.barrier())\n        loss.backward()\n",
    )
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, hook), quick=True)
    assert verdict.errors == [], seen(verdict)


def test_a_tensor_that_the_garbage_collector_has_emptied_is_nobodys_affair(tmp_path):
    """While something still holds it, it is in the list of all objects, and has no autograd graph that one could ask for."""
    emptied = (
        "    torch.manual_seed(SEED)  # the same first weights in every run\n",
        "    torch.manual_seed(SEED)\n    emptied = torch.ones(1)\n    import ctypes\n"
        "    # PyTypeObject.tp_clear, which Python's collector calls\n"
        "    clear = ctypes.c_void_p.from_address(id(torch.Tensor) + 192).value\n"
        "    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(clear)(emptied)\n",
    )
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, emptied), quick=True)
    assert verdict.findings == [], seen(verdict)


@pytest.mark.full
def test_an_unseeded_program_is_not_blamed_for_being_another_at_every_start(tmp_path):
    unseeded = ("torch.manual_seed(SEED)  # the same first weights in every run", "torch.seed()")
    order = ("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + 100 * int(agreed(device)))")
    agreed = (
        "def train_one_epoch(",
        "def agreed(device):\n    number = torch.randint(1000, (1,), device=device)\n"
        "    dist.broadcast(number, 0)\n    return number\n\n\ndef train_one_epoch(",
    )
    seed = ("torch.manual_seed(SEED + 1000 * epoch + rank)", "pass")
    script = version(tmp_path, TORCHRUN, unseeded, order, agreed, seed).rename(tmp_path / "mine.py")
    *_, verdict = judge.check_file(script, launch="torchrun", arguments=["--epochs", "2", "--snapshot", "run.pt"])
    assert verdict.errors == [], seen(verdict)
    forgets = script.read_text().replace('    optimizer.load_state_dict(snapshot["optimizer"])\n', "")
    script.write_text(forgets)
    *_, verdict = judge.check_file(script, launch="torchrun", arguments=["--epochs", "2", "--snapshot", "run.pt"])
    assert [finding.kind for finding in verdict.errors] == ["optimizer-lost"], seen(verdict)


def test_figures_that_are_not_there_or_cannot_be_compared_are_not_passed_over(tmp_path):
    report = ("            log.write(epoch, losses, accuracy, samples_per_second)\n", "            pass\n")
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, report), quick=True)
    assert [finding.kind for finding in verdict.errors] == ["metric-wrong"]
    assert "no accuracy is given to log.write()" in verdict.errors[0].seen
    # A model that takes the images as rows: the check cannot ask it about the test set.
    flat = [
        ("model = SmallCNN()", "model = Flat()"),
        (
            "SEED = 42\n",
            "SEED = 42\n\n\nclass Flat(SmallCNN):\n    def forward(self, rows):\n"
            "        return super().forward(rows.view(len(rows), 1, 28, 28)) if rows.dim() == 2 else rows.fail()\n",
        ),
        ("F.cross_entropy(model(images), labels)", "F.cross_entropy(model(images.flatten(1)), labels)"),
        ("model(images.to(device))", "model(images.to(device).flatten(1))"),
    ]
    *_, verdict = judge.check_file(version(tmp_path, TORCHRUN, *flat), quick=True)
    assert verdict.errors == [], seen(verdict)
    assert len(verdict.unchecked) == 1
    assert verdict.unchecked[0].startswith("the reported figures (AttributeError: ")


# ---------------------------------------------------------------- programs that end in other ways

ENDINGS = {
    "sys.exit(3)": ("import sys\nsys.exit(3)", "crash"),
    "an exception": ("raise ValueError('no')", "crash"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", "crash"),
    "a segmentation fault": ("import ctypes\nctypes.string_at(0)", "crash"),
    "an endless loop": ("while True: pass", "endless"),
    "a wait for ever": ("import time\ntime.sleep(1000)", "hang"),
    "output by the megabyte": ("while True: print('x' * 1000)", "output-flood"),
    "nothing": ("pass", "no-group"),
    "processes of processes": (
        "import os, time\nfor _ in range(6): os.fork()\nif os.fork() == 0: os.setsid(); time.sleep(1000)\ntime.sleep(1000)",
        "hang",
    ),
    "a daemon left behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(1000)\n    os._exit(0)\nos.wait()",
        "no-group",
    ),
    "a word that is no option": ("import argparse\nargparse.ArgumentParser().parse_args(['--nonsense'])", "crash"),
    "writing where it must not": ("open('/var/tmp/workshop-check-test', 'w')", "outside-write"),
}


@pytest.mark.parametrize(("program", "kind"), ENDINGS.values(), ids=ENDINGS.keys())
def test_every_ending_is_a_verdict_and_leaves_no_process(program, kind, tmp_path, monkeypatch):
    from workshop.check import launching

    monkeypatch.setattr(launching, "Patience", lambda **_: _Patience())
    script = tmp_path / "program.py"
    script.write_text(program)
    before = set(psutil.pids())
    start = time.monotonic()
    *_, verdict = judge.check_file(script, launch="torchrun")
    assert time.monotonic() - start < 40
    assert [finding.kind for finding in verdict.errors][:1] == [kind], seen(verdict)
    new = [process for process in psutil.process_iter() if process.pid not in before]
    assert str(script) not in runs.command_lines(new)
    assert psutil.Process().children(recursive=True) == []
    assert script.read_text() == program
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_folder_that_is_not_the_runs_own_cannot_be_removed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("three years")
    script = tmp_path / "program.py"
    # rmtree() goes into the folder, and names what it removes there.
    script.write_text(f"import shutil\nshutil.rmtree({str(kept)!r})")
    *_, verdict = judge.check_file(script, launch="torchrun")
    assert [finding.kind for finding in verdict.errors][:1] == ["outside-write"], seen(verdict)
    assert (kept / "thesis.txt").read_text() == "three years"


def test_temporary_files_of_the_same_name_are_each_ranks_own(tmp_path):
    script = tmp_path / "exercise2_multigpu_torchrun.py"
    temporary = """
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kept.txt").write_text(str(os.getpid()))
"""
    place = "def main():\n"
    text = TORCHRUN.read_text()
    assert text.count(place) == 1
    script.write_text(text.replace(place, place + temporary.lstrip("\n")))
    verdict, *_ = judge.check_file(script, quick=True)
    assert verdict.errors == [], seen(verdict)


class _Patience:
    idle, busy, total = 2.0, 4.0, 30.0


def test_a_hang_says_which_rank_waits_where_within_ten_seconds():
    hang = next(exercise for exercise in EXERCISES if "hang" in exercise.name)
    *_, verdict = judge.check_file(hang.path, quick=True)
    finding = verdict.errors[0]
    assert finding.kind == "hang"
    lines = hang.path.read_text().splitlines()
    for call in ("dist.barrier()", "loss.backward()"):
        number = next(number for number, line in enumerate(lines, 1) if call in line)
        assert f"{hang.path.name}:{number}" in finding.seen
    assert "rank 0 waits in" in finding.seen
    assert "rank 1 waits in" in finding.seen
    assert verdict.seconds < 10


def test_killing_the_check_leaves_no_process(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import time\ntime.sleep(1000)")
    running = runs.Running([sys.executable, "-P", "-m", "workshop", "check", script, "--launch", "torchrun"], tmp_path)
    deadline = time.monotonic() + 30
    while len(children := psutil.Process(running.process.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "no such file"),
        ("folder.py/", None, "is a folder"),
        ("guide.ipynb", "{}", "is a notebook"),
        ("notes.txt", "x", "neither a Python program"),
        ("syntax.py", "def f(:", "line 1"),
        ("binary.py", "\0", "cannot"),
        ("other.py", "print()", "--launch torchrun"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_status_2(name, content, words, tmp_path):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    done = workshop("check", path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_the_words_the_json_and_the_progress(tmp_path):
    progress = tmp_path / "progress.json"
    exercise = EXERCISES[1]
    done = workshop("check", exercise.path, "--device", "cpu", WORKSHOP_PROGRESS=progress)
    assert done.returncode == 1, done.stderr
    for words in (
        "✗",
        "seen",
        "why",
        "where",
        f"./workshop.sh hint {exercise.name} 1",
        "blocked by 1",
        "not checked",
    ):
        assert words in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    done = workshop("check", exercise.path, "--json", WORKSHOP_PROGRESS=progress)
    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"], report["exercise"]) == (1, False, exercise.name)
    assert report["findings"][0]["kind"] == "no-group"
    assert {goal["state"] for goal in report["goals"]} == {"open", "blocked"}
    assert json.loads(progress.read_text())


def test_a_generic_program_with_its_options(tmp_path):
    done = workshop("check", LANGUAGE_MODEL, "--launch", "torchrun", "--", "--steps", 12, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing wrong was seen" in done.stdout
    assert "not checked" in done.stdout
    assert os.listdir(tmp_path) == []


def test_watching_checks_again_at_every_save(tmp_path):
    script = tmp_path / EXERCISES[1].path.name
    shutil.copy(EXERCISES[1].solution, script)
    running = runs.Running([sys.executable, "-P", "-m", "workshop", "check", script, "--watch"], tmp_path)
    try:
        running.wait_for("5 of 5 goals met", timeout=60)
        script.write_text(script.read_text().replace("ddp_model = DDP(model)", "ddp_model = model"))
        running.wait_for("the gradients", timeout=60)
        running.wait_for("before step 1", timeout=60)
    finally:
        running.process.send_signal(2)
        assert running.wait(20) == 130, running.text()


def test_ctrl_c_at_the_moment_of_a_fork_ends_the_check(tmp_path):
    program = (
        "import os, signal, sys; from workshop.cli import main\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        f"sys.argv = ['workshop', 'check', {str(EXERCISES[1].solution)!r}]; main()"
    )
    done = runs.run([sys.executable, "-c", program], tmp_path, TMPDIR=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (130, "workshop: stopped"), done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir() if "torchinductor" not in path.name] == []  # that is PyTorch's


def test_in_a_notebook(capsys):
    from workshop.check import check

    check("02_pytorch_ddp/exercise1_multigpu.py", "--device", "cpu")
    assert "one process trains" in capsys.readouterr().out


# ---------------------------------------------------------------- what needs a real launcher


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param(('if __name__ == "__main__":\n    main()', "main()"), "crash", id="no main guard"),
        pytest.param(
            ("mp.spawn(worker, args", "mp.spawn(lambda *given: worker(*given), args"),
            "crash",
            id="a lambda",
            marks=pytest.mark.full,
        ),
        pytest.param(("mp.spawn(worker, args", "mp.spawn(worker, args"), None, id="nothing", marks=pytest.mark.full),
    ],
)
def test_what_only_a_real_spawn_shows(change, kind, tmp_path):
    solution = runs.ROOT / "solutions/02_pytorch_ddp/exercise1_multigpu.py"
    script = tmp_path / solution.name
    assert change[0] in solution.read_text()
    script.write_text(solution.read_text().replace(*change))
    quick, complete = (
        [finding.kind for finding in verdict.errors] for verdict in judge.check_file(script)
    )  # the verdict grows: what it says is read at once
    assert quick == []
    assert complete[:1] == ([kind] if kind else [])


@pytest.mark.full
def test_kills_with_the_real_torchrun():
    *_, verdict = judge.check_file(TORCHRUN)
    assert verdict.errors == [], seen(verdict)
    assert verdict.complete


RUNNERS = {  # what the runner beside the finished script is, and what has to be found
    "no restarts": (
        lambda solution, exercise: solution.replace("max_restarts=3", "max_restarts=0"),
        "not-restarted",
        3,
    ),
    "as delivered": (lambda solution, exercise: exercise, "crash", 0),  # it starts the script by itself: no RANK is set
    "one process": (
        lambda solution, exercise: solution.replace('--nproc-per-node="$nproc"', "--nproc-per-node=1"),
        "no-group",
        1,
    ),
    "without exec": (lambda solution, exercise: solution.replace('exec "$PYTHON" -P', '"$PYTHON" -P'), None, None),
}


@pytest.mark.full
@pytest.mark.parametrize(("edit", "kind", "goal"), RUNNERS.values(), ids=RUNNERS.keys())
def test_runners(edit, kind, goal):
    place = (
        runs.ROOT / "runs" / f"test-{os.getpid()}"
    )  # in the repository: a runner finds the workshop from where it lies
    place.mkdir(parents=True)
    try:
        runner = place / "exercise2_run_multigpu_torchrun.sh"
        solution = TORCHRUN.with_name(runner.name).read_text().replace("/../../workshop/", "/../workshop/")
        exercise = (runs.ROOT / "02_pytorch_ddp" / runner.name).read_text()
        runner.write_text(edit(solution, exercise).replace("/../workshop/", "/../../workshop/"))
        assert runner.read_text() != TORCHRUN.with_name(runner.name).read_text()
        runner.chmod(0o755)
        shutil.copy(TORCHRUN, place)
        *_, verdict = judge.check_file(place / TORCHRUN.name)
        assert [finding.kind for finding in verdict.errors][:1] == ([kind] if kind else []), seen(verdict)
        assert verdict.first_open == goal
    finally:
        shutil.rmtree(place)


@pytest.mark.full
def test_speed_of_exercise_1(tmp_path):
    *_, verdict = judge.check_file(EXERCISES[0].solution)
    assert verdict.errors == []
    slow = runs.ROOT / "01_single_gpu" / "single_gpu.py"
    findings = judge.real_part(EXERCISES[0])(slow, EXERCISES[0], tmp_path, True)
    assert [finding.kind for finding in findings] == ["slower"]


@pytest.mark.parametrize(
    ("speeds", "settled"),
    [
        ([100.0], False),
        ([100.0, 95.0], True),
        ([100.0, 60.0], False),
        ([100.0, 60.0, 97.0], True),
        ([1, 2, 4, 8, 16], True),
    ],
)
def test_a_speed_counts_once_it_has_come_twice(speeds, settled):
    assert real._settled(speeds) == settled


# ---------------------------------------------------------------- rules by themselves


def test_rules_are_pure_functions_of_evidence():
    one = [(1.0, [0.5, -0.5]), (2.0, [1.0])]
    assert rules.difference(one, one) == 0
    assert rules.difference(one, [(2.0, [1.0, -1.0]), (4.0, [2.0])]) == pytest.approx(0.5)
    assert rules.difference(one, [None, (2.0, [1.0])]) == float("inf")
    assert rules.different_names(one, [(1.0, [0.5, -0.5]), (2.0, [1.1])], ["a", "b"]) == ["b"]


def test_a_finding_has_a_reason():
    assert Finding("leak", "x").why
    assert Finding("leak", "x").is_error
    assert not Finding("same-random", "x").is_error
    with pytest.raises(AssertionError):
        Finding("nonsense", "x")
