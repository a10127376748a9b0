"""Judge a program: one loop over the scenarios that its rules need.

The judge asks a bench to make a scenario (to run the program, with ``probes`` inside each of its processes), and then asks
the ``rules`` that judge it; ``report`` shows the verdict.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from workshop.check.rules.rule import Detector, NotJudged, Seen
from workshop.check.scenarios import Scenario, Unavailable
from workshop.check.subject import KEPT, Subject
from workshop.check.verdict import Finding, Verdict

Made = dict[Scenario[Any], Any]
BUG = "please report this error of the check:"


class Bench(Protocol):
    """Makes the scenarios of one program."""

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that it can make of this program, in the order in which it makes them."""

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make one of them, given what has been made before; raises Unavailable if it cannot be made here."""


def plan(subject: Subject, offers: tuple[Scenario[Any], ...]) -> tuple[list[Scenario[Any]], list[Detector]]:
    """Return the offered scenarios that the rules of a subject need, and the detectors in the order of asking."""
    detectors = [detector for rule in subject.rules for detector in rule.detectors]
    counting = [each for each in detectors if _counts(subject, each) and set(offers).issuperset(each.runs)]
    needed = {scenario for detector in counting for scenario in detector.runs}
    scenarios = [scenario for scenario in offers if scenario in needed]
    return scenarios, in_order([detector for detector in detectors if needed.issuperset(detector.runs)])


def _counts(subject: Subject, detector: Detector) -> bool:
    """Whether the check makes scenarios for a detector: not for hints, nor for always-asked rules that no goal lists."""
    listed = any(detector.rule in goal.rules for goal in subject.goals)
    unlisted = bool(subject.goals) and detector.rule.always  # in a program without goals, no goal lists it
    return not detector.passive and (listed or not (unlisted or subject.advises(detector.rule)))


def in_order(detectors: list[Detector]) -> list[Detector]:
    """Order detectors so that those that explain more come first; otherwise keep the given order."""
    done: dict[Detector, None] = {}
    below: set[Detector] = set()

    def visit(detector: Detector) -> None:
        if detector in done:
            return
        if detector in below:
            raise ValueError(f"the rule {detector.rule.name} comes before itself")
        below.add(detector)
        before = [each for rule in detector.after for each in detectors if each.rule is rule]
        before += [each for each in detectors if detector.rule in each.instead_of]
        for each in before:
            if each.rule is not detector.rule and (detector.last or not each.last):
                visit(each)
        below.remove(detector)
        done[detector] = None

    for detector in sorted(detectors, key=lambda each: each.last):
        visit(detector)
    return list(done)


def judge(subject: Subject, bench: Bench, quick: bool = False) -> Iterator[Verdict]:
    """Check a program; yield the verdict after the quick scenarios and, without ``quick``, again after the slow ones.

    Of a program without goals, also yield it before each scenario, because some take a while: it has the errors so far.
    """
    start = time.monotonic()
    scenarios, detectors = plan(subject, bench.offers)
    verdict = Verdict(subject, planned=set(detectors), unchecked=list(subject.unchecked))
    made: Made = {}
    slow_ones = not quick and any(scenario.slow for scenario in scenarios)
    for slow in (False, True):
        for scenario in (each for each in scenarios if each.slow == slow):
            if not subject.goals:
                verdict.checking = scenario.title
                yield verdict
            _judge_by(scenario, bench, detectors, made, verdict)
            verdict.seconds = time.monotonic() - start
            if any(slow or finding.rule.blocks for finding in verdict.errors):
                break
        if slow_ones and not slow and verdict.errors:
            verdict.unchecked.append("the parts that start the program for real: first fix the findings above")
        verdict.seconds = time.monotonic() - start
        verdict.complete = slow or not slow_ones or bool(verdict.errors)
        yield verdict
        if verdict.complete:
            return


def _judge_by(scenario: Scenario[Any], bench: Bench, detectors: list[Detector], made: Made, verdict: Verdict) -> None:
    judging = [detector for detector in detectors if scenario in detector.runs]
    try:
        made[scenario] = bench.make(scenario, made)
    except Unavailable as reason:
        if str(reason):
            verdict.unchecked.append(str(reason))
        verdict.planned.difference_update(judging)
        verdict.missed.update(judging)
        counting = [detector for detector in judging if _counts(verdict.subject, detector)]
        verdict.unjudged.update(verdict.subject.goal_of(detector.rule) for detector in counting)
    else:
        ask(verdict, [detector for detector in judging if made.keys() >= set(detector.runs)], made)


def _said(verdict: Verdict, detector: Detector, made: Mapping[Scenario[Any], Any]) -> Sequence[Seen | NotJudged]:
    """What a detector says. An error in it must not cost what the others say about a program that nobody here knows."""
    try:
        return list(detector.function(*(made[scenario] for scenario in detector.runs)))
    except Exception as error:
        if verdict.subject.goals:
            raise
        return [NotJudged(f"{detector.rule.name} ({BUG} {type(error).__name__}: {error})", goal=False)]


def ask(verdict: Verdict, detectors: list[Detector], made: Mapping[Scenario[Any], Any]) -> None:
    """Ask detectors, in order, about the scenarios that were made."""
    explained = {rule for earlier in verdict.findings for each in earlier.rule.detectors for rule in each.instead_of}
    found: list[Finding] = []
    for detector in detectors:
        so_far = {finding.rule for finding in (*verdict.findings, *found)}
        if (
            detector.rule in explained
            or so_far.intersection(detector.after)
            or (detector.last and any(not verdict.subject.advises(rule) for rule in so_far))
            or (detector.figures and any(rule.spoils for rule in so_far))
        ):
            continue
        verdict.asked.add(detector)
        for said in _said(verdict, detector, made):
            if isinstance(said, NotJudged):
                verdict.missed.add(detector)
                if said.text not in verdict.unchecked:
                    verdict.unchecked.append(said.text)
                if said.goal:
                    verdict.unjudged.update({verdict.subject.goal_of(detector.rule)} - {KEPT})
            else:
                advice = verdict.subject.advises(detector.rule) or (said.mild and not verdict.subject.goals)
                found.append(Finding(detector.rule, said.text, said.where, said.detail, advice, said.fix, said.origin))
                explained.update(detector.instead_of)
    if not verdict.subject.goals and any(finding.rule.ends for finding in found):
        # What a hang or a crash left unfinished is no second mistake. (In exercises, the goals show what was judged.)
        found = [finding for finding in found if finding.rule.ends]
    verdict.add(sorted(found, key=lambda finding: verdict.subject.rules.index(finding.rule)))
