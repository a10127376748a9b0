"""The row of a learner on the board: made only from the events in this learner's file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from workshop.check.rules.rule import RULES
from workshop.check.subject import KEPT
from workshop.course.exercises import HINTS_PER_GOAL, exercises, stage_files
from workshop.course.sharing import clean_name

QUIET = 3600.0  # seconds without an event after which a learner does not count as waiting
LONGEST_CHECK = 86400.0
BROKEN, UNKNOWN = (
    "lines that are no events",
    "events of exercises, goals or rules that this copy of the course does not have",
)

Event = dict[str, Any]


@dataclass
class GoalState:
    """What a learner has done for a goal.

    Attributes:
        met: whether the last check that judged it has found it met.
        since: when it became the goal that the learner works on; None: it never was.
        checks: the checks since then, with the one that met it.
        hints: the number of the last hint that was shown.
        minutes: the minutes from ``since`` until it was met; None: it is open, or the first check found it met.
        mistakes: the rules of the first findings while the learner worked on it.
    """

    met: bool = False
    since: float | None = None
    checks: int = 0
    hints: int = 0
    minutes: float | None = None
    mistakes: set[str] = field(default_factory=set)


@dataclass
class Row:
    """What the board knows about a learner.

    Attributes:
        name: the name that the learner has chosen; "": none.
        stage: the stage whose notebook was started last; "": none.
        exercise: the exercise of the last check or hint; "": none yet.
        states: the state of each goal, by exercise and number.
        rule: the rule of the first finding of the last check; "": it found nothing.
        checks, hints: how many there were.
        first, last: the times of the first and of the last event; 0: there is none.
        skew: seconds by which the clock of the learner's machine is behind.
    """

    name: str = ""
    stage: str = ""
    exercise: str = ""
    states: dict[str, dict[int, GoalState]] = field(default_factory=dict)
    rule: str = ""
    checks: int = 0
    hints: int = 0
    first: float = 0.0
    last: float = 0.0
    skew: float = 0.0

    @property
    def goal(self) -> int | None:
        """The goal that the learner works on: the first one that is not met; None: all are met, or no exercise was begun."""
        return next((number for number, state in self.states.get(self.exercise, {}).items() if not state.met), None)

    @property
    def current(self) -> GoalState | None:
        """The state of this goal."""
        return None if self.goal is None else self.states[self.exercise][self.goal]

    def is_quiet(self, now: float) -> bool:
        """Whether there was no event for an hour."""
        return now - self.last > QUIET

    def waits(self, now: float) -> float:
        """The seconds that the learner has worked on the current goal."""
        return max(now - self.current.since, 0.0) if self.current and self.current.since is not None else 0.0

    def apply(self, event: Event, time: float) -> None:
        """Change the row by an event that ``parse`` has accepted; the times never decrease."""
        gap = time - self.last if self.last else 0.0
        self.first, self.last = self.first or time, time
        if self.current and self.current.since is not None and gap > QUIET:
            self.current.since += gap  # a break, not work
        kind = event["event"]
        if kind == "join":
            self.name = event["name"]
        elif kind == "start":
            self.stage = event["stage"]
        else:
            self._turn_to(event["exercise"], time)
            if kind == "hint":
                self.hints += 1
                state = self.states[self.exercise][event["goal"]]
                state.hints = max(state.hints, event["number"])
            else:
                self._check(event, time)
            if self.current and self.current.since is None:
                self.current.since = time

    def _turn_to(self, exercise: str, time: float) -> None:
        """Begin an exercise, or continue it: the time spent in between on a different one does not count."""
        if exercise != self.exercise:
            self.exercise, self.rule = exercise, ""
            if exercise not in self.states:
                self.states[exercise] = {number: GoalState() for number in known_goals()[exercise]}
            if self.current and self.current.since is not None:
                self.current.since = time

    def _check(self, event: Event, time: float) -> None:
        self.checks += 1
        self.rule = event["rule"]
        before = self.current
        for number, met in event["goals"].items():
            state = self.states[self.exercise][number]
            if met and not state.met:
                state.minutes = None if state.since is None else (time - state.since) / 60
            if not met and state.met:
                state.since = state.minutes = None
            state.met = met
        if counted := before or self.current:
            counted.checks += 1
        if self.current and self.rule:
            self.current.mistakes.add(self.rule)


@cache
def known_goals() -> dict[str, tuple[int, ...]]:
    """Return the numbers of the goals of each exercise of this copy of the course, goal 0 last."""
    return {each.name: tuple(sorted(each.titles, key=lambda number: (number == KEPT, number))) for each in exercises()}


def parse(line: bytes) -> Event | str:
    """Return the event of a line, with all its values checked, or what is wrong with the line (``BROKEN``, ``UNKNOWN``)."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return BROKEN
    if not isinstance(found, dict):
        return BROKEN
    kind, at = found.get("event"), found.get("at")
    event: Event = {"event": kind, "at": float(at) if _is_number(at, 1e11) else None}
    if kind == "join":
        return event | {"name": clean_name(found.get("name", ""))}
    if kind == "start":
        return event | {"stage": found["stage"]} if found.get("stage") in list(stage_files()) else UNKNOWN
    if kind not in ("check", "hint"):
        return BROKEN
    name = found.get("exercise")
    if not isinstance(name, str) or name not in known_goals():
        return UNKNOWN if isinstance(name, str) else BROKEN
    known = known_goals()[name]
    event["exercise"] = name
    if kind == "hint":
        goal, number = found.get("goal"), found.get("number")
        if not (_is_number(number, HINTS_PER_GOAL) and isinstance(number, int) and number and isinstance(goal, int)):
            return BROKEN
        return event | {"goal": goal, "number": number} if goal in known else UNKNOWN
    return _checked(event, found, known)


def _checked(event: Event, found: Event, known: Sequence[int]) -> Event | str:
    goals, rule, seconds = found.get("goals"), found.get("rule"), found.get("seconds")
    if not (isinstance(goals, dict) and isinstance(rule, str) and _is_number(seconds, LONGEST_CHECK)):
        return BROKEN
    names = {str(number): number for number in known}
    if not goals.keys() <= names.keys() or (rule and rule not in RULES):
        return UNKNOWN
    if not all(isinstance(met, bool) for met in goals.values()):
        return BROKEN
    return event | {"goals": {names[name]: met for name, met in goals.items()}, "rule": rule}


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def times(events: Sequence[Event], reference: float, earliest: float) -> list[float]:
    """Return when the events of one look happened, on the clock of the reader.

    Clocks of learners can be wrong, so the last event gets the time ``reference``. The others keep their distance from it, but
    the times never decrease, and none is before ``earliest``.
    """
    last = next((event["at"] for event in reversed(events) if event["at"] is not None), None)
    found, after = [], reference
    for event in reversed(events):
        if last is not None and event["at"] is not None:
            after = max(min(after, reference - last + event["at"]), earliest)
        found.append(after)
    return found[::-1]
