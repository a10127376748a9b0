"""Run ``workshop report``: check the exercises of a learner again, and print or write their points."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from workshop.check.reports import save
from workshop.errors import UserError
from workshop.grades.formats import FORMATS, as_text, exercise_text
from workshop.grades.isolation import Course, Outcome, check_alone
from workshop.grades.points import Task, every_task, read_points
from workshop.grades.results import STATES, ExerciseResult, GoalResult, Report, settled
from workshop.grades.submission import Submitted, is_untouched, read_submission
from workshop.run.machine import cores

# Findings of these rules can come from a moment in which the machine was busy. The check is repeated once: a real hang repeats.
TIMED = ("hang", "slower")
BUSY = 1.5  # runnable processes per core


def run_report(paths: Sequence[Path], points: Path | None, formats: Sequence[str], outputs: Sequence[Path]) -> int:
    """Report the points of a learner and return the exit status: 0 all points, 1 not all, 2 something could not be judged.

    Args:
        paths: the folder or the files of the learner; empty: this course.
        points: the file of the instructor; None: one point for each goal of each exercise that the learner has.
        formats: keys of ``FORMATS``.
        outputs: a file for each format; empty, with one format: standard output.

    Raises:
        UserError: a path, the file of the instructor or an option is wrong.
    """
    if len(outputs) != len(formats) and (outputs or len(formats) > 1):
        raise UserError("give one --output for each --format, in the same order; a single --format may be without")
    _require_writable(outputs)
    submitted = read_submission(paths)
    tasks = read_points(points) if points else every_task()
    left_out: tuple[str, ...] = ()
    if not points:
        left_out = tuple(task.exercise.name for task in tasks if task.exercise.name not in submitted)
        tasks = tuple(task for task in tasks if task.exercise.name in submitted)
    progress = sys.stderr if formats and not outputs else sys.stdout
    start, results = time.monotonic(), []
    for result in _judge(tasks, submitted):
        results.append(result)
        print(exercise_text(result), file=progress, flush=True)
    report = Report(tuple(results), left_out, time.monotonic() - start)
    print(as_text(report), file=progress, flush=True)
    for name, output in zip(formats, outputs, strict=False):
        save(output, FORMATS[name](report))
    if formats and not outputs:
        print(FORMATS[formats[0]](report), end="")
    return report.status


def _require_writable(outputs: Sequence[Path]) -> None:
    """Raise a UserError before any check runs if a file cannot be written."""
    for path in outputs:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file with --output")
        if not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"{path} cannot be written: the folder {path.parent} is not writable")
    if double := next((path for path in outputs if list(outputs).count(path) > 1), None):
        raise UserError(f"two formats would be written to {double}; name a different file for each")


def _judge(tasks: Sequence[Task], submitted: dict[str, Submitted]) -> Iterator[ExerciseResult]:
    """Yield the result of each exercise. Everything is read before the first program runs."""
    untouched = {
        task.exercise.name
        for task in tasks
        if (found := submitted.get(task.exercise.name)) and found.files and is_untouched(task.exercise, found.files)
    }
    course = Course()
    for task in tasks:
        name = task.exercise.name
        found = submitted.get(name)
        if found is None:
            yield _same(task, "missing", "missing")
        elif found.problem:
            yield _same(task, "unjudged", "unjudged", found.problem)
        elif name in untouched:
            yield _same(task, "untouched", "untouched")
        else:
            yield _checked(course, task, found)


def _same(task: Task, state: str, of_goals: str, *reasons: str, seconds: float = 0.0) -> ExerciseResult:
    """Return an exercise whose goals all have the same state."""
    goals = tuple(
        GoalResult(each.number, each.title, of_goals, task.points[each.number]) for each in task.exercise.goals
    )
    return ExerciseResult(task.exercise.name, state, goals, reasons, seconds)


def _checked(course: Course, task: Task, found: Submitted) -> ExerciseResult:
    """Check an exercise, and return its result."""
    exercise = task.exercise
    outcome = check_alone(course, exercise, found.files, task.time_limit)
    seconds, busy = outcome.seconds, _load()
    if _may_be_slow(outcome, busy):
        outcome = check_alone(course, exercise, found.files, task.time_limit)
        seconds += outcome.seconds
    said = outcome.said
    if outcome.late:
        return _same(task, "judged", "blocked", outcome.problem, seconds=seconds)
    if outcome.problem:
        return _same(task, "unjudged", "unjudged", outcome.problem, seconds=seconds)
    if "error" in said:
        return _same(task, "judged", "blocked", said["error"], seconds=seconds)
    if not said["judged"]:
        return _same(task, "unjudged", "unjudged", *said["not_checked"], seconds=seconds)
    states = settled({goal.number: said["states"].get(str(goal.number), "waiting") for goal in exercise.goals})
    assert STATES.keys() >= set(states.values())
    findings = said["findings"]
    goals = []
    for goal in exercise.goals:
        own = tuple(
            {key: text for key, text in each.items() if key != "goal"}
            for each in findings
            if each["goal"] == goal.number
        )
        goals.append(GoalResult(goal.number, goal.title, states[goal.number], task.points[goal.number], own))
    reasons = [*said["not_checked"], *([busy] if busy and _may_be_slow(outcome, busy) else [])]
    return ExerciseResult(exercise.name, "judged", tuple(goals), tuple(reasons), seconds)


def _may_be_slow(outcome: Outcome, busy: str) -> bool:
    """Return whether a slow machine can be the reason for what a check has found: many rules have time limits."""
    kinds = {finding["kind"] for finding in outcome.said.get("findings", ()) if finding["level"] == "error"}
    return bool(kinds and (busy or kinds.intersection(TIMED)))


def _load() -> str:
    """Return a sentence about the load of this machine, or "" if it is not busy."""
    load = os.getloadavg()[0]
    if load <= BUSY * cores():
        return ""
    return (
        f"whether a busy machine is the reason: during the check, {load:.0f} processes shared {cores()} cores; "
        "run the report again when the machine is idle"
    )
