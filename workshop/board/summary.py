"""Summarize the rows of the board: who waits at which goal, which mistakes most have, and what to show on the screen next."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median, median_low
from typing import Any

from workshop.board.rows import Row, known_goals
from workshop.check.rules.rule import RULES
from workshop.check.subject import KEPT
from workshop.course.exercises import HINTS_PER_GOAL, Exercise, exercises
from workshop.repository import ROOT

MOST_MISTAKES = 3
SHARE = 0.2  # of the learners who work: if at least these wait at one goal, the board suggests what to show

LastCourse = Mapping[tuple[str, int], float]


@cache
def by_name() -> dict[str, Exercise]:
    """Return the exercises by name, in the order of the course."""
    return {exercise.name: exercise for exercise in exercises()}


@cache
def taught(name: str) -> str:
    """Return the part of the notebook that an exercise belongs to, such as "notebook 02, part 3: ..."; "": it has none."""
    exercise = by_name()[name]
    own = ROOT / exercise.stage / f"{exercise.stage}.ipynb"
    others = sorted(path for path in own.parent.glob("*.ipynb") if path != own)
    for path in (own, *others):
        if part := _part(path, exercise.file):
            notebook = short(exercise).split()[0] if path == own else path.stem
            return f"notebook {notebook}, part {part}"
    return ""


def _part(path: Path, file: str) -> str:
    """Return the number and title of the part of a notebook that checks an exercise; "": no part does."""
    heading = ""
    with suppress(OSError, ValueError, LookupError):
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                headings = re.findall(r"^## (?:Part )?(\d+)[.:] (.*)", text, re.MULTILINE)
                heading = ": ".join(headings[-1]) if headings else heading
            elif f'check("{file}"' in text:
                return heading
    return ""


def short(exercise: Exercise) -> str:
    """Return a short name, such as "02 exercise1_multigpu"."""
    number = exercise.stage.split("_")[0]
    return f"{number if number.isdigit() else exercise.stage} {exercise.path.stem}"


def duration(seconds: float) -> str:
    """Return a duration in words, such as "12 min"."""
    for size, unit in ((86400, "days"), (3600, "h")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 60)} min"


def summary(rows: Mapping[str, Row], now: float, last_course: LastCourse) -> dict[str, Any]:
    """Return what the page and the terminal show, as values for JSON.

    Args:
        rows: the rows, by the names to show.
        now: the time, in seconds since 1970.
        last_course: the median minutes of each goal in the last course.
    """
    current: dict[str, dict[str, Row]] = {}
    for name, row in rows.items():
        if row.exercise:
            current.setdefault(row.exercise, {})[name] = row
    working = {name: row for name, row in rows.items() if row.goal is not None and not row.is_quiet(now)}
    largest = sorted(current, key=lambda name: (-len(current[name]), list(by_name()).index(name)))
    return {
        "now": now,
        "learners": len(rows),
        "working": len(working),
        "checks": sum(row.checks for row in rows.values()),
        "exercises": [_exercise(by_name()[name], current[name], rows, now, last_course) for name in largest],
        "not_begun": [{"name": name, "stage": row.stage} for name, row in rows.items() if not row.exercise],
        "mistakes": _mistakes(working),
        "next": _next(working, now),
    }


def _exercise(
    exercise: Exercise, here: Mapping[str, Row], rows: Mapping[str, Row], now: float, last: LastCourse
) -> dict[str, Any]:
    """Return an exercise: its goals, with the figures of all learners, and the rows of those who work on it now."""
    name, goals = exercise.name, []
    begun = [row.states[name] for row in rows.values() if name in row.states]
    waiting = Counter(row.goal for row in here.values() if not row.is_quiet(now))
    for number in known_goals()[name]:
        states = [states[number] for states in begun]
        minutes = [state.minutes for state in states if state.minutes is not None]
        goals.append(
            {
                "number": number,
                "title": exercise.titles[number],
                "met": sum(state.met for state in states),
                "waiting": waiting[number],
                "minutes": round(median(minutes), 1) if minutes else None,
                "last": last.get((name, number)),
            }
        )
    order = sorted(
        here, key=lambda name: (here[name].goal is None, here[name].is_quiet(now), -here[name].waits(now), name)
    )
    return {
        "name": name,
        "short": short(exercise),
        "taught": taught(name),
        "goals": goals,
        "rows": [_row(each, here[each], now) for each in order],
    }


def _row(name: str, row: Row, now: float) -> dict[str, Any]:
    return {
        "name": name,
        "met": [state.met for state in row.states[row.exercise].values()],
        "goal": row.goal,
        "waits": round(row.waits(now)),
        "checks": row.current.checks if row.current else 0,
        "hints": row.current.hints if row.current else 0,
        "mistake": row.rule,
        "all_checks": row.checks,
        "all_hints": row.hints,
        "quiet": row.is_quiet(now),
    }


def _mistakes(working: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return the mistakes that most of the learners who work have now, in the words of their rules."""
    counts = Counter(row.rule for row in working.values() if row.rule)
    found = []
    for name, number in counts.most_common(MOST_MISTAKES):
        where = Counter(row.exercise for row in working.values() if row.rule == name).most_common(1)[0][0]
        rule = RULES[name]
        found.append(
            {
                "rule": name,
                "learners": number,
                "why": rule.why,
                "fix": rule.fix,
                "read": rule.read,
                "taught": taught(where),
            }
        )
    return found


def _next(working: Mapping[str, Row], now: float) -> dict[str, Any] | None:
    """Return what to show on the screen next: the next hint, or the solution, for the goal at which most wait."""
    places = Counter((row.exercise, row.goal) for row in working.values())
    if not places:
        return None
    (name, number), waiting = places.most_common(1)[0]
    if waiting < max(2, SHARE * len(working)):
        return None
    exercise, there = by_name()[name], [row for row in working.values() if (row.exercise, row.goal) == (name, number)]
    hints = median_low(row.current.hints for row in there if row.current)
    minutes = round(median(row.waits(now) for row in there) / 60)
    said = {
        "seen": f"{waiting} of the {len(working)} learners at work wait at goal {number} of {name} "
        f"({exercise.goal(number).title}), half of them for {minutes} min or more",
        "taught": taught(name),
        "hint": "",
    }
    if number == KEPT:
        return said | {"show": "how the check reports what worked before", "command": f"./workshop.sh check {name}"}
    if hints >= HINTS_PER_GOAL:
        show = "the solution: at least half of them have read all hints"
        return said | {"show": show, "command": f"./workshop.sh diff {name} --solution"}
    show = f"hint {hints + 1} of {HINTS_PER_GOAL}: half of them have read {f'hint {hints}' if hints else 'no hint'}"
    command = f"./workshop.sh hint {name} {number}"
    return said | {"show": show, "command": command, "hint": exercise.goal(number).hints[hints]}
