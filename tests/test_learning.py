"""Hints, progress, ``workshop diff`` and ``workshop reset``: hints do not reveal the solution, and no work is lost."""

import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from workshop.check.subject import KEPT
from workshop.course import exercises, learning, progress
from workshop.errors import UserError
from workshop.repository import ROOT

SPAWN = "02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "02_pytorch_ddp/exercise2_multigpu_torchrun.py"
RUNNER = "02_pytorch_ddp/exercise2_run_multigpu_torchrun.sh"
EXERCISES = exercises.exercises()
of_spawn = exercises.find_exercise(ROOT / SPAWN)
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.path.stem)


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch) -> Path:
    """A progress file for the test, so that the progress of the user does not change."""
    path = tmp_path / "progress.json"
    monkeypatch.setenv("WORKSHOP_PROGRESS", str(path))
    monkeypatch.setenv("COLUMNS", "80")  # the width of the console
    return path


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A folder with two exercises and their solutions that replaces the repository."""
    root = tmp_path / "course"
    for name in (SPAWN, TORCHRUN, RUNNER):
        for path in (Path(name), Path("solutions", name)):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, root / path)
    (root / "01_single_gpu").mkdir()
    (root / "01_single_gpu" / "README.md").touch()
    monkeypatch.setattr("workshop.repository.ROOT", root)
    monkeypatch.setattr(exercises, "ROOT", root)
    return root


def git(folder, *arguments) -> str:
    """Run git in the folder of a test, without variables that, for example, a git hook sets for a different repository."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(course) -> Path:
    """The course in a git repository with one commit."""
    git(course, "init", "--quiet", "--initial-branch=main")
    git(course, "add", ".")
    git(course, "commit", "--quiet", "--message=delivered")
    return course


def all_met(exercise) -> dict[int, bool]:
    return dict.fromkeys(exercise.titles, True)


# -- hints


def given_away(hints: list[str], solution: str, exercise: str = "") -> list[str]:
    """Return the lines of a solution that hints contain and that are not in the exercise."""
    lines = {line.strip() for line in solution.splitlines()} - {line.strip() for line in exercise.splitlines()}
    return [line for line in lines if len(line) >= 12 and any(line in hint for hint in hints)]


def test_every_goal_has_three_hints():
    goals = [goal for exercise in EXERCISES for goal in exercise.goals if goal.number != KEPT]
    texts = [text for goal in goals for text in goal.hints]
    assert all(len(goal.hints) == exercises.HINTS_PER_GOAL for goal in goals)
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) > 60
    assert all("?" in goal.hints[0] for goal in goals)


@each_exercise
def test_hints_contain_no_line_of_the_solution(exercise):
    given, solution = ("".join(path.read_text() for path in paths) for paths in zip(*exercise.pairs, strict=True))
    hints = [text for three in exercise.hints.values() for text in three]
    assert given_away(hints, solution, given) == []


def test_a_hint_that_contains_a_line_of_the_solution_is_found():
    assert given_away(["then call optimizer.step() once"], "    optimizer.step()\n") == ["optimizer.step()"]


def test_each_call_shows_the_next_hint_up_to_the_third(record):
    three = of_spawn.hints[2]
    shown = [progress.next_hint(of_spawn, 2) for _ in range(5)]
    assert shown == [(1, three[0]), (2, three[1]), (3, three[2]), (3, three[2]), (3, three[2])]
    assert progress.next_hint(of_spawn, 1)[0] == 1
    assert json.loads(record.read_text())[SPAWN]["hints"] == {"2": 3, "1": 1}


def test_hint_without_a_goal_is_for_the_first_open_goal(capsys):
    assert learning.run_hint(SPAWN) == 0
    assert "goal 1: the processes form one process" in capsys.readouterr().out
    progress.record_check(SPAWN, {1: True, 2: False, 3: True, 4: False, KEPT: False})
    learning.run_hint(SPAWN)
    assert "goal 2: each process uses its own device" in capsys.readouterr().out
    progress.record_check(SPAWN, dict.fromkeys(range(1, 7), True) | {KEPT: False})
    learning.run_hint(SPAWN)
    assert "goal 1: " in capsys.readouterr().out


def test_a_hint_says_how_to_see_the_next_one(capsys):
    said = []
    for _ in range(3):
        learning.run_hint("exercise1_multigpu", 3)
        said.append(capsys.readouterr().out)
    again = f"The next one: ./workshop.sh hint {SPAWN} 3\n"
    assert "Hint 1 of 3\n" in said[0]
    assert f"2 hints left. {again}" in said[0]
    assert f"1 hint left. {again}" in said[1]
    assert f"No hints left. Change your program, then run: ./workshop.sh check {SPAWN}\n" in said[2]
    # The console wraps the hints and does not show Markdown syntax.
    for text, out in zip(of_spawn.hints[3], said, strict=True):
        assert words(re.sub(r"```\w*", "", text)) in words(out)


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))


@pytest.mark.parametrize("goal", [KEPT, 7, -1])
def test_a_goal_without_hints_is_refused(goal, record):
    with pytest.raises(UserError, match=r"has hints for 1 \(the processes.*6 \(the metrics.*not for goal"):
        learning.run_hint(SPAWN, goal)
    assert not record.exists()


def test_a_hint_is_shown_even_if_progress_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert learning.run_hint(SPAWN, 1) == 0
    out = capsys.readouterr().out
    assert "Hint 1 of 3" in out
    assert "Set WORKSHOP_PROGRESS to a writable file." in out


# -- progress


def test_progress_is_stored_in_the_repository_by_default(monkeypatch):
    monkeypatch.delenv("WORKSHOP_PROGRESS")
    assert progress.progress_path() == ROOT / ".progress.json"


def test_progress_keeps_earlier_checks_and_hints(record):
    assert progress.read_progress() == {}
    progress.record_check(SPAWN, {1: True, 2: False})
    first = progress.read_progress()[SPAWN]
    assert (first["goals"], first["hints"]) == ({1: True, 2: False}, {})
    assert first["first_checked"] == first["last_checked"]
    content = json.loads(record.read_text())
    content[SPAWN] |= {"first_checked": "2026-01-02T03:04:05+00:00", "last_checked": "2026-01-02T03:04:05+00:00"}
    record.write_text(json.dumps(content))
    progress.next_hint(of_spawn, 2)
    progress.record_check(SPAWN, {1: True, 2: True})
    progress.record_check(TORCHRUN, {1: False})
    last = progress.read_progress()
    assert set(last) == {SPAWN, TORCHRUN}
    assert (last[SPAWN]["goals"], last[SPAWN]["hints"]) == ({1: True, 2: True}, {2: 1})
    assert last[SPAWN]["first_checked"] == "2026-01-02T03:04:05+00:00"
    assert last[SPAWN]["last_checked"] >= first["last_checked"]


def test_the_folder_of_the_progress_file_is_created(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_PROGRESS", str(tmp_path / "new" / "folder" / "progress.json"))
    progress.record_check(SPAWN, {1: True})
    assert progress.read_progress()[SPAWN]["goals"] == {1: True}


def test_progress_is_written_atomically(record, monkeypatch):
    progress.record_check(SPAWN, {1: True})
    before = record.read_text()
    seen = []

    def replace(source, target):
        # If the process is killed here, the old file remains. The new file is already complete.
        seen.append((record.read_text() == before, Path(source).parent == record.parent, Path(target) == record))
        assert json.loads(Path(source).read_text())[SPAWN]["goals"] == {"1": False}
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(progress.os, "replace", replace)
    progress.record_check(SPAWN, {1: False})
    assert seen == [(True, True, True)]
    assert record.read_text() == before
    assert os.listdir(record.parent) == [record.name]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"7",
        b"[" * 100_000,
        b'{"x": 1}',
        b'{"x": {}}',
        b'{"x": {"goals": {"a": true}, "hints": {}, "first_checked": null, "last_checked": null}}',
        b'{"x": {"goals": {}, "hints": {"1": Infinity}, "first_checked": null, "last_checked": null}}',
        b'{"x": {"goals": {}, "hints": {}, "first_checked": null, "last_checked": "yesterday"}}',
    ],
)
def test_a_damaged_progress_file_is_renamed_and_replaced(content, record, capsys):
    record.write_bytes(content)
    assert progress.read_progress() == {}
    assert record.with_name("progress.json.damaged").read_bytes() == content
    assert "was damaged and is now progress.json.damaged" in capsys.readouterr().err
    progress.record_check(SPAWN, {1: True})
    assert progress.read_progress()[SPAWN]["goals"] == {1: True}
    assert capsys.readouterr().err == ""


def test_a_damaged_progress_file_that_cannot_be_renamed_is_left_alone(record, monkeypatch):
    def replace(source, target):
        raise PermissionError(13, "Permission denied")

    record.write_text("{")
    monkeypatch.setattr(progress.os, "replace", replace)
    assert progress.read_progress() == {}
    progress.record_check(SPAWN, {1: True})
    assert record.read_text() == "{"
    assert os.listdir(record.parent) == [record.name]


def test_a_folder_at_the_path_of_the_progress_file_is_left_alone(record):
    record.mkdir()
    (record / "mine").touch()
    progress.record_check(SPAWN, {1: True})
    assert progress.next_hint(of_spawn, 1)[0] == 1
    assert os.listdir(record) == ["mine"]
    assert os.listdir(record.parent) == [record.name]


def test_next_exercise_is_the_first_not_done():
    first, second = EXERCISES[:2]
    assert not progress.is_done(first.name)
    assert progress.next_exercise() is first
    progress.record_check(first.name, all_met(first) | {KEPT: False})
    assert progress.next_exercise() is first
    progress.record_check(second.name, all_met(second))
    assert progress.is_done(second.name)
    assert progress.next_exercise() is first
    progress.record_check(first.name, all_met(first))
    assert progress.next_exercise() is EXERCISES[2]
    for exercise in EXERCISES:
        progress.record_check(exercise.name, all_met(exercise))
    assert progress.next_exercise() is None
    progress.record_check(second.name, all_met(second) | {1: False})
    assert progress.next_exercise() is second
    assert not progress.is_done("another.py")


def test_the_progress_table_shows_goals_hints_and_times():
    progress.record_check(SPAWN, {1: True, 2: True, 3: False, 4: True, KEPT: False})
    for goal in (3, 3, 1):
        progress.next_hint(of_spawn, goal)
    console = Console(file=io.StringIO(), width=80)
    progress.show_progress(console)
    lines = console.file.getvalue().splitlines()
    rows = {name: figures for name, *figures in (line.strip().split(maxsplit=3) for line in lines[2:])}
    assert [*rows] == [exercise.name for exercise in EXERCISES]  # a narrow terminal does not truncate the names
    assert rows[SPAWN][:2] == ["3/7", "3"]
    assert re.fullmatch(r"\d\d:\d\d|\d\d \w+", rows[SPAWN][2])  # the date, if midnight passes during the test
    assert rows[TORCHRUN] == ["0/4", "0", "not yet"]


# -- which exercise


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SPAWN, SPAWN),
        (str(ROOT / SPAWN), SPAWN),
        (f"solutions/{SPAWN}", SPAWN),
        (RUNNER, TORCHRUN),
        ("exercise1_multigpu", SPAWN),  # the full name of one exercise, and part of no other name
        ("exercise1_multigpu.py", SPAWN),
        ("torchrun", TORCHRUN),
        ("global", "02_pytorch_ddp/exercise3_global_metrics.py"),
        ("leak", "02_pytorch_ddp/exercise4_find_the_bug_leak.py"),
        ("01_single_gpu/exercise1", "01_single_gpu/exercise1_fast_single_gpu.py"),
        ("01_single_gpu/exercise1_fast_single_gpu.py", "01_single_gpu/exercise1_fast_single_gpu.py"),
    ],
)
def test_an_exercise_is_found_by_path_or_by_name(text, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert learning.resolve_exercise(text).name == name


def test_a_path_is_relative_to_the_current_folder(monkeypatch):
    monkeypatch.chdir(ROOT / "solutions")
    assert learning.resolve_exercise(Path("..", SPAWN)).name == SPAWN
    monkeypatch.chdir(ROOT / "02_pytorch_ddp")
    assert learning.resolve_exercise("./exercise1_multigpu.py").name == SPAWN


@pytest.mark.parametrize(
    ("text", "some", "other"),
    [
        ("exercise1", [EXERCISES[0].name, SPAWN], TORCHRUN),
        ("multigpu", [SPAWN, TORCHRUN], EXERCISES[0].name),
        ("exercise4", [f"find_the_bug_{bug}" for bug in ("hang", "leak", "accumulation", "no_learning")], SPAWN),
        ("", [SPAWN, TORCHRUN], "nothing"),
    ],
)
def test_an_ambiguous_name_lists_the_exercises_that_match(text, some, other):
    with pytest.raises(UserError, match="give the full name") as error:
        learning.resolve_exercise(text)
    assert all(name in str(error.value) for name in some)
    assert other not in str(error.value)


@pytest.mark.parametrize("text", ["exercise99", "01_single_gpu/single_gpu.py", "README.md", "x" * 5000])
def test_an_unknown_name_lists_all_exercises(text):
    with pytest.raises(UserError, match="the exercises are: ") as error:
        learning.resolve_exercise(text)
    assert all(exercise.name in str(error.value) for exercise in EXERCISES)


def test_the_name_of_a_different_program_matches_no_exercise(monkeypatch):
    monkeypatch.chdir(ROOT / "01_single_gpu")
    with pytest.raises(UserError, match=r"single_gpu\.py is not an exercise"):
        learning.resolve_exercise("single_gpu.py")


@pytest.mark.parametrize("command", [learning.run_hint, learning.run_diff, learning.run_reset])
def test_hint_diff_and_reset_need_the_stages(command, tmp_path, monkeypatch):
    monkeypatch.setattr("workshop.repository.ROOT", tmp_path)
    with pytest.raises(UserError, match="the stages are not beside the installed package"):
        command(SPAWN)


# -- diff


def test_diff_is_refused_until_all_goals_are_met(capsys):
    with pytest.raises(
        UserError, match=r"open goals.*1 \(the processes.*6 \(the metrics.*0 \(the model learns.*--solution"
    ):
        learning.run_diff(SPAWN)
    progress.record_check(SPAWN, dict.fromkeys(range(7), True) | {2: False})
    with pytest.raises(UserError, match=r"open goals: 2 \([^()]*\); check it, or add --solution"):
        learning.run_diff(SPAWN)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("force", [False, True])
def test_diff_compares_with_the_solution(force, capsys):
    if not force:
        progress.record_check(SPAWN, dict.fromkeys(range(7), True))
    assert learning.run_diff(SPAWN, force) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"--- {SPAWN}", f"+++ solutions/{SPAWN}"]
    mine, solution = (ROOT / SPAWN).read_text().splitlines(), (ROOT / "solutions" / SPAWN).read_text().splitlines()
    # The diff shows the lines of the files, not wrapped and not changed.
    assert {line[1:] for line in lines[2:] if line.startswith("-")} <= set(mine)
    assert {line[1:] for line in lines[2:] if line.startswith("+")} <= set(solution)
    assert {line[1:] for line in lines[2:] if line.startswith("+")} >= set(solution) - set(mine)


def test_diff_shows_the_runner_only_if_it_differs(capsys):
    learning.run_diff(SPAWN, force=True)
    assert capsys.readouterr().out.count("\n--- ") == 0
    learning.run_diff(TORCHRUN, force=True)
    out = capsys.readouterr().out
    assert f"--- {RUNNER}\n+++ solutions/{RUNNER}\n" in out
    assert "\n+max_restarts=3\n" in out
    assert "../../workshop" not in out


def test_diff_says_when_the_file_is_identical_to_the_solution(course, capsys):
    shutil.copy(course / "solutions" / SPAWN, course / SPAWN)
    learning.run_diff(SPAWN, force=True)
    assert capsys.readouterr().out == f"{SPAWN} is identical to the solution\n"


def test_diff_is_coloured_on_a_terminal_and_interprets_no_markup(course, monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False, width=40)
    monkeypatch.setattr(learning, "_console", lambda: console)
    (course / SPAWN).write_text("a[bold]b :smile: \xe4\n" + (course / "solutions" / SPAWN).read_text())
    learning.run_diff(SPAWN, force=True)
    assert "\x1b[31m-a[bold]b :smile: \xe4\x1b[0m\n" in console.file.getvalue()


def test_diff_reports_a_missing_file(course):
    (course / "solutions" / SPAWN).unlink()
    with pytest.raises(UserError, match=r"cannot read .*solutions/.*exercise1_multigpu.py"):
        learning.run_diff(SPAWN, force=True)
    (course / SPAWN).unlink()
    with pytest.raises(UserError, match=r"does not exist; restore it with: \./workshop\.sh reset"):
        learning.run_diff(SPAWN, force=True)


# -- reset


def test_reset_keeps_what_the_learner_wrote(clone, capsys):
    exercise, runner = clone / TORCHRUN, clone / RUNNER
    delivered = exercise.read_bytes(), runner.read_bytes()
    for number in (1, 2):
        exercise.write_text(f"mine {number}\n")
        assert learning.run_reset(TORCHRUN) == 0
        assert exercise.read_bytes() == delivered[0]
        assert exercise.with_name(f"exercise2_multigpu_torchrun.mine-{number}.py").read_text() == f"mine {number}\n"
        assert f"yours is kept as exercise2_multigpu_torchrun.mine-{number}.py" in capsys.readouterr().out
    assert not runner.with_name("exercise2_run_multigpu_torchrun.mine-1.sh").exists()

    runner.write_text("#!/bin/sh\n")
    learning.run_reset(TORCHRUN)
    assert runner.read_bytes() == delivered[1]
    assert os.access(runner, os.X_OK)
    assert runner.with_name("exercise2_run_multigpu_torchrun.mine-3.sh").read_text() == "#!/bin/sh\n"
    assert not exercise.with_name("exercise2_multigpu_torchrun.mine-3.py").exists()
    assert (exercise.read_bytes(), runner.read_bytes()) == delivered
    assert not list(clone.rglob("*.tmp"))
    assert git(clone, "diff", "--stat") == ""  # the runner is executable again


def test_reset_of_an_unchanged_exercise_does_nothing(clone, capsys):
    learning.run_reset(SPAWN)
    assert "nothing to restore" in capsys.readouterr().out
    assert git(clone, "status", "--short") == ""


def test_reset_restores_a_deleted_exercise(clone, capsys):
    (clone / TORCHRUN).unlink()
    (clone / RUNNER).unlink()
    learning.run_reset(TORCHRUN)
    assert git(clone, "status", "--short") == ""
    assert "kept" not in capsys.readouterr().out


def test_reset_restores_the_delivered_version_despite_commits_of_the_learner(clone, tmp_path, monkeypatch, capsys):
    origin = tmp_path / "origin"
    clone.rename(origin)
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    delivered = (clone / SPAWN).read_text()
    (clone / SPAWN).write_text("mine\n")
    git(clone, "commit", "--quiet", "--all", "--message=mine")
    # A newer version that the clone has fetched but not merged is not the version that was delivered.
    (origin / SPAWN).write_text("newer\n")
    git(origin, "commit", "--quiet", "--all", "--message=newer")
    git(clone, "fetch", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    learning.run_reset(SPAWN)
    assert (clone / SPAWN).read_text() == delivered
    assert (clone / SPAWN).with_name("exercise1_multigpu.mine-1.py").read_text() == "mine\n"
    assert git(clone, "rev-parse", "--short", "HEAD~1") in capsys.readouterr().out


def test_reset_outside_of_a_git_repository_is_refused(course, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(course.parent))
    (course / SPAWN).write_text("mine\n")
    with pytest.raises(UserError, match=r"git does not have .*not a git repository.*a fresh clone of the course"):
        learning.run_reset(SPAWN)
    monkeypatch.setenv("PATH", str(course))
    with pytest.raises(UserError, match=r"git cannot be started: No such file or directory.*a fresh clone"):
        learning.run_reset(SPAWN)
    assert (course / SPAWN).read_text() == "mine\n"


def test_reset_of_a_file_unknown_to_git_is_refused(clone):
    with pytest.raises(UserError, match="git does not have the original 02_pytorch_ddp/exercise3_global_metrics"):
        learning.run_reset("exercise3_global")


def test_reset_that_cannot_write_changes_nothing(clone, monkeypatch):
    def copy2(source, target):
        raise PermissionError(13, "Permission denied", str(target))

    (clone / SPAWN).write_text("mine\n")
    monkeypatch.setattr(learning.shutil, "copy2", copy2)
    with pytest.raises(UserError, match=r"cannot restore .*: .*Permission denied"):
        learning.run_reset(SPAWN)
    assert (clone / SPAWN).read_text() == "mine\n"
