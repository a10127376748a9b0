"""A verdict in words, and as JSON."""

import json
import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workshop.check.exercises import KEPT
from workshop.check.findings import Finding
from workshop.check.judge import Verdict
from workshop.repository import ROOT

SIGNS = {"met": ("✓", "green"), "open": ("✗", "red"), "blocked": ("·", "dim"), "unjudged": ("·", "dim")}


def short(path: Path) -> str:
    """The path as a learner would type it: from the current folder if it lies in it, else from the repository's root."""
    for base in (Path.cwd(), ROOT):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return str(path)


def show(verdict: Verdict, console: Console, verbose: bool = False) -> None:
    """Print a verdict: the goals, what was seen, why it matters, where; then what was not checked."""
    console.print(f"[bold]{escape(short(verdict.file))}[/]", highlight=False)
    if verdict.exercise:
        _goals(verdict, console, verbose)
    else:
        for finding in verdict.errors:
            _finding(finding, console, "✗", verbose)
        if not verdict.errors:
            console.print("[green]✓[/] nothing wrong was seen", highlight=False)
    for finding in verdict.findings:
        if not finding.is_error:
            _finding(finding, console, "-", verbose)
    for text in verdict.unchecked:
        console.print(f"[dim]not checked: {escape(text)}[/]", highlight=False)
    _summary(verdict, console)


def _goals(verdict: Verdict, console: Console, verbose: bool) -> None:
    states = verdict.states()
    for goal in sorted(verdict.exercise.goals, key=lambda number: number if number != KEPT else 99):
        state = states[goal]
        sign, style = SIGNS[state]
        title = escape(verdict.exercise.goals[goal])
        number = str(goal) if goal != KEPT else " "
        if state == "blocked":
            by = f", blocked by {verdict.first_open}" if verdict.first_open else ", not judged yet"
            console.print(f"[dim]{sign} {number} {title}{by}[/]", highlight=False)
            continue
        console.print(f"[{style}]{sign}[/] {number} {title}", highlight=False)
        if state == "open":
            findings = [finding for finding in verdict.errors if verdict.goal_of(finding) == goal]
            for finding in findings[: None if verbose else 2]:
                _finding(finding, console, "", verbose)
            if goal != KEPT:
                command = f"./workshop.sh hint {short(verdict.exercise.path)} {goal}"
                console.print(f"      hint   {escape(command)}", highlight=False)


def _finding(finding: Finding, console: Console, sign: str, verbose: bool) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=5)
    table.add_column(width=6)
    table.add_column(overflow="fold")
    table.add_row(sign, "[yellow]seen[/]", escape(finding.seen))
    table.add_row("", "[yellow]why[/]", escape(finding.why))
    if finding.where:
        table.add_row("", "[yellow]where[/]", escape(finding.where))
    console.print(table)
    if finding.detail and verbose:
        console.print(escape(finding.detail.rstrip()), style="dim", highlight=False)
    elif finding.detail and finding.kind in ("crash", "hang", "resume-fails"):
        console.print("[dim]      (--verbose shows the traceback or the stacks)[/]", highlight=False)


def _summary(verdict: Verdict, console: Console) -> None:
    if verdict.exercise:
        states = verdict.states()
        met = sum(state == "met" for state in states.values())
        more = "" if verdict.complete else "; now with the real launcher, up to a minute ..."
        console.print(f"{met} of {len(states)} goals met in {verdict.seconds:.1f} s{more}", highlight=False)
    else:
        console.print(
            f"{len(verdict.errors)} finding{'s' * (len(verdict.errors) != 1)} in {verdict.seconds:.1f} s",
            highlight=False,
        )


def as_json(verdict: Verdict) -> str:
    """The verdict for programs."""
    states = verdict.states()
    goals = [
        {
            "number": goal,
            "title": title,
            "state": states[goal],
            "findings": [finding.as_dict() for finding in verdict.findings if verdict.goal_of(finding) == goal],
        }
        for goal, title in (verdict.exercise.goals.items() if verdict.exercise else ())
    ]
    return json.dumps(
        {
            "file": os.fspath(verdict.file),
            "exercise": verdict.exercise.name if verdict.exercise else None,
            "passed": not verdict.errors,
            "goals": goals,
            "findings": [finding.as_dict() for finding in verdict.findings],
            "not_checked": verdict.unchecked,
            "seconds": round(verdict.seconds, 2),
        },
        indent=2,
    )
