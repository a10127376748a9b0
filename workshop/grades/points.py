"""Read the instructor's file with the exercises of a report and the points of their goals."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from workshop.course.exercises import Exercise, Table, exercises, key_of
from workshop.course.learning import resolve_exercise
from workshop.errors import UserError

TIME_LIMIT = 600.0  # seconds that the check of an exercise may take

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ExerciseTable(Table):
    """A table ``[[exercise]]``.

    Attributes:
        name: the exercise, as for ``workshop check``.
        points: the points of each goal.
        goals: other points, by the number of the goal.
        time_limit: seconds that the check of this exercise may take; None: as in the file.
    """

    name: str
    points: Number = 1.0
    goals: dict[str, Number] = Field(default={})
    time_limit: Seconds | None = None


class PointsFile(Table):
    """The file; ``time_limit`` are the seconds that the check of an exercise may take."""

    exercise: Annotated[tuple[ExerciseTable, ...], Field(strict=False, min_length=1)]
    time_limit: Seconds = TIME_LIMIT


@dataclass(frozen=True)
class Task:
    """An exercise that a report counts, the points of its goals by number, and the seconds that its check may take."""

    exercise: Exercise
    points: dict[int, float] = field(default_factory=dict)
    time_limit: float = TIME_LIMIT

    def __post_init__(self) -> None:
        """Give each goal one point by default."""
        if not self.points:
            self.points.update({goal.number: 1.0 for goal in self.exercise.goals})


def every_task() -> tuple[Task, ...]:
    """Return all exercises of the course with one point for each goal."""
    return tuple(map(Task, exercises()))


def read_points(path: Path) -> tuple[Task, ...]:
    """Read the file of the instructor.

    Raises:
        UserError: the file cannot be read, a key is missing or unknown, or a value is wrong.
    """
    content: dict[str, Any] = {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        file = PointsFile.model_validate(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        known = {"missing": "is missing", "extra_forbidden": "is not a key of this file"}
        said = known.get(first["type"], "is wrong: " + first["msg"])
        raise UserError(f"{path}: {key_of(content, first['loc'])} {said}") from None
    tasks = tuple(_task(table, file, path) for table in file.exercise)
    names = [task.exercise.name for task in tasks]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"{path}: {double} occurs {names.count(double)} times; write each exercise once")
    if not any(points for task in tasks for points in task.points.values()):
        raise UserError(f"{path}: no goal gives points")
    return tasks


def _task(table: ExerciseTable, file: PointsFile, path: Path) -> Task:
    try:
        exercise = resolve_exercise(table.name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    points = {goal.number: table.points for goal in exercise.goals}
    for number, value in table.goals.items():
        if not number.isdecimal() or int(number) not in points:
            known = ", ".join(map(str, points))
            raise UserError(f"{path}: {exercise.name} has no goal {number}; its goals are {known}")
        points[int(number)] = value
    return Task(exercise, points, table.time_limit or file.time_limit)
