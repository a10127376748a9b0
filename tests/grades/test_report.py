"""``workshop report``: the check runs again on the files of a learner, and no program changes the points of another exercise."""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

import runs
from grades import hostile
from workshop.check.rules.rule import RULES
from workshop.course.exercises import exercises
from workshop.course.todo import version
from workshop.errors import UserError
from workshop.grades import report as module
from workshop.grades.formats import FORMATS
from workshop.grades.isolation import PASSED, Course, Outcome
from workshop.grades.points import every_task
from workshop.grades.submission import own_names, read_submission
from workshop.repository import ROOT
from workshop.run.processes import family

EXERCISES = {exercise.path.stem: exercise for exercise in exercises()}
BUG = "exercise4_find_the_bug_{}"
LEAK, HANG, KILLED, LATE, UNTOUCHED = (
    EXERCISES[BUG.format(name)] for name in ("leak", "hang", "no_learning", "accumulation", "restart")
)
SYNTAX, LINK = EXERCISES["exercise1_multigpu"], EXERCISES["exercise2_multigpu_torchrun"]
MARKER = f"of-the-report-{os.getpid()}"


def report(*arguments, cwd=ROOT, **changes):
    return runs.run([sys.executable, "-P", "-m", "workshop", "report", *arguments], cwd, timeout=900, **changes)


def in_xml(text: str):
    return ElementTree.fromstring(text.encode())


# ---------------------------------------------------------------- one run with programs that attack it


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """The report of a submission in which several programs try to change it: the folder, the process, and each format."""
    folder = tmp_path_factory.mktemp("submission")
    stage = folder / "02_pytorch_ddp"
    stage.mkdir()
    (stage / HANG.file).write_text(hostile.VANDAL.format(marker=MARKER))
    (stage / KILLED.file).write_text(hostile.KILLER)
    (stage / LATE.file).write_text(hostile.SLEEPER)
    (stage / SYNTAX.file).write_text(hostile.BROKEN)
    (stage / LINK.file).symlink_to(LINK.solution)
    shutil.copy(LEAK.solution, stage)
    shutil.copy(UNTOUCHED.path, stage)
    # What is not a program of an exercise has no effect.
    marked = f"from pathlib import Path\nPath({str(folder / 'imported')!r}).touch()\n"
    for place in (folder / "sitecustomize.py", stage / "sitecustomize.py", folder / "workshop" / "__init__.py"):
        place.parent.mkdir(exist_ok=True)
        place.write_text(marked)
    goals = {name: {str(number): True for number in exercise.titles} for name, exercise in EXERCISES.items()}
    entries = {
        f"02_pytorch_ddp/{name}.py": {"goals": met, "hints": {}, "first_checked": None, "last_checked": None}
        for name, met in goals.items()
    }
    (folder / ".progress.json").write_text(json.dumps(entries))
    (stage / "exercises.toml").write_text(
        'order = 2\n[[exercise]]\nfile = "exercise1_multigpu.py"\nlaunch = "single"\n'
    )
    points = folder / "points.toml"
    points.write_text(f'[[exercise]]\nname = "{LATE.name}"\ntime_limit = 12\n')
    points.write_text(
        points.read_text()
        + "".join(f'[[exercise]]\nname = "{each.name}"\n' for each in (SYNTAX, LINK, HANG, LEAK, KILLED, UNTOUCHED))
        + f'[[exercise]]\nname = "{EXERCISES["exercise3_global_metrics"].name}"\npoints = 2\n'
    )
    places = {name: folder / f"report.{name}" for name in FORMATS}
    options = [word for name, place in places.items() for word in ("--format", name, "--output", place)]
    temporary = tmp_path_factory.mktemp("t")
    done = report(folder, "--points", points, *options, TMPDIR=temporary)
    assert os.listdir(temporary) == []
    return folder, done, {name: place.read_text() for name, place in places.items()}


def of_json(attacked) -> dict:
    return {each["exercise"]: each for each in json.loads(attacked[2]["json"])["exercises"]}


def test_a_solved_exercise_gets_all_points_whatever_the_others_do(attacked):
    leak = of_json(attacked)[LEAK.name]
    assert (leak["state"], leak["points"], leak["possible"]) == ("judged", 2, 2), attacked[1].stdout
    assert [goal["state"] for goal in leak["goals"]] == ["met", "met"]
    assert json.loads(attacked[2]["json"])["points"] == 2


def test_a_program_that_prints_a_verdict_or_deletes_the_course_gets_no_points(attacked):
    vandal = of_json(attacked)[HANG.name]
    assert (vandal["state"], vandal["points"]) == ("judged", 0)
    assert "100 of 100" not in attacked[1].stdout
    assert "\x1b" not in attacked[1].stdout + "".join(attacked[2].values())
    assert (ROOT / HANG.name).is_file()


def test_a_program_that_ends_its_check_and_writes_the_result_is_not_judged(attacked):
    killed = of_json(attacked)[KILLED.name]
    assert (killed["state"], killed["points"]) == ("unjudged", 0)
    assert "signal 9" in killed["not_checked"][0]


def test_a_program_that_never_ends_gets_no_points_after_the_time_limit(attacked):
    late = of_json(attacked)[LATE.name]
    assert (late["state"], late["points"]) == ("judged", 0)
    found = [finding["kind"] for goal in late["goals"] for finding in goal["findings"]]
    assert found == ["hang"] or "12 seconds, its time limit" in late["not_checked"][0]


def test_no_process_of_a_program_is_left(attacked):
    assert MARKER not in runs.command_lines(psutil.process_iter())


def test_a_program_with_a_syntax_error_gets_no_points_and_the_reason(attacked):
    broken = of_json(attacked)[SYNTAX.name]
    assert (broken["state"], broken["points"], broken["possible"]) == ("judged", 0, 7)
    assert broken["not_checked"] == [f"{SYNTAX.name}, line 1: invalid syntax; correct this error first"]


def test_a_link_to_a_different_file_is_not_read(attacked):
    link = of_json(attacked)[LINK.name]
    assert (link["state"], link["not_checked"]) == ("unjudged", [f"{LINK.file} is a link; submit the file itself"])


def test_an_untouched_and_a_missing_exercise_are_called_so(attacked):
    found = of_json(attacked)
    assert found[UNTOUCHED.name]["state"] == "untouched"
    missing = found[EXERCISES["exercise3_global_metrics"].name]
    assert (missing["state"], missing["points"], missing["possible"]) == ("missing", 0, 6)
    assert f"{UNTOUCHED.name}: 0 of 2 points (not begun: the files are as delivered)" in attacked[1].stdout


def test_progress_exercises_toml_and_modules_of_the_learner_have_no_effect(attacked):
    folder, done, _ = attacked
    assert not (folder / "imported").exists()
    assert done.returncode == json.loads(attacked[2]["json"])["status"] == 2  # two exercises could not be judged
    assert done.stderr == ""


def test_all_formats_agree_on_the_points(attacked):
    content = attacked[2]
    total = json.loads(content["json"])
    scope, otter = json.loads(content["gradescope"]), json.loads(content["otter"])
    cases = [case for each in otter["test_file_results"] for case in each["test_case_results"]]
    assert sum(case["test_case"]["points"] for case in cases if case["passed"]) == total["points"]
    assert sum(sum(each["points"]) for each in otter["test_file_results"]) == total["possible"]
    assert sum(test["score"] for test in scope["tests"]) == scope["score"] == total["points"]
    assert sum(test["max_score"] for test in scope["tests"]) == total["possible"]
    passed = [
        case for case in in_xml(content["junit"]).iter("testcase") if [child.tag for child in case] == ["system-out"]
    ]
    assert len(passed) == sum(test["status"] == "passed" for test in scope["tests"]) == 2
    assert f"## {total['points']:g} of {total['possible']:g} points" in content["markdown"]


def test_a_finding_about_time_needs_a_second_check(monkeypatch):
    """A busy machine makes programs slow, so the check runs again; what it says then counts."""
    assert set(module.TIMED) <= RULES.keys()
    task = next(task for task in every_task() if task.exercise is LEAK)
    finding = {
        "goal": 0,
        **dict.fromkeys(("kind", "seen", "why", "fix", "read", "where", "detail"), "hang"),
        "level": "error",
    }
    met = {"states": {"0": "met", "1": "met"}, "findings": [], "not_checked": [], "judged": True}
    slow = met | {"states": {"0": "open", "1": "blocked"}, "findings": [finding]}
    monkeypatch.setattr(module.os, "getloadavg", lambda: (1000.0, 0, 0))
    said = iter([slow, met])
    monkeypatch.setattr(module, "check_alone", lambda *_: Outcome(next(said), "", False, 1.0))
    found = module._checked(None, task, module.Submitted({}))
    assert (found.points, found.not_checked, found.seconds) == (2, (), 2)
    monkeypatch.setattr(module, "check_alone", lambda *_: Outcome(slow, "", False, 1.0))
    found = module._checked(None, task, module.Submitted({}))
    assert found.points == 0
    assert "1000 processes shared" in found.not_checked[0]
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.0, 0, 0))
    assert module._checked(None, task, module.Submitted({})).not_checked == ()
    other = slow | {"findings": [finding | {"kind": "same-samples"}]}
    said = iter([other])  # on an idle machine, a finding that is not about time is final
    monkeypatch.setattr(module, "check_alone", lambda *_: Outcome(next(said), "", False, 1.0))
    assert module._checked(None, task, module.Submitted({})).points == 0


# ---------------------------------------------------------------- the files of the learner


def test_files_are_found_in_a_flat_folder_a_course_and_an_archive(tmp_path):
    flat, inner = tmp_path / "flat", tmp_path / "archive" / "Name_123_file" / "course" / "02_pytorch_ddp"
    flat.mkdir()
    inner.mkdir(parents=True)
    for place in (flat, inner):
        (place / LEAK.file).write_text("1")
    (tmp_path / "archive" / "solutions" / "02_pytorch_ddp").mkdir(parents=True)
    (tmp_path / "archive" / "solutions" / "02_pytorch_ddp" / HANG.file).write_text("2")
    for folder in (flat, tmp_path / "archive"):
        assert {name: each.files for name, each in read_submission([folder]).items()} == {LEAK.name: {LEAK.file: b"1"}}
    assert read_submission([flat / LEAK.file])[LEAK.name].files == {LEAK.file: b"1"}


def test_only_the_files_that_a_learner_writes_are_taken(tmp_path):
    for exercise in EXERCISES.values():
        for own, _ in exercise.pairs:
            (tmp_path / own.name).write_text("mine")
    found = read_submission([tmp_path])
    assert set(found) == {exercise.name for exercise in EXERCISES.values()}
    torchrun, spawn = LINK, SYNTAX
    assert set(found[torchrun.name].files) == {torchrun.file, torchrun.runner.name}  # its runner has a TODO
    assert set(found[spawn.name].files) == {spawn.file}
    assert "ds_config.json" in own_names(EXERCISES["exercise1_deepspeed"])


def test_of_two_files_the_nearest_to_the_top_counts(tmp_path):
    for name in ("a/02_pytorch_ddp", "02_pytorch_ddp", "b/02_pytorch_ddp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / LEAK.file).write_text(name)
    assert read_submission([tmp_path])[LEAK.name].files == {LEAK.file: b"02_pytorch_ddp"}
    (tmp_path / "02_pytorch_ddp" / LEAK.file).unlink()
    assert "there are several files" in read_submission([tmp_path])[LEAK.name].problem


@pytest.mark.parametrize("kind", ["pipe", "large", "folder"])
def test_a_file_that_is_no_program_is_refused_at_once(kind, tmp_path):
    path = tmp_path / LEAK.file
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b"#" * 1_000_001)
    else:
        path.mkdir()
        with pytest.raises(UserError, match="contains no file of an exercise"):
            read_submission([tmp_path])
        return
    words = {"pipe": "is not a regular file", "large": "is larger than 1,000,000 bytes"}
    assert words[kind] in read_submission([tmp_path])[LEAK.name].problem


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["empty"], "empty contains no file of an exercise"),
        (["other.py"], "other.py is not a file of an exercise"),
        ([LEAK.file, "--points", "nowhere.toml"], "nowhere.toml: No such file or directory"),
        ([LEAK.file, "--format", "pdf"], "Invalid value for '--format'"),
        ([LEAK.file, "--output", "a.json"], "give one --output for each --format"),
        ([LEAK.file, "--format", "json", "--format", "junit"], "give one --output for each --format"),
        ([LEAK.file, "--format", "json", "--output", "empty"], "empty is a folder"),
        ([LEAK.file, "--format", "json", "--output", "none/a.json"], "there is no folder none"),
        (
            [LEAK.file, *("--format", "json", "--output", "a") * 2],
            "two formats would be written to a; name a different file for each",
        ),
    ],
)
def test_a_mistake_of_the_user_is_one_line(arguments, words, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.py").touch()
    (tmp_path / LEAK.file).touch()
    done = report(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert (done.stderr.count("\n"), done.stdout) == (1, "")
    assert sorted(os.listdir(tmp_path)) == sorted(["empty", "other.py", LEAK.file])


def test_one_format_without_a_file_is_printed_alone(tmp_path):
    (tmp_path / UNTOUCHED.file).write_bytes(UNTOUCHED.path.read_bytes().replace(b"\n", b"\r\n"))
    done = report(tmp_path, "--format", "json")
    (exercise,) = json.loads(done.stdout)["exercises"]
    assert (done.returncode, exercise["state"]) == (1, "untouched")
    assert "not begun" in done.stderr


def test_ctrl_c_ends_the_check_and_removes_its_files(tmp_path):
    folder, temporary = tmp_path / "submission", tmp_path / "t"
    folder.mkdir()
    temporary.mkdir()
    (folder / LATE.file).write_text(hostile.SLEEPER)
    command = [sys.executable, "-P", "-m", "workshop", "report", folder]
    running = runs.Running(command, tmp_path, TMPDIR=temporary)
    try:
        end = time.monotonic() + 180
        ranks = []
        while not ranks:
            assert time.monotonic() < end, running.text()
            time.sleep(0.05)
            with suppress(psutil.NoSuchProcess):  # a short-lived process ended in between
                ranks = [each for each in family(running.process.pid)[1:] if each.ppid() != running.process.pid]
        running.process.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        running.end()
    assert not psutil.wait_procs(ranks, timeout=5)[1]
    assert os.listdir(temporary) == []


# ---------------------------------------------------------------- the copy of the course


def test_a_check_gets_the_course_and_no_secrets(tmp_path, monkeypatch):
    from workshop.grades.isolation import _add_files, _variables

    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere.py")
    course = Course()
    course.write(tmp_path / "c")
    assert not {name for name in course.files if name.startswith((".git", "runs", "data")) or name.endswith(".ipynb")}
    for exercise in EXERCISES.values():
        for path in {path for pair in exercise.pairs for path in pair if path.exists()}:
            assert (tmp_path / "c" / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    variables = _variables(tmp_path / "c", tmp_path / "t")
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "c")
    assert not set(variables) & {"GITHUB_TOKEN", "PYTHONSTARTUP"}
    assert "GITHUB_TOKEN" not in PASSED
    mesh = EXERCISES["exercise8_all"]
    _add_files(tmp_path / "c", mesh, {mesh.file: b"mine"})
    stage = tmp_path / "c" / mesh.stage
    assert (stage / mesh.file).read_bytes() == b"mine"
    for name in mesh.imports:  # so that a mistake in one exercise costs no points in another
        assert (stage / name).read_bytes() == mesh.solution.with_name(name).read_bytes()


@pytest.mark.full
def test_every_solution_gets_all_points_and_every_exercise_with_one_goal_less_does_not(tmp_path):
    whole, partly = tmp_path / "whole", tmp_path / "partly"
    for exercise in EXERCISES.values():
        if exercise.launch == "slurm" and runs.NO_CLUSTER:
            continue
        for folder in (whole, partly):
            (folder / exercise.stage).mkdir(parents=True, exist_ok=True)
        for own, solution in exercise.pairs:
            # A script of the solution sources files of the course by a path that is one folder longer.
            is_runner = own.suffix == ".sh" and own.name != exercise.file
            text = version(own, solution, exercise.todos) if is_runner else solution.read_text()
            Path(whole / exercise.stage / own.name).write_text(text)
            Path(partly / exercise.stage / own.name).write_text(version(own, solution, exercise.todos[:-1]))
    done = report(whole)
    assert done.returncode == 0, done.stdout
    done = report(partly, "--format", "json")
    found = json.loads(done.stdout)["exercises"]
    assert [each["exercise"] for each in found if each["points"] == each["possible"]] == []
