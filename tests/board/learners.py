"""Simulated learners for the board: what they check, which hints they read, and their files in the folder of a class."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from workshop.check.subject import KEPT
from workshop.course.exercises import exercises

NAMES = [
    *(
        "Ada",
        "Amir",
        "Ana",
        "Björn",
        "Chen",
        "Chiara",
        "Dmitri",
        "Elif",
        "Emeka",
        "Fatima",
        "Freya",
        "Goran",
        "Hana",
        "Ines",
    ),
    *(
        "Ivan",
        "Jonas",
        "Kofi",
        "Lena",
        "Li",
        "Maja",
        "Mateo",
        "Nadia",
        "Noor",
        "Olga",
        "Pedro",
        "Priya",
        "Sven",
        "Tomás",
    ),
    *("Yuki", "Zoë"),
]
STAGE = "02_pytorch_ddp"


def events(chance: random.Random, patience: float = 0.5) -> Iterator[dict]:
    """Yield the checks and hints of a learner who does the exercises of stage 02, one goal after the other.

    Args:
        chance: the source of random numbers.
        patience: the probability that a check does not meet the goal that the learner works on.
    """
    for exercise in [each for each in exercises() if each.stage == STAGE]:
        goals = {goal: False for goal in exercise.todos} | {KEPT: True}
        for goal in exercise.todos:
            hint = 0
            rules = [rule.name for rule in exercise.rules(exercise.goal(goal))][:3]
            while chance.random() < patience:
                yield _check(exercise.name, goals, chance.choice(rules[:1] * 3 + rules))
                if hint < 3 and chance.random() < 0.4:
                    hint += 1
                    yield {"event": "hint", "exercise": exercise.name, "goal": goal, "number": hint}
            goals[goal] = True
            rest = [number for number in exercise.todos if not goals[number]]
            following = exercise.rules(exercise.goal(rest[0]))[0].name if rest else ""
            yield _check(exercise.name, goals, following)


def _check(exercise: str, goals: dict[int, bool], rule: str) -> dict:
    return {"event": "check", "exercise": exercise, "goals": dict(goals), "rule": rule, "seconds": 6.0}


def write_class(folder: Path, now: float, minutes: float = 55, seed: int = 5) -> None:
    """Write the files of thirty learners who have worked for some minutes until ``now``; goal 2 takes many of them long."""
    chance = random.Random(seed)
    for number, name in enumerate(NAMES):
        at = now - 60 * minutes + chance.uniform(0, 300)
        lines = [{"event": "join", "at": at, "name": name}, {"event": "start", "at": at + 5, "stage": STAGE}]
        if number not in (11, 26):  # these two have not checked anything
            for event in events(chance, 0.5):
                hard = event.get("rule") in ("device-shared", "same-samples") or event.get("goal") == 2
                at += chance.expovariate(1 / (420 if hard else 150)) + 20
                if at > now:
                    break
                lines.append(event | {"at": at})
        write(folder / f"learner-{number:016x}.jsonl", lines)


def write(path: Path, lines: list[dict]) -> None:
    """Write a file as if its last line had been appended at the time of the last event."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (lines[-1]["at"],) * 2)
