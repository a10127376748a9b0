"""Write the report of a course: for each goal, how many learners have met it, and what it took them."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from workshop.board.board import Board, open_board
from workshop.board.rows import GoalState, Row
from workshop.board.summary import by_name
from workshop.errors import UserError
from workshop.files import write_atomically

MOST_MISTAKES = 3


def run_export(path: Path, names: bool) -> int:
    """Write the report, print where it is, and return 0.

    Args:
        path: the file; its ending is .json, .csv or .md.
        names: add the figures of each learner (only to JSON).

    Raises:
        UserError: the ending is a different one, the folder of the class cannot be read, or the file cannot be written.
    """
    if path.suffix not in WRITERS or (names and path.suffix != ".json"):
        raise UserError(f"{path}: the name of the file must end with {'.json' if names else '.json, .csv or .md'}")
    board = open_board()
    found = report(board, names)
    try:
        write_atomically(path, WRITERS[path.suffix](found))
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from error
    print(f"{path}: {found['learners']} learners, {len(found['goals'])} goals")
    for sentence in found["left_out"]:
        print(sentence)
    return 0


def report(board: Board, names: bool) -> dict[str, Any]:
    """Return the report as values for JSON, without names unless they are asked for."""
    rows = board.named_rows()
    begun = [row for row in rows.values() if row.first]
    said: dict[str, Any] = {
        "learners": len(rows),
        "from": _time(min((row.first for row in begun), default=None)),
        "to": _time(max((row.last for row in begun), default=None)),
        "minutes": "from the first check or hint at a goal until the check that met it, without breaks of an hour or more; "
        "learners whose first check met the goal have no minutes",
        "goals": list(_goals(list(rows.values()))),
        "left_out": board.left_out(board.looked),
    }
    if not names:  # these sentences contain names
        said["left_out"] = [sentence for sentence in said["left_out"] if not sentence.startswith("the clock of")]
        return said
    return said | {"rows": {name: _learner(row) for name, row in rows.items()}}


def _goals(rows: list[Row]) -> Any:
    for exercise in by_name().values():
        begun = [row.states[exercise.name] for row in rows if exercise.name in row.states]
        for goal in exercise.goals if begun else ():
            states = [states[goal.number] for states in begun]
            met = [state for state in states if state.met]
            mistakes = Counter(rule for state in states for rule in state.mistakes)
            yield {
                "exercise": exercise.name,
                "goal": goal.number,
                "title": goal.title,
                "begun": len(begun),
                "met": len(met),
                "median_minutes": _median([state.minutes for state in met if state.minutes is not None]),
                "median_checks": _median([max(state.checks, 1) for state in met]),
                "median_hints": _median([state.hints for state in met]),
                "mistakes": dict(mistakes.most_common(MOST_MISTAKES)),
            }


def _median(values: list[Any]) -> float | None:
    return round(median(values), 1) if values else None


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="minutes")


def _learner(row: Row) -> dict[str, Any]:
    def figures(state: GoalState) -> dict[str, Any]:
        minutes = None if state.minutes is None else round(state.minutes, 1)
        return {"met": state.met, "minutes": minutes, "checks": state.checks, "hints": state.hints}

    goals = {name: {goal: figures(state) for goal, state in states.items()} for name, states in row.states.items()}
    return {
        "checks": row.checks,
        "hints": row.hints,
        "first": _time(row.first),
        "last": _time(row.last),
        "goals": goals,
    }


def _as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _cells(goal: dict[str, Any]) -> list[Any]:
    mistakes = ", ".join(f"{name} ({number})" for name, number in goal["mistakes"].items())
    return [*("" if goal[key] is None else goal[key] for key in list(goal)[:-1]), mistakes]


HEADINGS = [
    "exercise",
    "goal",
    "title",
    "begun",
    "met",
    "median minutes",
    "median checks",
    "median hints",
    "mistakes (learners)",
]


def _as_csv(found: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADINGS)
    writer.writerows(_cells(goal) for goal in found["goals"])
    return text.getvalue()


def _as_markdown(found: dict[str, Any]) -> str:
    lines = [f"# A course with {found['learners']} learners", "", f"From {found['from']} to {found['to']}.", ""]
    lines += [f"Minutes: {found['minutes']}.", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    for goal in found["goals"]:
        cells = (str(cell).replace("|", "\\|") for cell in _cells(goal))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {sentence}" for sentence in found["left_out"])] if found["left_out"] else []
    return "\n".join(lines) + "\n"


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {".json": _as_json, ".csv": _as_csv, ".md": _as_markdown}
