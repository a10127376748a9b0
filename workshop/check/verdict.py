"""The verdict on a program: findings, and the state of each goal."""

from dataclasses import dataclass, field
from pathlib import Path

from workshop.check.rules.pages import page
from workshop.check.rules.rule import Detector, Rule
from workshop.check.subject import KEPT, Subject


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a program, or a hint."""

    rule: Rule  # that found it
    seen: str  # one sentence with figures
    where: str = ""  # "file.py:12", the line of the cause
    detail: str = ""  # a traceback or stacks for ``--verbose``, in one or more lines
    advice: bool = False  # a hint: no goal depends on it
    remedy: str = ""  # in place of the fix of its rule
    origin: str = ""  # the kind of statement to look for from ``where`` on (see ``origins.py``)

    @property
    def fix(self) -> str:
        """What to do."""
        return self.remedy or self.rule.fix

    @property
    def read(self) -> str:
        """Where to read more: a web address, or a path of the repository."""
        return page(self.fix) or self.rule.read

    @property
    def kind(self) -> str:
        """The name of its rule."""
        return self.rule.name

    @property
    def is_error(self) -> bool:
        """Whether its goal cannot be met; a hint affects no goal."""
        return not self.advice

    def as_dict(self) -> dict[str, str]:
        """The finding for ``--json``."""
        said = {"kind": self.kind, "seen": self.seen, "why": self.rule.why, "fix": self.fix}
        said |= {"read": self.read, "where": self.where, "detail": self.detail}
        return said | {"level": "error" if self.is_error else "hint"}


@dataclass
class Verdict:
    """What the check knows so far about a program."""

    subject: Subject
    planned: set[Detector] = field(default_factory=set)  # those that the check will ask
    asked: set[Detector] = field(default_factory=set)  # those that it has asked
    findings: list[Finding] = field(default_factory=list)  # those that explain others come first
    unchecked: list[str] = field(default_factory=list)  # what could not be checked, and why
    unjudged: set[int] = field(default_factory=set)  # the goals that cannot be judged on this machine
    seconds: float = 0.0  # how long the checking took so far
    complete: bool = False  # the check is finished
    checking: str = ""  # what it does next
    missed: set[Detector] = field(default_factory=set)  # those that got no scenario, or could not judge it
    ignored: list[Finding] = field(default_factory=list)  # not reported, because the owner ignores their rules
    known: list[Finding] = field(default_factory=list)  # not reported, because the baseline has them
    baseline: Path | None = None

    @property
    def errors(self) -> list[Finding]:
        """The findings that keep a goal from being met."""
        return [finding for finding in self.findings if finding.is_error]

    @property
    def hidden(self) -> list[Finding]:
        """The findings that are not reported."""
        return [*self.ignored, *self.known]

    @property
    def judged_rules(self) -> set[Rule]:
        """The rules that have judged the program: if one of them found nothing, this part of the program is right."""
        found = {finding.rule for finding in (*self.findings, *self.hidden)}
        if not self.judged:
            return found
        asked = {detector.rule for detector in self.asked - self.missed}
        asked -= {each.rule for each in (self.planned - self.asked) | self.missed if not each.passive}
        if not self.subject.goals and any(rule.ends for rule in found):
            asked = {rule for rule in asked if rule.ends}  # what the others would find in such a run is left out
        return asked | found

    @property
    def judged(self) -> bool:
        """Whether the program did enough to judge anything."""
        errors = [finding for finding in (*self.findings, *self.hidden) if finding.is_error]
        why_not = bool(errors) and not self.subject.goals and all(finding.rule.unjudged for finding in errors)
        return bool(self.asked) and not why_not

    @property
    def status(self) -> int:
        """The exit status: 0 if no error was found, 1 otherwise, 2 if the program could not be judged, or not to the end."""
        if self.judged and self.errors:
            return 1
        return 0 if self.judged and self.complete else 2

    def goal_of(self, finding: Finding) -> int:
        """The number of the goal that a finding belongs to."""
        return self.subject.goal_of(finding.rule)

    @property
    def first_open(self) -> int | None:
        """The goal of the first error; None if there is none."""
        return self.goal_of(self.errors[0]) if self.errors else None

    def states(self) -> dict[int, str]:
        """The state of each goal, by its number, as ``report.SIGNS`` explains it."""
        return {goal.number: self._state(goal.number) for goal in self.subject.goals}

    def _state(self, number: int) -> str:
        blocking = bool(self.errors) and self.errors[0].rule.blocks
        mine = any(self.goal_of(finding) == number for finding in self.errors)
        if number == self.first_open or (mine and number != KEPT and not blocking):
            return "open"
        if blocking or mine:
            return "blocked"
        if number in self.unjudged:
            return "unjudged"
        for each in self.planned - self.asked:
            # A goal does not wait for hints, nor for a rule that only uses a slow scenario made for a rule of a different goal.
            looks = each.passive and any(scenario.slow for scenario in each.runs)
            if self.subject.goal_of(each.rule) == number and not self.subject.advises(each.rule) and not looks:
                return "blocked" if self.errors else "waiting"
        return "met"

    def add(self, found: list[Finding]) -> None:
        """Add findings without repetition: errors before hints, blocking errors first, then in the order of the goals."""

        def place(finding: Finding) -> tuple[bool, bool, bool, int]:
            goal = self.goal_of(finding)
            return not finding.is_error, not finding.rule.blocks, goal == KEPT, goal

        unique = {(finding.kind, finding.seen, finding.where): finding for finding in [*self.findings, *found]}
        self.findings = sorted(unique.values(), key=place)
