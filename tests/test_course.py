"""The exercises.toml of the stages: a mistake is reported in one line with its key; each file belongs to one exercise."""

import subprocess
import sys
from pathlib import Path

import pytest

import runs
from workshop.check.command import subject_of
from workshop.check.rules.rule import RULES
from workshop.check.subject import KEPT
from workshop.course import exercises
from workshop.course.exercises import find_exercise, programs, read_stage_file
from workshop.errors import UserError

FILE = runs.ROOT / "02_pytorch_ddp" / "exercises.toml"
SPAWN = "02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "02_pytorch_ddp/exercise2_multigpu_torchrun.py"


def stage_file(folder: Path, content: str) -> Path:
    """Write an ``exercises.toml`` of stage 02 with this content."""
    path = folder / "02_pytorch_ddp" / "exercises.toml"
    path.parent.mkdir()
    path.write_text(content)
    return path


EXERCISE = "exercise[exercise1_multigpu.py]"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("order = 2\n", "", "order is missing"),
        ("order = 2\n", 'order = "2"\n', "order is wrong"),
        ("order = 2\n", "order = = 2\n", "is not TOML"),
        ("order = 2\n", "order = 2\ntitle = 'DDP'\n", "title is not a key of exercises.toml"),
        ('launch = "spawn"\n', "", f"{EXERCISE}.launch is missing"),
        ('launch = "spawn"\n', 'launch = "mpirun"\n', f"{EXERCISE}.launch is wrong: Input should be 'single', 'spawn'"),
        ('launch = "spawn"\n', 'launch = "spawn"\nlaunches = 1\n', f"{EXERCISE}.launches is not a key"),
        ('launch = "spawn"\n', 'launch = "spawn"\nbench = "laps"\n', f"{EXERCISE}.bench is wrong"),
        ('launch = "spawn"\n', 'launch = "spawn"\nimages = [3, 32]\n', f"{EXERCISE}.images"),
        ('launch = "spawn"\n', 'launch = "spawn"\nshape = { nodes = 2 }\n', f"{EXERCISE}.shape.gpus is missing"),
        (
            'launch = "spawn"\n',
            'launch = "spawn"\nbeside = ["a.json"]\n',
            f"{EXERCISE}.beside names a.json, which is neither",
        ),
        ('launch = "spawn"\n', 'launch = "spawn"\ntodo_of = { "a.json" = 2 }\n', f"{EXERCISE}.todo_of says a.json = 2"),
        ('file = "exercise1_multigpu.py"\n', "", "exercise[0].file is missing"),
        ('file = "exercise1_multigpu.py"\n', 'file = "../train.py"\n', "exercise[../train.py].file is wrong"),
        (
            'file = "exercise1_multigpu.py"\n',
            'file = "exercise9_multigpu.py"\n',
            "exercise[exercise9_multigpu.py].file names exercise9_multigpu.py, which is neither in the stage nor in solutions",
        ),
        (
            'file = "exercise2_multigpu_torchrun.py"\n',
            'file = "exercise1_multigpu.py"\n',
            f"{EXERCISE}.file names exercise1_multigpu.py, which belongs to {EXERCISE}",
        ),
        ('"no-group", "wrong', '"no-grup", "wrong', f"{EXERCISE}.goals[1].rules names no-grup, but there is no rule"),
        ('"@files", "@lea', '"@fils", "@lea', f"{EXERCISE}.goals[0].rules names @fils, but there is no family"),
        ('"@files", "@lea', '"hang", "@lea', f"{EXERCISE}.goals[0].rules names hang, but goal 1 already names it"),
        ("number = 1\n", "", f"{EXERCISE}.goals[0].number is missing"),
        ("number = 1\n", "number = 2\n", f"{EXERCISE}.goals[2].number occurs 2 times"),
        ("number = 1\n", "number = 1\nhint = []\n", f"{EXERCISE}.goals[1].hint is not a key"),
    ],
)
def test_a_mistake_in_exercises_toml_is_one_line_with_its_key(old, new, said, tmp_path):
    text = FILE.read_text()
    assert old in text
    with pytest.raises(UserError) as error:
        read_stage_file(stage_file(tmp_path, text.replace(old, new, 1)))
    assert f"02_pytorch_ddp/exercises.toml: {said}" in str(error.value) or said == "is not TOML"
    assert said in str(error.value)
    assert "\n" not in str(error.value)


GOAL = """
[[exercise.goals]]
number = {number}
title = "it learns"
rules = ["no-learning"]
hints = [{hints}]
"""


@pytest.mark.parametrize(
    ("number", "hints", "said"),
    [
        (1, "", "goals[1].hints has 0 of 3 hints"),
        (1, '"a", "b"', "goals[1].hints has 2 of 3 hints"),
        (1, '"a", "b", "c", "d"', "goals[1].hints has 4 of 3 hints"),
        (0, '"a", "b", "c"', "goals[0].hints has 3 of 0 hints"),
    ],
)
def test_a_goal_with_a_todo_has_three_hints(number, hints, said, tmp_path):
    head = 'order = 2\n[[exercise]]\nfile = "exercise1_multigpu.py"\nlaunch = "spawn"\n'
    read_stage_file(stage_file(tmp_path, head + GOAL.format(number=1, hints='"a", "b", "c"')))
    (tmp_path / "more").mkdir()
    with pytest.raises(UserError, match="has") as error:
        read_stage_file(stage_file(tmp_path / "more", head + GOAL.format(number=number, hints=hints)))
    assert said in str(error.value)


def test_a_missing_exercises_toml_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"exercises\.toml: No such file"):
        read_stage_file(tmp_path / "exercises.toml")


def test_a_wrong_exercises_toml_stops_every_command_before_anything_runs(tmp_path):
    stage_file(tmp_path, FILE.read_text().replace('"no-group"', '"no-grup"', 1))
    (tmp_path / "01_single_gpu").mkdir()
    program = (
        "import pathlib, sys\n"
        "import workshop.course.exercises as course, workshop.repository as repository\n"
        f"course.ROOT = repository.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "from workshop.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    (tmp_path / "02_pytorch_ddp" / "exercise1_multigpu.py").touch()
    for arguments in (["check", __file__], ["check"], ["hint", "x"], ["progress"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=runs.environment(), capture_output=True, text=True
        )
        assert done.stdout == "2 False\n"
        assert done.stderr.startswith(
            f"workshop: 02_pytorch_ddp/exercises.toml: {EXERCISE}.goals[1].rules names no-grup"
        )
        assert done.stderr.count("\n") == 1


def test_every_program_named_in_exercises_toml_exists():
    for file in exercises.stage_files().values():
        named = [row.program for row in file.tour] + [
            script for step in file.step for script in (step.before, step.after)
        ]
        for exercise in (*file.exercise, *file.given):
            named += [exercise.name, *([exercise.reference] if exercise.reference else [])]
        for program in named:
            assert (runs.ROOT / program).is_file()
        assert all((runs.ROOT / test).is_file() for test in file.tests if test.startswith("tests/"))


# ---------------------------------------------------------------- which rules


def test_a_family_means_its_rules_that_no_other_goal_names():
    exercise = find_exercise(runs.ROOT / SPAWN)
    subject = exercise.subject(exercise.path)
    by_goal = {goal.number: {rule.name for rule in goal.rules} for goal in subject.goals}
    assert "two-writers" in by_goal[3]
    assert "no-checkpoint" in by_goal[KEPT]
    assert "@files" in exercise.goal(KEPT).rules
    named = [name for names in by_goal.values() for name in names]
    assert len(named) == len(set(named))
    assert not any(RULES[name].hint for name in named)


def test_rules_that_always_hold_are_checked_for_every_program():
    ever = {rule for rule in RULES.values() if rule.always}
    for program in programs():
        subject = program.subject(program.path)
        assert ever <= set(subject.rules)
        assert [rule for rule in RULES.values() if rule in subject.rules] == list(subject.rules)
    foreign = subject_of(Path("train.py"))
    assert (foreign.name, foreign.goals) == ("", ())
    assert set(foreign.rules) == ever | {rule for rule in RULES.values() if rule.anywhere}


def test_every_rule_is_checked_for_some_program():
    """A rule that no program lists and that does not apply anywhere would never be checked."""
    listed = {rule for program in programs() for rule in program.subject(program.path).rules}
    assert [rule.name for rule in RULES.values() if not (rule in listed or rule.anywhere)] == []


# ---------------------------------------------------------------- which exercise


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (runs.ROOT / SPAWN, SPAWN),
        (runs.ROOT / "solutions" / SPAWN, SPAWN),
        (runs.ROOT / "02_pytorch_ddp" / "exercise2_run_multigpu_torchrun.sh", TORCHRUN),
        (runs.ROOT / "solutions" / "05_deepspeed" / "ds_config.json", "05_deepspeed/exercise1_deepspeed.py"),
        (runs.ROOT / "01_single_gpu" / "single_gpu.py", "01_single_gpu/single_gpu.py"),
        ("elsewhere/" + SPAWN, SPAWN),
        ("elsewhere/solutions/" + SPAWN, SPAWN),
        ("exercise1_multigpu.py", SPAWN),
        ("elsewhere/single_gpu.py", "01_single_gpu/single_gpu.py"),
        ("train.py", None),
        ("02_pytorch_ddp/train.py", None),
        (runs.ROOT / "tests" / "runs.py", None),
    ],
)
def test_an_exercise_is_found_by_the_path_of_its_file(file, name, tmp_path):
    found = find_exercise(tmp_path / file)
    assert (found and found.name) == name


@pytest.fixture
def twice(monkeypatch):
    """A course in which two stages have an exercise with the same file name."""
    (first,) = (each for each in programs() if each.name == SPAWN)
    second = first.model_copy(deep=True)
    second._stage = "06_inference"
    monkeypatch.setattr(exercises, "programs", lambda: (first, second))
    return first, second


def test_an_ambiguous_file_name_lists_both_exercises(twice, tmp_path):
    first, second = twice
    assert find_exercise(first.path) is first
    assert find_exercise(second.path) is second
    assert find_exercise(tmp_path / "06_inference" / first.file) is second
    both = rf"{first.name} and 06_inference/{first.file}"
    with pytest.raises(UserError, match=both):
        find_exercise(tmp_path / first.file)


def test_exercises_are_listed_in_the_order_of_the_course():
    names = [exercise.name for exercise in exercises.exercises()]
    assert len(names) == len(set(names))
    stages = [exercise.stage for exercise in exercises.exercises()]
    assert list(dict.fromkeys(stages)) == sorted(set(stages), key=lambda stage: stage.replace("slurm-", "02_z"))
