"""Judge why a program hangs: each function looks at the scene for one family of causes, the clearest first."""

from __future__ import annotations

from collections.abc import Callable

from workshop.diagnose.causes.differing import absent, different_calls
from workshop.diagnose.causes.elsewhere import elsewhere
from workshop.diagnose.causes.ended import ended
from workshop.diagnose.causes.joining import interface, rendezvous
from workshop.diagnose.causes.words import BUSY, call_words, is_waiting, names, verb
from workshop.diagnose.evidence import Diagnosis, Rank, Scene

CAUSES: tuple[Callable[[Scene], Diagnosis | None], ...] = (
    ended,
    interface,
    rendezvous,
    elsewhere,
    different_calls,
    absent,
)


def judge(scene: Scene) -> Diagnosis:
    """Return why the program hangs, or what is known if no cause is recognised."""
    for cause in CAUSES:
        if diagnosis := cause(scene):
            return diagnosis
    return unexplained(scene)


def unexplained(scene: Scene) -> Diagnosis:
    """Return what is known if no cause was recognised."""
    if not scene.alive:
        return Diagnosis(
            "nothing",
            "No process of the program is running.",
            fix="Name a running program, or the folder with its logs.",
        )
    parts: dict[str, list[Rank]] = {}
    for rank in scene.alive:
        parts.setdefault(f"waiting in {call_words(rank)}" if is_waiting(rank) else rank.doing.words(), []).append(rank)
    said = ", and ".join(
        f"{names(them) if them[0].rank >= 0 else them[0].name} {verb(them, 'is', 'are')} {words}"
        for words, them in parts.items()
    )
    said = f"{said[0].upper()}{said[1:]}."
    if any(rank.busy > BUSY for rank in scene.alive):
        return Diagnosis("moves", f"{said} At least one rank computes, so this is not a hang.")
    fix = (
        "Send the folder of the report to someone who knows the program. Its native stacks show which C function waits."
    )
    return Diagnosis("unknown", said, "This matches none of the causes that the command knows.", fix)
