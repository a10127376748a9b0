"""From a program to a verdict: one loop over the scenarios of its rules.

The way through this folder: the judge asks a bench to make a scenario (to run the program, with ``probes`` inside each of its
processes), and then asks the ``rules`` that judge it; ``report`` shows the verdict.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from workshop.check.rules.rule import Detector, NotJudged, Rule
from workshop.check.scenarios import Scenario, Unavailable
from workshop.check.subject import KEPT, Subject
from workshop.check.verdict import Finding, Verdict

Made = dict[Scenario[Any], Any]


class Bench(Protocol):
    """Makes the scenarios of one program."""

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that it can make of this program, in the order in which they are made."""

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make one.

        Args:
            scenario: one that it offers.
            made: what has been made before.

        Raises:
            Unavailable: it cannot be made here.
        """


def plan(subject: Subject, offers: tuple[Scenario[Any], ...]) -> tuple[list[Scenario[Any]], list[Detector]]:
    """The scenarios that the rules of a subject need, of those on offer, and the detectors to ask, in the order of asking."""
    offered = set(offers)
    needed = {
        scenario
        for rule in subject.rules
        for detector in rule.detectors
        if _counts(subject, detector) and offered.issuperset(detector.runs)
        for scenario in detector.runs
    }
    scenarios = [scenario for scenario in offers if scenario in needed]
    detectors = [detector for rule in subject.rules for detector in rule.detectors if needed.issuperset(detector.runs)]
    return scenarios, in_order(detectors)


def _counts(subject: Subject, detector: Detector) -> bool:
    """Whether the check makes scenarios for a detector: not for a hint's, nor for a rule that is asked of every program anyway.

    An exercise that lists such a rule in a goal wants it judged in all scenarios that it is declared for.
    """
    rule = detector.rule
    listed = any(rule in goal.rules for goal in subject.goals)
    return not detector.passive and not rule.hint and (listed or not rule.always)


def in_order(detectors: list[Detector]) -> list[Detector]:
    """Detectors after those that explain more, else in the order given."""
    first: dict[Rule, list[Detector]] = {}  # by a rule: the detectors that come before it
    for detector in detectors:
        for later in detector.instead_of:
            first.setdefault(later, []).append(detector)
    by_rule: dict[Rule, list[Detector]] = {}
    for detector in detectors:
        by_rule.setdefault(detector.rule, []).append(detector)
    done: dict[Detector, None] = {}
    below: set[Detector] = set()

    def visit(detector: Detector) -> None:
        if detector in done:
            return
        if detector in below:
            raise ValueError(f"the rule {detector.rule.name} comes before itself")
        below.add(detector)
        before = [each for rule in detector.after for each in by_rule.get(rule, ())]
        for each in (*before, *first.get(detector.rule, ())):
            if each.rule is not detector.rule and (detector.last or not each.last):
                visit(each)
        below.remove(detector)
        done[detector] = None

    for detector in (*(each for each in detectors if not each.last), *(each for each in detectors if each.last)):
        visit(detector)
    return list(done)


def judge(subject: Subject, bench: Bench, quick: bool = False) -> Iterator[Verdict]:
    """Check a program; yield the verdict when the quick scenarios have been judged, and again when all are.

    Args:
        subject: the program, its goals and its rules.
        bench: makes its scenarios.
        quick: leave out the slow scenarios.
    """
    start = time.monotonic()
    scenarios, detectors = plan(subject, bench.offers)
    verdict = Verdict(subject, planned=set(detectors), unchecked=list(subject.unchecked))
    made: Made = {}
    slow = [scenario for scenario in scenarios if scenario.slow]
    for scenario in scenarios:
        if scenario.slow:
            continue
        _make_and_ask(verdict, bench, scenario, made, detectors)
        if any(finding.rule.blocks for finding in verdict.errors):
            break
    if slow and not quick and verdict.errors:
        verdict.unchecked.append("what needs a real launcher: first the findings above")
    verdict.seconds = time.monotonic() - start
    verdict.complete = not slow or quick or bool(verdict.errors)
    yield verdict
    if verdict.complete:
        return
    for scenario in slow:
        _make_and_ask(verdict, bench, scenario, made, detectors)
        if verdict.errors:
            break
    verdict.seconds, verdict.complete = time.monotonic() - start, True
    yield verdict


def _make_and_ask(
    verdict: Verdict, bench: Bench, scenario: Scenario[Any], made: Made, detectors: list[Detector]
) -> None:
    """Make a scenario, and ask the detectors that judge it."""
    try:
        made[scenario] = bench.make(scenario, made)
    except Unavailable as reason:
        if str(reason):
            verdict.unchecked.append(str(reason))
        for detector in detectors:
            if scenario in detector.runs:
                verdict.planned.discard(detector)
                if _counts(verdict.subject, detector):
                    verdict.unjudged.add(verdict.subject.goal_of(detector.rule))
        return
    ask(verdict, [each for each in detectors if scenario in each.runs and made.keys() >= set(each.runs)], made)


def ask(verdict: Verdict, detectors: list[Detector], made: Mapping[Scenario[Any], Any]) -> None:
    """Ask detectors, in order, about what has been made."""
    explained: set[Rule] = set()
    found: list[Finding] = []
    for detector in detectors:
        so_far = {finding.rule for finding in (*verdict.findings, *found)}
        if (
            detector.rule in explained
            or so_far.intersection(detector.after)
            or (detector.last and any(not rule.hint for rule in so_far))
            or (detector.figures and any(rule.spoils for rule in so_far))
        ):
            continue
        verdict.asked.add(detector)
        for said in detector.function(*(made[scenario] for scenario in detector.runs)):
            if isinstance(said, NotJudged):
                if said.text not in verdict.unchecked:
                    verdict.unchecked.append(said.text)
                if said.goal:
                    verdict.unjudged.update({verdict.subject.goal_of(detector.rule)} - {KEPT})
                continue
            found.append(Finding(detector.rule, said.text, said.where, said.detail))
            explained.update(detector.instead_of)
    index = {rule: number for number, rule in enumerate(verdict.subject.rules)}
    verdict.add(sorted(found, key=lambda finding: index[finding.rule]))
