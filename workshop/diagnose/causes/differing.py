"""Causes in which the ranks wait in different collectives, or for ranks that were not found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from workshop.diagnose.calls import Difference, first_difference
from workshop.diagnose.causes.words import SAME_ORDER, is_waiting, names, verb, waits
from workshop.diagnose.evidence import Call, Diagnosis, Place, Rank, Scene

TOGETHER = "Let all ranks decide together: all_reduce the flag first."


def different_calls(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if the ranks wait in different collectives."""
    difference = first_difference(scene.alive)
    if difference is None:
        return _by_stack(scene.alive)
    ranks = {rank.rank: rank for rank in scene.ranks}
    if difference.kind in ("name", "size", "dtype"):
        return _different(difference, ranks)
    if difference.kind == "line":
        return _branch(difference, ranks)
    absent, there = difference.ranks(called=False), difference.ranks(called=True)
    call = difference.calls[there[0]]
    assert call is not None
    late = ranks[absent[0]]
    return Diagnosis(
        "skipped",
        f"{names(absent).capitalize()} never called {_words(call, ranks[there[0]])}: {verb(absent, 'it is', 'they are')} "
        f"{late.doing.words()}.",
        waits([ranks[rank] for rank in there]),
        f"{SAME_ORDER} Look for a branch on the rank, or a loop whose length differs between ranks, around this call.",
        call.place or ranks[there[0]].doing.place,
    )


def _words(call: Call, rank: Rank) -> str:
    if call.place is None and rank.doing.place and not call.complete:
        return f"{call.name} #{call.number} of the backward pass ({rank.doing.place})"
    return str(call)


def _different(difference: Difference, ranks: dict[int, Rank]) -> Diagnosis:
    parts: dict[str, list[int]] = {}
    for rank, call in difference.calls.items():
        if call is not None:
            words = _words(call, ranks[rank]) + (
                f" with {call.shape()}" if difference.kind in ("size", "dtype") else ""
            )
            parts.setdefault(words, []).append(rank)
    said = ", and ".join(f"{names(them)} called {words}" for words, them in parts.items())
    causes = {"name": "order", "size": "shape", "dtype": "dtype"}
    fixes = {
        "name": "Look for a branch on the rank, or a step that one rank skips, before this call.",
        "size": "Pad the tensors to the same size first, or use all_gather_object.",
        "dtype": "Convert the tensors to one dtype first.",
    }
    place = _rarest(difference, ranks) or ranks[_odd(parts.values())[-1]].doing.place
    what = {
        "name": "different collectives",
        "size": "tensors of different sizes",
        "dtype": "tensors of different dtypes",
    }
    places = [rank.doing.place for rank in ranks.values()] + [call.place for call in difference.calls.values() if call]
    skip = skipped_step(places) if difference.kind == "name" else None
    return Diagnosis(
        causes[difference.kind],
        f"The ranks use {what[difference.kind]} in call #{difference.number}: {said}.{_skips(skip)}",
        "PyTorch matches the collectives of the ranks by the order of their calls.",
        f"{SAME_ORDER} {TOGETHER if skip else fixes[difference.kind]}",
        skip or place,
    )


def _rarest(difference: Difference, ranks: dict[int, Rank]) -> Place | None:
    """Return the line of the call that the ranks have made least often: a branch or a skip is more often around a rare call.

    Of equally rare ones, it is that of the ranks that differ from most of the others.
    """
    lines = [(call.place.file, call.place.line) for rank in ranks.values() for call in rank.calls or () if call.place]
    by_line: dict[Place, list[int]] = {}
    for rank, call in difference.calls.items():
        if call and call.place:
            by_line.setdefault(call.place, []).append(rank)
    return min(
        by_line, key=lambda at: (lines.count((at.file, at.line)), len(by_line[at]), -min(by_line[at])), default=None
    )


def _odd(groups: Iterable[list[int]]) -> list[int]:
    """Return the ranks that differ from most of the others; of two equal halves the one without the lowest rank."""
    return min(groups, key=lambda ranks: (len(ranks), -min(ranks)))


def _branch(difference: Difference, ranks: dict[int, Rank]) -> Diagnosis:
    groups: dict[str, list[int]] = {}
    for rank, call in difference.calls.items():
        if call is not None:
            groups.setdefault(str(call), []).append(rank)
    said = ", and ".join(f"{names(them)} called {words}" for words, them in groups.items())
    odd = _odd(groups.values())
    ahead = difference.calls[odd[-1]]
    skip = skipped_step([rank.doing.place for rank in ranks.values()] + [ahead.place if ahead else None])
    return Diagnosis(
        "skipped",
        f"The ranks take different branches before call #{difference.number}: {said}.{_skips(skip)}",
        "From this call on, the collectives of the ranks no longer match.",
        f"{SAME_ORDER} {TOGETHER if skip else 'Look for a branch that depends on the rank or on its data.'}",
        skip or (ahead.place if ahead else None),
    )


def _skips(skip: Place | None) -> str:
    return f" {skip} skips the step if a value is not finite, and each rank decides this alone." if skip else ""


def skipped_step(places: Iterable[Place | None]) -> Place | None:
    """Return the line of the program that skips a step if a value is not finite; None: there is none."""
    for file in dict.fromkeys(place.file for place in places if place):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if re.search(r"\bif\b.*(isnan|isfinite|isinf)", line) and re.search(
                r"\b(continue|return)\b", " ".join(lines[number - 1 : number + 3])
            ):
                return Place(file, number)
    return None


def _by_stack(ranks: Sequence[Rank]) -> Diagnosis | None:
    """Return the diagnosis if only the stacks are known, and they show that the ranks wait in different calls."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.doing.kind == "waits" and not rank.calls:
            groups.setdefault(rank.doing.words(), []).append(rank.rank)
    if len(groups) < 2:
        return None
    said = ", and ".join(f"{names(them)} {verb(them, 'is', 'are')} {words}" for words, them in groups.items())
    odd = _odd(groups.values())[-1]
    kinds = {rank.doing.what for rank in ranks}
    place = next(rank.doing.place for rank in ranks if rank.rank == odd)
    return Diagnosis(
        "order" if len(kinds) > 1 else "skipped",
        f"The ranks wait in different calls: {said}.",
        "PyTorch matches the collectives of the ranks by the order of their calls.",
        f"{SAME_ORDER} Look for a branch on the rank, or a step that one rank skips, before these calls.",
        place,
    )


def absent(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if all ranks that were found wait for ranks that were not found."""
    world = max((rank.world for rank in scene.alive), default=0)
    gone = sorted(set(range(world)) - {rank.rank for rank in scene.ranks})
    if not gone or not any(is_waiting(rank) for rank in scene.alive):
        return None
    return Diagnosis(
        "ended",
        f"{names(gone).capitalize()} of {world} {verb(gone, 'was', 'were')} not found: "
        f"{verb(gone, 'it has ended, or runs', 'they have ended, or run')} on a different node.",
        waits(scene.alive),
        "Look at the end of the log of these ranks, and at the state of their nodes (sinfo, sacct).",
    )
