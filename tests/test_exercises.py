"""Each exercise differs from its solution only at TODOs and runs after each TODO; the check names the open goal."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import runs
from needs import DEEPSPEED, needs
from workshop.course import todo
from workshop.course.checking import check_file
from workshop.course.exercises import exercises

EXERCISES = exercises()
BUGS = [exercise for exercise in EXERCISES if "find_the_bug" in exercise.name or "stands_still" in exercise.name]
STEPS = [exercise for exercise in EXERCISES if exercise not in BUGS]
WITH_RUNNER = [exercise for exercise in STEPS if exercise.runner]
LANGUAGE = [exercise for exercise in EXERCISES if exercise.bench == "steps"]
RUN_DAILY = "_fast_single_gpu.py"  # run daily with its runner; the others only with --full
SLOW = [
    *LANGUAGE[1:],
    *(each for each in EXERCISES if each.name.endswith(("requeue.sh", "srun.sh")) or each.bench == "engine"),
]
LONG = [each for each in EXERCISES if each.launch == "slurm" or each.images]  # jobs and a ResNet
GOALS = [(exercise, goal) for exercise in STEPS for goal in exercise.todos]


def marks_of(exercise) -> list:
    """Return the marks for what an exercise needs to run."""
    if exercise.launch == "slurm":
        return [runs.needs_cluster]
    return [needs(*DEEPSPEED)] if exercise.name.endswith("_deepspeed.py") else []


def params(cases, for_the_long_run=lambda exercise, *goal: False) -> list:
    """Return the parameters of a test that checks scripts: job scripts need a cluster and take longer than forked processes."""
    found = []
    for case in cases:
        case = case if isinstance(case, tuple) else (case,)
        marks = marks_of(case[0])
        marks += [pytest.mark.full] if for_the_long_run(*case) else []
        found.append(pytest.param(*case, marks=marks))
    return found


def name(value):
    return value.path.stem if hasattr(value, "path") else str(value)


def verdict_of(script):
    """Return the verdict on the quick goals."""
    *_, verdict = check_file(script, quick=True)
    return verdict


def seen(verdict):
    return "\n".join(
        f"goal {verdict.goal_of(each)}: {each.kind}: {each.seen} ({each.where})" for each in verdict.findings
    )


@pytest.mark.parametrize("exercise", EXERCISES, ids=name)
def test_every_exercise_is_complete_and_short(exercise):
    for path, solution in exercise.pairs:
        assert path.exists()
        assert solution.exists()
    for path, _ in exercise.pairs:
        assert path.suffix in (".py", ".json") or path.stat().st_mode & 0o111
    # (a language model also needs a tokenizer, a schedule, clipping and completions; stage 06 needs what PyTorch has elsewhere)
    most = {"steps": 255, "built": 210}.get(exercise.bench, 180)
    assert len(exercise.path.read_text().splitlines()) <= most
    assert "./workshop.sh check " + exercise.name in exercise.path.read_text()


def lines_of_code(path):
    """Count the lines of a program without blank lines, comments and docstrings."""
    text = path.read_text()
    nodes = [
        each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    texts = [each.body[0] for each in nodes if ast.get_docstring(each)]
    lines = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()}
    comments = {number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith("#")}
    return len(lines - comments - {number for each in texts for number in range(each.lineno, each.end_lineno + 1)})


@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.bench == "built"], ids=name)
def test_a_solution_of_stage_06_has_at_most_150_lines_of_code(exercise):
    assert lines_of_code(exercise.solution) <= 150


@pytest.mark.parametrize("exercise", STEPS, ids=name)
def test_every_difference_from_the_solution_has_its_todo(exercise):
    numbers = set()
    for path, solution in exercise.pairs:
        for found, before, after in todo.hunks(path, solution):
            if before != after:
                assert len(found) == 1, "".join(
                    ["a difference needs the number of one TODO:\n", *before, "---\n", *after]
                )
                numbers |= found
        assert "TODO" not in solution.read_text()
    assert numbers == set(exercise.todos)


@pytest.mark.parametrize("exercise", BUGS, ids=name)
def test_a_bug_changes_only_a_few_lines(exercise):
    changed = 0
    for path, solution in exercise.pairs:
        differences = [(before, after) for _, before, after in todo.hunks(path, solution) if before != after]
        changed += sum(max(len(before), len(after)) for before, after in differences)
    assert 1 <= changed <= 8
    assert "TODO 1" in exercise.path.read_text()


@pytest.mark.parametrize(
    ("exercise", "goal"),
    params(GOALS, lambda exercise, goal: exercise in (*SLOW, *LONG) or (exercise, goal) not in GOALS[1::3]),
    ids=name,
)
def test_with_only_this_todo_open_the_check_names_its_goal(exercise, goal, tmp_path):
    script = todo.write_version(exercise, set(exercise.todos) - {goal}, tmp_path)
    verdict = verdict_of(script)
    if verdict.states()[goal] == "unjudged":  # the processor is not faster in bfloat16, and the check says so
        assert verdict.errors == []
        assert any("bfloat16" in each for each in verdict.unchecked)
        return
    assert verdict.first_open == goal, seen(verdict)
    assert verdict.states()[goal] == "open"
    assert [other for other, state in verdict.states().items() if state == "open"] == [goal], seen(verdict)


@pytest.mark.parametrize(
    ("exercise", "goal"),
    params(GOALS, lambda exercise, goal: exercise.launch != "spawn"),  # the others only with --full
    ids=name,
)
def test_an_exercise_runs_after_each_todo_and_meets_the_goals_so_far(exercise, goal, tmp_path):
    done = set(range(1, goal + 1))
    script = todo.write_version(exercise, done, tmp_path)
    verdict = verdict_of(script)
    assert not [finding for finding in verdict.errors if finding.kind in ("crash", "hang", "endless")], seen(verdict)
    open_goals = {verdict.goal_of(finding) for finding in verdict.errors}
    assert not open_goals & done, seen(verdict)
    if done == set(exercise.todos):
        assert not verdict.errors, seen(verdict)


@pytest.mark.parametrize("exercise", params(EXERCISES, lambda exercise: exercise in SLOW), ids=name)
def test_as_delivered_the_check_names_goal_1(exercise):
    verdict = verdict_of(exercise.path)
    assert verdict.first_open == 1, seen(verdict)


@pytest.mark.parametrize(
    "exercise", params(EXERCISES, lambda exercise: "requeue" in exercise.name or exercise in LANGUAGE[1:]), ids=name
)
def test_the_solution_meets_all_goals(exercise):
    verdict = verdict_of(exercise.solution)
    assert verdict.findings == [], seen(verdict)
    # "waiting": only a real launcher can show whether the goal is met
    assert set(verdict.states().values()) <= {"met", "unjudged", "waiting"}


@pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(each, marks=marks_of(each) + [pytest.mark.full] * (not each.name.endswith(RUN_DAILY)))
        for each in [*WITH_RUNNER, *BUGS]
    ],
    ids=lambda each: name(each),
)
def test_a_delivered_exercise_runs_with_its_runner(exercise, data, tmp_path):
    options = ["--steps", "1"] if exercise.bench in ("steps", "built") else ["--epochs", "1"]
    options += ["--target", "0.0"] if "hang" in exercise.name else []
    done = runs.run([exercise.runner, *options], tmp_path, NPROC=2, WORKSHOP_DATA=data)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(epoch|step) 1/1( \||:)", done.stdout)


@pytest.mark.full
def test_the_exercise_that_hangs_ends_when_its_group_times_out(tmp_path):
    exercise = next(exercise for exercise in BUGS if "hang" in exercise.name)
    done = runs.run([exercise.runner], tmp_path, NPROC=2)
    assert done.returncode != 0
    assert Path(exercise.path).name in done.stderr


@pytest.mark.full
def test_accumulated_steps_have_the_losses_of_large_batches(tmp_path):
    """With a quarter of the batch and --accumulate 4, the losses are the same up to rounding."""
    script = runs.ROOT / "solutions/02_pytorch_ddp/exercise3_global_metrics.py"
    command = [*runs.command("torchrun", 2)[:-1], script, "--epochs", 1, "--checkpoint", "run.pt"]
    curves = []
    for batch, accumulate in ((64, 1), (16, 4)):
        folder = tmp_path / str(accumulate)
        folder.mkdir()
        done = runs.run([*command, "--batch-size", batch, "--accumulate", accumulate], folder, TEST_PATCH="float64,sgd")
        assert done.returncode == 0, done.stderr
        (entry,) = runs.read_log(folder / "run.pt")
        curves.append(entry["losses"])
    assert len(curves[0]) == len(curves[1]) == 11
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)
