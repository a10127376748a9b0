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
from workshop.repository import ROOT, workshop_command

SIGNS = {"met": ("✓", "green"), "open": ("✗", "red"), "blocked": ("·", "dim"), "unjudged": ("·", "dim")}


def short(path: Path) -> str:
    """The path as a learner would type it: from the current folder if it lies in it, else from the repository's root."""
    for base in (Path.cwd(), ROOT):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return str(path)


def show(verdict: Verdict, console: Console, verbose: bool = False, said: dict[int, str] | None = None) -> None:
    """Print a verdict: the goals, what was seen, why it matters, where; then what was not checked.

    Args:
        verdict: what to print.
        console: where.
        verbose: tracebacks and stacks too.
        said: the states of the goals that were printed before, if this verdict is the second: only what is new is printed.
    """
    if said is None:
        console.print(f"[bold]{escape(short(verdict.file))}[/]", highlight=False)
    if verdict.exercise:
        _goals(verdict, console, verbose, said or {})
    else:
        for finding in verdict.errors:
            _finding(finding, console, "✗", verbose)
        if not verdict.errors:
            console.print("[green]✓[/] nothing wrong was seen", highlight=False)
    if said is None:
        for finding in verdict.findings:
            if not finding.is_error:
                _finding(finding, console, "-", verbose)
        for text in verdict.unchecked:
            console.print(f"[dim]not checked: {escape(text)}[/]", highlight=False)
    _summary(verdict, console)


def _goals(verdict: Verdict, console: Console, verbose: bool, said: dict[int, str]) -> None:
    states = {goal: state for goal, state in verdict.states().items() if said.get(goal) != state}
    for goal in sorted(verdict.exercise.goals, key=lambda number: number if number != KEPT else 99):
        if goal not in states:
            continue
        state = states[goal]
        sign, style = SIGNS[state]
        title = escape(verdict.exercise.goals[goal])
        number = str(goal) if goal != KEPT else " "
        if state == "unjudged":
            console.print(_line(f"[dim]{sign}[/]", f"[dim]{number}[/]", f"[dim]{title}, cannot be judged here[/]"))
            continue
        if state == "blocked":
            by = f", blocked by {verdict.first_open}" if verdict.first_open else ", not judged yet"
            console.print(_line(f"[dim]{sign}[/]", f"[dim]{number}[/]", f"[dim]{title}{by}[/]"))
            continue
        console.print(_line(f"[{style}]{sign}[/]", number, title))
        if state == "open":
            findings = [finding for finding in verdict.errors if verdict.goal_of(finding) == goal]
            for finding in findings[: None if verbose else 2]:
                _finding(finding, console, "", verbose)
            if goal != KEPT:
                file = short(verdict.exercise.path)
                in_a_notebook = os.environ.get("WORKSHOP_NOTEBOOK")
                command = f'hint("{file}", {goal})' if in_a_notebook else f"{workshop_command()} hint {file} {goal}"
                console.print(f"      hint   {escape(command)}", highlight=False)


def _line(sign: str, number: str, title: str) -> Table:
    """A goal's line; a long title goes on below itself."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=1)
    table.add_column(overflow="fold")
    table.add_row(sign, number, title)
    return table


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
        judged = sum(state != "unjudged" for state in states.values())
        real = "training" if verdict.file.suffix == ".sh" else "launcher"
        more = "" if verdict.complete else f"; now with the real {real}, up to a minute ..."
        console.print(f"{met} of {judged} goals met in {verdict.seconds:.1f} s{more}", highlight=False)
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
