"""What is known about a program: findings, and the state of each goal."""

from dataclasses import dataclass, field
from pathlib import Path

from workshop.check.rules.rule import Detector, Rule
from workshop.check.subject import KEPT, Subject


@dataclass(frozen=True)
class Finding:
    """One thing that was observed.

    Attributes:
        rule: the rule that found it.
        seen: what was seen, one sentence with figures.
        where: "file.py:12", the line of the cause; "" where no line stands for it.
        detail: a traceback or stacks, for ``--verbose``; may have several lines.
    """

    rule: Rule
    seen: str
    where: str = ""
    detail: str = ""

    @property
    def kind(self) -> str:
        """The name of its rule."""
        return self.rule.name

    @property
    def is_error(self) -> bool:
        """Whether it keeps a goal from being met; a hint does not."""
        return not self.rule.hint

    def as_dict(self) -> dict[str, str]:
        """The finding for ``--json``."""
        return {
            "kind": self.kind,
            "seen": self.seen,
            "why": self.rule.why,
            "fix": self.rule.fix,
            "where": self.where,
            "detail": self.detail,
            "level": "error" if self.is_error else "hint",
        }


@dataclass
class Verdict:
    """What is known about a program.

    Attributes:
        subject: the program and its goals.
        planned: the detectors that the check is to ask.
        asked: those that it has asked.
        findings: in the order of what explains the most.
        unchecked: what could not be checked, and why.
        unjudged: the goals that nothing on this machine can show.
        seconds: how long the checking took so far.
        complete: whether all parts of the check have been done.
    """

    subject: Subject
    planned: set[Detector] = field(default_factory=set)
    asked: set[Detector] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    unjudged: set[int] = field(default_factory=set)
    seconds: float = 0.0
    complete: bool = False

    @property
    def file(self) -> Path:
        """The program."""
        return self.subject.file

    @property
    def errors(self) -> list[Finding]:
        """The findings that keep a goal from being met."""
        return [finding for finding in self.findings if finding.is_error]

    def goal_of(self, finding: Finding) -> int:
        """The number of the goal that a finding belongs to."""
        return self.subject.goal_of(finding.rule)

    @property
    def first_open(self) -> int | None:
        """The goal of the first error; None if there is none."""
        return self.goal_of(self.errors[0]) if self.errors else None

    def states(self) -> dict[int, str]:
        """The state of each goal, by its number.

        "met"; "open"; "blocked": it cannot be judged before the goal of the first error; "waiting": what shows it has not
        been run yet; "unjudged": nothing on this machine can show it.
        """
        return {goal.number: self._state(goal.number) for goal in self.subject.goals}

    def _state(self, number: int) -> str:
        blocking = bool(self.errors) and self.errors[0].rule.blocks
        mine = any(self.goal_of(finding) == number for finding in self.errors)
        if number == self.first_open or (mine and number != KEPT and not blocking):
            return "open"
        if blocking or (number == KEPT and self.errors):
            return "blocked"
        if number in self.unjudged:
            return "unjudged"
        if any(self.subject.goal_of(each.rule) == number and _holds_back(each) for each in self.planned - self.asked):
            return "blocked" if self.errors else "waiting"
        return "met"

    def add(self, found: list[Finding]) -> None:
        """Add findings: without repetition, errors before hints; what blocks first, then in the order of the goals."""
        unique = {(finding.kind, finding.seen): finding for finding in [*self.findings, *found]}

        def place(finding: Finding) -> tuple[bool, bool, int]:
            goal = self.goal_of(finding) if self.subject.goals else 0
            return (not finding.is_error, not finding.rule.blocks, goal if goal != KEPT else 99)

        self.findings = sorted(unique.values(), key=place)


def _holds_back(detector: Detector) -> bool:
    """Whether a goal is not met before this detector was asked.

    Not a hint's; and not one that only looks at a slow scenario which another goal's rule makes the check run.
    """
    only_looks = detector.passive and any(scenario.slow for scenario in detector.runs)
    return not detector.rule.hint and not only_looks
