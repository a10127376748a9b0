"""Show a verdict as text or JSON."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from workshop.check.rules.words import plural
from workshop.check.subject import KEPT, Goal
from workshop.check.verdict import Finding, Verdict
from workshop.repository import ROOT, workshop_command

# For each state of a goal: its sign, its style, and the words after the title.
SIGNS = {
    "met": ("✓", "green", ""),
    "open": ("✗", "red", ""),
    "blocked": ("·", "dim", ", not checked until goal {first} passes"),
    "waiting": ("·", "dim", ", not checked yet"),
    "unjudged": ("·", "dim", ", cannot be judged here"),
}
LEGEND = "✓ met   ✗ not met   · not checked yet   - a hint, on which no goal depends"
SHOWN = 2  # findings per goal without --verbose
JSON_VERSION = 1  # of the fields of ``as_json``; it increases if a field is removed or changes its meaning


def short(path: Path) -> str:
    """Return the path as a learner would type it: relative to the current folder if possible, else to the repository."""
    base = next((base for base in (Path.cwd(), ROOT) if path.is_relative_to(base)), None)
    return str(path.relative_to(base) if base else path)


class Shown(NamedTuple):
    """The parts of a verdict that have been printed."""

    states: dict[int, str]  # of the goals
    lines: set[str]  # hints, what was not checked, and errors of a program without goals


def show(verdict: Verdict, console: Console, verbose: bool = False, before: Shown | None = None) -> Shown:
    """Print a verdict, or only what is new since ``before``; return what has been printed so far."""
    if before is None:
        console.print(f"[bold]{escape(short(verdict.subject.file))}[/]", highlight=False)
    states, lines = verdict.states(), set(before.lines if before else ())
    for goal in verdict.subject.goals:
        if before is None or before.states[goal.number] != states[goal.number]:
            _goal(verdict, goal, states[goal.number], console, verbose)
    if not verdict.subject.goals:
        _errors(verdict, console, verbose, lines)
        if not verdict.complete:
            return Shown(states, lines)
    for finding in verdict.findings:
        if not finding.is_error and finding.seen not in lines:
            _finding(finding, console, "-", verbose, "" if verdict.subject.goals else finding.kind)
            lines.add(finding.seen)
    for text in verdict.unchecked:
        if text not in lines:
            console.print(f"[dim]not checked: {escape(text)}[/]", highlight=False)
            lines.add(text)
    if verdict.subject.goals and before is None:
        console.print(f"[dim]{LEGEND}[/]", highlight=False)
    if verdict.subject.goals:
        judged = [state for state in states.values() if state != "unjudged"]
        more = "" if verdict.complete else "; now it starts for real, which takes up to a minute ..."
        text = f"{judged.count('met')} of {len(judged)} goals met in {verdict.seconds:.1f} s{more}"
    else:
        hints = len(verdict.findings) - len(verdict.errors)
        found = plural(len(verdict.errors), "error") + (f", {plural(hints, 'hint')}" if hints else "")
        found = found if verdict.judged else "could not be judged"
        text = f"{found} in {verdict.seconds:.1f} s{_known(verdict)}"
    console.print(text, highlight=False)
    return Shown(states, lines)


def _errors(verdict: Verdict, console: Console, verbose: bool, lines: set[str]) -> None:
    """Print the errors of a program without goals that are not in ``lines``, and add them."""
    new = False
    for finding in verdict.errors:
        if (key := f"{finding.where} {finding.seen}") not in lines:
            _finding(finding, console, "?" if finding.rule.unjudged else "✗", verbose, finding.kind)
            lines.add(key)
            new = True
    if not verdict.complete and new:
        console.print(f"[dim]... found in {verdict.seconds:.1f} s; the check goes on[/]", highlight=False)
    elif verdict.complete and not verdict.errors and verdict.judged:
        console.print(f"[green]✓[/] no {'new ' if verdict.known else ''}error was seen", highlight=False)


def _known(verdict: Verdict) -> str:
    """Say how many findings the baseline has."""
    if not (verdict.known and verdict.baseline):
        return ""
    verb = "is" if len(verdict.known) == 1 else "are"
    return f"; {plural(len(verdict.known), 'known finding')} {verb} in {escape(short(verdict.baseline))}"


def show_all(verdicts: Iterator[Verdict], json_only: bool, verbose: bool) -> Verdict:
    """Print verdicts as they come, or the last one as JSON, also if the user stops the check; return the last one."""
    console, shown = Console(highlight=False), None
    verdict = None
    try:
        while following := _next(verdicts, console, verdict, waits=not json_only):
            verdict = following
            if not json_only:
                shown = show(verdict, console, verbose, shown)
    finally:
        if json_only and verdict:
            print(as_json(verdict), flush=True)
    if verdict is None:
        raise ValueError("there is no verdict")
    return verdict


def _next(verdicts: Iterator[Verdict], console: Console, before: Verdict | None, waits: bool) -> Verdict | None:
    """Return the next verdict; None at the end. While it ``waits`` for one, a terminal shows for what, and the time."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not (waits and console.file.isatty())) as progress:
        if before:
            progress.add_task(f"checking {before.checking}" if before.checking else "started for real")
        return next(verdicts, None)


def _goal(verdict: Verdict, goal: Goal, state: str, console: Console, verbose: bool) -> None:
    sign, style, more = SIGNS[state]
    if state == "blocked":
        more = more.format(first=verdict.first_open) if verdict.first_open else SIGNS["waiting"][2]
    number = str(goal.number) if goal.number != KEPT else " "
    title = escape(goal.title + more)
    if style == "dim":
        number, title = f"[dim]{number}[/]", f"[dim]{title}[/]"
    table = _table(1, 1)
    table.add_row(f"[{style}]{sign}[/]", number, title)
    console.print(table)
    if state != "open":
        return
    findings = [finding for finding in verdict.errors if verdict.goal_of(finding) == goal.number]
    for finding in findings[: None if verbose else SHOWN]:
        _finding(finding, console, "", verbose)
    if goal.number != KEPT:
        file = short(ROOT / verdict.subject.name)
        command = f"{workshop_command()} hint {file} {goal.number}"
        if os.environ.get("WORKSHOP_NOTEBOOK"):
            command = f'hint("{file}", {goal.number})'
        console.print(f"      hint   {escape(command)}", highlight=False)


def _table(*widths: int) -> Table:
    """A table with columns of these widths, and a last column in which long text wraps."""
    table = Table.grid(padding=(0, 1))
    for width in widths:
        table.add_column(width=width)
    table.add_column(overflow="fold")
    return table


def _finding(finding: Finding, console: Console, sign: str, verbose: bool, kind: str = "") -> None:
    table = _table(5, 6)
    table.add_row(sign, "[yellow]seen[/]", escape(finding.seen))
    for name, text in (("why", finding.rule.why), ("fix", finding.fix)):
        table.add_row("", f"[yellow]{name}[/]", escape(text))
    console.print(table)
    for name, text in (("read", finding.read), ("where", finding.where), ("kind", kind)):
        if text:  # soft_wrap: an address on two lines would not work as a link in a terminal or in JupyterLab
            console.print(f"      [yellow]{name:6}[/] {escape(text)}", highlight=False, soft_wrap=True)
    if finding.detail and verbose:
        console.print(escape(finding.detail.rstrip()), style="dim", highlight=False)
    elif finding.detail:
        console.print("[dim]      (--verbose shows the traceback, the stacks or the output)[/]", highlight=False)


def _level(verdict: Verdict, finding: Finding) -> dict[str, str]:
    """The level of a finding that says why a program of its owner could not be judged; otherwise it has its own."""
    return {"level": "not judged"} if finding.rule.unjudged and not verdict.subject.goals else {}


def as_json(verdict: Verdict) -> str:
    """Return the verdict as JSON; docs/for-assistants.md of the course describes each field."""
    states = verdict.states()
    findings = [
        (verdict.goal_of(finding), finding.as_dict() | _level(verdict, finding)) for finding in verdict.findings
    ]
    goals: list[dict[str, object]] = []
    for goal in verdict.subject.goals:
        own = [finding for number, finding in findings if number == goal.number]
        goals.append({"number": goal.number, "title": goal.title, "state": states[goal.number], "findings": own})
    content: dict[str, object] = {"version": JSON_VERSION, "status": verdict.status}
    content |= {"file": os.fspath(verdict.subject.file), "exercise": verdict.subject.name or None}
    content |= {"complete": verdict.complete, "passed": verdict.complete and not verdict.errors, "goals": goals}
    content |= {"findings": [finding for _, finding in findings]}
    content |= {"known": len(verdict.known), "not_checked": verdict.unchecked, "seconds": round(verdict.seconds, 2)}
    return json.dumps(content, indent=2)
