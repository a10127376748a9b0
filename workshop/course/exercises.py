"""Read the exercises from the ``exercises.toml`` of each stage folder.

A stage is a folder of the repository that has such a file; no other file lists the stages or the exercises. The attributes
of the classes below are the keys of the file.
"""

import inspect
import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from workshop.check import subject
from workshop.check.rules import FAMILIES
from workshop.check.rules.rule import RULES, Rule
from workshop.check.subject import KEPT
from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.slurm.shape import Shape

FILE = "exercises.toml"
HINTS_PER_GOAL = 3

Words = Annotated[tuple[str, ...], Field(strict=False)]  # not strict, because TOML has lists and no tuples


class Table(BaseModel):
    """A table of the file. An unknown key, or a value of the wrong type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Goal(Table):
    """A goal of an exercise.

    Attributes:
        number: the number of its TODO; 0: what the program does already, and must still do at the end.
        title: what the program does when the goal is met.
        rules: the rules that must find nothing. "@samples": all rules of this family that no goal of the exercise names.
        hints: three texts in Markdown, each of which says more than the one before; none for goal 0.
    """

    number: int = Field(ge=0, le=9)
    title: str
    rules: Words
    hints: Words = ()

    @field_validator("hints")
    @classmethod
    def _dedented(cls, hints: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(inspect.cleandoc, hints))


class JobShape(Table):
    """What a job script requests from Slurm: see ``workshop.slurm.shape.Shape``."""

    nodes: int
    gpus: int
    tasks: int
    cores: int


class Exercise(Table):
    """An exercise, or (``[[given]]``) a program of the course that has no TODOs but can be checked as well.

    Attributes:
        file: its program or job script, in the stage folder; the solution has the same path under ``solutions/``.
        launch: how its processes are started: "single" (one process), "spawn" (by the script itself), "torchrun", or "slurm"
            (by a job script).
        bench: which bench runs it: see ``checking.py``.
        goals: its goals, in the order in which they are shown.
        options: options for the check's runs. Here and below, "{stage}" stands for the path of the stage folder.
        metric: the metric that it must report: "accuracy", or a different figure of ``log.write()``; "": none.
        beside: its other files, in the same folder.
        imports: the files of other exercises in this folder that it imports.
        todo_of: for each of these files that cannot contain comments: the TODO that all changes in it belong to.
        interrupted: how the check stops a run before it resumes: "ended" (the run has fewer epochs), or "killed".
        images: channels, height and width of the images that its model takes.
        reference: the program with the same training but without the engine, as a path from the repository's root.
        cases: which module of ``workshop/course/built`` tries its classes.
        mesh: options with the sizes of the axes of a mesh, for the runs with several processes.
        uneven_options: options for a run in which the processes evaluate different numbers of batches.
        shape: what its job must request; None: anything.
        other_shape: a different shape in which the script must also work.
    """

    file: str = Field(pattern=r"^[^/]+\.(py|sh)$")
    launch: Literal["single", "spawn", "torchrun", "slurm"]
    bench: Literal["epochs", "steps", "engine", "job", "built", "resizing"] = "epochs"
    goals: Annotated[tuple[Goal, ...], Field(strict=False, min_length=1)]
    options: Words = ()
    metric: str = ""
    beside: Words = ()
    imports: Words = ()
    todo_of: dict[str, int] = {}
    interrupted: Literal["ended", "killed"] = "ended"
    images: Annotated[tuple[int, int, int], Field(strict=False)] | None = None
    reference: str = ""
    cases: str = ""
    mesh: Words = ()
    uneven_options: Words = ()
    shape_: JobShape | None = Field(default=None, alias="shape")
    other_shape_: JobShape | None = Field(default=None, alias="other_shape")

    _stage: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def model_post_init(self, context: Any) -> None:
        """Store the stage: ``read_stage_file`` passes the name of the folder as the context of the validation."""
        self._stage = context

    @field_validator("options", "uneven_options")
    @classmethod
    def _in_stage(cls, options: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return tuple(option.replace("{stage}", str(ROOT / str(info.context))) for option in options)

    @property
    def stage(self) -> str:
        """The name of the stage folder."""
        return self._stage

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return f"{self._stage}/{self.file}"

    @property
    def path(self) -> Path:
        """The path of the file that the learner edits."""
        return ROOT / self.name

    @property
    def solution(self) -> Path:
        """The path of the solution."""
        return ROOT / "solutions" / self.name

    @property
    def runner(self) -> Path | None:
        """The script that starts it; None: it is a job script, which sbatch starts directly."""
        number, _, topic = self.path.stem.partition("_")
        return self.path.with_name(f"{number}_run_{topic}.sh") if self.launch != "slurm" else None

    @property
    def pairs(self) -> list[tuple[Path, Path]]:
        """Each of its files with the file of the solution: the program, its runner if it has one, and the files beside it."""
        files = [self.path, *([self.runner] if self.runner else []), *map(self.path.with_name, self.beside)]
        return [(file, self.solution.with_name(file.name)) for file in files]

    @property
    def shape(self) -> Shape | None:
        """What its job must request; None: anything."""
        return Shape(**self.shape_.model_dump()) if self.shape_ else None

    @property
    def other_shape(self) -> Shape | None:
        """A different shape in which the script must also work."""
        return Shape(**self.other_shape_.model_dump()) if self.other_shape_ else None

    @property
    def titles(self) -> dict[int, str]:
        """The titles of the goals, by number."""
        return {goal.number: goal.title for goal in self.goals}

    @property
    def hints(self) -> dict[int, tuple[str, ...]]:
        """The hints of the goals with a TODO, by number."""
        return {goal.number: goal.hints for goal in self.goals if goal.hints}

    @property
    def todos(self) -> tuple[int, ...]:
        """The numbers of the goals with a TODO."""
        return tuple(goal.number for goal in self.goals if goal.number != KEPT)

    def goal(self, number: int) -> Goal:
        """Return the goal with this number."""
        return next(goal for goal in self.goals if goal.number == number)

    @cached_property
    def _named(self) -> set[str]:
        """The rules that its goals name individually, and not as a family."""
        return {name for goal in self.goals for name in goal.rules if not name.startswith("@")}

    def rules(self, goal: Goal) -> tuple[Rule, ...]:
        """Return the rules that must find nothing for a goal to be met."""
        found = []
        for name in goal.rules:
            if not name.startswith("@"):
                found.append(RULES[name])
                continue
            family = [rule for rule in RULES.values() if rule.family == name[1:]]
            found += [rule for rule in family if not (rule.hint or rule.always or rule.name in self._named)]
        return tuple(found)

    def subject(self, file: Path) -> subject.Subject:
        """Return a program as a subject of the check, with the goals of this exercise and all rules to apply."""
        goals = tuple(subject.Goal(goal.number, goal.title, self.rules(goal)) for goal in self.goals)
        listed = {rule.name for goal in goals for rule in goal.rules}
        rules = tuple(rule for rule in RULES.values() if rule.name in listed or rule.always or rule.hint)
        return subject.Subject(file, self.name, goals, rules)


class Step(Table):
    """A script that is an earlier script plus one idea. A test counts the lines that change.

    Attributes:
        before, after: the paths of the two scripts from the repository's root.
        most: the largest number of lines that may change.
        keeps_comments: whether the later script keeps the comments of the earlier one.
    """

    before: str
    after: str
    most: int = 48
    keeps_comments: bool = True


class TourRow(Table):
    """A program that ``workshop tour`` runs. It takes --batch-size, the batch of each process.

    A program that trains on images takes --epochs and --checkpoint and writes an ``EpochLog``; one that trains the language
    model takes --steps and --folder and writes a ``TrainingLog``.

    Attributes:
        name: its name in the table.
        program: its path in the repository.
        torchrun: whether torchrun starts its processes.
        processes_option: the option with the number of processes that it starts itself; "" without torchrun: one process.
        language: whether it trains the language model.
    """

    name: str
    program: str
    torchrun: bool = False
    processes_option: str = ""
    language: bool = False


class StageFile(Table):
    """An ``exercises.toml``.

    Attributes:
        order: the position of the stage in the course.
        lines, columns: the maximum length and width of a script in a step.
        tests: arguments for pytest: the tests that ``workshop versions`` runs for this stage.
        tour: the programs that ``workshop tour`` runs.
        step: which scripts are an earlier script plus one idea.
        exercise: its exercises, in the order of the course.
        given: programs that are not exercises but can be checked as well.
    """

    order: int
    lines: int = 165
    columns: int = 130
    tests: Words = ()
    tour: Annotated[tuple[TourRow, ...], Field(strict=False)] = ()
    step: Annotated[tuple[Step, ...], Field(strict=False)] = ()
    exercise: Annotated[tuple[Exercise, ...], Field(strict=False)] = ()
    given: Annotated[tuple[Exercise, ...], Field(strict=False)] = ()


def foreign_job(file: Path) -> subject.Subject:
    """Return a job script that is not an exercise as a subject of the check: without goals, with the rules for any script."""
    return subject.Subject(file, "", (), tuple(rule for rule in RULES.values() if rule.anywhere or rule.always))


# ---------------------------------------------------------------- which exercise


def exercises() -> tuple[Exercise, ...]:
    """Return all exercises, in the order of the course.

    Raises:
        UserError: an ``exercises.toml`` is wrong; the message names the file and the key.
    """
    return tuple(exercise for file in stage_files().values() for exercise in file.exercise)


def programs() -> tuple[Exercise, ...]:
    """Return all exercises, and the given programs that can be checked as well.

    Raises:
        UserError: see ``exercises``.
    """
    return (*exercises(), *(program for file in stage_files().values() for program in file.given))


def find_exercise(path: Path) -> Exercise | None:
    """Find the exercise of a file: the learner's file, a file of the solution, or a copy in a different place.

    A copy is recognized by its folder and its name, as in ``elsewhere/02_pytorch_ddp/exercise1_multigpu.py``, or else by its
    name alone.

    Returns:
        The exercise or given program; None: the file belongs to neither.

    Raises:
        UserError: several exercises have a file of this name.
    """
    real = Path(os.path.realpath(path))
    for exercise in programs():
        if any(real in (Path(os.path.realpath(own)), Path(os.path.realpath(other))) for own, other in exercise.pairs):
            return exercise
    same_name = [each for each in programs() if any(own.name == real.name for own, _ in each.pairs)]
    found = [each for each in same_name if each.stage == real.parent.name] or same_name
    if len(found) > 1:
        names = " and ".join(f"{each.stage}/{real.name}" for each in found)
        raise UserError(f"{path} could be {names}; put it into a folder that is named like its stage")
    return found[0] if found else None


# ---------------------------------------------------------------- reading


@cache
def stage_files() -> dict[str, StageFile]:
    """Return the ``exercises.toml`` of each stage, by the name of the folder, in the order of the course.

    Raises:
        UserError: one of them is wrong.
    """
    files = {path.parent.name: read_stage_file(path) for path in ROOT.glob(f"*/{FILE}")}
    return dict(sorted(files.items(), key=lambda item: (item[1].order, item[0])))


def read_stage_file(path: Path) -> StageFile:
    """Read an ``exercises.toml``.

    Raises:
        UserError: the file cannot be read, a key is missing or unknown, or a value is wrong.
    """
    name = f"{path.parent.name}/{path.name}"
    content: dict[str, Any] = {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        file = StageFile.model_validate(content, context=path.parent.name)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{name} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        known = {"missing": "is missing", "extra_forbidden": f"is not a key of {FILE}"}
        said = known.get(first["type"], "is wrong: " + first["msg"])
        raise UserError(f"{name}: {key_of(content, first['loc'])} {said}") from None
    for problem in _problems(file, path.parent):
        raise UserError(f"{name}: {problem}")
    return file


def key_of(content: Any, places: tuple[int | str, ...]) -> str:
    """Return a key as text: "exercise[exercise1_multigpu.py].goals[2].title"."""
    words = ""
    for place in places:
        try:
            content = content[place]
        except (LookupError, TypeError):
            content = None
        if isinstance(place, int):
            table = content if isinstance(content, dict) else {}
            words += f"[{table.get('file', table.get('number', table.get('name', place)))}]"
        else:
            words += f".{place}" if words else place
    return words


def _problems(file: StageFile, folder: Path) -> Iterator[str]:
    """Yield the problems, each with its key, that the validation of the single tables cannot find."""
    owners: dict[str, str] = {}
    solutions = ROOT / "solutions" / folder.name
    for kind, tables in (("exercise", file.exercise), ("given", file.given)):
        for exercise in tables:
            key = f"{kind}[{exercise.file}]"
            for name in exercise.imports:
                if solutions.is_dir() and not (solutions / name).exists():
                    yield f"{key}.imports names {name}, which solutions/{folder.name} does not contain"
            for place, name in (("file", exercise.file), *(("beside", each) for each in exercise.beside)):
                if name in owners:
                    yield f"{key}.{place} names {name}, which belongs to {owners[name]}"
                owners[name] = key
                # A file that only the learner has deleted is no problem: `workshop reset` must be able to restore it.
                if (
                    kind == "exercise"
                    and solutions.is_dir()
                    and not ((folder / name).exists() or (solutions / name).exists())
                ):
                    yield f"{key}.{place} names {name}, which is neither in the stage nor in solutions/{folder.name}"
            for name, number in exercise.todo_of.items():
                if name not in exercise.beside or number not in exercise.todos:
                    yield f"{key}.todo_of says {name} = {number}; write a file of beside, and the number of a goal"
            yield from (f"{key}.{problem}" for problem in _problems_of_goals(exercise))


def _problems_of_goals(exercise: Exercise) -> Iterator[str]:
    counts = Counter(goal.number for goal in exercise.goals)
    owners: dict[str, int] = {}
    for goal in exercise.goals:
        key = f"goals[{goal.number}]"
        if counts[goal.number] > 1:
            yield f"{key}.number occurs {counts[goal.number]} times; each goal needs its own number"
        wanted = 0 if goal.number == KEPT else HINTS_PER_GOAL
        if len(goal.hints) != wanted:
            yield f"{key}.hints has {len(goal.hints)} of {wanted} hints"
        for name in goal.rules:
            if name not in RULES and not (name.startswith("@") and name[1:] in FAMILIES):
                what = "family of rules" if name.startswith("@") else "rule"
                yield f"{key}.rules names {name}, but there is no {what} with this name"
            if name in owners:
                yield f"{key}.rules names {name}, but goal {owners[name]} already names it"
            owners[name] = goal.number
